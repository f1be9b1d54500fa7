"""What a ledger that is behind has lost: `compare` holds all that a machine saw against the log as it is now.

For example with the limit of `quota.recovery.high_water_mark`: this machine saw 7,100 units in epoch e1, and the log
of 12:00, put back at 15:30, holds 5,000 of them.

    the log is a copy of e1         5,000 units are still logged and 2,100 are missing
    the log is new (root e9)        all 7,100 are missing, whatever the log holds. The observation of e1 is kept
    then the copy of e1 is put      5,000 of the 7,100 unlogged units have reappeared and are taken off; 2,100 stay
    back after all

Two processes that saw the same loss report it once: their reports are merged by view and lost epoch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from quota.ledger.contract import RETENTION_SLACK_MS, read_entries, root_of
from quota.limits import selector_of
from quota.recovery.observations import (
    furthest_slices,
    less_reappeared,
    merge,
    missing_usage,
    still_in_window,
    with_slices,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from quota.ledger.contract import Ledger
    from quota.ledger.unlogged import UnloggedUsage
    from quota.recovery.observations import ViewObservation, Watermark


class Loss(NamedTuple):
    """What one view lost: so many units that still count, the last of them until `until_ms`."""

    units: int
    until_ms: int


class Comparison(NamedTuple):
    """What follows from comparing watermarks with the log.

    `usages` is all that the ledger has to count though its log lacks it, by view and lost epoch, and `missing` what of
    it was found missing just now. `still_logged` is what the log still has, or has again, of each observation.
    `lost_log_observations` are to be kept for the day on which a copy of a lost log is put back.
    """

    usages: dict[tuple[str, str], UnloggedUsage]
    missing: list[UnloggedUsage]
    still_logged: list[ViewObservation]
    lost_log_observations: set[ViewObservation]

    def largest_loss(self, now_ms: int) -> Loss | None:
        """The view that lost most, of those that lost something just now. For the log."""
        views = {usage.view for usage in self.missing if usage.until_ms > now_ms}
        of_views = [[usage for usage in self.usages.values() if usage.view == view] for view in views]
        losses = [Loss(sum(u.units_at(now_ms) for u in some), max(u.until_ms for u in some)) for some in of_views]
        return max(losses, default=None)


def compare(ledger: Ledger, project: str, epoch: str, now_ms: int, watermarks: Sequence[Watermark]) -> Comparison:
    """Compare what the processes of a machine saw with the log of a ledger that is in `epoch` now.

    Raises LedgerError: it reads the log.
    """
    since_ms = now_ms - RETENTION_SLACK_MS  # should the clock go back, expired units count again
    current, lost_log = _live_observations(watermarks, since_ms)
    root = root_of(epoch)
    reappeared = {
        observation: _logged_part(ledger, project, still_in_window(observation, now_ms))
        for observation in lost_log
        if root_of(observation.epoch) == root
    }
    usages = _known_usages(watermarks, reappeared, since_ms, now_ms)
    still_logged = {observation: _still_logged(ledger, project, root, observation) for observation in current}
    missing = [
        missing_usage(observation, logged, _logged_part(ledger, project, still_in_window(logged, now_ms)))
        for observation, logged in still_logged.items()
        if logged.units < observation.units
    ]
    for usage in missing:
        merge(usages, usage, now_ms)
    lost_log_observations = {
        observation
        for observation in current | lost_log
        if root_of(observation.epoch) != root and (observation.view, observation.epoch) in usages
    }
    return Comparison(usages, missing, [*still_logged.values(), *reappeared.values()], lost_log_observations)


def _live_observations(
    watermarks: Sequence[Watermark], since_ms: int
) -> tuple[set[ViewObservation], set[ViewObservation]]:
    """Observations that have not expired: of the log that each process saw last, with its slices; and of logs that were
    lost before."""
    sliced = {epoch: furthest_slices(watermarks, epoch) for epoch in {watermark.epoch for watermark in watermarks}}
    current, lost_log = set(), set()
    for watermark in watermarks:
        for observation in watermark.observations:
            if observation.until_ms > since_ms:
                if observation.epoch == watermark.epoch:
                    current.add(with_slices(observation, sliced[watermark.epoch]))
                else:
                    lost_log.add(observation)
    return current, lost_log


def _known_usages(
    watermarks: Sequence[Watermark],
    reappeared: Mapping[ViewObservation, ViewObservation],
    since_ms: int,
    now_ms: int,
) -> dict[tuple[str, str], UnloggedUsage]:
    """The unlogged usage that is known from losses before this one, without what reappeared of it."""
    usages: dict[tuple[str, str], UnloggedUsage] = {}
    for watermark in watermarks:
        # Only with the observation beside it: where that is gone, what reappeared was taken off before.
        back = {(o.view, o.epoch): reappeared[o] for o in watermark.observations if o in reappeared}
        for usage in watermark.usages:
            if usage.until_ms > since_ms:
                logged = back.get((usage.view, usage.epoch))
                merge(usages, usage if logged is None else less_reappeared(usage, logged, now_ms), now_ms)
    return usages


def _still_logged(ledger: Ledger, project: str, root: str, observation: ViewObservation) -> ViewObservation:
    """What the log still has of an observation: all of it, if it has the last entry that was seen.

    Another log has nothing of it, whatever it holds. But if everything is there, only the log's name was lost.
    """
    logged = _logged_part(ledger, project, observation)
    if root_of(observation.epoch) == root:
        return observation if logged.last == observation.last else logged
    return (
        observation
        if logged.units == observation.units and logged.last == observation.last
        else observation._replace(units=0)
    )


def _logged_part(ledger: Ledger, project: str, observation: ViewObservation) -> ViewObservation:
    """What the log has between the bounds of an observation."""
    selector = selector_of(observation.view)
    units, last = 0, (0, 0)
    for entry in read_entries(ledger, project, observation.since_ms + 1, observation.last[0]):
        if (entry.ms, entry.seq) <= observation.last:
            last = (entry.ms, entry.seq)
            if selector.counts(entry.bucket, entry.method, entry.job):
                units += selector.cost(entry.units)
    return observation._replace(units=units, last=last, slices=())
