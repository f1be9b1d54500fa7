"""What a process tells its ledger beside its decisions: the calls that were refused, each once."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

import quota
from quota.budget import Budget, project_of
from quota.deciding import recorder as recorder_module
from quota.deciding.recorder import ATTEND_EVERY_S, MAX_KINDS, Recorder
from support.processes import in_child
from support.proxy import Proxy
from support.servers import RedisServer
from support.setup import Setup, limit

CONFIG = """
[ledger]
url = "{}"
[credentials.main]
api = "youtube-v3"
limits = [{{ name = "day", units = 100, window = "24h" }}]
"""


def recorded(setup: Setup, *limits: object) -> tuple[Budget, Recorder]:
    project_of(budget := setup.budget(*limits)).recorder = recorder = Recorder(setup.state)  # type: ignore[arg-type]
    return budget, recorder


def counts_of(setup: Setup) -> list[tuple[str, str, str, int]]:
    counts = setup.state.refusals().counts
    return sorted((count.limit, count.job, count.reason, count.calls) for count in counts)


@pytest.mark.topology
def test_refusals_are_kept_and_handed_over_with_an_answer_ten_seconds_later(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1_000.0
    monkeypatch.setattr(recorder_module, "elapsed_s", lambda: now_s)
    budget, _ = recorded(setup, limit(2), limit(1, name="searches", methods=("search.list",)))
    budget.charge("videos.list", units=2)
    for job in ("a", "b", "a"):
        assert not budget.charge("videos.list", job=job, region="DE").admitted
    assert not budget.peek("videos.list").admitted, "a question, not a refusal"
    assert counts_of(setup) == []
    now_s += ATTEND_EVERY_S - 0.001
    budget.peek("videos.list")
    assert counts_of(setup) == []
    now_s += 0.001
    budget.peek("videos.list")
    assert counts_of(setup) == [("day", "a", "limit", 2), ("day", "b", "limit", 1)]
    newest = json.loads(setup.state.refusals().newest[-1])
    assert (newest["job"], newest["region"], newest["refused_by"]) == ("a", "DE", "day")
    assert newest["why"] == "limit 'day' has 2 of 2 units used"
    now_s += ATTEND_EVERY_S
    budget.peek("videos.list")
    assert len(setup.state.refusals().newest) == 3, "once"


def test_the_recorder_keeps_a_bounded_number_of_kinds(setup: Setup) -> None:
    budget, recorder = recorded(setup, limit(1))
    refused = budget.charge("videos.list", units=1) and budget.charge("videos.list")
    for n in range(MAX_KINDS + 50):
        recorder.refused(refused, f"job-{n}", "", "run")
    recorder.refused(refused, "job-0", "", "run")
    recorder.close()
    assert sum(calls for _, _, _, calls in counts_of(setup)) == MAX_KINDS + 1


def test_a_child_does_not_report_refusals_of_its_parent(setup: Setup) -> None:
    budget, recorder = recorded(setup, limit(1))
    budget.charge("videos.list")
    budget.charge("videos.list")

    def be_refused() -> None:
        budget.charge("videos.list", job="child")
        recorder.close()

    in_child(be_refused)
    recorder.close()
    assert counts_of(setup) == [("day", "", "limit", 1), ("day", "child", "limit", 1)]


def test_a_ledger_that_just_did_not_answer_is_not_asked_and_gets_all_later(server: RedisServer) -> None:
    with Proxy(server.port) as proxy, closing((setup := Setup.open(proxy.url)).ledger):
        budget, recorder = recorded(setup, limit(1))
        budget.charge("videos.list")
        proxy.fail("drop-request", times=1_000)
        assert budget.charge("videos.list").reason == "ledger-unavailable"
        asked = proxy.requests
        recorder.close()
        assert proxy.requests == asked
        proxy.heal()
        budget.charge("videos.list")
        proxy.fail("drop-reply", times=1_000)
        recorder.close()
        proxy.heal()
        budget.charge("videos.list")
        recorder.close()
        assert {reason: calls for _, _, reason, calls in counts_of(setup)} == {"ledger-unavailable": 1, "limit": 2}


def test_a_session_reports_its_refusals_when_it_closes(ledger_url: str, state_dir: Path, tmp_path: Path) -> None:
    config = tmp_path / "quota.toml"
    config.write_text(CONFIG.format(ledger_url))
    for _ in range(2):
        with quota.open(config) as session:
            session.budget().charge("search.list")
            session.budget().charge("search.list")
    with quota.open(config) as session:
        assert [count.calls for count in session.project().state.refusals().counts] == [3]
