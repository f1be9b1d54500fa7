"""What a charge did to the limits."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from quota.budget import Budget, account_of
from quota.common.clock import NEVER, rfc3339
from quota.common.members import members
from quota.common.text import one_line
from quota.deciding.corrections import charges_in, draw_of
from quota.errors import UnknownCharge, UsageError
from quota.ledger.contract import RETENTION_SLACK_MS, entries_between, just_before, read_entries
from quota.ledger.entry import Charge, Entry, Id, counted
from quota.ledger.history import RUN_CHARS
from quota.ledger.state_fields import read_id
from quota.session import Session, projects_of
from quota.terms.limits import Limit, cutoff, leaves_at

if TYPE_CHECKING:
    from quota.recovery.allowance import Draw


class LimitAroundCharge(NamedTuple):
    """A limit that counts a charge: what it counted without it at that moment, and with it, other charges with the
    corrections they have today. The charge stops counting at `leaves_ms`. If not `whole`, the log has let go of a part
    of that window, and what was used before was more."""

    limit: Limit
    before_units: int
    after_units: int
    leaves_ms: int
    whole: bool


class ChargeExplained(NamedTuple):
    """What a charge was, asked at `asked_ms` by the ledger's clock. `entry` is None while a charge that was `drawn` on
    this machine's allowance is owed, or if the log has let go of it. `not_counted_by` names limits that do not count
    it. Of a call of several buckets it is the first charge, and `also` has the others."""

    charge_id: str
    credential: str
    project: str
    asked_ms: int
    entry: Entry | None
    drawn: Draw | None
    limits: tuple[LimitAroundCharge, ...]
    not_counted_by: tuple[str, ...]
    also: tuple[ChargeExplained, ...] = ()

    @property
    def charge(self) -> Entry | Charge:
        """What was charged, and what it counts now."""
        if self.entry is not None:
            return self.entry
        assert self.drawn is not None  # noqa: S101  # one of both is there
        return self.drawn.charge

    @property
    def run(self) -> str:
        return self.charge.idempotency_key[:RUN_CHARS]

    @property
    def charged_units(self) -> int | None:
        """What it was charged; None where only the journal has it, which keeps what it counts now."""
        return None if self.entry is None else self.entry.charged_units

    @property
    def at_ms(self) -> int:
        if self.drawn is not None:
            return self.drawn.drawn_ms
        assert self.entry is not None  # noqa: S101  # one of both is there
        return self.entry.ms

    def as_json(self) -> dict[str, object]:
        return {
            "id": self.charge_id,
            **members(self, "asked_at at credential project run charged_units"),
            **members(self.charge, "method bucket job region units"),
            "drawn": None
            if self.drawn is None
            else {
                "at": rfc3339(self.drawn.drawn_ms),
                "repaid": self.drawn.repaid,
                "entry": self.entry and self.entry.id,
            },
            "limits": [
                {
                    "window": one.limit.view.window.name,
                    **members(one.limit, "name limit_units"),
                    **members(one, "before_units after_units whole leaves_at"),
                }
                for one in self.limits
            ],
            "not_counted_by": list(self.not_counted_by),
            **({"also": [one.as_json() for one in self.also]} if self.also else {}),
        }


def explain_charge(session: Session, charge_id: str, credential: str | None = None) -> ChargeExplained:
    """The charge of this id, or the charges of a call of several buckets, of whichever project has it.

    Raises UnknownCharge for an id that no charge has, or whose charge has left the log; UsageError if several projects
    have one of that id; LedgerError.
    """
    first_id, *others = charges_in(charge_id)
    first = _explained(session, first_id, credential)
    also = tuple([_explained(session, one, first.credential) for one in others])
    return first._replace(charge_id=charge_id, also=also)


def _explained(session: Session, charge_id: str, credential: str | None) -> ChargeExplained:
    names = [one.name for one in projects_of(session, credential).values()]
    found = [one for name in names if (one := _find(session, session.budget(name), charge_id)) is not None]
    if len(found) > 1:
        raise UsageError(
            f"several projects have a charge {charge_id}; name the credential, for example {found[0].credential!r}"
        )
    if found:
        return found[0]
    raise UnknownCharge(_why_unknown(session, list(projects_of(session, credential)), charge_id))


def _why_unknown(session: Session, projects: Sequence[str], charge_id: str) -> str:
    named = f"no charge {one_line(charge_id)[:80]!r} in project {', '.join(map(repr, projects))}"
    made = _id_of(charge_id)
    if made is None:
        if charge_id.startswith("allowance-"):
            return f"{named}: it was drawn on another machine, or this one's journal no longer has it"
        return f"{named}: an id is as `quota log` shows it, for example 1795233255077-0"
    after_ms = max(map(session.ledger.whole_after_ms, projects), default=0)
    if made[0] <= after_ms:
        return (
            f"{named} any more: it is older than the log, which has single charges since {rfc3339(after_ms)}; "
            "`quota spend` has older ones by the hour"
        )
    return f"{named}; `quota log` lists those that there are"


def _id_of(text: str) -> Id | None:
    """The id of a charge; None for any other text."""
    try:
        made = read_id(text)
    except ValueError:
        return None
    return made if made[0] else None


def _find(session: Session, budget: Budget, charge_id: str) -> ChargeExplained | None:
    ledger, project = session.ledger, budget.project
    drawn, entry = draw_of(account_of(budget), charge_id), None
    if drawn is not None and drawn.repaid:
        # The newest entry of that key is the draw; an earlier one is the same call, whose answer was lost.
        log = read_entries(ledger, project, max(0, drawn.drawn_ms - RETENTION_SLACK_MS), NEVER)
        entry = next(reversed([e for e in log if e.idempotency_key == drawn.charge.idempotency_key]), None)
    made = _id_of(charge_id)
    if made is not None:
        after = (made[0], made[1] - 1) if made[1] else (made[0] - 1, NEVER)
        entry = next((e for e in ledger.read(project, after, made[0], 1) if (e.ms, e.seq) == made), None)
    if entry is None and drawn is None:
        return None
    limits, others = ((), ()) if entry is None else _around(session, budget, entry)
    return ChargeExplained(charge_id, budget.credential, project, ledger.now_ms(), entry, drawn, limits, others)


def _around(session: Session, budget: Budget, entry: Entry) -> tuple[tuple[LimitAroundCharge, ...], tuple[str, ...]]:
    """Each limit before and after an entry, and the names of those that do not count it."""
    limits = dict.fromkeys([*budget.limits, *budget.limits_of(entry.job)])
    counting = [x for x in limits if x.view.selector.counts(entry.bucket, entry.method, entry.job)]
    cutoffs_ms = [cutoff(limit.view.window, entry.ms) for limit in counting]
    before_units = [0] * len(counting)
    edges = [just_before(ms + 1) for ms in sorted(set(cutoffs_ms))]
    last = (entry.ms, entry.seq - 1) if entry.seq else just_before(entry.ms)
    for begin, through in pairwise([*edges, last]):
        for earlier in entries_between(session.ledger, budget.project, begin, through):
            for n, limit in enumerate(counting):
                if just_before(cutoffs_ms[n] + 1) <= begin:
                    before_units[n] += counted(limit.view.selector, earlier)
    whole_after_ms = session.ledger.whole_after_ms(budget.project)
    rows = []
    for limit, cutoff_ms, before in zip(counting, cutoffs_ms, before_units, strict=True):
        leaves_ms = leaves_at(limit.view.window, entry.ms)
        after = before + limit.view.selector.cost(entry.charged_units)
        rows.append(LimitAroundCharge(limit, before, after, leaves_ms, whole_after_ms <= cutoff_ms))
    return tuple(rows), tuple(limit.name for limit in limits if limit not in counting)
