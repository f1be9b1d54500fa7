"""Facts, claims, places and refusals in a project's state. A pure rule decides each change, for every log.

    change      reads fields, asks a rule for the new fields, and writes them; begins again if others were quicker
    State       all changes, of one project

The rules are in `quota.rules`: `facts`, `claims`, `refusals`.

**Lost answers.** If the answer to a change is lost, and its marker is in the log, the change was made. Else the rule
decides once more, about the fields of that moment. A claim that is made twice is one claim. The refusals remember the
keys of their newest additions. So no change happens twice, even if others made changes in between.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from quota.common.clock import elapsed_s
from quota.common.text import many, number_in, one_line, show
from quota.errors import LedgerError, OtherApi, UnusableLedger, UsageError
from quota.ledger.log import EPOCH, FENCE, SEAL, Fields, Log, Moment, all_between, fence_is_over, is_fence, is_seal
from quota.rules import claims
from quota.rules import facts as facts_rules
from quota.rules import refusals as refusals_rules
from quota.rules.claims import CLAIM, Claim, Claimed, Ending, Holder, Record
from quota.rules.entry import START, Entry
from quota.rules.facts import FACTS, Compared, Exhaustion, Facts, Grant, Loss
from quota.rules.refusals import REFUSALS, REFUSED_SUMS, RefusalCount, Refusals, RefusedSum
from quota.terms.arguments import MAX_NUMBER

T = TypeVar("T")

CHANGE_WITHIN_S = 3.0
"""How long a change tries again while others are quicker."""

MAX_CHANGES = 1_000
"""The most tries of a change."""

FENCED_WITHIN_S = 0.3
"""How long a change waits for a fence, behind which others put back lost charges or move the log."""

FENCED_PAUSE_S = 0.02

ENDED_FENCE = f"{FENCE}ended:0"
"""A change takes a fence whose lease has ended from its owner, who may have read the state already. The next decision
lifts this fence."""


Rule = Callable[[int, Mapping[str, str]], tuple[T, Fields]]
"""Takes the ledger's clock and the fields of the state. Returns the answer to the caller, and the new fields (None
removes a field)."""


def change(
    log: Log,
    project: str,
    names: Sequence[str],
    rule: Rule[T],
    marker_key: str | None = None,
) -> T:
    """Change the state of a project by a rule, which gets the named fields that exist.

    With `marker_key` the same step appends a marker with this key to the log. If nothing changes, it writes nothing.
    Raises LedgerError if the ledger cannot answer, if others are always quicker, or if a fence stands; UnusableLedger
    if the log has moved.
    """
    marker = None if marker_key is None else Entry(START, 0, "", "", "", "", marker_key, "marker")
    began_s, is_lost = elapsed_s(), False
    stands = _read(log, project, names)
    for _ in range(MAX_CHANGES):
        _check_usable(log, project, "", stands)
        fields = {name: stands.state[name] for name in names if name in stands.state}
        answer, becomes = rule(stands.clock_ms, fields)
        becomes = {name: now for name, now in becomes.items() if name not in names or fields.get(name) != now}
        if not becomes:
            return answer
        expected = {name: fields.get(name) for name in names}
        if is_fence(stands.epoch) and fence_is_over(stands.epoch, stands.clock_ms):  # its owner may only be late
            expected[EPOCH], becomes = stands.epoch, {**becomes, EPOCH: ENDED_FENCE}
        try:
            stands = log.change(project, expected, becomes, marker)
        except UnusableLedger:
            raise
        except LedgerError:
            if is_lost:
                raise
            is_lost, before = True, stands.tip
            stands = _read(log, project, names)
            if marker is not None and any(entry.key == marker.key for entry in all_between(log.read, project, before)):
                return answer
            continue
        if stands.done:
            return answer
        if is_fence(stands.epoch):
            if elapsed_s() - began_s > FENCED_WITHIN_S:
                raise LedgerError(f"ledger {log.label}: another process puts back what it lost; run again in a moment")
            time.sleep(FENCED_PAUSE_S)
        elif elapsed_s() - began_s > CHANGE_WITHIN_S:
            break
    raise LedgerError(f"ledger {log.label}: other processes were quicker each time; run again in a moment")


def _read(log: Log, project: str, names: Sequence[str]) -> Moment:
    return log.change(project, dict.fromkeys(names), {})


API = "api"
"""The field of the state that names the API of a project's charges."""

