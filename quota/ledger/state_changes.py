"""What changes seldom in a project's state, by one rule on every ledger. See docs/ledger-rules.md.

Change          what follows for the fields of a state
StateChanges    the methods of `quota.ledger.parts` that make such changes

The history (L29, L30) is not among them: most processes write it as they end, on Redis in one trip.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from quota.common.text import many
from quota.errors import UsageError
from quota.ledger.compared import Compared, compared_text
from quota.ledger.contract import MIN_RETENTION_MS, RETENTION_SLACK_MS, following_epoch, root_of
from quota.ledger.grants import Grant, grants_text
from quota.ledger.history import HISTORY_MS
from quota.ledger.state_fields import read_ms, read_usages, usages_text
from quota.ledger.unlogged import UnloggedUsage, is_carry
from quota.terms.arguments import text

if TYPE_CHECKING:
    from quota.ledger.claims import Claim, Claimed, Ending, Record

T = TypeVar("T")

_TIMES = ("retention_ms", "unlogged_until_ms", "trimmed_through_ms")


class Change(NamedTuple, Generic[T]):
    """The answer to the caller, and the fields with what they become; None: they go. The state is kept for `keep_ms` at
    least."""

    answer: T
    fields: Mapping[str, str | None] = {}
    keep_ms: int = HISTORY_MS


Rule = Callable[[int, Mapping[str, str]], Change[T]]
"""Says what follows at a time, of the ledger's clock, for a state that has these fields."""


