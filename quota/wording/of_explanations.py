"""Why a call was refused, and what a charge did, in words. The cause comes first; the rest is the evidence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from quota.common.clock import NEVER, moment, second, weekday
from quota.common.text import many, spell
from quota.decision import SET_THE_CLOCK
from quota.explain.admits import Change, Setting
from quota.explain.charge import ChargeExplained
from quota.explain.refusal import RefusalExplained
from quota.terms.limits import SECOND_MS
from quota.wording.of_status import spent_elsewhere
from quota.wording.parts import Line, Part, Table

ROWS = 10
"""The most rows in the table of what fills a limit; the JSON has all."""

NAMED = 3
SHARE = 20
"""The most names in the line that says who filled it. Each has at least one part in SHARE."""


# -- a refusal ---------------------------------------------------------------------------------------------------------


def refusal_told(x: RefusalExplained) -> Iterator[Part]:
    """Why a call was refused: the cause, who filled it, who asked, what is different now, and the evidence. An empty
    line begins a new paragraph."""
    yield Line(f"REFUSED: {_cause(x)}", "verdict")
    for text in _who_filled(x):
        yield Line(text, "strong")
    yield Line(_asker(x))
    yield Line(_now(x), "strong")
    if x.limits:
        yield Line("")
        yield _limits(x)
    yield from map(Line, _upstream(x))
    if x.filled_name is not None:
        yield Line("")
        yield from _filled(x)
    if x.expiries:
        yield Line("")
        yield from _expiries(x)
    yield Line("")
    yield from map(Line, _admits(x))


def _cause(x: RefusalExplained) -> str:
    kept = x.kept
    row = x.limit(kept.refused_by)
    if x.closed_by_upstream:
        return kept.why.partition(" (")[0]  # its words come below
    if kept.reason not in ("limit", "leave") or row is None or row.then is None:
        return kept.why
    then = row.then
    left = many(max(0, then.limit_units - then.used_units), row.noun)
    pace = ", which its pace had released by then" if " by the end of the " in kept.why else ""
    if kept.reason == "leave":
        left += f" left beyond what {f'job {kept.job}' if kept.job else 'this job'} leaves to others"
    else:
        left += f" left of {then.limit_units:,}"
    needs = f"{kept.method} needs"
    if kept.calls > 1:
        needs = f"{many(kept.calls, 'call')} together, {kept.method} and {kept.calls - 1:,} more, need"
    return f"limit {row.name!r} had {left}{pace}; {needs} {then.cost_units:,}"


def _who_filled(x: RefusalExplained) -> Iterator[str]:
    """Who spent the most of what the limit counts; or what is ours of a bucket that upstream closed."""
    if x.closed_by_upstream:
        yield from _whose(x)
        return
    row = x.limit(x.filled_name)
    spent: Counter[str] = Counter()
    for one in x.filled:
        who = f"job {one.job}, {one.method}" if one.job else one.method
        spent[who] += one.now_units if one.then_units is None else one.then_units
    if x.log_whole and row is not None and row.then is not None:
        whole, unlogged_units = row.then.used_units, row.then_unlogged_units
    else:
        whole, unlogged_units = spent.total() + x.unlogged_units, x.unlogged_units
    if unlogged_units:
        spent["others, as upstream said:" if x.upstream_units >= unlogged_units else "not in the log"] = unlogged_units
    named = [f"{who} {units:,}" for who, units in spent.most_common(NAMED) if units * SHARE >= whole]
    if named:
        named[0] += f" of {whole:,}"
        yield f"Filled by: {'; '.join(named)}"


def _whose(x: RefusalExplained) -> Iterator[str]:
    """How much of what upstream grants was charged here."""
    if x.granted_units:
        ours = sum(one.now_units if one.then_units is None else one.then_units for one in x.filled)
        charged = f"{many(ours, 'unit')} of the {x.granted_units:,} that upstream grants were charged here"
        if x.upstream_units:
            yield f"{charged}; {x.upstream_units:,} only upstream counted: somebody else spends this project"
        elif ours + x.kept.cost_units <= x.granted_units:
            yield f"{charged}: {spent_elsewhere(x.comparable)}"
        else:
            yield charged


def _asker(x: RefusalExplained) -> str:
    kept = x.kept
    who = [f"job {kept.job}"] if kept.job else []
    who += [f"region {kept.region}"] if kept.region else []
    who += [f"run {kept.run}"] if kept.run else []
    who += [f"on {kept.machine}"] if kept.machine else []
    then = "" if kept.retry_at_ms is None else f"; told to come back {_ahead(kept.retry_at_ms, x)}"
    return f"{weekday(kept.at_ms)}, credential {kept.credential}, {', '.join(who)}".rstrip(", ") + then


def _now(x: RefusalExplained) -> str:
    since_ms = x.asked_ms - x.kept.at_ms
    then = f"Now, {spell(since_ms)} later," if since_ms >= SECOND_MS else "Now"
    if x.now is None:
        return f"{then} it could never be admitted: {x.never}"
    now = x.now.decision
    same = "the same call" if x.kept.calls == 1 else f"the same {many(x.kept.calls, 'call')} together"
    if not x.same_asked:
        same = f"a single {x.kept.method} of {many(x.kept.cost_units, 'unit')}"
    if now.admitted:
        return f"{then} {same} would be admitted"
    until = "" if now.retry_at_ms is None else f" until {_ahead(now.retry_at_ms, x)}"
    why = ", for the same reason" if now.why() == x.kept.why else f": {now.why()}"
    return f"{then} {same} would be refused{until}{why}"


def _limits(x: RefusalExplained) -> Table:
    """Then and now, limit by limit."""
    headings = ["limit", "window", "then used", "of", "now used", "of"]
    headings += ["room again"] if any(one.room_ms is not None for one in x.limits) else []
    rows = []
    for one in x.limits:
        then = ("?", "?") if one.then is None else (f"{one.then.used_units:,}", f"{one.then.limit_units:,}")
        now = ("?", "?") if one.now is None else (f"{one.now.used_units:,}", f"{one.now.limit_units:,}")
        room = [] if len(headings) == 6 else ["" if one.room_ms is None else f"in {spell(one.room_ms - x.asked_ms)}"]
        rows.append((one.name, one.window or "(no longer configured)", *then, *now, *room))
    bad = frozenset(n for n, one in enumerate(x.limits) if one.name == x.kept.refused_by)
    return Table(headings, rows, frozenset((2, 3, 4, 5)), bad, without=(1,))


def _upstream(x: RefusalExplained) -> Iterator[str]:
    """What upstream said of the bucket that it closed."""
    kept, record = x.kept, x.exhaustion
    if not x.closed_by_upstream:
        return
    if record is None:
        yield f'its words: "{kept.why.partition(" (")[2].removesuffix(")")}"'
        yield f"upstream's answer to bucket {kept.refused_by} is no longer recorded"
        return
    until = "it grants quota" if record.until_ms == NEVER else _ahead(record.until_ms, x)
    yield f"upstream said so on {weekday(record.since_ms)}, told by {record.reported_by}; it holds until {until}"
    yield f'its words: "{record.evidence}"'
    if record.reopened_ms:
        yield f"reopened on {weekday(record.reopened_ms)}: {record.reopened_because}"


def _filled(x: RefusalExplained) -> Iterator[Part]:
    """Who filled the limit that decided; or what we know of that a closed bucket counts."""
    closed = x.closed_by_upstream
    what = (
        f"What this ledger charged to bucket {x.filled_name}" if closed else f"What counts in limit {x.filled_name!r}"
    )
    if not x.filled:
        yield Line(f"{what}: nothing that the log still has")
    else:
        yield Line(f"{what}, in {_noun(x, x.filled_name)}s:")
        rows = [
            (
                one.job or "-",
                one.method,
                one.region or "-",
                "?" if one.then_units is None else f"{one.then_units:,}",
                f"{one.now_units:,}",
            )
            for one in x.filled[:ROWS]
        ]
        more = x.filled[ROWS:]
        if more:
            then_units = f"{sum(one.then_units or 0 for one in more):,}" if x.log_whole else "?"
            rows.append((f"{len(more):,} more", "", "", then_units, f"{sum(one.now_units for one in more):,}"))
        then_total = f"{sum(one.then_units or 0 for one in x.filled):,}" if x.log_whole else "?"
        footer = ("total", "", "", then_total, f"{sum(one.now_units for one in x.filled):,}")
        yield Table(("job", "method", "region", "then", "now"), rows, frozenset((3, 4)), footer=footer, without=(2,))
    if not x.log_whole:
        yield Line("then: the log no longer has everything that counted at the refusal", "note")
    for note in _differences(x):
        yield Line(note, "note")


def _differences(x: RefusalExplained) -> Iterator[str]:
    """What counts beside the charges in the log."""
    lost, until = x.unlogged_units - x.upstream_units, _ahead(x.unlogged_until_ms, x)
    noun = _noun(x, x.filled_name)
    if lost:
        yield f"now also {many(lost, noun)} of charges that the ledger's log lacks, until {until}"
    if x.upstream_units:
        yield f"now also {many(x.upstream_units, noun)} used by others, as upstream said, until {until}"
    row = x.limit(x.filled_name)
    if row is None or row.then is None:
        return
    if row.then_unlogged_units:
        yield f"then also {many(row.then_unlogged_units, noun)} that the ledger's log lacked"
    logged_units = sum(one.then_units or 0 for one in x.filled)
    missing = row.then.used_units - row.then_unlogged_units - logged_units
    if x.log_whole and missing > 0:
        yield f"then also {many(missing, noun)} that were given back since (refunded, settled) or lost"
    elif x.log_whole and missing < 0:
        yield f"then {many(-missing, noun)} less: charges were settled higher since, or charged at the same moment"


def _expiries(x: RefusalExplained) -> Iterator[Part]:
    yield Line(f"What leaves limit {x.expiring!r} next:")
    fits = "the call fits" if x.kept.calls == 1 else "the calls fit"
    rows = []
    for one in x.expiries:
        what = f"{one.method} {one.charge_id}" if one.kind == "charge" else _WHAT[one.kind]
        rows.append((_second_up(one.at_ms), f"{one.units:,}", what, one.job or "-", fits * one.makes_room))
    heading = f"{_noun(x, x.expiring)}s"
    yield Table(("at", heading, "of", "job", ""), rows, frozenset((1,)), without=(3,))


def _noun(x: RefusalExplained, name: str | None) -> str:
    """What a limit counts: units, or calls. A bucket counts units."""
    row = None if x.closed_by_upstream else x.limit(name)
    return "unit" if row is None else row.noun


_WHAT = {
    "lost": "charges that the log lacks",
    "upstream": "used by others, as upstream said",
    "reset": "all of them: reset",
    "pace": "its pace goes on",
    "grant": "what upstream granted is believed no more",
}


def _admits(x: RefusalExplained) -> Iterator[str]:
    """What would have admitted the call."""
    kept = x.kept
    if x.admitted_today:
        yield "It would have been admitted with the configuration as it is today."
        return
    if kept.reason == "clock":
        yield f"It would have been admitted with clocks that agree: {SET_THE_CLOCK}."
        return
    if kept.reason == "counting":
        yield "It was not compared with any limit: the ledger still counted a long log for a new one."
        return
    if not x.admits:
        yield _why_nothing(x)
        return
    yield "It would have been admitted" + (" with any one of these:" if len(x.admits) > 1 else ":")
    for change in x.admits:
        yield f"  {_change(change, kept.job)}"
    for one in x.admits[0]:
        if one.kind == "limit" and one.units > one.upstream_units > 0:
            yield f"But upstream grants {one.upstream_units:,}: beyond that it refuses calls itself."


def _why_nothing(x: RefusalExplained) -> str:
    kept = x.kept
    if kept.limits_left_out:
        left_out = f"{many(kept.limits_left_out, 'limit')}"
        return f"What would have admitted it is not known: the refusal was kept without {left_out}."
    if kept.reason == "ledger-unavailable" and kept.calls > 1:
        return "What allowance would have admitted them is not known: the refusal does not say what each call cost."
    if kept.reason == "ledger-unavailable":
        return f"What an allowance would have admitted is known on its machine only: {kept.machine or 'unknown'}."
    return "Nothing in the configuration would have admitted it."


def _change(change: Change, job: str) -> str:
    return ", and ".join(_setting(one, job) for one in change)


def _setting(one: Setting, job: str) -> str:
    instead = f"instead of {one.was_units:,}"
    if one.kind == "limit":
        return f"limit {one.name!r}: {one.units:,} {instead}"
    if one.kind == "leave":
        return f"jobs.{job}: leave = {one.units:,} of limit {one.name!r} {instead}"
    if one.kind == "pace":
        return f"limit {one.name!r} without pacing"
    if one.kind == "price":
        return f"{one.name} at {many(one.units, 'unit')} {instead}"
    if one.kind == "reopen":
        return f"bucket {one.name} open: `quota reopen {one.name} --because TEXT`, if upstream has quota again"
    return f"[ledger] unavailable: {one.kind} = {one.units:,} {instead}"


# -- a charge ----------------------------------------------------------------------------------------------------------


def charge_told(x: ChargeExplained) -> Iterator[Part]:
    """What a charge was, and each limit before and after it."""
    charged = many(x.charge.units if x.charged_units is None else x.charged_units, "unit")
    drawn = "" if x.drawn is None else " on this machine's allowance, while the ledger did not answer"
    yield Line(f"CHARGED {charged} for {x.charge.method} on {weekday(x.at_ms)}{drawn}", "strong")
    who = [f"job {x.charge.job or '-'}", f"region {x.charge.region or '-'}", f"run {x.run or '-'}"]
    yield Line(f"{', '.join(who)}; project {x.project}, bucket {x.charge.bucket}")
    yield Line(_corrected(x), "strong" if x.charged_units not in (None, x.charge.units) else "")
    if x.limits:
        yield Line("")
        yield _around(x)
    if any(not one.whole for one in x.limits):
        yield Line("at least: the log no longer has all that counted before it", "note")
    if x.not_counted_by:
        yield Line(f"not counted by: {', '.join(x.not_counted_by)}")
    for one in x.also:
        yield Line("")
        yield from charge_told(one)


def _corrected(x: ChargeExplained) -> str:
    if x.drawn is not None and x.entry is None:
        if x.drawn.repaid:
            return f"It was repaid to the ledger, whose log no longer has it; it counted {many(x.charge.units, 'unit')}"
        return f"It is owed: the next charge repays it, dated then; it counts {many(x.charge.units, 'unit')} now"
    repaid = ""
    if x.drawn is not None and x.entry is not None:
        repaid = f"Repaid on {weekday(x.entry.ms)} as charge {x.entry.id}. "
    if x.entry is not None and x.entry.reserved_units:
        return f"{repaid}It is reserved: nobody has said yet what the call cost"
    if x.charged_units == x.charge.units:
        return f"{repaid}It was never corrected"
    how = "refunded: it counts nothing" if not x.charge.units else f"settled: it counts {many(x.charge.units, 'unit')}"
    return f"{repaid}It was {how} now, {x.charged_units:,} before"


def _around(x: ChargeExplained) -> Table:
    rows = []
    for one in x.limits:
        least = "" if one.whole else ">= "
        until = "since " if one.leaves_ms <= x.asked_ms else ""
        rows.append(
            (
                one.limit.name,
                one.limit.view.window.name,
                f"{least}{one.before_units:,}",
                f"{least}{one.after_units:,}",
                f"{one.limit.limit_units:,}",
                until + _second_up(one.leaves_ms),
            )
        )
    headings = ("limit", "window", "before", "after", "of", "stops counting")
    return Table(headings, rows, frozenset((2, 3, 4)), without=(1,))


def _second_up(at_ms: int) -> str:
    """Rounded up to a second."""
    return second(-(-at_ms // 1000) * 1000)


def _ahead(at_ms: int, x: RefusalExplained) -> str:
    """A time as `quota status` has it, or with its day where it is over: rounded up, so that nobody comes too early."""
    return moment(at_ms, x.asked_ms) if at_ms > x.asked_ms else weekday(-(-at_ms // 60_000) * 60_000)
