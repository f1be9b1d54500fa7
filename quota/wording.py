"""The words and tables that people read, in a terminal or on the dashboard.

A text is made of lines and tables. The command line draws them in a terminal, the dashboard as HTML. They show a
status, the reason of a refusal, and the effect of a charge. The cause comes first, then the evidence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from quota.common.clock import NEVER, moment, stamp, until
from quota.common.text import listed, many, spell
from quota.decision import REPAIR, SET_THE_CLOCK, Decision, enforced
from quota.settings.model import BUILT_IN_NOTICE
from quota.terms.limits import MINUTE_MS, SECOND_MS

if TYPE_CHECKING:
    from quota.reports.refusal import Fill, Filled, RefusalExplained
    from quota.reports.spending import ChargeExplained
    from quota.reports.status import CredentialRow, JobRow, Status
    from quota.rules.facts import Exhaustion, Loss
    from quota.terms.costs import CostBook

ROWS = 10
"""The most rows in the table of the charges that fill a limit; the JSON has all."""

MAX_NAMES = 3
SHARE = 20
"""The most names in the line `Filled by`. Each has at least one part in SHARE."""


# -- lines and tables --------------------------------------------------------------------------------------------------

Tone = Literal["", "strong", "note", "bad", "verdict", "open", "good"]
"""The kind of a line or a row: plain, the main point, something unusual, something wrong, why calls are refused, that
they are admitted, or that all is well."""


class Line(NamedTuple):
    """One paragraph."""

    text: str
    tone: Tone = ""


class Table(NamedTuple):
    """Rows under headings. `numbers` are the columns with numbers; `whole` columns are never folded, because people
    copy their values. `tones` has the tone of each row; empty: all are plain. In a narrow terminal, the `joined`
    columns share the first of them; if that is not enough, the columns in `without` go, one after the other. With
    `least_fold`, they go before lines are folded to fewer characters."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: Collection[int] = ()
    whole: Collection[int] = ()
    tones: Sequence[Tone] = ()
    footer: Sequence[str] = ()
    joined: Sequence[int] = ()
    without: Sequence[int] = ()
    least_fold: int = 0

    @property
    def shown(self) -> list[int]:
        """The columns with a cell, or all if there is no row."""
        return [n for n in range(len(self.headings)) if not self.rows or any(row[n] for row in self.rows)]


Part = Line | Table


# -- a status ----------------------------------------------------------------------------------------------------------


def status_parts(status: Status) -> Iterator[Part]:
    """A status: a headline, a table of limits and notes for each credential."""
    where = "shared by every machine that reaches it" if status.shared else "shared by this machine only"
    if status.ledger == "memory:":
        where = "of this process only"
    if status.built_in:
        yield Line(BUILT_IN_NOTICE, "note")
    yield Line(f"ledger {status.ledger}, {where}")
    if status.unwritable:
        yield Line(status.unwritable, "bad")
    for credential in status.credentials:
        yield Line("")
        settings = credential.settings
        shared = f", one budget with {', '.join(credential.shared_with)}" if credential.shared_with else ""
        yield Line(f"{settings.name}: project {settings.project}, {settings.api}{shared}", "strong")
        verdict = verdict_of(credential)
        yield Line(f"{verdict.word.upper()}{verdict.rest}", "open" if credential.open else "verdict")
        yield from early_of(credential)
        if credential.limits:
            yield _limits_of(credential, status.at_ms)
        resets: dict[tuple[int, str | None], list[str]] = {}
        for row in credential.limits:
            if row.resets_ms is not None:
                resets.setdefault((row.resets_ms, row.zone), []).append(row.limit.name)
        for (edge_ms, zone), names in resets.items():
            what = f"upstream resets {listed(names)}:" if len(resets) > 1 else "upstream resets"
            yield Line(f"{what} {moment(edge_ms, zone)}, in {spell(edge_ms - status.at_ms)}")
        if credential.jobs:
            yield _jobs(credential.jobs, status.at_ms)
        yield from stopped_jobs_of(credential)
        yield from notes_of(credential)