class StateChanges(ABC):
    """The methods of a ledger that change its state by a rule. See `quota.ledger.parts`."""

    @abstractmethod
    def _change_state(self, project: str, names: Sequence[str], rule: Rule[T], *, once: bool = False) -> T:
        """Change the state in one atomic step by a rule, which gets those of the named fields that there are.

        Where others change the same meanwhile, or an answer was lost, it is asked anew, and finds what it has changed
        itself. With `once` it is not: what others have made of these fields stands, as if it had come after this.
        """

    def reopen(self, project: str, bucket: str, because: str = "") -> bool:
        """L20."""
        closed, reopened = f"closed:{text(bucket, 'bucket')}", f"reopened:{bucket}"

        def rule(now_ms: int, fields: Mapping[str, str]) -> Change[bool]:
            if closed not in fields:
                return Change(False)
            lifted = f"{now_ms} {json.dumps(because)}\n{fields[closed]}"
            return Change(True, {reopened: lifted, closed: None})

        return self._change_state(project, (closed,), rule, once=True)

    def grant(self, project: str, grants: Sequence[Grant], compared: Sequence[Compared] | None = None) -> None:
        """L28."""
        try:
            fields = {"granted": grants_text(grants) or None}
            if compared is not None:
                fields["compared"] = compared_text(compared) or None
        except ValueError as error:
            raise UsageError(f"grants: {error}") from None
        self._change_state(project, tuple(fields), lambda *_: Change(None, fields), once=True)

    def add_unlogged(
        self,
        project: str,
        epoch: str,
        usages: Sequence[UnloggedUsage],
        retention_ms: int = MIN_RETENTION_MS,
        root: str | None = None,
    ) -> str:
        """L17, L18."""
        if re.fullmatch(r"[^\s@/]+", epoch) is None:
            raise UsageError(f"{epoch!r:.100}: an epoch's name is a word without @ and /")
        try:
            views = {usage.view for usage in usages if read_usages(usage.view, usages_text([usage]))}
        except ValueError as error:
            raise UsageError(f"unlogged usage: {error}") from None

        def rule(now_ms: int, fields: Mapping[str, str]) -> Change[str]:
            current = fields.get("epoch", "")
            if root not in (None, root_of(current)):
                return Change(current)
            kept_ms, until_ms, trimmed_ms = (read_ms(fields.get(name, "0")) for name in _TIMES)
            stands = {
                (view, one.epoch): one
                for view in views
                for one in read_usages(view, fields.get(f"unlogged:{view}", ""))
                if one.until_ms + RETENTION_SLACK_MS > min(now_ms, trimmed_ms)
            }
            changed, lost = set(), not current
            for usage in usages:
                if is_carry(usage.epoch) and root_of(usage.epoch) == root_of(current):
                    continue  # this log has it
                key = usage.view, usage.epoch
                merged = stands[key].with_report(usage, now_ms) if key in stands else usage
                if merged != stands.get(key):
                    stands[key] = merged
                    changed.add(usage.view)
                    until_ms = max(until_ms, merged.until_ms)
                    lost = lost or not is_carry(usage.epoch)
            kept_ms = max(kept_ms, retention_ms)
            becomes = {
                "epoch": following_epoch(current, epoch) if lost else current,
                "retention_ms": str(kept_ms),
                "unlogged_until_ms": str(until_ms),
            }
            for view in changed:
                becomes[f"unlogged:{view}"] = usages_text([one for one in stands.values() if one.view == view])
            lives_ms = max(HISTORY_MS, kept_ms, until_ms + RETENTION_SLACK_MS - now_ms)
            return Change(becomes["epoch"], becomes, lives_ms)

        return self._change_state(project, ("epoch", *_TIMES, *(f"unlogged:{view}" for view in views)), rule)

    def claim(self, project: str, claim: Claim, *, take_over: bool = False) -> Claimed:
        return self._change_claims(project, claim, lambda record, checked: record.claim(checked, take_over=take_over))

    def end_claim(self, project: str, claim: Claim, ending: Ending) -> None:
        self._change_claims(project, claim, lambda record, checked: record.end(checked, ending))

    def places(self, project: str, name: str, regions: Sequence[str]) -> Mapping[str, str]:
        """L31."""
        from quota.ledger.claims import MAX_REGIONS, place_field, read_place

        if len(regions) > MAX_REGIONS:
            raise UsageError(f"{many(len(regions), 'region')}: the places of at most {MAX_REGIONS:,} are read at once")
        names = {place_field(name, region): region for region in regions}

        def rule(now_ms: int, fields: Mapping[str, str]) -> Change[dict[str, str]]:
            places = {names[field]: read_place(stored, now_ms) for field, stored in fields.items()}
            return Change({region: place for region, place in places.items() if place is not None})

        return self._change_state(project, tuple(names), rule)

    def keep_places(self, project: str, claim: Claim, name: str, places: Mapping[str, str]) -> Claimed:
        """L31."""
        from quota.ledger.claims import checked_place, place_field, stored_place

        if unclaimed := [region for region in places if region not in claim.regions]:
            raise UsageError(f"region {unclaimed[0]!r:.100}: a place is kept only of a region that is claimed")
        checked = {region: (place_field(name, region), checked_place(place)) for region, place in places.items()}

        def becomes(claimed: Claimed) -> dict[str, str]:
            kept = [one for region, one in checked.items() if region not in claimed.elsewhere]
            return {field: stored_place(place, claimed.now_ms) for field, place in kept}

        return self._change_claims(project, claim, lambda record, its: record.renew(its), becomes)

    def _change_claims(
        self,
        project: str,
        claim: Claim,
        change: Callable[[Record, Claim], T],
        also: Callable[[T], Mapping[str, str]] = lambda _: {},
    ) -> T:
        """L25. Change the record of a job's claims, and what follows `also` from the answer."""
        from quota.ledger.claims import Record, checked_claim  # late: a charge claims nothing

        claim = checked_claim(claim)
        field = f"claim:{claim.name}"

        def rule(now_ms: int, fields: Mapping[str, str]) -> Change[T]:
            record = Record(fields.get(field, ""), now_ms)
            answer = change(record, claim)
            return Change(answer, {field: record.stored(), **also(answer)})

        return self._change_state(project, (field,), rule)
