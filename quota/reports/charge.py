"""A charge, and what it did to the limits."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from quota.budget import Budget, charge_id, parts_of_id, project_of
from quota.common.clock import NEVER, moment, rfc3339
from quota.common.text import members, one_line
from quota.deciding.history import charges, whole_since_ms
from quota.deciding.project import Project
from quota.errors import UnknownCharge
from quota.reports.spending import entries_of_window
from quota.rules.entry import FURTHER
from quota.rules.spent import Spent, spent
from quota.rules.total import total_of
from quota.session import Session, projects_of
from quota.terms.limits import Limit, cutoff, leaves_at

if TYPE_CHECKING:
    from quota.journal.draws import Draw


class LimitAround(NamedTuple):
    """A limit that counts a charge: its units just before and after it, and when it stops counting. Unless `whole`, the
    history does not cover the limit's window, and the limit counted more than is shown."""

    window: str
    name: str
    limit_units: int
    before_units: int
    after_units: int
    whole: bool
    leaves_ms: int


class ChargeExplained(NamedTuple):
    """A charge, read at `asked_ms` by the ledger's clock. `limits` are those that count it; `not_counted_by` names the
    others.

    `draw` is set if the charge was drawn on this machine's allowance. Unless it is `in_log`, only the journal has it.
    If the call charged several buckets, this is the first charge, and `also` has the others.
    """

    id: str
    credential: str
    project: str
    asked_ms: int
    charge: Spent
    draw: Draw | None
    in_log: bool
    limits: tuple[LimitAround, ...]
    not_counted_by: tuple[str, ...]
    also: tuple[ChargeExplained, ...] = ()

    @property
    def charged_units(self) -> int | None:
        """The units as charged; None if only the journal has the charge: the journal keeps the present units."""
        return self.charge.charged_units if self.in_log else None

    @property
    def entry(self) -> str | None:
        """The name of the entry in the log; None if only the journal has the charge."""
        return charge_id(self.charge.id[0], self.charge.key, 0) if self.in_log else None

    @property
    def at_ms(self) -> int:
        return self.charge.id[0] if self.draw is None else self.draw.entry.id[0]

    def as_json(self) -> dict[str, object]:
        draw, charge, drawn = self.draw, self.charge, None
        if draw is not None:
            drawn = {"at": rfc3339(self.at_ms), "repaid": draw.handed_id is not None, "entry": self.entry}
        return {
            **members(self, "id asked_at at credential project"),
            **members(charge, "run"),
            **members(self, "charged_units"),
            **members(charge, "method bucket job region units"),
            "drawn": drawn,
            "limits": [
                members(row, "window name limit_units before_units after_units whole leaves_at") for row in self.limits
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
    projects = ", ".join(repr(budget.project) for budget in chosen)
    unknown = f"no charge {one_line(name)[:80]!r} in project {projects}"
    since_ms = max([whole_since_ms(project_of(budget)) for budget in chosen], default=0)
    if key and ms < since_ms:
        raise UnknownCharge(f"{unknown} any more: the ledger has single charges since {moment(since_ms)}")
    raise UnknownCharge(f"{unknown}; `quota log` lists the charges")


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
        id=name,
        credential=budget.credential,
        project=budget.project,
        asked_ms=project.log.now_ms(),
        charge=charge,
        draw=draw,
        in_log=logged is not None,
        limits=tuple(_around(project, charge, counting)),
        not_counted_by=tuple([limit.name for limit in limits if limit not in counting]),
    )


def _around(project: Project, charge: Spent, limits: Sequence[Limit]) -> Iterator[LimitAround]:
    """Each of these limits around a charge that it counts."""
    if not limits:
        return
    at_ms, trimmed = charge.id[0], project.log.begin(project.name).trimmed
    longest = min((limit.view.window for limit in limits), key=lambda window: cutoff(window, at_ms))
    behind = entries_of_window(project, longest, at_ms, charge.id)
    whole_ms = whole_since_ms(project)
    for limit in limits:
        window = limit.view.window
        before_units = total_of(limit.view, behind, at_ms, trimmed).used_units
        yield LimitAround(
            window=window.name,
            name=limit.name,
            limit_units=limit.limit_units,
            before_units=before_units,
            after_units=before_units + limit.view.selector.cost(charge.charged_units),
            whole=whole_ms <= cutoff(window, at_ms),
            leaves_ms=leaves_at(window, at_ms),
        )
