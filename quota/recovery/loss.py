"""What a ledger that is behind has lost."""

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
    units: int
    until_ms: int


class Comparison(NamedTuple):
    usages: dict[tuple[str, str], UnloggedUsage]
    missing: list[UnloggedUsage]
    still_logged: list[ViewObservation]
    lost_log_observations: set[ViewObservation]

    def largest_loss(self, now_ms: int) -> Loss | None:
        views = {usage.view for usage in self.missing if usage.until_ms > now_ms}
        of_views = [[usage for usage in self.usages.values() if usage.view == view] for view in views]
        losses = [Loss(sum(c.units_at(now_ms) for c in some), max(c.until_ms for c in some)) for some in of_views]
        return max(losses, default=None)


def compare(ledger: Ledger, project: str, epoch: str, now_ms: int, watermarks: Sequence[Watermark]) -> Comparison:
    since_ms = now_ms - RETENTION_SLACK_MS  # should the clock go back, what has expired counts again
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
    usages: dict[tuple[str, str], UnloggedUsage] = {}
    for watermark in watermarks:
        # Only where a record stands beside its carry: without one, what came back was taken off before.
        back = {(o.view, o.epoch): reappeared[o] for o in watermark.observations if o in reappeared}
        for usage in watermark.usages:
            if usage.until_ms > since_ms:
                logged = back.get((usage.view, usage.epoch))
                merge(usages, usage if logged is None else less_reappeared(usage, logged, now_ms), now_ms)
    return usages


def _still_logged(ledger: Ledger, project: str, root: str, observation: ViewObservation) -> ViewObservation:
    """What the ledger still has of an observation: all of it, if it has the newest entry that was seen.

    Another log has nothing of it, whatever it holds; but where all of it is there, only the log's name was lost.
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
    """As much of an observation as the log has within its bounds."""
    selector = selector_of(observation.view)
    units, last = 0, (0, 0)
    for entry in read_entries(ledger, project, observation.since_ms + 1, observation.last[0]):
        if (entry.ms, entry.seq) <= observation.last:
            last = (entry.ms, entry.seq)
            if selector.counts(entry.bucket, entry.method, entry.job):
                units += selector.cost(entry.units)
    return observation._replace(units=units, last=last, slices=())