class Verdict(NamedTuple):
    """Whether calls may leave, in `word` and `more`. `why` explains the verdict, and `end_ms` is when it ends, if
    known."""

    word: Literal["open", "full", "stopped", "closed"]
    why: str
    end_ms: int | None = None
    more: str = ""

    @property
    def rest(self) -> str:
        """What follows the word."""
        return f"{self.more}{until(self.end_ms)}: {self.why}"


def verdict_of(credential: CredentialRow) -> Verdict:
    """The headline of a credential: whether calls may leave now, and if not, why and until when."""
    outlook = credential.outlook
    if outlook.closed is not None:
        verdict = closed(outlook.closed)
        if outlook.next_ms is None or outlook.next_ms <= outlook.closed.until_ms:
            return verdict
        at = moment(outlook.next_ms)  # machines come back at different times
        full_until_ms = 0 if outlook.full is None else outlook.full.retry_at_ms or 0
        is_longer = full_until_ms > outlook.closed.until_ms
        then = f"then full until {at}" if is_longer else f"this machine goes on at {at}"
        return verdict._replace(why=f"{verdict.why}; {then}")
    if outlook.full is not None:
        word: Literal["full", "stopped"] = "stopped" if outlook.full.reason == "ledger-unavailable" else "full"
        return Verdict(word, outlook.full.why(), outlook.next_ms)
    left, stopped = credential.remaining_units, credential.stopped
    if stopped is not None:
        other = "" if left is None else f"; other calls have {many(left, 'unit')}"
        of_jobs = Verdict("full", f"job {stopped.job}: {stopped.why}{other}", stopped.retry_ms, " for its jobs")
        if stopped.refusal is None:
            return of_jobs._replace(word="stopped")
        return of_jobs._replace(word="closed") if stopped.is_closed else of_jobs
    if outlook.unwritable and credential.allowance is not None:
        return Verdict("open", str(credential.allowance))
    units = "no limit counts its units" if left is None else many(left, "unit")
    return Verdict("open", f"{units}{_calls_left(outlook.dearest, left or 0)}")


