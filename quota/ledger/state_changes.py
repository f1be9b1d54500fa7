"""What changes seldom in a project's state, by one rule on every ledger. The rules (L20, ...) are in ARCHITECTURE.md.

Change          what follows for the fields of a state
StateChanges    the methods of `quota.ledger.contract.Ledger` that make such changes
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from quota.errors import UsageError
from quota.ledger.compared import compared_text
from quota.ledger.grants import grants_text
from quota.ledger.history import HISTORY_MS
from quota.terms.arguments import text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from quota.ledger.claims import Claim, Claimed, Ending, Record
    from quota.ledger.compared import Compared
    from quota.ledger.grants import Grant

T = TypeVar("T")


class Change(NamedTuple, Generic[T]):
    """The answer to who asked, and the fields with what they become; None: they go. The state is kept for `keep_ms` at
    least."""

    answer: T
    fields: Mapping[str, str | None] = {}
    keep_ms: int = HISTORY_MS


if TYPE_CHECKING:
    Rule = Callable[[int, Mapping[str, str]], Change[T]]
    """Says what follows at a time, of the ledger's clock, for a state that has these fields."""


class StateChanges:
    """The methods of a ledger that change its state by a rule. See `quota.ledger.contract.Ledger`."""

    def _change_state(self, project: str, names: Sequence[str], rule: Rule[T], *, once: bool = False) -> T:
        """Change the state in one atomic step by a rule, which gets those of the named fields that there are.

        Where others change the same meanwhile, or an answer was lost, it is asked anew, and finds what it has changed
        itself. With `once` it is not: what stands there then stands, as if it had come after this.
        """
        raise NotImplementedError

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

    def claim(self, project: str, claim: Claim, *, take_over: bool = False) -> Claimed:
        return self._change_claims(project, claim, lambda record, checked: record.claim(checked, take_over=take_over))

    def end_claim(self, project: str, claim: Claim, ending: Ending) -> None:
        self._change_claims(project, claim, lambda record, checked: record.end(checked, ending))

    def _change_claims(self, project: str, claim: Claim, change: Callable[[Record, Claim], T]) -> T:
        """L25. Change the record of a job's claims."""
        from quota.ledger.claims import Record, checked_claim  # late: a charge claims nothing

        claim = checked_claim(claim)
        field = f"claim:{claim.name}"

        def rule(now_ms: int, fields: Mapping[str, str]) -> Change[T]:
            record = Record(fields.get(field, ""), now_ms)
            answer = change(record, claim)
            return Change(answer, {field: record.stored()})

        return self._change_state(project, (field,), rule)