LONGEST = "longest_ms"
"""The field of the state with the longest window ever named. An entry stays in the log for so long."""


def longest_of(state: Mapping[str, str]) -> int:
    """The longest window that a state names, in ms; 0 if it names none."""
    return number_in(state.get(LONGEST, ""), 0, MAX_NUMBER) or 0


def check_api(label: str, project: str, api: str, state: Mapping[str, str]) -> None:
    """Raises OtherApi if a project belongs to another API: bucket names repeat, and upstream counts each API by
    itself."""
    if api and state.get(API, api) != api:
        raise OtherApi(
            f"ledger {label}: project {project!r} has the charges of api {show(state[API])}, and upstream counts "
            f"{show(api)} separately; give this credential another project"
        )


def begin(log: Log, project: str, fields: Sequence[str] = (), api: str = "") -> Moment:
    """As `Log.begin`, also with the field API if the log must have the charges of one. Raises UnusableLedger if the log
    has moved, or has those of another API."""
    beginning = log.begin(project, (*fields, API) if api else fields)
    _check_usable(log, project, api, beginning)
    return beginning


def _check_usable(log: Log, project: str, api: str, stands: Moment) -> None:
    if is_seal(stands.epoch):
        place = one_line(stands.epoch.removeprefix(SEAL))
        raise UnusableLedger(f"ledger {log.label} has moved to {place}; put that url into [ledger]")
    check_api(log.label, project, api, stands.state)


