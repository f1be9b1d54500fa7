"""What `quota explain` says of a refusal and of a charge, compared with sums over everything that was charged."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from quota.budget import project_of
from quota.cli.output import render_parts as render
from quota.common.clock import NEVER, rfc3339
from quota.deciding.history import charges
from quota.decision import Decision
from quota.errors import LedgerError, UnknownCharge
from quota.reports.refusal import EXPIRIES, Change, explain_refusal
from quota.reports.spending import explain_charge
from quota.rules.entry import id_of_call
from quota.rules.facts import Grant
from quota.rules.refusals import refusal_text
from quota.session import Session
from quota.settings.load import load_settings
from quota.terms.limits import DAY_MS, HOUR_MS, Calendar, Limit
from quota.wording import charge_parts, refusal_parts
from support.commands import Quota
from support.explaining import NOON_MS, World, shown_lines, text_of, units_in
from support.servers import until
from support.setup import ids_of


@pytest.fixture
def world(any_ledger_url: str, tmp_path: Path, state_dir: Path) -> Iterator[World]:
    world = World(any_ledger_url, tmp_path)
    yield world
    world.session.close()


def changed(world: World, change: Change, job: str, by: int = 0) -> tuple[tuple[Limit, ...], dict[str, int]]:
    """Limits, and what is left, with a change applied; `by` makes each number worse by that much."""
    limits = {limit.name: limit for limit in world.budget.limits}
    leave = dict(world.session.settings.jobs[job].leave) if job in world.session.settings.jobs else {}
    for setting in change:
        if setting.kind == "limit":
            limits[setting.name] = replace(limits[setting.name], limit_units=setting.units - by)
        elif setting.kind == "leave":
            leave[setting.name] = setting.units + by
        elif setting.kind == "pace":
            limits[setting.name] = replace(limits[setting.name], paced=bool(by))
    return tuple(limits.values()), leave


def check(world: World, decision: Decision, job: str, *, changes: bool = True) -> Counter[str]:
    """Hold all that is said of a refusal that was just met against the log and against the budget itself."""
    x = world.explain(job)
    seen: Counter[str] = Counter()
    assert (x.kept.reason, x.kept.refused_by) == (decision.reason, decision.refused_by)
    assert x.kept.limits == tuple(state._replace(noun="unit") for state in decision.limits)
    assert x.now is not None
    limit = next(limit for limit in world.budget.limits if limit.name == decision.refused_by)
    entries = world.log()
    filled = units_in(limit.view, entries, world.now_ms)
    assert {(f.job, f.method, f.region): f.then_units for f in x.fill.rows} == dict(filled)
    assert {(f.job, f.method, f.region): f.now_units for f in x.fill.rows} == dict(filled)
    assert [f.now_units for f in x.fill.rows] == sorted((f.now_units for f in x.fill.rows), reverse=True)
    assert sum(filled.values()) == next(state.used_units for state in decision.limits if state.name == limit.name)
    if not isinstance(limit.view.window, Calendar):
        window_ms = limit.view.window.window_ms
        leaving = [
            (entry.id[0] + window_ms, name)
            for name, entry in zip(ids_of(entries), entries, strict=True)
            if entry.id[0] > world.now_ms - window_ms
            and entry.units
            and limit.view.selector.counts(entry.bucket, entry.method, entry.job)
        ]
        assert [(expiry.at_ms, expiry.charge) for expiry in x.expiries[:EXPIRIES]] == leaving[:EXPIRIES]
        assert len(x.expiries) <= EXPIRIES + 1
    (fits,) = [expiry for expiry in x.expiries if expiry.makes_room]
    paced = any(limit.paced for limit in world.budget.limits)
    assert fits.at_ms == decision.retry_at_ms or (paced and fits.at_ms <= (decision.retry_at_ms or 0))
    seen["far"] += len(x.expiries) > EXPIRIES
    seen[fits.kind] += 1
    now_ms = world.now_ms
    world.now_ms = decision.retry_at_ms or 0
    assert world.budget.peek(decision.method, job=job).admitted
    world.now_ms -= 1
    assert not world.budget.peek(decision.method, job=job).admitted
    world.now_ms = now_ms
    assert (x.admitted_today, bool(x.admits)) == (False, changes), decision
    for change in x.admits:
        seen["+".join(sorted({setting.kind for setting in change}))] += 1
        assert world.other(*changed(world, change, job), job).peek(decision.method, job=job).admitted, change
        assert not world.other(*changed(world, change, job, by=1), job).peek(decision.method, job=job).admitted, change
    return seen


@pytest.mark.parametrize("pacing", [False, True])
def test_the_explanation_of_a_refusal_is_true(ledger_url: str, tmp_path: Path, state_dir: Path, pacing: bool) -> None:
    """L5, L9. Who filled the limit, what leaves it next and lets the call through, and which changes would have."""
    world = World(ledger_url, tmp_path, pacing=pacing, pacific="900" if pacing else "1_500")
    dice = random.Random(f"explain {pacing}")
    seen: Counter[str] = Counter()
    for _ in range(110):
        world.now_ms += dice.choice([1, 7, 60_000, 20 * 60_000, 2 * HOUR_MS])
        job = dice.choice(["backfill", "trending", ""])
        method = dice.choice(["search.list", "videos.list", "captions.list", "videos.insert"])
        decision = world.charge(method, job=job, region=dice.choice(["DE", "FR", ""]))
        if decision.id is not None and dice.random() < 0.2:
            world.budget.settle(decision.id, dice.choice([0, 1, 30]))
        if not decision.admitted:
            seen.update(check(world, decision, job))
    expected = {"limit", "leave", "charge", *(["pace"] if pacing else ["far", "reset"])}
    assert {kind for kind in expected if not seen[kind]} == set()
    world.session.close()


def test_a_refusal_by_a_pace_names_what_the_whole_period_has(ledger_url: str, tmp_path: Path, state_dir: Path) -> None:
    world = World(ledger_url, tmp_path, pacing=True, pacific="900")
    world.charge("videos.list", units=560)
    left_of = ("", "2 units left of 562, of 900"), ("backfill", "0 units left of 500, of 800")
    for units, (job, left) in product((700, 10), left_of):
        world.charge("videos.list", units=units, job=job)
        assert head(world).startswith(f"REFUSED: limit 'pacific' had {left} by the end of the day")
    assert " by the end of the day, this job leaves 100 to others; videos.list needs 10 " in head(world)
    world.session.close()


def test_explain_separates_the_refusal_from_the_present(world: World) -> None:
    for region in ("DE", "DE", "FR"):
        assert world.charge("videos.list", units=600, job="trending", region=region).admitted
    assert not world.charge("search.list", job="backfill", region="US").admitted
    then_ms = world.now_ms
    world.now_ms += 10 * HOUR_MS  # in the evening: the calendar day is still the same
    world.budget.refund(ids_of(world.log())[0])
    assert world.charge("videos.list", units=60, job="other").admitted
    x = world.explain()
    assert (x.kept.at_ms, x.asked_ms, x.kept.region) == (then_ms, world.now_ms, "US")
    then, now = x.then_limits["day"], x.now_limits["day"]
    assert (then.used_units, now.used_units, then.limit_units) == (1_800, 1_260, 1_300)
    assert [(f.job, f.region, f.then_units, f.now_units) for f in x.fill.rows] == [
        ("trending", "DE", 1_200, 600),
        ("trending", "FR", 600, 600),
        ("other", "", 0, 60),
    ]
    world.now_ms = then_ms + 25 * HOUR_MS
    x = world.explain()
    assert x.now is not None
    assert x.now.admitted
    assert [(f.job, f.region, f.then_units, f.now_units) for f in x.fill.rows] == [
        ("trending", "DE", 1_200, 0),
        ("trending", "FR", 600, 0),
        ("other", "", 0, 60),
    ]
    assert not [expiry for expiry in x.expiries if expiry.makes_room], "it fits already"


@pytest.mark.usefixtures("ledger_place")
def test_a_refusal_that_is_older_than_the_history(world: World) -> None:
    """Single charges are kept for 35 days; a refusal has the numbers that decided."""
    assert world.charge("videos.list", units=1_850, job="trending").admitted
    refused = world.charge("search.list", job="trending")
    world.pass_days(40)
    x = world.explain()
    assert x.kept.retry_at_ms == refused.retry_at_ms
    assert not x.fill.is_whole
    assert [(f.job, f.then_units, f.now_units) for f in x.fill.rows] == [("later", None, 1)]
    assert x.admits


def test_a_closed_bucket_is_explained_with_upstreams_words(world: World) -> None:
    assert world.charge("videos.list", units=11, job="trending").admitted
    until_ms = world.now_ms + 12 * HOUR_MS
    words = "quotaExceeded: The request cannot be completed"
    world.close_bucket("units", words, until_ms)
    assert world.charge("search.list", job="trending").reason == "exhausted"
    x = world.explain()
    assert (x.exhaustion, x.granted_units) == (world.state.facts().exhaustion("units"), 10_000)
    assert words in x.kept.why
    assert [(f.job, f.then_units) for f in x.fill.rows] == [("trending", 11)], "ours alone would not have exhausted it"
    assert [[(setting.kind, setting.name) for setting in change] for change in x.admits] == [[("reopen", "units")]]
    world.budget.reopen("units", "asked them")
    assert world.budget.peek("search.list", job="trending").admitted, "as was said"
    assert world.charge("videos.list", units=1_800).admitted
    world.now_ms += 1
    world.close_bucket("units", words, until_ms)
    assert world.charge("search.list", job="backfill").reason == "exhausted"
    kinds = [[setting.kind for setting in change] for change in world.explain().admits]
    assert all(change[0] == "reopen" for change in kinds)
    assert ["reopen", "limit", "limit"] in kinds, "and a limit is full"


def test_explain_names_no_change_if_upstream_grants_too_little(world: World) -> None:
    """No number of ours would have admitted the call, and the explanation names none."""
    assert world.charge("videos.list", units=100, job="trending").admitted
    world.budget.grant([Grant("units", 150, world.now_ms, world.now_ms + 7 * DAY_MS)])
    decision = world.charge("search.list", job="trending")
    assert (decision.reason, decision.admitted) == ("limit", False)
    check(world, decision, "trending", changes=False)
    world.budget.grant([Grant("units", 150, world.now_ms, world.now_ms + HOUR_MS)])
    assert world.charge("search.list", job="trending").retry_at_ms == world.now_ms + HOUR_MS
    assert [(expiry.kind, expiry.at_ms) for expiry in world.explain().expiries if expiry.makes_room] == [
        ("grant", world.now_ms + HOUR_MS)
    ]
    world.now_ms += 1
    world.budget.grant([Grant("units", 60, world.now_ms, world.now_ms + 7 * DAY_MS)])
    assert world.charge("search.list", job="trending").reason == "closed"
    x = world.explain()
    assert (x.admits, x.admitted_today, x.kept.closed_by_upstream) == ((), False, False)
    assert x.fill.rows[0].now_units == 100
    assert not [expiry for expiry in x.expiries if expiry.makes_room], "waiting does not help"
    assert "upstream grants 60" in head(world)


def test_units_that_only_upstream_counted_have_a_row_of_their_own(world: World) -> None:
    assert world.charge("videos.list", units=500, job="trending").admitted
    until_ms = world.now_ms + 3 * HOUR_MS
    world.budget.add_others("units", 1_450, world.now_ms, until_ms, "reconciled")
    assert world.charge("search.list", job="trending").retry_at_ms == until_ms
    x = world.explain()
    assert (x.fill.upstream_then_units, x.fill.upstream_units, x.fill.upstream_until_ms) == (1_450, 1_450, until_ms)
    assert [(expiry.kind, expiry.units, expiry.makes_room) for expiry in x.expiries] == [
        ("upstream", 1_450, True),
        ("charge", 500, False),
    ]
    shown = text_of(refusal_parts(x))
    assert "now also 1,450 units used by others, as upstream said" in shown


def test_explain_names_the_allowance_if_the_ledger_did_not_answer(world: World) -> None:
    with world.away():
        assert world.budget.charge("captions.list", units=6).reason == "ledger-unavailable"
    assert world.charge("videos.list").admitted  # it answers again, and is told
    assert "larger allowance" in text_of(refusal_parts(world.explain()))


def test_charges_that_are_dated_just_after_the_refusal_they_caused_counted_then(world: World) -> None:
    """The process dates a refusal by a lower bound of the clock by which the ledger dates charges."""
    assert world.charge("videos.list", units=1_900).admitted
    refused = world.budget.peek("videos.list", units=700)
    world.budget.note_refusal(refused._replace(decided_at_ms=refused.decided_at_ms - 2), "", "")
    world.budget.note_refusal(refused._replace(decided_at_ms=refused.decided_at_ms - HOUR_MS), "behind", "")
    world.budget.hand_over_refusals()
    assert world.explain().kept.job == "behind", "the ledger's clock dates it"
    assert world.explain("").fill.then_units == 1_900
    assert "given back" not in world.shown()


def test_explain_says_what_the_configuration_of_today_would_decide(world: World) -> None:
    assert world.charge("videos.list", units=1_900).admitted
    assert not world.charge("search.list", job="backfill").admitted
    text = world.path.read_text(encoding="utf-8").replace("2_000", "5_000").replace("1_900", "5_000")
    x = world.explain_under(text)
    assert x.now is not None
    assert (x.admitted_today, x.now.admitted) == (True, True)
    x = world.explain_under(text.replace("5_000", "710"))
    assert (x.now, "it can never fit" in x.never) == (None, True)


@pytest.mark.usefixtures("ledger_place")
def test_explain_finds_the_last_refusal_of_a_job(world: World) -> None:
    assert explain_refusal(world.session) is None
    assert world.charge("videos.list", units=1_800).admitted
    assert not world.charge("search.list", job="backfill", region="DE").admitted
    world.now_ms += 1
    assert not world.charge("videos.insert", units=1_000, job="trending").admitted
    world.now_ms += 1
    assert world.explain().kept.job == "trending"
    assert world.explain("backfill").kept.region == "DE"
    assert explain_refusal(world.session, job="other") is None
    first = refusal_text(world.budget.peek("search.list", job="backfill"), "first", "", "", "")
    second = refusal_text(world.budget.peek("search.list", job="backfill"), "second", "", "", "")
    older = first.replace(rfc3339(world.now_ms), rfc3339(world.now_ms - DAY_MS))
    world.state.add_refusals([], [first, second, older])
    assert world.explain().kept.job == "second", "the newest, and of the same time the last"
    ahead = first.replace(rfc3339(world.now_ms), rfc3339(world.now_ms + 300 * DAY_MS))
    world.state.add_refusals([], [ahead])
    assert world.explain().kept.job == "second", "a clock was wrong"


def test_explain_searches_several_projects(ledger_url: str, tmp_path: Path, state_dir: Path) -> None:
    path = tmp_path / "quota.toml"
    credentials = "".join(
        f'[credentials.{name}]\napi = "youtube-v3"\nlimits = [{{ name = "day", units = 150, window = "24h" }}]\n'
        for name in ("one", "two")
    )
    path.write_text(f'[ledger]\nurl = "{ledger_url}"\n{credentials}', encoding="utf-8")
    now_ms = NOON_MS
    with closing(Session(load_settings(path), clock=lambda: now_ms)) as session:
        ids = {name: str(session.budget(name).charge("search.list", region=name).id) for name in ("one", "two")}
        for name in ids:
            x = explain_charge(session, ids[name])
            assert (x.credential, x.charge.region) == (name, name)
        with pytest.raises(UnknownCharge):
            explain_charge(session, ids["one"], "two")
        now_ms += 1
        assert session.budget("two").charge("videos.list").admitted
        for name in ("two", "one"):
            now_ms += 1
            assert not session.budget(name).charge("search.list", region=name).admitted
            session.budget(name).hand_over_refusals()
        last, of_two = explain_refusal(session), explain_refusal(session, "two")
        assert last is not None
        assert of_two is not None
        assert (last.kept.credential, of_two.kept.credential) == ("one", "two")
        assert [(f.region, f.now_units) for f in of_two.fill.rows] == [("two", 100), ("", 1)]


@pytest.mark.usefixtures("ledger_place")
def test_foreign_text_is_shown_escaped(world: World) -> None:
    assert world.charge("videos.list", units=1_900, job="trending", region="DE").admitted
    text = refusal_text(world.budget.peek("search.list", job="trending"), "trending", "DE", "run", "")
    hostile = text.replace('"DE"', '"\\u001b[2J\\u202eevil\\nquota: done\\ud800"')
    world.state.add_refusals([], [hostile])
    x = world.explain()
    assert x.kept.region == "\x1b[2J\u202eevil\nquota: done\ud800"
    shown = "\n".join(shown_lines(render(refusal_parts(x))))
    assert "\x1b" not in shown
    assert r"\x1b[2J\u202eevil\nquota: done\ud800" in shown.replace("\n", "")
    for wrong in ("{}", "[]", "nothing", '{"at": 1}', text.replace("1900", "-1"), text.replace("Z", ""), "[" * 3_000):
        world.state.add_refusals([], [wrong])
        with pytest.raises(LedgerError, match="data that no quota program writes"):
            explain_refusal(world.session)
        world.state.add_refusals([], [text] * 100)
        assert explain_refusal(world.session) is not None
    for odd in (
        text.replace("search.list", "a\\nb"),
        text.replace('"cost_units": 100', '"cost_units": 9007199254740991'),
    ):
        world.state.add_refusals([], [odd])
        assert world.explain().now is None, "no such call can be made"
        assert shown_lines(render(refusal_parts(world.explain())))
        world.state.add_refusals([], [text] * 100)


def head(world: World) -> str:
    return " ".join(" ".join(shown_lines(render(refusal_parts(world.explain())))[:3]).split())


def test_the_cause_is_in_the_first_three_lines(world: World) -> None:
    assert world.charge("videos.list", units=1_250, job="trending", region="DE").admitted
    for units, reason in ((100, "leave"), (800, "limit")):
        assert world.charge("videos.list", units=units, job="backfill", region="FR").reason == reason
        assert head(world).startswith(
            "REFUSED: limit 'day' had 50 units left for job backfill, which must leave 700 to others; videos.list needs"
            f" {units} Filled by: job trending, videos.list 1,250 of 1,250"
        )
        world.now_ms += 1
    assert not world.charge("videos.list", units=700, job="trending").admitted
    assert head(world).startswith(
        "REFUSED: limit 'pacific' had 650 units left of 1,900; videos.list needs 700"
        " Filled by: job trending, videos.list 1,250 of 1,250"
    )
    world.now_ms += 1
    words = "quotaExceeded: " + "the quota of the project " * 4
    world.close_bucket("units", words)
    assert not world.charge("videos.list").admitted
    assert head(world) == (
        "REFUSED: upstream said its bucket 'units' is exhausted Charged here: 1,250 units of the 10,000 that "
        "upstream grants; somebody else uses this project, or its quota is smaller; `quota reconcile` shows which"
    )
    configured = world.path.read_text(encoding="utf-8").replace("units = 2_000", "quota = 50_000")
    assert world.explain_under(configured).granted_units == 50_000
    shown = world.shown()
    assert words.strip() in shown, "upstream's own words"
    assert "trending videos.list DE 1,250" in shown, "what was ours"
    assert "quota reopen units" in shown
    charge = explain_charge(world.session, ids_of(world.log())[0])
    assert shown_lines(render(charge_parts(charge)))[0].startswith("CHARGED 1,250 units for videos.list on")
    assert world.budget.reopen("units", "raised")
    world.close_bucket("units", words, NEVER)
    assert not world.charge("videos.list").admitted
    assert head(world).startswith("REFUSED: upstream grants this project nothing in bucket 'units' 2026-11-21")
    assert "for the same reason; waiting will not help:" in head(world)


def test_quota_explain_prints_text_and_json(ledger_url: str, tmp_path: Path) -> None:
    World(ledger_url, tmp_path).session.close()
    quota = Quota(tmp_path)
    assert quota("charge", "videos.list", "--units", "1900", "--job", "trending").returncode == 0
    assert quota("charge", "search.list", "--job", "backfill", "--region", "FR").returncode == 75
    explained = quota("explain")
    assert (explained.returncode, explained.stderr) == (0, "")
    assert explained.stdout.startswith("REFUSED: limit ")
    answer = quota.json("explain", "--job", "backfill")
    assert (answer["region"], answer["now"]["admitted"]) == ("FR", False)
    assert answer["filled"]["by"][0]["then_units"] == 1_900
    with closing(Session(load_settings(tmp_path / "quota.toml"))) as session:
        (name,) = ids_of(charges(session.project()))
    assert quota.json("explain", name)["limits"][0]["after_units"] == 1_900


@pytest.mark.parametrize(
    ("arguments", "status"),
    [(("1-0", "--last"), 2), (("--credential", "nobody"), 2), (("1-0",), 1), (("--job", "nobody"), 1)],
)
def test_an_unexplainable_refusal_is_one_line(tmp_path: Path, arguments: tuple[str, ...], status: int) -> None:
    World(f"sqlite:///{tmp_path / 'ledger.db'}", tmp_path).session.close()
    answer = Quota(tmp_path)("explain", *arguments)
    assert (answer.returncode, answer.stdout, len(answer.stderr.splitlines())) == (status, "", 1), answer
    assert ("; a call that can never fit is not kept" in answer.stderr) == ("nobody" in arguments[1:] and status == 1)


def test_a_limit_that_counts_calls_is_explained_in_calls(world: World) -> None:
    ids = [str(world.charge("search.list", job="trending").id) for _ in range(9)]
    assert not world.charge("search.list", job="trending").admitted
    answer = world.shown()
    assert answer.startswith("REFUSED: limit 'searches' had 0 calls left of 9; search.list needs 1 Filled by:")
    headings = ["What counts in limit 'searches', in calls:", "at calls what job id"]
    assert all(text in answer for text in [*headings, *ids]), "`quota log` has the charges with these ids"
    assert "Now the same call would be refused until" in answer, "not 0 s later"
    for each in ids:
        world.budget.refund(each)
    assert "What counts in limit 'searches': no charge now" in world.shown()


def test_several_calls_that_were_refused_together_are_one_refusal_with_their_sum(world: World) -> None:
    world.charge("videos.list", units=1_890)
    refused = world.budget.charge_many(["videos.list", ("videos.list", 2), "videos.list"] * 4)
    assert refused[0].refused_by == "pacific"
    world.budget.hand_over_refusals()
    explained = world.explain()
    assert [count.calls for count in world.state.refusals().counts] == [12]
    assert (explained.kept.calls, explained.kept.cost_units, explained.as_json()["calls"]) == (12, 16, 12)
    then = explained.then_limits["pacific"]
    assert (then.used_units, then.cost_units) == (1_890, 16)
    answer = text_of(refusal_parts(explained))
    ((back, until),) = re.findall(
        r"next at ([^,]*?) Now the same 12 calls together would be refused until (\S+), for the same reason", answer
    )
    assert back == until
    assert answer.startswith(
        "REFUSED: limit 'pacific' had 10 units left of 1,900; 12 calls together, videos.list and 11 more, need 16"
    )
    assert "the calls fit" in answer
    assert [[(setting.kind, setting.units) for setting in change] for change in explained.admits] == [
        [("limit", 1_906)]
    ]


def test_calls_refused_together_are_asked_again_with_what_each_limit_counts_of_them(world: World) -> None:
    for _ in range(7):
        assert world.charge("search.list").admitted
    refused = world.budget.charge_many(["videos.list", "search.list", "search.list", "search.list"])
    assert (refused[0].admitted, refused[0].refused_by) == (False, "searches")
    world.budget.hand_over_refusals()
    x = world.explain()
    assert x.now is not None
    assert (x.now.admitted, x.now.refused_by) == (False, "searches")
    assert [[(setting.kind, setting.units) for setting in change] for change in x.admits] == [[("limit", 10)]]
    assert (x.now_limits["searches"].cost_units, x.now_limits["searches"].used_units) == (3, 7)
    world.now_ms += HOUR_MS
    assert "the same 4 calls together would be admitted" in world.shown()
    x = world.explain_under(world.path.read_text(encoding="utf-8").replace("units = 9", "units = 2"))
    assert x.never.startswith("4 calls together cost 3 calls and limit 'searches' of credential 'main' holds 2")


def test_explain_shows_each_limit_as_its_decision_saw_it(world: World) -> None:
    dice = random.Random("before and after")
    admitted: list[Decision] = []
    for _ in range(80):
        world.now_ms += dice.choice([0, 1, 60_000, HOUR_MS])
        method = dice.choice(["search.list", "videos.list"])
        decision = world.charge(method, job=dice.choice(["backfill", "trending"]), region="DE")
        if decision.admitted:
            admitted.append(decision)
            if dice.random() < 0.3:
                world.budget.settle(str(dice.choice(admitted).id), dice.choice([0, 3]))
    entries, views = world.log(), {limit.name: limit.view for limit in world.budget.limits}
    assert len(admitted) == len(entries) > 40
    for decision, entry in zip(admitted, entries, strict=True):
        x = explain_charge(world.session, str(decision.id))
        assert (x.charge, x.at_ms, x.charged_units) == (entry, decision.decided_at_ms, decision.cost_units)
        states = {state.name: state for state in decision.limits}
        assert {row.name for row in x.limits} == states.keys()
        assert {*states, *x.not_counted_by} == {"day", "pacific", "searches"}
        for row in x.limits:
            state, view = states[row.name], views[row.name]
            assert (row.before_units, row.after_units) == (state.used_units - state.cost_units, state.used_units)
            alone = [entry._replace(units=1)]
            assert units_in(view, alone, row.leaves_ms - 1), "it counts until then"
            assert not units_in(view, alone, row.leaves_ms)
            assert row.whole


@pytest.mark.usefixtures("ledger_place")
def test_a_charge_that_has_left_the_log_is_explained_from_the_past(world: World) -> None:
    world.budget.settle(str(world.charge("videos.list", units=300, job="first").id), 200)
    world.now_ms += HOUR_MS
    settled = str(world.charge("videos.list", units=500, job="second").id)
    world.budget.settle(settled, 40)
    world.pass_days(20)
    x = explain_charge(world.session, settled)
    assert (x.charged_units, x.charge.units, x.charge.settled) == (500, 40, True)
    assert {row.name: row.before_units for row in x.limits} == {"day": 200, "pacific": 200}


def test_explain_rejects_an_id_without_a_charge(world: World) -> None:
    assert world.charge("videos.list").admitted
    world.pass_days(40)
    with pytest.raises(UnknownCharge, match="any more: the ledger has single charges since"):
        explain_charge(world.session, f"{NOON_MS - DAY_MS}-0123456789abcdefghijklm")
    for wrong in ("", "x", "-", "1-", f"{world.now_ms + DAY_MS}-0", f"{world.now_ms}-00", "allowance-0000-1"):
        with pytest.raises(UnknownCharge, match="`quota log` lists the charges"):
            explain_charge(world.session, wrong)
    (oldest,) = ids_of(world.log()[:1])
    assert not all(row.whole for row in explain_charge(world.session, oldest).limits), "more was before it"


@pytest.mark.usefixtures("real_walls")
def test_explain_shows_a_draw_before_and_after_hand_over(ledger_url: str, tmp_path: Path, state_dir: Path) -> None:
    world = World(ledger_url, tmp_path, unavailable="unavailable = { max_cost = 5, allowance = 20 }")
    with world.away():
        drawn = str(world.budget.charge("videos.list", units=4, job="trending", region="DE").id)
    journal = project_of(world.budget).journal
    assert journal is not None
    with ExitStack() as another, ThreadPoolExecutor(1) as thread:  # which keeps this one from handing over
        thread.submit(lambda: another.enter_context(journal.locked())).result()
        x = explain_charge(world.session, drawn)
    assert (x.in_log, x.charged_units, x.charge.units, x.charge.region) == (False, None, 4, "DE")
    assert "It is owed" in text_of(charge_parts(x))
    drawn_ms = world.now_ms
    world.now_ms += HOUR_MS
    until(lambda: world.budget.peek("videos.list").admitted and not world.budget.owed_units())  # once a second
    x = explain_charge(world.session, drawn)
    assert (x.in_log, x.at_ms, x.charge.id[0], x.charge.units) == (True, drawn_ms, world.now_ms, 4)
    assert [row.before_units for row in x.limits] == [0, 0]
    handed = id_of_call(world.now_ms, x.charge.key, 0)
    assert f"as charge {handed}" in text_of(charge_parts(x))
    assert explain_charge(world.session, handed).charge == x.charge
    world.session.close()
