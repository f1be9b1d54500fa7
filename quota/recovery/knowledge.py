"""What one process knows of a project's ledger: one value that is never changed, and how the next one is made. Pure.

    Knowledge     all of it. Its own fields change with each decision; the `rest` is kept by most of them
    recalled      what the processes of this machine wrote down, as a new process begins with it
    decided       after a decision
    looked        after a look at what other processes of this machine saw
    compared      after a loss was reported to the ledger
    carried       after it was told what counts on of other logs

A process puts the new value in the place of the old one in one step (quota.recovery.high_water_mark). So whatever
interrupts it, it knows what it knew before, or what it knows since.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from quota.common.clock import NEVER
from quota.ledger.contract import NOTHING_EXPECTED, RETENTION_SLACK_MS, ChargeResult, Expected, LimitCheck, root_of
from quota.ledger.entry import Entry, Id
from quota.ledger.unlogged import UnloggedUsage, is_carry
from quota.recovery.loss import Comparison, Usages, carries, furthest_observations, not_counted
from quota.recovery.observations import SlicedUsage, ViewObservation, Watermark, merge, observation_of, span_of
from quota.recovery.slices import Unread, furthest_slices, next_slice_end_ms, read_on, unread_slices, with_slices
from quota.recovery.watermark_file import SeenByOthers

NO_EPOCH = "?"
"""No ledger has this epoch, so one that is expected to have it is behind."""

STEP_MS, MAX_STEPS = 100, 1_024
"""How often a process remembers the newest entry as it was, and how many of these it has at most."""

TIDY_EVERY_MS = 600_000
"""So often what has expired is forgotten."""


class Others(NamedTuple):
    """What the other processes of this machine saw, and the ledger must have too."""

    ids: tuple[Id, ...] = ()
    """Entries that they saw, until a decision of ours has shown as much."""
    other_epoch_ms: int = 0
    """When one of them last saw this log in another epoch."""
    compared_ms: int = 0
    """All that they saw until then has been compared with the log."""
    saw_another_epoch: bool = False
    """One of them saw this log in another epoch, before it went on to another log."""
    lacks_carry: bool = False
    """The ledger does not count all that was seen of other logs."""


NO_OTHERS = Others()


class Rest(NamedTuple):
    """What most decisions leave as it is: all that is written as the text of a slot, and what follows from it.

    `checks` are those of the last decision, and `unlogged` what the ledger said to each. `observations` are of the
    views that it did not check, and of other logs: one of them may come back. `usages` are by view and epoch.
    """

    epoch: str = ""
    label: str = ""
    checks: Sequence[LimitCheck] = ()
    unlogged: tuple[tuple[UnloggedUsage, ...], ...] = ()
    observations: tuple[ViewObservation, ...] = ()
    usages: Mapping[tuple[str, str], UnloggedUsage] = MappingProxyType({})
    sliced: Mapping[str, SlicedUsage] = MappingProxyType({})
    tidy_ms: int = 0
    """Until then a decision about the same views changes only the numbers."""
    slice_end_ms: int = NEVER
    """An entry this new completes a slice of a view that the last decision checked."""


class Knowledge(NamedTuple):
    """Everything that a process knows. Of the last decision: the newest entry, when it was by the ledger's clock, and
    what each view counted of the log. `path`: the newest entry, time and again. `expected`: what the ledger must have.
    """

    newest: Id
    at_ms: int
    units: tuple[int, ...]
    path: tuple[Id, ...]
    expected: Expected
    others: Others
    rest: Rest

    @property
    def epoch(self) -> str:
        return self.rest.epoch

    def last_observations(self) -> list[ViewObservation]:
        """What the last decision showed of each view."""
        return [
            observation_of(check.view.name, span_of(check), self.epoch, units, self.newest, self.at_ms)
            for check, units in zip(self.rest.checks, self.units, strict=True)
        ]

    def watermark(self, configuration: str) -> Watermark:
        """All of it, as other processes are told."""
        kept = self._beside_the_last(configuration)
        return kept._replace(observations=(*self.last_observations(), *kept.observations))

    def text(self, configuration: str) -> tuple[str, int]:
        """The text of a slot, and how many of its lines are needed: those of slices come last and may be missing."""
        kept, checks = self._beside_the_last(configuration), self.rest.checks
        text = kept.to_text([(check.view.name, span_of(check)) for check in checks])
        return text, 1 + len(checks) + len(kept.observations) + len(kept.usages)

    def _beside_the_last(self, configuration: str) -> Watermark:
        rest = self.rest
        usages = tuple(rest.usages.values())
        return Watermark(
            rest.epoch, self.at_ms, rest.observations, usages, rest.sliced, rest.label, configuration, self.path
        )

    def expecting(self) -> Knowledge:
        """The same, with what the ledger must have by it."""
        others, rest = self.others, self.rest
        ids = others.ids
        if (rest.checks or self.newest > (0, 0)) and self.newest not in ids:
            ids = (*ids, self.newest)
        # When outdated: an old copy may have been put back that holds all that this process saw, but not what others
        # saw since. An epoch that no ledger has makes it compare everything, or carry over what is lacking.
        if self.must_compare or others.lacks_carry:
            return self._replace(expected=Expected(NO_EPOCH, ids))
        return self._replace(expected=Expected(rest.epoch, ids) if rest.epoch else NOTHING_EXPECTED)

    @property
    def must_compare(self) -> bool:
        """Whether others of this machine saw the ledger in another epoch, later than this process did."""
        others = self.others
        return others.saw_another_epoch or others.other_epoch_ms > max(self.at_ms, others.compared_ms)

    def is_without(self, result: ChargeResult) -> bool:
        """Whether a charge was made before another task restored what was missing, and may itself be missing."""
        return result.id is not None and result.epoch != self.rest.epoch and result.epoch != ""

    def unread(self) -> list[Unread]:
        """What is to be read of the log next."""
        views = (check.view for check in self.rest.checks)
        return unread_slices(views, self.rest.sliced, self.newest, self.at_ms)


NOTHING_KNOWN = Knowledge((0, 0), 0, (), (), NOTHING_EXPECTED, NO_OTHERS, Rest())


def logged(watermark: Watermark, since_ms: int) -> list[ViewObservation]:
    """What a process observed of the log that it saw last, and may still count."""
    return [o for o in watermark.observations if o.epoch == watermark.epoch and o.until_ms > since_ms]


# -- a new process -----------------------------------------------------------------------------------------------------


def recalled(watermarks: Sequence[Watermark], siblings: Sequence[Watermark], label: str) -> Knowledge:
    """Begin with the epoch that this machine saw last, at this place if it was seen here at all.

    Whatever one of the `watermarks` has stays known, so any of their slots may be written over. `siblings` are of other
    configurations, which keep them.
    """
    here = [watermark for watermark in watermarks if watermark.label == label]
    known = here or watermarks or [sibling for sibling in siblings if sibling.label == label]
    latest = max(known, key=lambda watermark: watermark.at_ms, default=None)
    if latest is None:
        return NOTHING_KNOWN
    since_ms = latest.at_ms - RETENTION_SLACK_MS
    same_log = [one for one in (*watermarks, *siblings) if one.root == latest.root]
    usages: Usages = {}
    for watermark in same_log:
        # A later report says what survived its loss, which only its own observations hold.
        if watermark.epoch == latest.epoch or watermark.at_ms <= latest.at_ms:
            _merge_live(usages, watermark.counted(), since_ms, latest.at_ms)
    for watermark in watermarks:
        # Carries of other logs are in the ledger, or `with_other_logs` finds that they are not.
        of_others = (usage for usage in watermark.usages if _is_of_another_log(usage, latest.root))
        _merge_live(usages, of_others, since_ms, latest.at_ms)
    observations = furthest_observations(_kept(watermarks, latest.epoch, since_ms))
    same_epoch = (watermark for watermark in same_log if watermark.epoch == latest.epoch)
    others = Others(
        ids=tuple({one.last for watermark in same_epoch for one in logged(watermark, since_ms)}),
        other_epoch_ms=max((one.at_ms for one in same_log if one.epoch != latest.epoch), default=0),
    )
    rest = Rest(
        epoch=latest.epoch,
        label=latest.label,
        observations=tuple(observations),
        usages=usages,
        # Siblings may have read further, and know no more of what has expired since. What moves along is ours alone.
        sliced=furthest_slices(same_log if here else watermarks, latest.epoch),
    )
    newest = max((one.last for one in observations if one.epoch == latest.epoch), default=(0, 0))
    found = Knowledge(newest, latest.at_ms, (), (), NOTHING_EXPECTED, others, rest)
    if any(watermark.root != latest.root for watermark in watermarks):
        return with_other_logs(found, watermarks)
    return found.expecting()


def _kept(watermarks: Sequence[Watermark], epoch: str, since_ms: int) -> Iterator[ViewObservation]:
    """What was seen in this epoch, and of other logs with the slices that are known of it."""
    for watermark in watermarks:
        for one in watermark.observations:
            if one.until_ms <= since_ms:
                continue
            if root_of(one.epoch) != root_of(epoch):
                yield with_slices(one, watermark.sliced) if one.epoch == watermark.epoch else one
            elif one.epoch == watermark.epoch == epoch:
                yield one


def _merge_live(into: Usages, usages: Iterable[UnloggedUsage], since_ms: int, now_ms: int) -> None:
    for usage in usages:
        if usage.until_ms > since_ms:
            merge(into, usage, now_ms)


def _is_of_another_log(usage: UnloggedUsage, root: str) -> bool:
    """Whether another log lost it, and this one need not count it."""
    return not is_carry(usage.epoch) and root_of(usage.epoch) != root


# -- others ------------------------------------------------------------------------------------------------------------


def looked(known: Knowledge, seen: SeenByOthers, siblings: Sequence[Watermark]) -> Knowledge:
    """After a look at what the other processes of this machine, and its other configurations, have seen meanwhile."""
    newest, other_epoch_ms = seen.newest, seen.other_epoch_ms
    for sibling in siblings:
        if sibling.epoch == known.epoch:
            newest = max(newest, *(observation.last for observation in logged(sibling, 0)), (0, 0))
        elif sibling.root == root_of(known.epoch):
            other_epoch_ms = max(other_epoch_ms, sibling.at_ms)
    others = known.others._replace(other_epoch_ms=other_epoch_ms)
    if newest > known.newest and newest not in others.ids:
        others = others._replace(ids=(*others.ids, newest))
    return known if others == known.others else known._replace(others=others).expecting()


def with_other_logs(known: Knowledge, watermarks: Sequence[Watermark]) -> Knowledge:
    """With whether processes of this machine saw anything of other logs that this ledger does not count."""
    root, since_ms = root_of(known.epoch), known.at_ms - RETENTION_SLACK_MS
    counted = dict(known.rest.usages)
    merge_counted(counted, watermarks, root, known.at_ms)
    found = carries(watermarks, root, since_ms).usages
    # What they saw of this log before they went on to another, or were told of it there.
    told = {one for watermark in watermarks if watermark.root != root for one in watermark.told_of(root, since_ms)}
    others = known.others
    others = others._replace(
        lacks_carry=others.lacks_carry or bool(not_counted(found, counted, known.at_ms)),
        saw_another_epoch=others.saw_another_epoch or any(epoch != known.epoch for epoch, _ in told),
        ids=tuple({*others.ids, *(last for epoch, last in told if epoch == known.epoch)}),
    )
    return known._replace(others=others).expecting()


def merge_counted(into: Usages, watermarks: Iterable[Watermark], root: str, now_ms: int) -> None:
    """Add what the ledger of this root was told, as far as its processes know."""
    for watermark in watermarks:
        if watermark.root == root:
            for usage in watermark.counted():
                merge(into, usage, now_ms)


# -- decisions ---------------------------------------------------------------------------------------------------------


def adds_nothing(known: Knowledge, checks: Sequence[LimitCheck], result: ChargeResult) -> bool:
    """Whether a decision shows what this machine had seen already, with all of its slices read."""
    if (result.epoch, result.last) != (known.epoch, known.newest) or result.unlogged:
        return False
    if lacking_carries(known, checks, result):
        return False
    known_of = {one.view: one for one in known.rest.observations if one.epoch == known.epoch}
    for check, units in zip(checks, result.used_units, strict=True):
        view, seen = check.view, known_of.get(check.view.name)
        now = observation_of(view.name, span_of(check), result.epoch, units, result.last, result.now_ms)
        if seen is None or (seen.units, seen.last, seen.until_ms) != (now.units, now.last, now.until_ms):
            return False
        if result.last[0] >= next_slice_end_ms(view, known.rest.sliced):
            return False
    return True


def decided(known: Knowledge, checks: Sequence[LimitCheck], result: ChargeResult, label: str) -> Knowledge:
    """After a decision of the ledger at `label`. Most are about the same views as the one before: only the numbers
    change, and the `rest` is the same. Where a call was refused, mostly nothing changes."""
    newest, _, units_before, path, _, others, rest = known
    last, now_ms = result.last, result.now_ms
    if (
        result.epoch != rest.epoch
        or result.unlogged != rest.unlogged
        or now_ms >= rest.tidy_ms
        or (checks is not rest.checks and not _same_views(checks, rest.checks))
    ):
        return _decided_on_more(known, checks, result, label)
    if last < newest:  # another thread has seen more
        return known
    units = _without_unlogged(result) if result.unlogged else result.used_units
    if last == newest and units == units_before and others == NO_OTHERS:
        return known
    if not path or last[0] >= path[-1][0] + STEP_MS:
        path = _further(path, last)
    after = Knowledge(last, now_ms, units, path, Expected(rest.epoch, (last,)), others, rest)
    return after if others == NO_OTHERS else after._replace(others=others._replace(ids=())).expecting()


def _decided_on_more(known: Knowledge, checks: Sequence[LimitCheck], result: ChargeResult, label: str) -> Knowledge:
    """More has changed than the numbers."""
    if not result.epoch:
        return known
    if result.epoch != known.epoch:
        if known.rest.checks or any(one.epoch == known.epoch for one in known.rest.observations):
            return known  # decided before another task restored what was missing
        known = _in_epoch(known, result.epoch)
    others = known.others._replace(ids=())
    if result.last < known.newest:
        return known._replace(others=others).expecting()
    rest = known.rest
    lacking = lacking_carries(known, checks, result)
    usages = {**rest.usages, **_counted(result)}
    for usage in lacking:
        merge(usages, usage, result.now_ms)
    views = {check.view.name for check in checks}
    seen = (*rest.observations, *known.last_observations())
    rest = rest._replace(
        label=label,
        checks=checks,
        unlogged=result.unlogged,
        observations=tuple([one for one in seen if one.epoch != result.epoch or one.view not in views]),
        usages=usages,
        slice_end_ms=min((next_slice_end_ms(check.view, rest.sliced) for check in checks), default=NEVER),
    )
    if result.now_ms >= rest.tidy_ms:
        rest = _tidied(rest, views, result.now_ms)
    is_step = not known.path or result.last[0] >= known.path[-1][0] + STEP_MS
    return Knowledge(
        result.last,
        result.now_ms,
        _without_unlogged(result),
        _further(known.path, result.last) if is_step else known.path,
        NOTHING_EXPECTED,
        others._replace(lacks_carry=others.lacks_carry or bool(lacking)),
        rest,
    ).expecting()


def _in_epoch(known: Knowledge, epoch: str) -> Knowledge:
    """Only the epoch of this log is known yet; what is known of other logs stays."""
    root, rest = root_of(known.epoch), known.rest
    usages = {key: usage for key, usage in rest.usages.items() if _is_of_another_log(usage, root)}
    rest = Rest(epoch=epoch, observations=rest.observations, usages=usages)
    return NOTHING_KNOWN._replace(others=Others(lacks_carry=known.others.lacks_carry), rest=rest)


def _tidied(rest: Rest, views: set[str], now_ms: int) -> Rest:
    """Without what has expired. `views` are those of the last decision."""
    since_ms = now_ms - RETENTION_SLACK_MS
    live = [one for one in rest.observations if one.until_ms > since_ms and (one.units or one.epoch != rest.epoch)]
    views = views | {one.view for one in live}
    return rest._replace(
        observations=tuple(live),
        usages={key: usage for key, usage in rest.usages.items() if usage.until_ms > since_ms},
        sliced={view: sliced for view, sliced in rest.sliced.items() if view in views},
        tidy_ms=now_ms + TIDY_EVERY_MS,
    )


def lacking_carries(known: Knowledge, checks: Sequence[LimitCheck], result: ChargeResult) -> list[UnloggedUsage]:
    """The carries that an answer lacks although the ledger was told of them.

    A carry begins no new epoch. So a copy that is put back may lack one although it has all else: that shows here.
    """
    if result.epoch != known.epoch or result.last < known.newest:
        return []
    views = {check.view.name for check in checks}
    carried = {key: u for key, u in known.rest.usages.items() if key[0] in views and is_carry(u.epoch)}
    return not_counted(carried, _counted(result), result.now_ms)


def _counted(result: ChargeResult) -> Usages:
    """What the ledger counts of what it lacks: our own reports and those of others."""
    return {(usage.view, usage.epoch): usage for of_view in result.unlogged for usage in of_view}


def _further(path: tuple[Id, ...], newest: Id) -> tuple[Id, ...]:
    """The path with this entry. Of a long one the older half loses every other entry: it only gets coarser."""
    if len(path) >= MAX_STEPS:
        path = path[: MAX_STEPS // 2 : 2] + path[MAX_STEPS // 2 :]
    return (*path, newest)


def _same_views(checks: Sequence[LimitCheck], others: Sequence[LimitCheck]) -> bool:
    """Whether two decisions check the same views, at the same edges. A view is made once and used often."""
    if len(checks) != len(others):
        return False
    for check, other in zip(checks, others, strict=True):  # half the time of `all` and a generator
        if check.view is not other.view or check.edges != other.edges:
            return False
    return True


def _without_unlogged(result: ChargeResult) -> tuple[int, ...]:
    """What each view counts of the log alone."""
    if not result.unlogged:
        return result.used_units
    pairs = zip(result.used_units, result.unlogged, strict=True)
    return tuple(max(0, units - sum(u.units_at(result.now_ms) for u in usages)) for units, usages in pairs)


# -- the log, and what is missing of it --------------------------------------------------------------------------------


def with_read(known: Knowledge, unread: Sequence[Unread], entries: Sequence[Entry], *, more: bool) -> Knowledge:
    """After a piece of the log was read."""
    rest = known.rest
    sliced = read_on(rest.sliced, unread, entries, known.at_ms, more=more)
    slice_end_ms = min((next_slice_end_ms(check.view, sliced) for check in rest.checks), default=NEVER)
    return known._replace(rest=rest._replace(sliced=sliced, slice_end_ms=slice_end_ms))


def compared(found: Comparison, epoch: str, label: str, now_ms: int, compared_ms: int) -> Knowledge:
    """Begin anew with what the log has, after the ledger was told what it lacks; since then it is in `epoch`."""
    still_logged = {one.view: one for one in sorted(found.still_logged, key=lambda one: one.last) if one.units > 0}
    rest = Rest(
        epoch=epoch,
        label=label,
        observations=(*(one._replace(epoch=epoch) for one in still_logged.values()), *found.other_observations),
        usages=found.usages | found.other_losses,
    )
    newest = max((one.last for one in still_logged.values()), default=(0, 0))
    others = Others(compared_ms=compared_ms)
    return Knowledge(newest, now_ms, (), (), NOTHING_EXPECTED, others, rest).expecting()


def carried(known: Knowledge, found: Usages, now_ms: int) -> Knowledge:
    """After the ledger was told what counts on of other logs."""
    usages = dict(known.rest.usages)
    for usage in found.values():
        merge(usages, usage, now_ms)
    others = known.others._replace(lacks_carry=False)
    return known._replace(others=others, rest=known.rest._replace(usages=usages)).expecting()
