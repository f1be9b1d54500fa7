"""The verdict that a status begins with, and its JSON, in each state of a credential."""

from __future__ import annotations

import io
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from quota.cli.output import render_parts
from quota.common.clock import NEVER, moment, rfc3339
from quota.deciding.project import MAX_CLOCK_AHEAD_MS
from quota.errors import LedgerError
from quota.jobs.job import attempt_of, load_fetch
from quota.reports.metrics import of_status
from quota.reports.status import read_status
from quota.session import Session
from quota.settings.load import load_settings
from quota.settings.model import BUILT_IN_FETCHES
from quota.terms.limits import DAY_MS, HOUR_MS, MINUTE_MS, Sliding
from quota.wording import status_parts
from support.commands import Quota, one_line
from support.losses import LedgerStorage
from support.setup import charges_at

TEN_MS = 1_795_255_200_000
"""Saturday 21 November 2026, 10:00 UTC, 22 h before upstream's midnight."""

MIDNIGHT_MS = TEN_MS + 22 * HOUR_MS
SAID = "You have exceeded your quota."

JOB = '[jobs.s]\nfetch = "search"\ncredential = "main"\noptions = { words = "x" }\n'
DAY = '[[credentials.main.limits]]\nname = "day"\nunits = 500\nwindow = "24h"\n'
NARROW = '[[credentials.main.limits]]\nname = "few"\nmethods = ["search.list"]\nunits = 300\nwindow = "1h"\n'
PACED = (
    '[[credentials.main.limits]]\nname = "pacific-day"\nunits = 9_600\npacing = true\n'
    'window = { calendar = "day", zone = "America/Los_Angeles" }\n'
)


class Scene:
    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.path = url, folder / "quota.toml"
        self.now_ms = TEN_MS
        self._session: Session | None = None

    def configure(self, text: str, api: str = "youtube-v3") -> Session:
        head = f'[ledger]\nurl = "{self.url}"\n[credentials.main]\napi = "{api}"\nproject = "p"\n'
        self.path.write_text(head + text, encoding="utf-8")
        self.close()
        self._session = Session(load_settings(self.path), clock=lambda: self.now_ms)
        return self._session

    @property
    def session(self) -> Session:
        assert self._session is not None
        return self._session

    def spend(self, calls: int, method: str = "search.list") -> None:
        for _ in range(calls):
            assert self.session.budget("main").charge(method).admitted

    def shut(self, bucket: str, until_ms: int) -> None:
        self.session.budget("main").exhaust(bucket, self.now_ms, until_ms, SAID, "host:1")

    def result(self, width: int = 200) -> str:
        """The verdict: the line after the credential's name."""
        lines = self.lines(width)
        return lines[next(n for n, line in enumerate(lines) if line.startswith("main: ")) + 1]

    def lines(self, width: int = 200) -> list[str]:
        console = Console(file=io.StringIO(), width=width, highlight=False)
        console.print(render_parts(status_parts(read_status(self.session))))
        return [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]

    def json(self) -> Any:
        return read_status(self.session).as_json()["credentials"][0]  # type: ignore[index]

    def fields(self) -> tuple[object, ...]:
        return tuple(self.json()[name] for name in ("open", "closed_by", "full_by", "next_at"))

    def remaining(self) -> dict[str, int]:
        return {limit["name"]: limit["remaining_units"] for limit in self.json()["limits"]}

    def close(self) -> None:
        if self._session is not None:
            self._session.close()


