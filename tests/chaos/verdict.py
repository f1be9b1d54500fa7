"""Holds wire, ledger, allowances and stores against each other: figures, and what is wrong."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import median
from typing import TYPE_CHECKING, Any

from chaos.evidence import token_of
from chaos.plan import MOVES
from chaos.scene import FETCH, PAGE_ITEMS, PAGES, REGIONS, SHARED, SHARED_REGIONS
from quota.common.clock import NEVER

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from chaos.evidence import Attempt, Event, Evidence, Life
    from chaos.supervisor import Loss

FSYNC_MS = 2_500
"""What a server that syncs every second may lose when it is killed: while a sync takes long it holds back writes for up
to 2 s, and answers all the same."""

CLOCK_MS = 2
"""Two processes of one machine read one clock, and each rounds down."""

ASKED_AGAIN_MS = 20
"""What was decided so long after it was asked may have been asked twice."""

HELD_MS = 5_000
"""A request may be held so long by the network, and be done after its sender gave up."""

RECOVERY_MS = 10_000
EVERYTHING = "day"
"""A limit that counts all methods."""

BEHIND = "ledger_behind"
"""Begin the warning of a machine that has seen more than the ledger now holds."""

WASTED_SHARE = 0.01
KILLS = ("worker-killed", "server-killed", "server-emptied", "old-aof-restored", "old-rdb-restored")
"""What may cost one attempt each: charged, and its answer or its sender gone."""


@dataclass
class Verdict:
    figures: dict[str, Any] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def hold(self, holds: bool, what: str) -> None:
        if not holds:
            self.wrong.append(what)


def judge(evidence: Evidence) -> Verdict:
    verdict = Verdict()
    kinds = _kinds(evidence, verdict)
    _course(evidence, verdict)
    _put_back(evidence, verdict)
    _charged_before(evidence, verdict)
    unknown_of = {name: _unknown(evidence, name) for name in evidence.scene.limits}
    _clocks(evidence, verdict)
    _overspend(evidence, verdict, unknown_of)
    _replay(evidence, verdict, kinds)
    _refusals(evidence, verdict, unknown_of)
    _pages(evidence, verdict)
    _owners(evidence, verdict)
    _debts(evidence, verdict)
    _recovery(evidence, verdict)
    _waste(evidence, verdict)
    return verdict


# -- what each entry of the ledger is ----------------------------------------------------------------------------------


def _kinds(evidence: Evidence, verdict: Verdict) -> dict[str, str]:
    """Token -> "charge", or "repaid": it was drawn, and then handed over. A charge whose answer was lost, and the draw
    that was made in its place, carry the same token, and are one."""
    kinds: dict[str, str] = {}
    for token, entry in evidence.entries.items():
        attempt = evidence.attempts.get(token)
        if attempt is not None:
            kinds[token] = "charge" if attempt.draw is None or entry.ms < attempt.draw.ms else "repaid"
    strangers = [token for token in evidence.entries if token not in kinds]
    logs = [*(loss.log for loss in evidence.course.losses), evidence.course.log]
    twice = sum(times > 1 for log in logs for times in Counter(entry.token for entry in log).values())
    verdict.hold(not strangers, f"{len(strangers)} entries of the ledger carry tokens that no worker asked with")
    verdict.hold(not twice, f"{twice} calls were charged more than once")
    verdict.figures["charged twice"] = twice
    return kinds


def _acknowledged(evidence: Evidence) -> list[Attempt]:
    """What the ledger has charged, by what the workers were told."""
    attempts = evidence.attempts.values()
    return [a for a in attempts if a.decision is not None and a.decision["source"] == "ledger"]


def _unsynced(evidence: Evidence) -> list[tuple[int, int]]:
    """The time and units of what was acknowledged by a server that was killed before it wrote it down."""
    known_lost = _lost(evidence)
    lost = {
        attempt.token: (_id_ms(attempt), _units(attempt))
        for kill in evidence.course.unsafe_kills
        for attempt in _acknowledged(evidence)
        if 0 <= kill.at_ms - _id_ms(attempt) <= FSYNC_MS and attempt.token not in kill.kept | known_lost
    }
    return [*lost.values()]


def _lost(evidence: Evidence) -> set[str]:
    """The tokens of what the ledger lost."""
    return {entry.token for loss in evidence.course.losses for entry in loss.log if entry.token not in loss.kept}


def _from_ledger(evidence: Evidence) -> list[tuple[Life, Event]]:
    """The decisions that the ledger took. What a peek was told by the allowance has no limits either."""
    return [(life, event) for life, event in evidence.events("decision") if event["by_ledger"]]


# -- the run itself ----------------------------------------------------------------------------------------------------


def _course(evidence: Evidence, verdict: Verdict) -> None:
    course, figures = evidence.course, verdict.figures
    verdict.wrong += course.failed
    decisions = [event for _, event in evidence.events("decision")]
    reasons = Counter("admitted" if e["admitted"] else str(e["refused_by"] or e["reason"]) for e in decisions)
    figures["decisions"] = len(decisions)
    figures["decisions by answer"] = dict(sorted(reasons.items()))
    figures["ticks"] = dict(sorted(Counter(e["outcome"] for _, e in evidence.events("tick")).items()))
    figures["faults"] = dict(sorted(course.faults.items()))
    warnings = Counter(str(e["text"]).split(" ", 1)[0] for _, e in evidence.events("warning"))
    figures["warnings"] = dict(sorted(warnings.items()))
    figures["lost by fsync everysec"] = len(_unsynced(evidence))


def _id_ms(attempt: Attempt) -> int:
    assert attempt.decision is not None
    return int(str(attempt.decision["id"]).partition("-")[0])


def _units(attempt: Attempt) -> int:
    assert attempt.decision is not None
    return int(attempt.decision["units"])


# -- what was lost is put back -----------------------------------------------------------------------------------------


def _put_back(evidence: Evidence, verdict: Verdict) -> None:
    """At the end all machines have asked: every charge that anybody was told of is in the log, at its own time."""
    final = {entry.token: entry for entry in evidence.course.log}
    lost = _lost(evidence)
    acknowledged = _acknowledged(evidence)
    missing = [a.token for a in acknowledged if a.token not in final]
    there = [a for a in acknowledged if a.token in final]
    moved = [a.token for a in there if (final[a.token].ms, final[a.token].units) != (_id_ms(a), _units(a))]
    verdict.figures["charges lost / of these put back"] = [len(lost), len(lost & final.keys())]
    verdict.hold(not missing, f"{len(missing)} acknowledged charges are not in the log at the end: {missing[:3]}")
    verdict.hold(not moved, f"{len(moved)} charges have other times or units at the end: {moved[:3]}")


# -- 1. charged before it left -----------------------------------------------------------------------------------------


def _charged_before(evidence: Evidence, verdict: Verdict) -> None:
    matched = {id(attempt.arrival): attempt for attempt in evidence.attempts.values() if attempt.arrival is not None}
    free, late = [], []
    for arrival in evidence.wire:
        attempt = matched.get(id(arrival))
        if attempt is None:
            free.append(arrival.call)
        elif _charged_ms(attempt) > arrival.ms + CLOCK_MS:
            late.append(arrival.call)
    wire_units = sum(arrival.units for arrival in evidence.wire)
    charged_units = sum(entry.units for entry in evidence.entries.values())
    unpaid_units = sum(draw.units for draw in evidence.draws if not draw.repaid)
    figures, usage = verdict.figures, evidence.course.usage
    figures["wire requests"], figures["wire units"] = len(evidence.wire), wire_units
    figures["charged units"] = charged_units + unpaid_units
    figures["allowance units"] = sum(draw.units for draw in evidence.draws)
    verdict.hold(not free, f"{len(free)} requests reached the wire without a charge: {free[:3]}")
    verdict.hold(not late, f"{len(late)} requests were charged after they arrived: {late[:3]}")
    verdict.hold(wire_units <= charged_units + unpaid_units, "the wire carried more units than were charged")
    counted = (usage["requests"], usage["units"]["units"])
    verdict.hold(
        counted == (len(evidence.wire), wire_units), f"the emulator counted {counted}, its file says otherwise"
    )
    refused = [arrival for arrival in evidence.wire if arrival.refused]
    figures["refused by upstream"] = len(refused)
    verdict.hold(not refused, f"upstream refused {len(refused)} requests: its quota was exceeded")


def _charged_ms(attempt: Attempt) -> int:
    """When an attempt was let through: by its draw, or by the charge that its decision names."""
    return attempt.draw.ms if attempt.draw is not None else _id_ms(attempt)


# -- 2. overspend ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ignorance:
    """A loss, and what was admitted until a machine that had seen all of it had asked."""

    at_ms: int
    until_ms: int
    units: int
    remembered: bool
    """Whether anybody was told of anything that was lost."""

    noticed: bool
    """Whether a machine has warned of it."""


def _ignorance(evidence: Evidence, decisions: list[tuple[Life, Event]], loss: Loss, name: str) -> Ignorance | None:
    """What may be spent twice in one limit because of one loss; None where it took nothing of that.

    An answer has all that is new in the log, whatever was asked for.
    """
    method = evidence.scene.limits[name].method
    lost = [entry for entry in loss.log if entry.token not in loss.kept and method in (None, entry.method)]
    if not lost:
        return None
    seen_ms: Counter[str] = Counter()
    for life, event in decisions:
        if event["ms"] <= loss.at_ms and event["used"]:
            # An id tells when the ledger was read; of a refusal only the question's time is known.
            read_ms = int(event["id"].partition("-")[0]) if event["source"] == "ledger" else event["asked_ms"]
            seen_ms[life.machine] = max(seen_ms[life.machine], read_ms)
    knows = max(seen_ms, key=lambda machine: seen_ms[machine], default="")
    asked = (
        event["ms"]
        for life, event in decisions
        if life.machine == knows and event["asked_ms"] >= loss.at_ms and event["used"]
    )
    until_ms = next(asked, evidence.course.ended_ms)
    # What nobody was told of, nobody can remember.
    units = sum(entry.units for entry in lost if entry.ms > seen_ms[knows])
    units += sum(
        attempt.arrival.units
        for attempt in evidence.attempts.values()
        if attempt.arrival is not None
        and method in (None, attempt.arrival.method)
        and attempt.draw is None
        and loss.at_ms <= _charged_ms(attempt) <= until_ms
    )
    remembered = any(entry.ms <= seen_ms[knows] for entry in lost)
    warned_ms = [event["ms"] for _, event in evidence.events("warning") if event["text"].startswith(BEHIND)]
    return Ignorance(loss.at_ms, until_ms, units, remembered, max(warned_ms, default=0) >= loss.at_ms)


def _unknown(evidence: Evidence, name: str) -> list[Ignorance]:
    decisions = _from_ledger(evidence)
    each = (_ignorance(evidence, decisions, loss, name) for loss in evidence.course.losses)
    return [ignorance for ignorance in each if ignorance is not None]


def _overspend(evidence: Evidence, verdict: Verdict, unknown_of: dict[str, list[Ignorance]]) -> None:
    """Every window, by the time of the charge: what a slow worker sends late does not count against the ledger."""
    scene, losses = evidence.scene, evidence.course.losses
    unsynced = _unsynced(evidence)
    sent = [(attempt, attempt.arrival) for attempt in evidence.attempts.values() if attempt.arrival is not None]
    allowed_units = len(scene.machines) * scene.allowance_units
    rows = {}
    for name, limit in scene.limits.items():
        units, window_ms = limit.units, limit.window_ms
        counted = [(attempt, arrival) for attempt, arrival in sent if limit.method in (None, arrival.method)]
        by_ledger = sorted(
            (_charged_ms(attempt), arrival.units) for attempt, arrival in counted if attempt.draw is None
        )
        by_all = sorted((_charged_ms(attempt), arrival.units) for attempt, arrival in counted)
        unknown = unknown_of[name]
        over, grace_at_worst, worst = 0, 0, None
        for at_ms, used in _windows(by_ledger, window_ms):
            grace = sum(x.units for x in unknown if at_ms - window_ms < x.at_ms <= at_ms)
            grace += sum(u for ms, u in unsynced if at_ms - window_ms < ms <= at_ms)
            if used > units and used - units > over:
                over, grace_at_worst = used - units, grace
            if used > units + grace and worst is None:
                worst = f"limit {name!r}: {used} units were admitted in one window of {units}, {grace} of them excused"
        verdict.hold(worst is None, str(worst))
        most_all = max((used for _, used in _windows(by_all, window_ms)), default=0)
        grace = sum(x.units for x in unknown) + sum(u for _, u in unsynced)
        bound = units + allowed_units + grace
        verdict.hold(most_all <= bound, f"limit {name!r}: {most_all} units in one window, at most {bound} are excused")
        rows[name] = {
            "limit": units,
            "most in a window": most_all,
            "of it by the ledger": max((used for _, used in _windows(by_ledger, window_ms)), default=0),
            "bound": bound,
            "overspent by the ledger": over,
            "excused there": grace_at_worst,
        }
    figures = verdict.figures
    unknown = unknown_of[EVERYTHING]
    figures["limits"] = rows
    figures["losses"] = sum(loss.kind not in MOVES for loss in losses)
    course = evidence.course
    figures["moves"] = {
        "by editing the url": len(losses) - figures["losses"],
        "by the command": len(course.moves_ms),
        "killed on their way": course.movers_killed,
    }
    figures["spent before a loss was known"] = [x.units for x in unknown]
    unnoticed = sum(x.remembered and not x.noticed for x in unknown)
    verdict.hold(not unnoticed, f"{unnoticed} of {len(unknown)} losses were noticed by no machine")
    by_machine: Counter[str] = Counter()
    for draw in evidence.draws:
        by_machine[draw.machine] += draw.units
    figures["allowance by machine"] = dict(sorted(by_machine.items()))
    verdict.hold(
        max(by_machine.values(), default=0) <= scene.allowance_units, f"a machine drew too much: {dict(by_machine)}"
    )


def _windows(spent: Sequence[tuple[int, int]], window_ms: int) -> Iterable[tuple[int, int]]:
    """For each moment at which something was spent, what the window that ends there holds."""
    inside: deque[tuple[int, int]] = deque()
    used = 0
    for ms, units in spent:
        inside.append((ms, units))
        used += units
        while inside[0][0] <= ms - window_ms:
            used -= inside.popleft()[1]
        yield ms, used


# -- the ledger's log, decided once more in its own order -------------------------------------------------------------


def _replay(evidence: Evidence, verdict: Verdict, kinds: dict[str, str]) -> None:
    """The log before the first loss. A later one has what was put back, too."""
    course, wrong = evidence.course, 0
    log = course.losses[0].log if course.losses else course.log
    for limit in evidence.scene.limits.values():
        counted = [entry for entry in log if limit.method in (None, entry.method)]
        uses = _windows([(entry.ms, entry.units) for entry in counted], limit.window_ms)
        for entry, (_, used) in zip(counted, uses, strict=True):
            wrong += kinds.get(entry.token) == "charge" and entry.units > 0 and used > limit.units
    final = Counter(kinds.get(entry.token, "") for entry in course.log)
    verdict.figures["log"] = {"entries": len(course.log), **dict(sorted(final.items()))}
    verdict.figures["admitted against the log"] = wrong
    verdict.hold(not wrong, f"{wrong} charges were admitted although the log had no room for them")


def _refusals(evidence: Evidence, verdict: Verdict, unknown_of: dict[str, list[Ignorance]]) -> None:
    """What each decision was told of each limit, against all that was ever charged, lost or not.

    A decision that counted too little may overspend; one that counted too much may refuse what had room.
    """
    spent = sorted(evidence.entries.values(), key=lambda e: (e.ms, e.seq))
    decisions = _from_ledger(evidence)
    unsynced = _unsynced(evidence)
    first_loss_ms = min((loss.at_ms for loss in evidence.course.losses), default=evidence.course.ended_ms)
    inexact, short = [], []
    rows = {}
    for name, limit in evidence.scene.limits.items():
        counted = [entry for entry in spent if limit.method in (None, entry.method)]
        ids = [(entry.ms, entry.seq) for entry in counted]
        sums = [0, *accumulate(entry.units for entry in counted)]
        unknown = unknown_of[name]
        needless = asked = least = most = total = 0
        for life, event in decisions:
            if name not in event["used"]:
                continue
            used, asked_ms, at_ms = event["used"][name], event["asked_ms"], event["at_ms"]
            entry = evidence.entries.get(token_of(event)) if event["source"] == "ledger" else None
            until = bisect_right(ids, (event["ms"] + CLOCK_MS, NEVER))
            true = sums[until] - sums[bisect_right(ids, (asked_ms - CLOCK_MS - limit.window_ms, NEVER))]
            needless += event["refused_by"] == name and true + event["units"] <= limit.units
            # A call whose answer was lost is told of its charge later than it was made, if not in the same millisecond.
            if entry is not None and entry.ms == at_ms:
                own = bisect_right(ids, (entry.ms, entry.seq))
                last = bisect_right(ids, (at_ms, NEVER)) if at_ms - asked_ms > ASKED_AGAIN_MS else own
                left = sums[bisect_right(ids, (at_ms - limit.window_ms, NEVER))]
                true = next((sums[n] - left for n in range(own, last + 1) if sums[n] - left == used), sums[own] - left)
                message = (
                    f"{name} {used} of {true} to {life.name} on {life.machine} at {event['id']}, told {event['ms']}"
                )
                if used != true and event["ms"] < first_loss_ms:
                    inexact.append(message)
                if not any(x.at_ms <= event["ms"] and asked_ms <= x.until_ms for x in unknown):
                    excused = sum(x.units for x in unknown if at_ms - limit.window_ms < x.at_ms <= at_ms)
                    excused += sum(u for lost_ms, u in unsynced if at_ms - limit.window_ms < lost_ms <= at_ms)
                    least = max(least, true - used)
                    short += [message] if true - used > excused else []
            asked += 1
            most = max(most, used - true)
            total += max(0, used - true)
        rows[name] = {
            "refused in spite of room": needless,
            "too little, most": least,
            "too much, most": most,
            "too much, share": round(total / max(asked, 1) / limit.units, 4),
        }
    verdict.figures["against the truth"] = rows
    verdict.hold(
        not inexact,
        f"{len(inexact)} decisions were told other sums than the log has, and nothing was lost yet: {inexact[:3]}",
    )
    verdict.hold(
        not short, f"{len(short)} decisions counted less than was spent, and known to have been spent: {short[:3]}"
    )
    if not evidence.course.losses:
        needless = sum(int(row["refused in spite of room"]) for row in rows.values())
        verdict.hold(not needless, f"{needless} calls were refused in spite of room")


# -- wrong clocks ------------------------------------------------------------------------------------------------------


def _clocks(evidence: Evidence, verdict: Verdict) -> None:
    """Whose clock is hours behind is refused for that, and nobody else is: a clock that is ahead frees nothing."""
    behind = [life for life in evidence.lives if life.ahead_ms < 0]
    ahead = [life for life in evidence.lives if life.ahead_ms > 0]
    reasons: Counter[str] = Counter()
    misled = 0
    for life, event in evidence.events("decision"):
        if life.ahead_ms < 0:
            reasons["admitted" if event["admitted"] else str(event["reason"])] += 1
        elif event["reason"] == "clock":
            misled += 1
    refused = reasons["clock"]
    sent = sum(attempt.arrival is not None for attempt in evidence.attempts.values() if attempt.life.ahead_ms < 0)
    verdict.figures["wrong clocks"] = {
        "workers behind": len(behind),
        "refused for that": refused,
        "sent": sent,
        "workers ahead": len(ahead),
    }
    verdict.hold(not sent and reasons.total() == refused, f"workers whose clock is behind were told {dict(reasons)}")
    verdict.hold(not misled, f"{misled} decisions were refused for a wrong clock, and none was behind")
    verdict.hold(not behind or refused > 0, "no worker whose clock is behind was refused for that")


# -- 3. pages ----------------------------------------------------------------------------------------------------------


def _pages(evidence: Evidence, verdict: Verdict) -> None:
    fetched = stored = unstored = 0
    page_counts: Counter[tuple[str, str, int, int]] = Counter()
    for life in evidence.lives:
        waiting: Event | None = None
        for event in life.events:
            if event["event"] == "fetched":
                unstored += waiting is not None
                waiting, fetched = event, fetched + 1
            elif event["event"] == "stored":
                stored += 1
                key = (life.machine, event["region"], event["taken_ms"], event["pages"])
                page_counts[key] += 1
                _compare_page(evidence, verdict, life, event, waiting)
                waiting = None
        if waiting is not None:
            unstored += not life.killed
    again = [key for key, times in page_counts.items() if times > 1]
    kept = gaps = unfinished = 0
    for machine, store in evidence.stores.items():
        for (region, _), ranks in store.passes.items():
            kept += len(ranks) // PAGE_ITEMS
            gaps += [rank for rank, _ in ranks] != list(range(1, len(ranks) + 1))
            # What was taken over stays where it was, as far as it got.
            unfinished += len(ranks) != PAGES * PAGE_ITEMS and region in REGIONS
        complete = store.complete() >= set(REGIONS)
        verdict.hold(complete, f"{machine}: not all regions are complete at the end: {store.checkpoints}")
    killed_between = fetched - stored
    figures = verdict.figures
    figures["pages"] = {
        "fetched": fetched,
        "in the stores": kept,
        "lost": unstored,
        "stored twice": len(again) + gaps,
        "fetched again after a kill": fetched - kept,
    }
    verdict.hold(not unstored, f"{unstored} pages were fetched by workers that lived on, and not stored")
    verdict.hold(not again, f"{len(again)} pages were stored twice: {again[:3]}")
    verdict.hold(not gaps, f"{gaps} passes have gaps or doubles in their ranks")
    verdict.hold(not unfinished, f"{unfinished} passes are not complete at the end")
    verdict.hold(
        stored <= kept <= fetched and killed_between <= len(evidence.course.killed),
        f"{fetched} pages fetched, {stored} noted as stored, {kept} in the stores, {len(evidence.course.killed)} kills",
    )


def _compare_page(evidence: Evidence, verdict: Verdict, life: Life, event: Event, fetched: Event | None) -> None:
    """What was fetched stands in the store, at its ranks."""
    ranks = evidence.stores[life.machine].passes.get((event["region"], event["taken_ms"]), [])
    last = event["pages"] * PAGE_ITEMS
    there = [video for rank, video in ranks if last - PAGE_ITEMS < rank <= last]
    verdict.hold(
        fetched is not None and there == fetched["ids"],
        f"{life.machine} {event['region']} page {event['pages']} is not in the store as it was fetched",
    )


def _owners(evidence: Evidence, verdict: Verdict) -> None:
    """Each region of the shared job belongs to one machine at a time, by what the ledger told each.

    It changes hands when it is taken over, when its run gave it up, and when the ledger lost what it knew. A run
    fetches what it has, what it got no answer about, and the page that it has in hand when it is replaced.
    """
    course = evidence.course
    lost_ms = [*(loss.at_ms for loss in course.losses), *(kill.at_ms for kill in course.unsafe_kills)]
    job = f"{FETCH}|{SHARED}"
    given = [(life, event) for life, event in evidence.events("claim") if event["job"] == job and event["answered"]]
    gone_ms = defaultdict(list)
    for life, event in evidence.events("failed-run"):
        gone_ms[life.machine].append(event["ms"])
    taking_ms = defaultdict(list)
    for life, event in evidence.events("taking"):
        taking_ms[life.machine].append(event["ms"])
    owner: dict[str, tuple[str, int]] = {}
    changes: Counter[str] = Counter()
    grants: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
    # Who takes regions over within the same millisecond comes after who had them.
    for life, event in sorted(given, key=lambda pair: (pair[1]["at_ms"], pair[1]["took_over"])):
        at_ms = event["at_ms"]
        for region in set(event["regions"]) - set(event["away"]):
            before, since_ms = owner.get(region, (life.machine, at_ms))
            if before != life.machine:
                if any(since_ms - HELD_MS <= ms <= event["ms"] for ms in taking_ms[life.machine]):
                    changes["taken over"] += 1
                elif any(since_ms <= ms <= event["ms"] for ms in lost_ms):
                    changes["after a loss"] += 1
                elif any(since_ms - HELD_MS <= ms <= event["ms"] for ms in gone_ms[before]):
                    changes["given up"] += 1
                else:
                    changes["for nothing"] += 1
            owner[region] = life.machine, at_ms
            grants[region].append((at_ms, life.machine))
    fetched = not_theirs = unanswered = in_hand = unasked = 0
    for life in evidence.lives:
        run, theirs, answered, since = "", set(SHARED_REGIONS), True, 0
        for event in life.events:
            if event["event"] == "claim" and event["job"] == job:
                if event["run"] != run:
                    run, theirs = event["run"], set(event["regions"])
                theirs -= set(event.get("away", ()))
                answered, since = event["answered"], 0
            elif event["event"] == "fetched" and event["region"] in SHARED_REGIONS:
                region = event["region"]
                fetched, since = fetched + 1, since + 1
                not_theirs += region not in theirs
                unasked += since > 1
                last = bisect_right(grants[region], (event["ms"], ""))
                if last > 0 and grants[region][last - 1][1] != life.machine:
                    unanswered += not answered
                    in_hand += answered
    finished = {region: region in evidence.stores[machine].complete() for region, (machine, _) in owner.items()}
    verdict.figures["shared pages"] = {
        "fetched": fetched,
        "of another machine's, ledger away": unanswered,
        "of another machine's, in hand": in_hand,
        "regions taken over": changes["taken over"],
        "regions free after a loss": changes["after a loss"],
        "regions given up": changes["given up"],
        "regions given to two": (stray := changes["for nothing"]),
    }
    verdict.hold(not stray, f"{stray} regions were given to a machine while they belonged to another")
    verdict.hold(not unasked, f"{unasked} pages were fetched by runs that had not asked since the page before")
    verdict.hold(not not_theirs, f"{not_theirs} pages were fetched by machines that knew them to be another's")
    verdict.hold(
        finished.keys() == set(SHARED_REGIONS) and all(finished.values()), f"the shared job is not complete: {finished}"
    )


# -- 4. debts ----------------------------------------------------------------------------------------------------------


def _debts(evidence: Evidence, verdict: Verdict) -> None:
    unpaid = [draw for draw in evidence.draws if not draw.repaid]
    final = {entry.token for entry in evidence.course.log}
    missing = [draw for draw in evidence.draws if draw.token not in final]
    figures = verdict.figures
    figures["debts"] = {
        "draws": len(evidence.draws),
        "unpaid": len(unpaid),
        "missing": len(missing),
    }
    verdict.hold(not unpaid, f"{len(unpaid)} draws were not repaid")
    verdict.hold(not missing, f"{len(missing)} draws are not in the log at the end: {missing[:3]}")


# -- 5. recovery -------------------------------------------------------------------------------------------------------


def _recovery(evidence: Evidence, verdict: Verdict) -> None:
    answered_ms = [event["ms"] for _, event in _from_ledger(evidence)]
    took: defaultdict[str, list[int]] = defaultdict(list)
    for outage in evidence.course.outages:
        at = bisect_left(answered_ms, outage.back_ms)
        took[outage.kind].append(answered_ms[at] - outage.back_ms if at < len(answered_ms) else RECOVERY_MS)
    everything = [ms for some in took.values() for ms in some]
    verdict.figures["recovery ms"] = {
        "outages": len(everything),
        "median": int(median(everything)) if everything else 0,
        "max": max(everything, default=0),
        "max by fault": {kind: max(some) for kind, some in sorted(took.items())},
    }
    verdict.hold(max(everything, default=0) < RECOVERY_MS, f"recovery took too long: {dict(took)}")


# -- 6. waste ----------------------------------------------------------------------------------------------------------


def _waste(evidence: Evidence, verdict: Verdict) -> None:
    """Units that were charged and never reached the wire."""
    wasted: Counter[str] = Counter()
    attempts: Counter[str] = Counter()
    units_each: list[int] = []
    for attempt in evidence.attempts.values():
        charged_units = 0 if attempt.entry is None else attempt.entry.units
        over = charged_units - (attempt.arrival.units if attempt.arrival is not None else 0)
        if over <= 0:
            continue
        decision = attempt.decision
        if decision is None:
            why = "killed"
        elif attempt.draw is not None:
            why = "doubt, drawn instead"
        elif not decision["admitted"]:
            why = "doubt, refused"
        elif attempt.life.killed and attempt is attempt.life.last_attempt:
            why = "killed"
        else:
            why = "on a dead connection"
        wasted[why] += over
        attempts[why] += 1
        units_each.append(over)
    granted = sum(entry.units for entry in evidence.entries.values())
    faults = evidence.course.faults
    kills = sum(times for fault, times in faults.items() if fault in KILLS)
    beyond = sum(sorted(units_each, reverse=True)[kills:])
    verdict.figures["wasted"] = {
        "units": sum(units_each),
        "share": round(sum(units_each) / max(granted, 1), 4),
        "beyond one attempt a kill": beyond,
        "units by cause": dict(sorted(wasted.items())),
        "attempts by cause": dict(sorted(attempts.items())),
    }
    dead, most = (
        attempts["on a dead connection"],
        sum(n for fault, n in faults.items() if fault.startswith("upstream-")),
    )
    verdict.hold(dead <= 3 * most, f"{dead} attempts were charged and did not arrive, {most} times upstream hung up")
    verdict.hold(
        beyond <= WASTED_SHARE * granted, f"{beyond} of {granted} units were wasted beyond one attempt a kill: {wasted}"
    )
