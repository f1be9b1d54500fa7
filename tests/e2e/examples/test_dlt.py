"""docs/examples/dlt_pipeline.py, with dlt itself."""

from __future__ import annotations

import json

from e2e.examples.conftest import Taken
from support.servers import free_port

RUNS = """
import logging, pathlib, sys
import dlt_pipeline, quota

config = pathlib.Path("quota.toml")
text = config.read_text()
config.write_text(text.replace("sqlite:///ledger.db", "redis://127.0.0.1:PORT/0"))
try:
    dlt_pipeline.run()
except quota.Refused as refused:
    print(refused)
config.write_text(text)
dlt_pipeline.logger.addHandler(logging.StreamHandler(sys.stdout))
assert not dlt_pipeline.run().has_failed_jobs
assert not dlt_pipeline.run().has_failed_jobs
config.write_text(text.replace("units = 3", "units = 10"))
assert not dlt_pipeline.run().has_failed_jobs
"""

A_STALE_PLACE = """
import dlt, dlt_pipeline, pathlib

dlt_pipeline.run()
pipeline = dlt.pipeline("videos", destination="filesystem", dataset_name="videos")
with pipeline.managed_state(extract_state=True) as state:
    (source,) = state["sources"].values()
    source["resources"]["videos"]["DE"]["token"] = "stale"
config = pathlib.Path("quota.toml")
config.write_text(config.read_text().replace("units = 3", "units = 10"))
for _ in range(3):  # the first loads the changed state only
    assert not dlt_pipeline.run().has_failed_jobs
"""


def settle(taken: Taken) -> None:
    taken.env |= {
        "DESTINATION__FILESYSTEM__BUCKET_URL": str(taken.folder / "loaded"),
        "DLT_DATA_DIR": str(taken.folder / "dlt"),
        "RUNTIME__DLTHUB_TELEMETRY": "false",
        "NORMALIZE__DATA_WRITER__DISABLE_COMPRESSION": "true",
    }


def test_a_refused_pipeline_ends_well_and_a_later_run_goes_on_at_its_page(taken: Taken) -> None:
    """Without a ledger, a run fails. The budget has room for three of four pages; the run after that calls nobody."""
    settle(taken)
    taken.take("dlt_pipeline", units=3)
    failed, first, second = taken.python(RUNS.replace("PORT", str(free_port()))).splitlines()
    assert "cannot be reached" in failed
    for line in first, second:
        assert line.startswith("refused videos.list (1 unit) on main: limit 'hour' has 3 of 3 units used; next at ")
    files = sorted((taken.folder / "loaded" / "videos" / "videos").rglob("*.jsonl"))
    loads = [[json.loads(line)["id"] for line in file.read_text(encoding="utf-8").splitlines()] for file in files]
    assert sorted(map(len, loads)) == [50, 150]
    assert len({video for load in loads for video in load}) == 200
    assert taken.sent() == 4


def test_after_a_page_token_that_upstream_refuses_the_next_run_begins_anew(taken: Taken) -> None:
    settle(taken)
    taken.take("dlt_pipeline", units=3)
    taken.python(A_STALE_PLACE)
    assert taken.sent() == 3 + 1 + 4