def _calls_left(dearest: Decision | None, units: int) -> str:
    """` = 94 searches`: how many calls of the most expensive method of the project's jobs the units allow."""
    if dearest is None:
        return ""
    resource = dearest.method.partition(".")[0]
    if not dearest.admitted:
        return f", no {'searches' if resource == 'search' else dearest.method}{until(dearest.retry_at_ms)}"
    left = min((state.remaining_units // state.cost_units for state in enforced(dearest.limits)), default=units)
    if left == units:
        return ""  # a unit a call
    calls = many(left, "search") if resource == "search" else f"{many(left, 'call')} of {dearest.method}"
    return f"{' =' if left == units // dearest.cost_units else ','} {calls}"


def _limits_of(credential: CredentialRow, at_ms: int) -> Table:
    rows = [
        (
            row.limit.name,
            row.limit.view.window.name,
            f"{row.state.used_units:,}",
            f"{row.state.limit_units:,}" if row.limit.paced else "",
            f"{row.enforced_units:,}",
            f"{row.state.remaining_units:,}",
            "" if row.room_ms is None else f"in {spell(row.room_ms - at_ms)}",
        )
        for row in credential.limits
    ]
    return Table(
        ("limit", "window", "used", "now", "limit", "remaining", "room again"),
        rows,
        numbers=(2, 3, 4, 5),
        tones=[_LEVEL_TONE[row.level] for row in credential.limits],
        without=(1, 4),  # the limit's name implies its window; used and remaining imply its number
    )


_LEVEL_TONE: dict[str, Tone] = {"full": "bad", "near": "note", "open": ""}


def early_of(credential: CredentialRow) -> Iterator[Line]:
    """The buckets that upstream closed before we had spent them. The lines belong right below the verdict."""
    for early in credential.early:
        used, why = many(early.used_units, "unit"), spent_elsewhere(credential.settings.book)
        text = f"{early.bucket}: upstream says exhausted with {used} of {early.quota_units:,} counted here: {why}"
        yield Line(text, "note")


def notes_of(credential: CredentialRow) -> Iterator[Line]:
    """The notes on a credential that its verdict and limits do not show."""
    for row in credential.limits:
        name = row.limit.name
        if row.reserved_units:
            reserved = many(row.reserved_units, "unit")
            yield Line(f"{name}: includes {reserved} reserved; no answer has shown the cost of these calls", "note")
        if row.limit.shadow:
            now = ", and would refuse calls now" if row.state.would_refuse else ""
            yield Line(f"{name}: a shadow: it counts and refuses no call{now}", "note")
        if row.upstream_units:
            used = many(row.upstream_units, row.state.noun)
            yield Line(
                f"{name}: includes {used} used by others, as upstream said,{until(row.upstream_until_ms)}", "note"
            )
        if row.grant is not None:
            held = f"held to {row.enforced_units:,} instead of {row.limit.limit_units:,}"
            grants = f"upstream grants {row.grant.quota_units:,} (said {stamp(row.grant.since_ms)})"
            yield Line(f"{name}: {held}: {grants},{until(row.grant.until_ms)} or its next figure", "note")
    for row in credential.limits:
        if row.exact_from_ms is not None:
            since, exact = moment(row.counts_since_ms), moment(row.exact_from_ms)
            yield Line(f"{row.limit.name}: counts since {since}, exact from {exact}", "note")
    if credential.ahead_ms:
        yield Line(f"a clock was wrong and dated a charge {stamp(credential.ahead_ms)}: `{REPAIR}`", "bad")
    if credential.owed_units:
        owed = f"owed: {many(credential.owed_units, 'unit')} drawn without the ledger; the next charge repays them"
        yield Line(owed, "note")
    allowance = credential.allowance
    if allowance is not None and (allowance.drawn_units or allowance.trouble):
        yield Line(str(allowance), "note")
    if credential.losses:
        yield Line(lost(credential.losses), "note")
    for exhaustion in credential.exhausted:
        if exhaustion.reopened_ms:
            at = stamp(exhaustion.reopened_ms)
            because = f'{exhaustion.reopened_because} (upstream had said "{exhaustion.evidence}")'
            yield Line(f"bucket {exhaustion.bucket} was reopened at {at}: {because}")
        elif exhaustion != credential.outlook.closed:
            yield Line(f"bucket {exhaustion.bucket} is closed{closed(exhaustion).rest}", "bad")


def jobs_alone(jobs: Sequence[JobRow], at_ms: int) -> Iterator[Part]:
    """Jobs whose credentials are not known, because the ledger does not answer."""
    if jobs:
        yield _jobs(jobs, at_ms, "unknown")
    yield from _stopped(jobs)


def _jobs(jobs: Sequence[JobRow], at_ms: int, nobody: str = "-") -> Table:
    """Who runs each job, its next tick, and whether a run could go on now."""
    rows = []
    for job in jobs:
        runs_on = job.runs_on
        if job.seen_ms is not None:
            runs_on += f"; {job.seen_on}" if job.seen_on != job.runs_on else ","
            is_silent = at_ms - job.seen_ms > MINUTE_MS  # it waits for an answer, or was killed
            runs_on += f" silent since {stamp(job.seen_ms)}" if is_silent else " running"
        a_run_now = "goes on" if job.until_ms is None else f"there; here from {moment(job.until_ms)}"
        if job.why:
            there = "" if job.until_ms is None else "there "
            a_run_now = "no" if job.retry_ms is None else f"{there}from {moment(job.retry_ms)}"
        rows.append((job.job, runs_on or nobody, "-" if job.next_ms is None else moment(job.next_ms), a_run_now))
    tones: list[Tone] = ["bad" if job.why else "" for job in jobs]
    return Table(("job", "runs on", "next tick", "a run now"), rows, tones=tones, without=(2,))


def stopped_jobs_of(credential: CredentialRow) -> Iterator[Line]:
    """The jobs that could not go on now, by their reasons, without the reason that the verdict has."""
    outlook, jobs = credential.outlook, []
    for job in credential.jobs:
        is_closed = outlook.closed is not None and job.is_closed and job.refused_by == outlook.closed.bucket
        is_full = outlook.full is not None and job.why == outlook.full.why()
        if not is_closed and not is_full and job != credential.stopped:
            jobs.append(job)
    yield from _stopped(jobs)


def _stopped(jobs: Sequence[JobRow]) -> Iterator[Line]:
    names_of: dict[str, list[str]] = {}
    for job in jobs:
        if job.why:
            names_of.setdefault(job.why, []).append(job.job)
    for why, names in names_of.items():
        noun = "job" if len(names) == 1 else "jobs"
        yield Line(f"{noun} {listed(names)} could not go on now: {why}", "note")


def closed(exhaustion: Exhaustion) -> Verdict:
    """How long a bucket is closed, and upstream's words."""
    why = f'"{exhaustion.evidence}"'
    if exhaustion.until_ms != NEVER:
        return Verdict("closed", why, exhaustion.until_ms, " by upstream")
    ask = f"ask upstream for quota, then `quota reopen {exhaustion.bucket} --because TEXT`"
    return Verdict("closed", f"{why}; {ask}", None, " by upstream until it grants quota")


def lost(losses: Sequence[Loss]) -> str:
    """What the ledger had lost and machines put back. The last loss is the newest."""
    charges = many(sum(loss.charges for loss in losses), "charge")
    units = many(sum(loss.units for loss in losses), "unit")
    times = f" in {len(losses)} losses, the last" if len(losses) > 1 else ","
    newest = losses[-1]
    return f"the ledger had lost {charges} of {units}{times} put back at {stamp(newest.at_ms)} by {newest.machine}"


def spent_elsewhere(book: CostBook) -> str:
    """Why upstream closed a bucket that we had not spent, and where to find out more."""
    tells = "the provider's own console may tell which" if book.monitoring is None else "`quota reconcile` shows which"
    return f"somebody else uses this project, or its quota is smaller; {tells}"


# -- a refusal ---------------------------------------------------------------------------------------------------------


def refusal_parts(refusal: RefusalExplained) -> Iterator[Part]:
    """Why a call was refused: the cause, who filled the limit, who asked, what changed since, and the evidence. An
    empty line begins a new paragraph."""
    yield Line(f"REFUSED: {_cause(refusal)}", "verdict")
    for text in _who_filled(refusal):
        yield Line(text, "strong")
    kept = refusal.kept
    asker = {"credential": kept.credential, "job": kept.job, "region": kept.region, "run": kept.run, "on": kept.machine}
    who = ", ".join([f"{what} {name}" for what, name in asker.items() if name])
    then = "" if kept.retry_at_ms is None else f"; next at {moment(kept.retry_at_ms)}"
    yield Line(f"{stamp(kept.at_ms)}, {who}{then}")
    yield Line(_now(refusal), "strong")
    if refusal.names:
        yield Line("")
        yield _limits(refusal)
    yield from map(Line, _upstream(refusal))
    if refusal.fill.name is not None:
        yield Line("")
        yield from _filled(refusal)
    if refusal.expiries:
        yield Line("")
        yield from _expiries(refusal)
    yield Line("")
    yield from map(Line, _admits(refusal))


def _cause(refusal: RefusalExplained) -> str:
    kept = refusal.kept
    then = refusal.then_limits.get(kept.refused_by or "")
    if kept.closed_by_upstream:
        return kept.why.partition(" (")[0]  # upstream's words come below
    if kept.reason not in ("limit", "leave") or then is None:
        return kept.why
    left = many(max(0, then.limit_units - then.used_units), refusal.noun(then.name))
    details = [f", {part}" for part in kept.why.split(", ") if "by the end of the" in part or "this job leaves" in part]
    if kept.reason == "leave" or then.leave_units:
        left += f" left for {f'job {kept.job}' if kept.job else 'this job'}"
    else:
        left += f" left of {then.limit_units:,}"
    if then.leave_units:  # a paced limit has other numbers
        details = [f", which must leave {then.leave_units:,} to others"]
    needs = f"{kept.method} needs"
    if kept.calls > 1:
        needs = f"{many(kept.calls, 'call')} together, {kept.method} and {kept.calls - 1:,} more, need"
    return f"limit {then.name!r} had {left}{''.join(details)}; {needs} {then.cost_units:,}"


def _who_filled(refusal: RefusalExplained) -> Iterator[str]:
    """Who spent most of the limit; for a bucket that upstream closed, how much of it we charged."""
    if refusal.kept.closed_by_upstream:
        yield from _whose(refusal)
        return
    fill, then = refusal.fill, refusal.then_limits.get(refusal.fill.name or "")
    units: Counter[str] = Counter()
    for row in fill.rows:
        who = f"job {row.job}, {row.method}" if row.job else row.method
        units[who] += (row.then_units or 0) if fill.is_whole else row.now_units
    units["others, as upstream said:"] = fill.upstream_then_units if fill.is_whole else fill.upstream_units
    whole_units = then.used_units if fill.is_whole and then is not None else units.total()
    named = [f"{who} {n:,}" for who, n in units.most_common(MAX_NAMES) if n and n * SHARE >= whole_units]
    if named:
        named[0] += f" of {whole_units:,}"
        yield f"Filled by: {'; '.join(named)}"


def _whose(refusal: RefusalExplained) -> Iterator[str]:
    """How much of upstream's grant was charged here."""
    if refusal.granted_units:
        fill, exhaustion = refusal.fill, refusal.exhaustion
        ours = fill.then_units if fill.is_whole else sum(row.now_units for row in fill.rows)
        charged = f"Charged here: {many(ours, 'unit')} of the {refusal.granted_units:,} that upstream grants"
        if fill.upstream_units:
            yield f"{charged}; {fill.upstream_units:,} only upstream counted: somebody else uses this project"
        elif ours + refusal.kept.cost_units <= refusal.granted_units and not (exhaustion and exhaustion.is_pause):
            yield f"{charged}; {spent_elsewhere(refusal.book)}"
        else:
            yield charged


def _now(refusal: RefusalExplained) -> str:
    since_ms = refusal.asked_ms - refusal.kept.at_ms
    then = f"Now, {spell(since_ms)} later," if since_ms >= SECOND_MS else "Now"
    if refusal.now is None:
        return f"{then} it could never be admitted: {refusal.never}"
    now = refusal.now
    same = "the same call" if refusal.kept.calls == 1 else f"the same {many(refusal.kept.calls, 'call')} together"
    if refusal.kept.calls > 1 and not refusal.kept.tells_costs:
        same = f"a single {refusal.kept.method} of {many(refusal.kept.cost_units, 'unit')}"
    if now.admitted:
        return f"{then} {same} would be admitted"
    why = ", for the same reason" if now.why() == refusal.kept.why else f": {now.why()}"
    ask = f"; {now.remedy()}" if now.reason == "closed" else ""
    return f"{then} {same} would be refused{until(now.retry_at_ms)}{why}{ask}"


def _limits(refusal: RefusalExplained) -> Table:
    """Each limit, then and now."""
    rows, rooms_ms = [], refusal.rooms_ms
    for name in refusal.names:
        limit = refusal.limits.get(name)
        row = [name, "(no longer configured)" if limit is None else limit.view.window.name]
        for state in (refusal.then_limits.get(name), refusal.now_limits.get(name)):
            used_of = ("?", "?")
            if state is not None:
                used_of = (f"{state.used_units:,}", f"{state.limit_units + state.leave_units:,}")
            row += used_of
        rows.append((*row, f"in {spell(rooms_ms[name] - refusal.asked_ms)}" if name in rooms_ms else ""))
    tones: list[Tone] = ["bad" if name == refusal.kept.refused_by else "" for name in refusal.names]
    headings = ("limit", "window", "then used", "of", "now used", "of", "room again")
    return Table(headings, rows, numbers=(2, 3, 4, 5), tones=tones, without=(1,))


def _upstream(refusal: RefusalExplained) -> Iterator[str]:
    """Upstream's words about the bucket that it closed."""
    kept, record = refusal.kept, refusal.exhaustion
    if not kept.closed_by_upstream:
        return
    if record is None:
        yield f'its words: "{kept.why.partition(" (")[2].removesuffix(")")}"'
        yield f"upstream's answer to bucket {kept.refused_by} is no longer recorded"
        return
    end = "it grants quota" if record.until_ms == NEVER else moment(record.until_ms)
    yield f"upstream closed it on {stamp(record.since_ms)}, reported by {record.reported_by}, until {end}"
    yield f'its words: "{record.evidence}"'
    if record.reopened_ms:
        yield f"reopened on {stamp(record.reopened_ms)}: {record.reopened_because}"


def _filled(refusal: RefusalExplained) -> Iterator[Part]:
    """Who filled the limit that refused; for a closed bucket, who charged to it here."""
    fill = refusal.fill
    what = (
        f"What this ledger charged to bucket {fill.name}"
        if refusal.kept.closed_by_upstream
        else f"What counts in limit {fill.name!r}"
    )
    if not fill.rows:
        yield Line(f"{what}: {'no charge now' if fill.is_whole else 'the log has none of it any more'}")
    else:
        yield Line(f"{what}, in {refusal.noun(fill.name)}s:")
        rows = [(row.job or "-", row.method, row.region or "-", *_numbers(fill, (row,))) for row in fill.rows[:ROWS]]
        if more := fill.rows[ROWS:]:
            rows.append((f"{len(more):,} more", "", "", *_numbers(fill, more)))
        footer = ("total", "", "", *_numbers(fill, fill.rows))
        yield Table(("job", "method", "region", "then", "now"), rows, numbers=(3, 4), footer=footer, without=(2,))
    if not fill.is_whole:
        yield Line("then: the log no longer has everything that counted at the refusal", "note")
    for note in _differences(refusal):
        yield Line(note, "note")


def _numbers(fill: Fill, rows: Sequence[Filled]) -> tuple[str, str]:
    """The sums of these rows, then and now."""
    then = f"{sum(row.then_units or 0 for row in rows):,}" if fill.is_whole else "?"
    return then, f"{sum(row.now_units for row in rows):,}"


def _differences(refusal: RefusalExplained) -> Iterator[str]:
    """The units that count and are not charges in the log."""
    fill, noun = refusal.fill, refusal.noun(refusal.fill.name)
    if fill.upstream_units:
        others = many(fill.upstream_units, noun)
        yield f"now also {others} used by others, as upstream said,{until(fill.upstream_until_ms)}"
    if fill.reserved_units:
        yield f"now {many(fill.reserved_units, noun)} only reserved; if an answer shows less, the call fits sooner"
    if fill.upstream_then_units:
        yield f"then also {many(fill.upstream_then_units, noun)} used by others, as upstream said"
    then = refusal.then_limits.get(fill.name or "")
    if then is None or not fill.is_whole:
        return
    missing_units = then.used_units - fill.upstream_then_units - fill.then_units
    if missing_units > 0:
        yield f"then also {many(missing_units, noun)} given back since (refunded, settled) or lost"
    elif missing_units < 0:
        yield f"then {many(-missing_units, noun)} less: charged at the same moment, or settled higher since"


def _expiries(refusal: RefusalExplained) -> Iterator[Part]:
    yield Line(f"What leaves limit {refusal.expiring!r} next:")
    fits = "the call fits" if refusal.kept.calls == 1 else "the calls fit"
    rows = []
    for expiry in refusal.expiries:
        what = expiry.method or _WHAT[expiry.kind]
        units, room = f"{expiry.units:,}", fits if expiry.makes_room else ""
        rows.append((moment(expiry.at_ms), units, what, expiry.job or "-", room, expiry.charge or ""))
    headings = ("at", f"{refusal.noun(refusal.expiring)}s", "what", "job", "", "id")
    yield Table(headings, rows, numbers=(1,), whole=(5,), joined=(2, 3), without=(5,))


_WHAT = {
    "upstream": "used by others, as upstream said",
    "reset": "the reset: all of them",
    "pace": "the pace releases more",
    "grant": "upstream's smaller grant ends",
}


def _admits(refusal: RefusalExplained) -> Iterator[str]:
    """The changes that would have admitted the call."""
    kept = refusal.kept
    if refusal.admitted_today:
        yield "It would have been admitted with the configuration as it is today."
        return
    if kept.reason == "clock":
        yield f"It would have been admitted with clocks that agree: {SET_THE_CLOCK}."
        return
    if kept.reason == "ledger-unavailable":
        yield "A larger allowance may admit such a call without the ledger: `unavailable` of [ledger]."
        return
    if not refusal.admits:
        yield "No change of the configuration is known that would have admitted it."
        return
    yield "It would have been admitted" + (" with any one of these:" if len(refusal.admits) > 1 else " with:")
    for change in refusal.admits:
        words = [_SETTINGS[setting.kind].format(**setting._asdict(), job=kept.job) for setting in change]
        yield f"  {', and '.join(words)}"
    for setting in refusal.admits[0]:
        if setting.kind == "limit" and setting.units > setting.upstream_units > 0:
            yield f"But upstream grants {setting.upstream_units:,}: beyond that it refuses calls itself."


_SETTINGS = {
    "limit": "limit {name!r}: {units:,} instead of {was_units:,}",
    "headroom": "limit {name!r}: headroom = {units:,} instead of {was_units:,}",
    "leave": "jobs.{job}: leave = {units:,} of limit {name!r} instead of {was_units:,}",
    "pace": "limit {name!r} without pacing",
    "reopen": "bucket {name} open: `quota reopen {name} --because TEXT`, if upstream has quota again",
}
"""Each kind of `Setting`, in words."""


# -- a charge ----------------------------------------------------------------------------------------------------------


def charge_parts(explained: ChargeExplained) -> Iterator[Part]:
    """A charge, and each limit before and after it."""
    charged = many(explained.charge.units if explained.charged_units is None else explained.charged_units, "unit")
    drawn = "" if explained.draw is None else " on this machine's allowance, while the ledger did not answer"
    yield Line(f"CHARGED {charged} for {explained.charge.method} on {stamp(explained.at_ms)}{drawn}", "strong")
    who = [f"{field} {getattr(explained.charge, field) or '-'}" for field in ("job", "region", "run")]
    yield Line(f"{', '.join(who)}; project {explained.project}, bucket {explained.charge.bucket}")
    yield Line(_corrected(explained), "strong" if explained.charged_units not in (None, explained.charge.units) else "")
    if explained.limits:
        rows = []
        for row in explained.limits:
            least = "" if row.whole else ">= "
            since = "since " if row.leaves_ms <= explained.asked_ms else ""
            units = f"{least}{row.before_units:,}", f"{least}{row.after_units:,}", f"{row.limit_units:,}"
            rows.append((row.name, row.window, *units, since + moment(row.leaves_ms)))
        headings = ("limit", "window", "before", "after", "of", "stops counting")
        yield Line("")
        yield Table(headings, rows, numbers=(2, 3, 4), without=(1,))
    if not all(row.whole for row in explained.limits):
        yield Line(">=: the log no longer has every charge that counted before it", "note")
    if explained.not_counted_by:
        yield Line(f"not counted by: {', '.join(explained.not_counted_by)}")
    for further in explained.also:
        yield Line("")
        yield from charge_parts(further)


def _corrected(explained: ChargeExplained) -> str:
    charge, counts = explained.charge, many(explained.charge.units, "unit")
    if explained.draw is not None and not explained.in_log:
        if explained.draw.handed_id is not None:
            return f"It was repaid to the ledger, whose log no longer has it; it counted {counts}"
        return f"It is owed: the next charge repays it, dated then; it counts {counts} now"
    repaid = ""
    if explained.draw is not None:
        repaid = f"Repaid on {stamp(charge.id[0])} as charge {explained.entry}. "
    if charge.reserved_units:
        return f"{repaid}It is reserved: the cost of the call is not known yet"
    if charge.charged_units == charge.units:
        return f"{repaid}It was never corrected"
    how = "refunded, or settled at 0: it counts nothing" if not charge.units else f"settled: it counts {counts}"
    return f"{repaid}It was {how} now, {charge.charged_units:,} before"
