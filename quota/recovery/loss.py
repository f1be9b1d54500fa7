"""What a ledger lacks of all that a machine saw: `compare` holds it against the log as it is now.

A log is known by its *root*, the first part of its epoch.

    the same root     what the log lacks of an observation is a loss: the newest units. A server restored from a copy
    another root      nothing of it is in this log. All of it counts on, as a carry: the ledger was emptied, or moved to
                      another place

For example with the limit of `quota.recovery.high_water_mark`: this machine saw 7,100 units in epoch e1, and the log of
12:00, put back at 15:30, holds 5,000 of them.

    the log is a copy of e1         5,000 units are still logged and 2,100 are missing
    the log is new (root e9)        a carry of 7,100 units under the epoch `e1/*`. The observation of e1 is kept
    then the copy of e1 is put      5,000 are logged, 2,100 are missing. What was spent in e9 is carried, as `e9/*`; of
    back after all                  `e1/*` nothing counts here, because this log is that one

Of several processes, each has seen a log up to another entry. So of two carries of one epoch the larger is right, at
every moment. It is never lowered by what the new log holds: these are other charges. Two processes that saw the same
loss report it once: their reports are merged by view and lost epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from quota.common.clock import NEVER
from quota.common.text import one_line
from quota.ledger.contract import RETENTION_SLACK_MS, Ledger, read_entries, root_of
from quota.ledger.entry import Id, counted
from quota.ledger.unlogged import CARRIED, UnloggedUsage, carry_epoch, covers, is_carry
from quota.recovery.observations import ViewObservation, Watermark, merge, missing_usage, still_in_window
from quota.recovery.slices import furthest_slices, with_slices
from quota.terms.limits import selector_of

Usages = dict[tuple[str, str], UnloggedUsage]
"""Unlogged usage by view and epoch."""


class Loss(NamedTuple):
    """What one view lost: `units` that still count, the last of them until `until_ms`."""

    units: int
    until_ms: int


class Comparison(NamedTuple):
    """What follows from comparing watermarks with the log.

    `usages` is all that the ledger has to count though its log lacks it: its losses, and the carries of other logs.
    `missing` is what of the losses was found just now. `still_logged` is what the log still has of each observation.
    The observations and losses of other logs are kept for the day on which one of these comes back.
    """

    usages: Usages
    missing: list[UnloggedUsage]
    still_logged: list[ViewObservation]
    other_observations: set[ViewObservation]
    other_losses: Usages

    def largest_loss(self, now_ms: int) -> Loss | None:
        """The view that lost most, of those that lost something just now. For the log."""
        return largest(self.missing, self.usages.values(), now_ms)


class Carries(NamedTuple):
    """What counts on of other logs, and for each root where its ledger was."""

    usages: Usages
    labels: dict[str, str]


def compare(
    ledger: Ledger, project: str, epoch: str, last: Id, now_ms: int, watermarks: Sequence[Watermark]
) -> Comparison:
    """Compare what the processes of a machine saw with the log of a ledger that is in `epoch`, its newest entry `last`.

    Raises LedgerError: it reads the log.
    """
    since_ms = now_ms - RETENTION_SLACK_MS  # should the clock go back, expired units count again
    root = root_of(epoch)
    renamed = renamed_log(ledger, project, root, last, watermarks)
    here: set[ViewObservation] = set()
    others: set[ViewObservation] = set()
    for observation in _live_observations(watermarks, since_ms):
        is_here = root_of(observation.epoch) == root or renamed(observation)
        (here if is_here else others).add(observation)
    losses, other_losses = _known_losses(watermarks, root, since_ms, now_ms)
    paths = _paths(watermarks)
    before = {one: _first_gone(ledger, project, one, paths.get(one._replace(slices=()), ())) for one in here}
    still_logged = {}
    for one in here:  # all of it, if the log has the last entry that was seen
        logged = _logged_part(ledger, project, one, before[one])
        still_logged[one] = one if logged.last == one.last else logged
    for told in _told_of(watermarks, root, since_ms):
        logged = _logged_part(ledger, project, told)
        if logged.last != told.last:
            still_logged[told] = logged
    missing = [
        missing_usage(
            observation,
            logged,
            _logged_part(ledger, project, still_in_window(observation, now_ms), before.get(observation, _NEVER)),
        )
        for observation, logged in still_logged.items()
        if logged.units < observation.units
    ]
    for usage in missing:
        merge(losses, usage, now_ms)
    return Comparison(
        losses | carries(watermarks, root, since_ms, renamed).usages,
        missing,
        list(still_logged.values()),
        furthest_observations(others),
        other_losses,
    )


def carries(
    watermarks: Sequence[Watermark],
    root: str,
    since_ms: int,
    renamed: Callable[[ViewObservation], bool] = lambda observation: False,
) -> Carries:
    """What the processes of a machine know of logs with another root than this, and counts after `since_ms`.

    Of the log that a process saw last, that is what it counted, with the losses of that log. Of earlier ones it is what
    the ledger was told at the time.
    """
    usages: Usages = {}
    labels: dict[str, str] = {}
    sliced = {epoch: furthest_slices(watermarks, epoch) for epoch in {watermark.epoch for watermark in watermarks}}
    for watermark in watermarks:
        found = [usage for usage in watermark.usages if is_carry(usage.epoch) and root_of(usage.epoch) != root]
        if watermark.root not in ("", root):
            found += _seen(
                watermark,
                [
                    with_slices(observation, sliced[watermark.epoch])
                    for observation in watermark.observations
                    if observation.epoch == watermark.epoch and not renamed(observation)
                ],
            )
        for usage in found:
            if usage.until_ms > since_ms and usage.units_at(-1):
                merge(usages, usage, since_ms)
                labels.setdefault(root_of(usage.epoch), watermark.label)
                if root_of(usage.epoch) == watermark.root:
                    labels[watermark.root] = watermark.label
    return Carries(usages, labels)


def _seen(watermark: Watermark, observations: Iterable[ViewObservation]) -> list[UnloggedUsage]:
    """What a process counted of the log that it saw last, as carries: what was logged, and what that log had lost."""
    logged = [
        UnloggedUsage(one.view, carry_epoch(one.epoch), one.expiries, one.last, since_ms=one.since_ms)
        for one in observations
        if one.units > 0
    ]
    lost = [
        usage._replace(epoch=carry_epoch(usage.epoch))
        for usage in watermark.usages
        if root_of(usage.epoch) == watermark.root and not is_carry(usage.epoch)
    ]
    return [*logged, *lost]


def not_counted(carried: Usages, counted: Usages, now_ms: int) -> list[UnloggedUsage]:
    """The carries that would count more, at `now_ms` or later, in a ledger that counts `counted`."""
    lacking = []
    for key, usage in carried.items():
        told = counted[key].with_report(usage, now_ms) if key in counted else usage
        if not covers(counted[key].expiries if key in counted else (), told.expiries, now_ms):
            lacking.append(usage)
    return lacking


def largest(found: Iterable[UnloggedUsage], usages: Iterable[UnloggedUsage], now_ms: int) -> Loss | None:
    """Of the views in `found`, the one for which most of `usages` counts. For the log."""
    views = {usage.view for usage in found if usage.until_ms > now_ms}
    usages = list(usages)
    of_views = [[usage for usage in usages if usage.view == view] for view in views]
    losses = [Loss(sum(u.units_at(now_ms) for u in some), max(u.until_ms for u in some)) for some in of_views]
    return max(losses, default=None)


def renamed_log(
    ledger: Ledger, project: str, root: str, last: Id, watermarks: Sequence[Watermark]
) -> Callable[[ViewObservation], bool]:
    """Whether a log whose newest entry is `last` is the one that an observation is of, and only its name was lost.

    A server that evicts keys may lose the name alone (L14). The log then has all of the observation. It is in its old
    place: elsewhere, another charge may have the same id by chance.
    """
    known: dict[ViewObservation, bool] = {}
    seen_here = {
        observation._replace(slices=())
        for watermark in watermarks
        if watermark.label in ("", one_line(ledger.label))
        for observation in watermark.observations
        if observation.epoch == watermark.epoch
    }

    def renamed(observation: ViewObservation) -> bool:
        observation = observation._replace(slices=())
        if root_of(observation.epoch) == root or not (0, 0) < observation.last <= last or observation not in seen_here:
            return False
        if observation not in known:
            ms, seq = observation.last
            found = any((entry.ms, entry.seq) == (ms, seq) for entry in read_entries(ledger, project, ms, ms))
            known[observation] = found and _logged_part(ledger, project, observation).units == observation.units
        return known[observation]

    return renamed


def furthest_observations(observations: Iterable[ViewObservation]) -> set[ViewObservation]:
    """Of each view in each epoch, the observation that goes furthest: it holds all that the others do."""
    furthest: dict[tuple[str, str], ViewObservation] = {}
    for one in observations:
        key = (one.view, one.epoch)
        if key not in furthest or (one.last, one.since_ms) > (furthest[key].last, furthest[key].since_ms):
            furthest[key] = one
    return set(furthest.values())


def _live_observations(watermarks: Sequence[Watermark], since_ms: int) -> set[ViewObservation]:
    """Observations that have not expired: of the log that each process saw last, with its slices, and of others."""
    sliced = {epoch: furthest_slices(watermarks, epoch) for epoch in {watermark.epoch for watermark in watermarks}}
    return {
        with_slices(observation, sliced[watermark.epoch]) if observation.epoch == watermark.epoch else observation
        for watermark in watermarks
        for observation in watermark.observations
        if observation.until_ms > since_ms
    }


def _told_of(watermarks: Sequence[Watermark], root: str, since_ms: int) -> set[ViewObservation]:
    """What another ledger was told of this log, as observations: others may have seen more of it than this machine.

    What had survived a loss is no part of a carry any more, but was part of what was seen: the oldest of it.
    """
    carried = (usage for watermark in watermarks for usage in watermark.usages if is_carry(usage.epoch))
    return {
        ViewObservation(
            usage.view,
            usage.epoch.removesuffix(CARRIED),
            usage.logged_units + sum(units for units, _ in usage.expiries),
            min(usage.since_ms, usage.last[0] - 1),
            usage.last,
            usage.until_ms,
            ((usage.logged_units, usage.expiries[0][1]), *usage.expiries[:-1]),
        )
        for usage in carried
        if root_of(usage.epoch) == root and usage.until_ms > since_ms
    }


def _known_losses(watermarks: Sequence[Watermark], root: str, since_ms: int, now_ms: int) -> tuple[Usages, Usages]:
    """The losses that are known from before: of the log with this root, and of others."""
    here: Usages = {}
    others: Usages = {}
    for watermark in watermarks:
        for usage in watermark.usages:
            if usage.until_ms > since_ms and not is_carry(usage.epoch):
                merge(here if root_of(usage.epoch) == root else others, usage, now_ms)
    return here, others


def _paths(watermarks: Sequence[Watermark]) -> dict[ViewObservation, tuple[Id, ...]]:
    """Which entries a process had seen by the time of an observation, where it is still that process."""
    return {
        observation._replace(slices=()): watermark.path
        for watermark in watermarks
        for observation in watermark.observations
        if watermark.path and observation.epoch == watermark.epoch
    }


def _first_gone(ledger: Ledger, project: str, observation: ViewObservation, path: Sequence[Id]) -> Id:
    """The first entry on the path of an observation that the log lacks. What it has after that, others have charged
    since it parted from what was seen."""
    seen = [one for one in path if observation.since_ms < one[0] and one < observation.last]
    if not seen:
        return _NEVER
    there = {(entry.ms, entry.seq) for entry in read_entries(ledger, project, seen[0][0], seen[-1][0])}
    return next((one for one in seen if one not in there), _NEVER)


_NEVER: Id = (NEVER, NEVER)


def _logged_part(ledger: Ledger, project: str, observation: ViewObservation, before: Id = _NEVER) -> ViewObservation:
    """What the log has between the bounds of an observation, and before another entry."""
    selector = selector_of(observation.view)
    units, last = 0, (0, 0)
    for entry in read_entries(ledger, project, observation.since_ms + 1, observation.last[0]):
        if (entry.ms, entry.seq) <= observation.last and (entry.ms, entry.seq) < before:
            last = (entry.ms, entry.seq)
            units += counted(selector, entry)
    return observation._replace(units=units, last=last, slices=())
