"""docs/examples/airflow_dag.py, with Airflow itself: what its tasks tell the scheduler."""

from __future__ import annotations

import json
from datetime import datetime

from e2e.examples.conftest import Taken
from support.servers import free_port

TASKS = """
import json, logging, pathlib, quota
from airflow.sdk.exceptions import AirflowRescheduleException, AirflowSkipException, TaskDeferred
from airflow_dag import logger, videos

logged = logging.Handler()
logged.emit = lambda record: lines.append(record.getMessage())
lines = []
logger.addHandler(logged)
logger.setLevel("INFO")
dag = videos()
popular, nightly = dag.get_task("popular"), dag.get_task("nightly")
budget = dag.get_task("budget")
assert budget.downstream_task_ids == {"popular", "nightly"}

budget.execute({})
first = popular.python_callable("DE")
told = []
try:
    budget.execute({})
except TaskDeferred as deferred:
    assert deferred.method_name == "execute"
    told.append(deferred.trigger.moment.isoformat())
try:
    popular.python_callable("DE")
except AirflowRescheduleException as rescheduled:
    told.append(rescheduled.reschedule_date.isoformat())
try:
    nightly.python_callable("US")
except AirflowSkipException as skipped:
    sentence = str(skipped)
config = pathlib.Path("quota.toml")
config.write_text(config.read_text().replace("sqlite:///ledger.db", "redis://127.0.0.1:PORT/0"))
failed = []
for task, given in (popular.python_callable, "DE"), (nightly.python_callable, "US"), (budget.execute, {}):
    try:
        task(given)
    except quota.Refused as refused:
        failed.append(str(refused))
print(json.dumps([len(first), told, sentence, lines, failed]))
"""


def test_a_refused_task_waits_for_its_time_or_is_skipped(taken: Taken) -> None:
    taken.take("airflow_dag", units=1)
    home = str(taken.folder / "airflow")
    output = taken.python(
        TASKS.replace("PORT", str(free_port())),
        "apache-airflow",
        AIRFLOW_HOME=home,
        AIRFLOW__CORE__LOAD_EXAMPLES="false",
    )
    titles, reasons, skipped, lines, failed = json.loads(output.splitlines()[-1])
    assert (titles, taken.sent()) == (5, 1)
    taken.allow(1)
    fits = datetime.fromisoformat(taken.json("peek", "videos.list", status=75)["retry_at"])
    later_s = [(datetime.fromisoformat(at) - fits).total_seconds() for at in reasons]
    assert 0 < min(later_s) < max(later_s) <= 361, "tasks that are refused together come back one after another"
    assert [line.partition(";")[0] for line in lines] == [skipped.partition(";")[0]] * 3
    assert [("cannot be reached" in line) for line in failed] == [True] * 3
    assert skipped.startswith("refused videos.list (1 unit) on main: limit 'hour' has 1 of 1 unit used; next at ")