@dataclass(frozen=True)
class State:
    """The state of one project. `new_key` makes the key of a marker, or of an addition. `note` gets the text of the
    facts after each change of this process."""

    log: Log
    project: str
    new_key: Callable[[], str]
    note: Callable[[str], None] = lambda _: None

    # -- facts -------------------------------------------------------------------------------------------------------

    def facts(self) -> Facts:
        """The current facts, also of a log that is fenced or has moved."""
        return Facts.read(_read(self.log, self.project, (FACTS,)).state.get(FACTS, ""))

    def exhaust(self, exhaustion: Exhaustion) -> Exhaustion:
        """Close a bucket. Returns the exhaustion that stands then: this one, an earlier one, or one that somebody has
        lifted since upstream's answer."""
        _, after = self._change_facts(lambda facts, now_ms: facts_rules.exhaust(facts, exhaustion, now_ms))
        return after.exhaustion(exhaustion.bucket) or exhaustion

    def reopen(self, bucket: str, because: str = "") -> bool:
        """Open a closed bucket. False if it is open."""
        before, after = self._change_facts(lambda facts, now_ms: facts_rules.reopen(facts, bucket, because, now_ms))
        return after != before

    def grant(self, grants: Sequence[Grant], compared: Sequence[Compared] | None = None) -> None:
        """Replace upstream's grants, and its counts unless `compared` is None."""
        self._change_facts(lambda facts, now_ms: facts_rules.grant(facts, grants, compared, now_ms))

    def lose(self, loss: Loss, newest_ms: int) -> None:
        """Note charges that this machine has put back, the newest of them of `newest_ms`."""
        self._change_facts(lambda facts, _: facts_rules.lose(facts, loss, newest_ms))

    def unite(self, other: Facts) -> tuple[Facts, Facts]:
        """Add what another history of the facts has. Returns the facts before and after."""
        return self._change_facts(lambda facts, _: facts_rules.union(facts, other))

    def _change_facts(self, rule: Callable[[Facts, int], Facts]) -> tuple[Facts, Facts]:
        """Change the facts, with a marker. Returns them before and after, even if others have changed them since."""

        def changed(now_ms: int, fields: Mapping[str, str]) -> tuple[tuple[Facts, Facts], Fields]:
            before = Facts.read(fields.get(FACTS, ""))
            after = rule(before, now_ms)
            return (before, after), {} if after == before else {FACTS: after.text()}

        before, after = change(self.log, self.project, (FACTS,), changed, self.new_key())
        if after != before:
            self.note(after.text())
        return before, after

    # -- claims and places -------------------------------------------------------------------------------------------

    def claim(self, claim: Claim, *, take_over: bool = False) -> Claimed:
        """Claim regions and a tick. Claim them again to renew the claim."""
        claim = claims.checked_claim(claim)
        return self._change_claims(claim.name, lambda record: record.claim(claim, take_over=take_over))

    def holders(self, name: str) -> list[Holder]:
        """The current holders of the regions of a job."""
        stands = begin(self.log, self.project, (CLAIM + name,))
        return Record(stands.state.get(CLAIM + name, ""), stands.clock_ms).holders()

    def end_claim(self, claim: Claim, ending: Ending) -> None:
        """Note that a run has ended."""
        claim = claims.checked_claim(claim)
        self._change_claims(claim.name, lambda record: record.end(claim, ending))

    def forget_ticks(self, name: str, ticks: Collection[str]) -> None:
        """Let these ticks of a job be claimed again."""
        self._change_claims(name, lambda record: record.forget(ticks))

    def places(self, name: str, regions: Sequence[str]) -> Mapping[str, str]:
        """The places of a job that are kept, by region."""
        if len(regions) > claims.MAX_REGIONS:
            raise UsageError(
                f"{many(len(regions), 'region')}: the places of at most {claims.MAX_REGIONS:,} are read at once"
            )
        regions_of = {claims.place_field(name, region): region for region in regions}
        stands = begin(self.log, self.project, tuple(regions_of))
        places = {regions_of[field]: claims.read_place(kept, stands.clock_ms) for field, kept in stands.state.items()}
        return {region: place for region, place in places.items() if place is not None}

    def keep_places(self, claim: Claim, name: str, places: Mapping[str, str]) -> Claimed:
        """Renew a claim, and keep the job's places in the regions that it still has. The answer has the other regions
        in `elsewhere`."""
        if unclaimed := [region for region in places if region not in claim.regions]:
            raise UsageError(f"region {unclaimed[0]!r:.100}: claim a region before you keep its place")

        def becomes(claimed: Claimed) -> dict[str, str]:
            own = [region for region in places if region not in claimed.elsewhere]
            return {
                claims.place_field(name, region): claims.stored_place(places[region], claimed.now_ms) for region in own
            }

        claim = claims.checked_claim(claim)
        return self._change_claims(claim.name, lambda record: record.renew(claim), becomes)

    def _change_claims(
        self, name: str, ask: Callable[[Record], T], also: Callable[[T], Mapping[str, str]] = lambda _: {}
    ) -> T:
        """Change the record of a job's claims, and the fields that `also` derives from the answer."""
        field = CLAIM + name

        def rule(now_ms: int, fields: Mapping[str, str]) -> tuple[T, Fields]:
            record = Record(fields.get(field, ""), now_ms)
            answer = ask(record)
            return answer, {field: record.stored(), **also(answer)}

        return change(self.log, self.project, (field,), rule)

    # -- refusals ----------------------------------------------------------------------------------------------------

    def add_refusals(self, counts: Sequence[RefusalCount], newest: Sequence[str] = (), key: str | None = None) -> None:
        """Add refused calls: their counts, and the newest refusals in full, the oldest first. After a LedgerError, try
        again with the same `key`."""
        key = self.new_key() if key is None else key

        def rule(now_ms: int, fields: Mapping[str, str]) -> tuple[None, Fields]:
            return None, refusals_rules.add(fields, now_ms, key, counts, newest)

        change(self.log, self.project, refusals_rules.names_to_add(counts), rule)

    def refusals(self, since_ms: int = 0) -> Refusals:
        """The refusals of all hours that end after `since_ms`, also of a log that is fenced or has moved."""
        stored = _read(self.log, self.project, (REFUSALS,)).state.get(REFUSALS, "")
        names = refusals_rules.names_to_read(stored, since_ms)
        return refusals_rules.read(_read(self.log, self.project, names).state)

    def refused_sums(self) -> Sequence[RefusedSum]:
        """The sums of all refused calls ever, also of a log that is fenced or has moved."""
        return refusals_rules.read(_read(self.log, self.project, (REFUSED_SUMS,)).state).sums
