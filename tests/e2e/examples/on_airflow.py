"""docs/examples/airflow_dag.py, with Airflow itself: what its tasks tell the scheduler."""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from e2e.examples.conftest import Taken

TASKS = """
import json
from airflow.sdk.exceptions import AirflowRescheduleException, AirflowSkipException, TaskDeferred
from airflow_dag import videos

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
    print(json.dumps([len(first), told, str(skipped)]))
"""


def test_a_refused_task_waits_for_its_time_or_is_skipped(taken: Taken) -> None:
    taken.take("airflow_dag", units=1)
    home = str(taken.folder / "airflow")
    said = taken.python(TASKS, "apache-airflow", AIRFLOW_HOME=home, AIRFLOW__CORE__LOAD_EXAMPLES="false")
    titles, told, skipped = json.loads(said.splitlines()[-1])
    assert (titles, taken.sent()) == (5, 1)
    fits = datetime.fromisoformat(taken.json("peek", "videos.list", status=75)["retry_at"])
    assert [datetime.fromisoformat(at) for at in told] == [fits, fits]
    assert skipped.startswith("refused videos.list (1 unit) on main: limit 'hour' has 1 of 1 unit used; next at ")
