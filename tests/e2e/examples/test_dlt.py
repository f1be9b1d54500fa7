"""docs/examples/dlt_pipeline.py, with dlt itself."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from e2e.examples.conftest import Taken

RUNS = """
import pathlib
import dlt_pipeline

assert not dlt_pipeline.run().has_failed_jobs
assert not dlt_pipeline.run().has_failed_jobs
config = pathlib.Path("quota.toml")
config.write_text(config.read_text().replace("units = 3", "units = 10"))
assert not dlt_pipeline.run().has_failed_jobs
"""


def test_a_refused_pipeline_ends_well_and_a_later_run_goes_on_at_its_page(taken: Taken) -> None:
    """The budget has room for three of four pages. The run after that calls nobody."""
    taken.env |= {
        "DESTINATION__FILESYSTEM__BUCKET_URL": str(taken.folder / "loaded"),
        "DLT_DATA_DIR": str(taken.folder / "dlt"),
        "RUNTIME__DLTHUB_TELEMETRY": "false",
        "NORMALIZE__DATA_WRITER__DISABLE_COMPRESSION": "true",
    }
    taken.take("dlt_pipeline", units=3)
    taken.python(RUNS)
    files = sorted((taken.folder / "loaded" / "videos" / "videos").rglob("*.jsonl"))
    loads = [[json.loads(line)["id"] for line in file.read_text(encoding="utf-8").splitlines()] for file in files]
    assert sorted(map(len, loads)) == [50, 150]
    assert len({video for load in loads for video in load}) == 200
    assert taken.sent() == 4