@pytest.fixture
def scene(any_ledger_url: str, tmp_path: Path, state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setattr("quota.session.machine_jitter_ms", lambda: 3_000)
    monkeypatch.setattr("quota.reports.status.machine_jitter_ms", lambda: 3_000)
    monkeypatch.setenv("TZ", "UTC")
    scene = Scene(any_ledger_url, tmp_path)
    yield scene
    scene.close()


OPEN = (True, None, None, None)


def test_open_shows_how_many_calls_of_the_jobs_dearest_method_fit(scene: Scene) -> None:
    scene.configure(DAY)
    scene.spend(1)
    assert (scene.result(), scene.fields()) == ("OPEN: 400 units", OPEN)
    scene.configure(DAY + JOB)
    assert scene.result() == "OPEN: 400 units = 4 searches"
    scene.spend(3)
    assert scene.result() == "OPEN: 100 units = 1 search"
    scene.spend(1, "videos.list")
    retry_at = moment(TEN_MS + DAY_MS)
    assert scene.result() == f"OPEN: 99 units, no searches until {retry_at}", "one of the four has left by then"
    assert read_status(scene.session).exit_status == 0


def test_full_shows_when_the_cheapest_call_fits(scene: Scene) -> None:
    scene.configure(DAY + JOB)
    scene.spend(4)
    scene.now_ms += HOUR_MS
    scene.spend(1)
    free_ms = TEN_MS + DAY_MS
    assert scene.result() == "FULL until 2026-11-22T10:00:00+00:00: limit 'day' has 500 of 500 units used"
    assert scene.fields() == (False, None, "day", rfc3339(free_ms))
    assert any(line.split()[-4:] == ["0", "in", "23h", "00m"] for line in scene.lines() if line.startswith("day "))
    peeked = scene.session.budget("main").peek("videos.list")
    assert (peeked.admitted, peeked.retry_at_ms) == (False, free_ms)
    scene.now_ms = free_ms
    assert scene.fields() == OPEN


def test_a_full_narrow_limit_leaves_the_others_open(scene: Scene) -> None:
    scene.configure(DAY + NARROW + JOB)
    scene.spend(1)
    assert scene.result() == "OPEN: 400 units, 2 searches", "those two are not what 400 units are worth"
    scene.spend(2)
    assert (scene.result(), scene.fields()) == ("OPEN: 200 units, no searches until 2026-11-21T11:00:00+00:00", OPEN)
    (row,) = [line for line in scene.lines() if line.startswith("few ")]
    assert row.split()[-4:] == ["0", "in", "1h", "00m"]


def test_closed_shows_who_closed_it_until_when_and_why(scene: Scene) -> None:
    scene.configure(DAY + NARROW + JOB)
    scene.spend(1)
    scene.shut("units", MIDNIGHT_MS)
    on = "this machine goes on at 2026-11-22T08:00:03+00:00"
    assert scene.result() == f'CLOSED by upstream until 2026-11-22T08:00:00+00:00: "{SAID}"; {on}'
    assert scene.fields() == (False, "units", None, rfc3339(MIDNIGHT_MS + 3_000))
    assert scene.remaining() == {"day": 0, "few": 0}
    assert [x["bucket"] for x in scene.json()["exhausted"]] == ["units"]
    scene.now_ms = MIDNIGHT_MS + 2_999
    assert scene.fields()[:2] == (False, "units"), "this machine comes back a little later"
    assert [x["bucket"] for x in scene.json()["exhausted"]] == ["units"]
    scene.now_ms += 1
    assert (scene.fields(), scene.json()["exhausted"]) == (OPEN, [])


def test_closed_for_good_has_no_time(scene: Scene) -> None:
    scene.configure(DAY)
    scene.shut("units", NEVER)
    ask = "ask upstream for quota, then `quota reopen units --because TEXT`"
    assert scene.result() == f'CLOSED by upstream until it grants quota: "{SAID}"; {ask}'
    assert "somebody else" not in " ".join(scene.lines())
    assert scene.fields() == (False, "units", None, None)
    assert scene.json()["limits"][0]["next_capacity_at"] is None


def test_a_reopened_bucket_shows_the_reason_until_its_closing_would_end(scene: Scene) -> None:
    scene.configure(DAY)
    scene.shut("units", MIDNIGHT_MS)
    scene.now_ms += HOUR_MS
    assert scene.session.budget("main").reopen("units", "raised to 50,000")
    assert (scene.result(), scene.fields(), scene.remaining()) == ("OPEN: 500 units", OPEN, {"day": 500})
    assert (
        f'bucket units was reopened at 2026-11-21T11:00:00+00:00: raised to 50,000 (upstream had said "{SAID}")'
        in scene.lines()
    )
    (exhaustion,) = scene.json()["exhausted"]
    assert (exhaustion["bucket"], exhaustion["until"], exhaustion["reopened_because"]) == (
        "units",
        rfc3339(MIDNIGHT_MS),
        "raised to 50,000",
    )
    scene.now_ms = MIDNIGHT_MS + 3_000
    assert scene.json()["exhausted"] == []
    scene.shut("units", NEVER)
    assert "reopened_because" not in scene.json()["exhausted"][0]
    scene.session.budget("main").reopen("units", "granted")
    assert len(scene.json()["exhausted"]) == 1
    scene.now_ms += DAY_MS + 3_000
    assert scene.json()["exhausted"] == [], "what would hold for good is read for a day"


def test_a_closed_and_full_credential_shows_the_later_time(scene: Scene) -> None:
    scene.configure(DAY)
    scene.spend(5)
    scene.shut("units", MIDNIGHT_MS)
    until, then = "2026-11-22T08:00:00+00:00", "2026-11-22T10:00:00+00:00"
    assert scene.result() == f'CLOSED by upstream until {until}: "{SAID}"; then full until {then}'
    assert scene.fields() == (False, "units", "day", rfc3339(TEN_MS + DAY_MS))


@pytest.mark.parametrize("api", ["youtube-v3", "youtube-v3-buckets"])
def test_a_pool_that_upstream_closed_leaves_the_rest_open(scene: Scene, api: str) -> None:
    scene.configure(DAY + NARROW + JOB, api=api)
    scene.shut("search", MIDNIGHT_MS)
    assert (scene.result(), scene.fields()) == ("OPEN: 500 units, no searches until 2026-11-22T08:00:03+00:00", OPEN)
    assert scene.remaining() == {"day": 500, "few": 0}, "all that the second counts is closed"
    assert f'bucket search is closed by upstream until 2026-11-22T08:00:00+00:00: "{SAID}"' in scene.lines()


def test_a_paced_limit_is_full_until_its_pace_gives_more(scene: Scene) -> None:
    scene.configure(PACED)
    assert scene.result() == "OPEN: 2,000 units"
    scene.session.budget("main").charge("videos.list", units=2_000)
    assert scene.result() == (
        "FULL until 2026-11-21T10:00:09+00:00: "
        "limit 'pacific-day' has 2,000 of 2,000 units used, of 9,600 by the end of the day"
    )
    assert scene.fields() == (False, None, "pacific-day", rfc3339(TEN_MS + 9_000))


TWO = DAY + '[credentials.two]\napi = "youtube-v3"\nproject = "p"\n'


def test_credentials_of_one_project_show_the_same_numbers(scene: Scene) -> None:
    """Another process charges all the time."""
    session = scene.configure(TWO)
    with Session(load_settings(scene.path), clock=lambda: scene.now_ms) as other:
        session.project("main").wall = lambda: other.budget("main").charge("videos.list") and scene.now_ms
        rows = [read_status(session).credentials for _ in range(10)]
        scene.close()
    assert [main.remaining_units - two.remaining_units for main, two in rows] == [0] * 10


def test_credentials_of_one_project_show_that_they_share_a_budget(scene: Scene) -> None:
    scene.configure(TWO + '[credentials.other]\napi = "gmail-v1"\n')
    scene.spend(5)
    lines = scene.lines()
    assert "main: project p, youtube-v3, one budget with two" in lines
    assert "two: project p, youtube-v3, one budget with main" in lines
    assert "other: project other, gmail-v1" in lines
    assert sum(line.startswith("FULL until 2026-11-22T10:00:00+00:00") for line in lines) == 2
    status = read_status(scene.session)
    assert [row.open for row in status.credentials] == [False, False, True]
    assert status.exit_status == 75, "the worst of them"


def test_every_status_fits_the_screen(scene: Scene) -> None:
    for text in (DAY + NARROW + JOB, PACED + JOB, JOB):
        scene.configure(text)
        for state in ("open", "full", "closed"):
            if state == "full":
                while scene.session.budget("main").charge("search.list").admitted:
                    pass
            if state == "closed":
                scene.shut("units", MIDNIGHT_MS)
            lines = scene.lines(40)
            assert max(map(len, lines)) <= 40
            assert not any("…" in line for line in lines)
        scene.session.budget("main").reopen("units", "")
        scene.now_ms += 2 * DAY_MS


def test_units_of_others_count_and_are_shown(scene: Scene) -> None:
    scene.configure(DAY)
    budget = scene.session.budget("main")
    budget.add_others("units", 30, TEN_MS, MIDNIGHT_MS, "reconciled")
    assert scene.result() == "OPEN: 470 units"
    assert "day: includes 30 units used by others, as upstream said, until 2026-11-22T08:00:00+00:00" in scene.lines()
    assert scene.json()["limits"][0]["upstream_units"] == 30
    scene.now_ms = MIDNIGHT_MS
    assert "upstream_units" not in scene.json()["limits"][0]


@pytest.mark.topology
def test_an_early_closing_is_told_by_the_longest_window(scene: Scene) -> None:
    minute = '[[credentials.main.limits]]\nname = "minute"\nquota = 900\nwindow = "1m"\n'
    scene.configure(DAY.replace("units = 500", "quota = 9_000") + minute)
    scene.spend(8)
    scene.now_ms += 2 * MINUTE_MS
    scene.shut("units", MIDNIGHT_MS)
    assert any("units: upstream says exhausted with 800 units of 9,000 counted here" in line for line in scene.lines())


def test_a_loss_is_shown_for_a_day(scene: Scene, ledger_place: LedgerStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quota.deciding.losses.machine_name", lambda: "collector")
    scene.configure(DAY)
    scene.spend(2)
    assert "put_back" not in scene.json()
    ledger_place.empty()
    scene.configure(DAY)
    assert scene.result() == "OPEN: 300 units"
    at = "2026-11-21T10:00:00+00:00"
    assert scene.lines()[-1] == f"the ledger had lost 2 charges of 200 units, put back at {at} by collector"
    assert scene.json()["put_back"] == [{"at": rfc3339(TEN_MS), "machine": "collector", "charges": 2, "units": 200}]
    numbers = {sample.family: sample.value for sample in of_status(read_status(scene.session), "p")}
    assert numbers["quota_ledger_put_back_charges"] == 2
    scene.now_ms += 1_000
    ledger_place.empty()
    scene.configure(DAY)
    both = [x["at"] for x in scene.json()["put_back"]]
    assert both == [rfc3339(TEN_MS), rfc3339(TEN_MS + 1_000)], "the second loss takes the ledger's note of the first"
    scene.now_ms += DAY_MS
    assert "put_back" not in scene.json()


def test_a_wrong_clock_is_one_line(scene: Scene) -> None:
    scene.configure(DAY)
    scene.spend(1)
    scene.session.project("main").wall = lambda: scene.now_ms - MAX_CLOCK_AHEAD_MS // 2
    assert "newest_charge_at" not in scene.json(), "by the ledger's clock"
    scene.session.project("main").wall = lambda: scene.now_ms - MAX_CLOCK_AHEAD_MS - 1
    with pytest.raises(
        LedgerError, match=r"clock reads 2026-11-21T08:59:59\+00:00, the ledger's 2026-11-21T10:00:00\+00:00; set the"
    ):
        read_status(scene.session)


def test_the_status_knows_the_first_method_of_each_built_in_job() -> None:
    options: dict[str, dict[str, str]] = {"search": {"words": "x"}}
    for name, method in BUILT_IN_FETCHES.items():
        assert attempt_of(load_fetch(name, options.get(name, {})), None) == method


# -- the command -------------------------------------------------------------------------------------------------------


def test_check_exits_with_the_worst_status_of_all_credentials(tmp_path: Path) -> None:
    quota = Quota(tmp_path)
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    quota.configure(
        f'[ledger]\nurl = "{url}"\n[credentials.main]\napi = "youtube-v3"\n{DAY}[credentials.b]\napi = "gmail-v1"\n'
    )
    assert quota("status", "--check").returncode == 0
    quota("charge", "videos.list", "--units", "500", "--credential", "main")
    assert quota("status").returncode == 0
    checked = quota("status", "--check")
    assert (checked.returncode, checked.stderr, checked.stdout.count("FULL until")) == (75, "", 1)
    assert quota.json("status", "--check", status=75)["credentials"][0]["open"] is False
    assert "cannot be combined" in one_line(quota("status", "--check", "--watch"), 2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    quota.configure(f'[ledger]\nurl = "redis://127.0.0.1:{port}/0"\n[credentials.main]\napi = "youtube-v3"\n')
    assert "cannot be reached" in one_line(quota("status", "--check"), 69)


@pytest.mark.usefixtures("ledger_place")
def test_the_next_capacity_comes_when_the_oldest_charge_leaves(scene: Scene) -> None:
    session, dice = scene.configure(DAY.replace("500", "50_000") + NARROW.replace("300", "50_000")), random.Random(1)
    budget, charged = session.budget(), list[Any]()
    for _ in range(120):
        scene.now_ms += dice.choice((0, 1, 40_000, 40 * MINUTE_MS))
        if dice.random() < 0.7:
            charged.append(budget.charge(dice.choice(("videos.list", "search.list"))))
        elif charged:
            budget.settle(str(dice.choice(charged[-20:]).id), dice.choice((0, 3)))
        if dice.random() < 0.3:
            entries = charges_at(session.ledger, "p")
            for row in read_status(session).credentials[0].limits:
                window, selector = row.limit.view.window, row.limit.view.selector
                assert isinstance(window, Sliding)
                counted = [e for e in entries if e.units and selector.counts(e.bucket, e.method, e.job)]
                leaves_ms = [e.id[0] + window.window_ms for e in counted if e.id[0] + window.window_ms > scene.now_ms]
                assert row.next_capacity_ms == min(leaves_ms, default=None)
