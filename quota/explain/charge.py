"""A charge, and what it did to the limits."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

from quota.budget import Budget, charge_id, parts_of_id, project_of
from quota.common.clock import NEVER, moment, rfc3339
from quota.common.text import members, one_line
from quota.deciding.history import charges, entries, whole_since_ms
from quota.deciding.project import Project
from quota.errors import UnknownCharge
from quota.rules.entry import FURTHER, just_before
from quota.rules.spent import Spent, spent
from quota.rules.total import total_of
from quota.session import Session, projects_of
from quota.terms.limits import Limit, cutoff, leaves_at

if TYPE_CHECKING:
    from quota.journal.draws import Draw


class ChargeExplained(NamedTuple):
    """A charge, read at `asked_ms` by the ledger's clock. `limits` has each limit that counts it, with the units just
    before it; `not_counted_by` names the other limits. The history is whole since `whole_since_ms`.

    `draw` is set if the charge was drawn on this machine's allowance. Unless it is `in_log`, only the journal has it.
    If the call charged several buckets, this is the first charge, and `also` has the others.
    """

    charge_id: str
    credential: str
    project: str
    asked_ms: int
    charge: Spent
    draw: Draw | None
    in_log: bool
    limits: Mapping[Limit, int]
    not_counted_by: tuple[str, ...]
    whole_since_ms: int
    also: tuple[ChargeExplained, ...] = ()

    @property
    def run(self) -> str:
        return self.charge.run

    @property
    def charged_units(self) -> int | None:
        """The units as charged; None if only the journal has the charge: the journal keeps the present units."""
        return self.charge.charged_units if self.in_log else None

    @property
    def at_ms(self) -> int:
        return self.charge.id[0] if self.draw is None else self.draw.entry.id[0]

    def after_units(self, limit: Limit) -> int:
        """The units of the limit with the charge."""
        return self.limits[limit] + limit.view.selector.cost(self.charge.charged_units)

    def leaves_ms(self, limit: Limit) -> int:
        """When the limit stops counting the charge."""
        return leaves_at(limit.view.window, self.charge.id[0])

    def is_whole(self, limit: Limit) -> bool:
        """Whether the history covers the limit's window. If not, the limit counted more than is shown."""
        return self.whole_since_ms <= cutoff(limit.view.window, self.charge.id[0])

    def as_json(self) -> dict[str, object]:
        draw, charge = self.draw, self.charge
        return {
            "id": self.charge_id,
            **members(self, "asked_at at credential project run charged_units"),
            **members(charge, "method bucket job region units"),
            "drawn": None
            if draw is None
            else {
                "at": rfc3339(self.at_ms),
                "repaid": draw.handed_id is not None,
                "entry": charge_id(charge.id[0], charge.key, 0) if self.in_log else None,
            },
            "limits": [
                {
                    "window": limit.view.window.name,
                    **members(limit, "name limit_units"),
                    "before_units": before_units,
                    "after_units": self.after_units(limit),
                    "whole": self.is_whole(limit),
                    "leaves_at": rfc3339(self.leaves_ms(limit)),
                }
                for limit, before_units in self.limits.items()
            ],
            "not_counted_by": list(self.not_counted_by),
            **({"also": [further.as_json() for further in self.also]} if self.also else {}),
        }


def explain_charge(session: Session, name: str, credential: str | None = None) -> ChargeExplained:
    """The charge with this id in any project, with the further charges of its call.

    Raises UnknownCharge if no charge has the id, or the ledger no longer keeps it; LedgerError.
    """
    ms, key, further = parts_of_id(name)
    keys = [key, *(f"{key}{FURTHER}{n}" for n in range(1, further + 1))]
    chosen = [session.budget(settings.name) for settings in projects_of(session, credential).values()]
    for budget in chosen if key else ():
        draws, logged = _draws(project_of(budget), keys), _logged(project_of(budget), ms, keys)
        explained = [
            _explained(budget, name, logged.get(key), draws.get(key)) for key in keys if key in logged or key in draws
        ]
        if explained and explained[0].charge.key == key:
            return explained[0]._replace(also=tuple(explained[1:]))
    raise UnknownCharge(_why_unknown(chosen, name, ms, key))


def _draws(project: Project, keys: Collection[str]) -> dict[str, Draw]:
    """The draws of these charges in this machine's journal."""
    if project.journal is None:
        return {}
    drawn = project.journal.draws.drawn(project.wall(), NEVER)
    return {draw.entry.key: draw for draw in drawn if draw.entry.key in keys}


def _logged(project: Project, ms: int, keys: Collection[str]) -> dict[str, Spent]:
    """These charges in the history: since their time, or anywhere in the log if a repair dated them anew."""
    logged = {charge.key: charge for charge in charges(project, ms) if charge.key in keys}
    if not logged:
        trimmed_ms = project.log.begin(project.name).trimmed[0]
        logged = {charge.key: charge for charge in charges(project, trimmed_ms) if charge.key in keys}
    return logged


def _explained(budget: Budget, name: str, logged: Spent | None, draw: Draw | None) -> ChargeExplained:
    project, charge = project_of(budget), logged
    if charge is None:
        assert draw is not None  # noqa: S101  # one of the two is there
        (charge,) = spent([draw.entry])
    limits = [*dict.fromkeys([*budget.limits, *budget.limits_of(charge.job)])] if logged is not None else []
    counting = [limit for limit in limits if limit.view.selector.counts(charge.bucket, charge.method, charge.job)]
    return ChargeExplained(
        charge_id=name,
        credential=budget.credential,
        project=budget.project,
        asked_ms=project.log.now_ms(),
        charge=charge,
        draw=draw,
        in_log=logged is not None,
        limits=_before(project, charge, counting),
        not_counted_by=tuple([limit.name for limit in limits if limit not in counting]),
        whole_since_ms=whole_since_ms(project),
    )


def _before(project: Project, charge: Spent, limits: Sequence[Limit]) -> dict[Limit, int]:
    """The units of each limit just before a charge."""
    if not limits:
        return {}
    at_ms, trimmed = charge.id[0], project.log.begin(project.name).trimmed
    earliest_ms = min(cutoff(limit.view.window, at_ms) for limit in limits)
    window = entries(project, just_before(max(0, earliest_ms + 1)))
    behind = list(takewhile(lambda entry: entry.id < charge.id, window))
    return {limit: total_of(limit.view, behind, at_ms, trimmed).used_units for limit in limits}


def _why_unknown(budgets: Sequence[Budget], name: str, ms: int, key: str) -> str:
    projects = ", ".join(repr(budget.project) for budget in budgets)
    unknown = f"no charge {one_line(name)[:80]!r} in project {projects}"
    since_ms = max([whole_since_ms(project_of(budget)) for budget in budgets], default=0)
    if key and ms < since_ms:
        return f"{unknown} any more: the ledger has single charges since {moment(since_ms)}"
    return f"{unknown}; `quota log` lists the charges"
