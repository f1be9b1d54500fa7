"""What others use, and what upstream grants, by the answers to one budget's calls.

    Levels       compares what answers say remains with the ledger, and counts the difference as used by others
    charged_ms   the time of a decision's charge

A level is compared with the charges at the time of the question, not at the time of the call: upstream may have counted
every call that left by then, and our own charges must not look like others'. So calls under way hide as many units of
others until the next answer; a call that returns units compares again what was heard meanwhile.

One entry of the kind `others` holds what others used in one period of upstream. It has one name per period, and the
largest entry counts: two processes that read the same answer count it once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from quota.common.clock import rfc3339
from quota.common.log import line
from quota.deciding.answers import Answers
from quota.deciding.corrections import count_others
from quota.deciding.outlook import counted
from quota.decision import Decision
from quota.rules.calls import lowers, wanted_grants
from quota.rules.entry import CALLS, Entry, others_units, parts_of_id
from quota.rules.evidence import Heard, Level, evidence_of, others_name
from quota.terms.limits import DAY_MS, SECOND_MS

_log = logging.getLogger("quota")

AGAIN_MS = SECOND_MS
"""A process reports one window of a bucket to the ledger at most this often, and its emptiness at most this often."""

BELIEVED_MS = DAY_MS
"""How long a smaller limit from an answer holds. Later answers renew it."""


class Levels:
    """What upstream's answers have said about the buckets of one budget. Safe to share between threads."""

    def __init__(self, answers: Answers) -> None:
        self._answers, self._book = answers, answers.checklists.book
        self._project, self._limits = answers.project, answers.checklists.shown
        self._newest: dict[tuple[str, tuple[str, ...]], tuple[Heard, int]] = {}
        """What the newest answers said of a bucket's window, and when: by bucket and the names of the limits."""
        self._asked_ms: dict[tuple[str, bool, tuple[str, ...]], int] = {}
        """When the ledger was last asked about an answer's figure for a bucket: by bucket, whether the answer says
        that nothing remains, and the names of the limits."""
        self._kept: tuple[tuple[Heard, ...], int] = (), 0
        self.without_usage: set[str] = set()
        """The methods of calls that a whole answer has not settled: no comparison waits until they are."""

    # -- from what this process has read -----------------------------------------------------------------------------

    def news(self, decision: Decision, levels: Sequence[Level], now_ms: int) -> tuple[Heard, ...]:
        """The levels of an answer that are worth a question to the ledger: those that change a limit by more than
        WORTH_PERCENT, or empty a bucket. At most one level per second and window of a bucket. Charges to buckets that
        the call does not spend are unknown here. `now_ms` is the time of the answer by the ledger's clock, as far as
        it is known."""
        used = {state.name: state.used_units for state in decision.limits}
        worth, asked_before_ms = list[Heard](), self._asked_ms.copy()
        for level in levels:
            heard = evidence_of(level, self._book, self._limits, charged_ms(decision), now_ms)
            if heard is None:
                continue
            is_empty, names = level.remaining_units == 0, tuple([limit.name for limit in heard.limits])
            self._newest[level.bucket, names] = heard, now_ms
            if not (is_empty or heard.changes(used) or self._granted_anew([heard])):
                continue
            topic = level.bucket, is_empty, names
            if not 0 <= now_ms - asked_before_ms.get(topic, 0) < AGAIN_MS:
                self._asked_ms[topic] = now_ms
                worth.append(heard)
        return tuple(worth)

    def news_since(self, since_ms: int, now_ms: int) -> list[Heard]:
        """What was heard since a time, holds now, and changes a limit by what this process has read."""
        newest = tuple(self._newest.values())
        standing = [heard for heard, at_ms in newest if at_ms >= since_ms and heard.stands(at_ms, now_ms)]
        read = self._project.used_units() if standing else {}
        used = {limit.name: read[limit.view.name] for limit in self._limits if limit.view.name in read}
        return [heard for heard in standing if heard.changes(used)]

    def kept(self, heard: tuple[Heard, ...], now_ms: int) -> list[Heard]:
        """Keep what an answer says until its call is settled. Returns what holds of the answer that was kept before:
        perhaps nobody reads that."""
        (earlier, at_ms), self._kept = self._kept, (heard, now_ms)
        return [each for each in earlier if each.stands(at_ms, now_ms)]

    def _granted_anew(self, all_heard: Iterable[Heard]) -> dict[str, int]:
        """What upstream grants by these levels, per bucket; empty if all of it holds already."""
        granted = {each.level.bucket: each.granted_units for each in all_heard if each.granted_units is not None}
        wanted = {bucket: units if lowers(self._limits, bucket, units) else None for bucket, units in granted.items()}
        believed = self._answers.granted_now()
        return granted if any(believed.get(bucket) != units for bucket, units in wanted.items()) else {}

    # -- by the ledger -----------------------------------------------------------------------------------------------

    def observe(self, all_heard: Sequence[Heard]) -> None:
        """Count what others used, by what was heard. Raises LedgerError."""
        project, limits = self._project, [limit for limit in self._limits if not limit.narrow]
        outcome = counted(project, self._answers.checklists.of("", (), dict.fromkeys(limits, 0), ""))
        now_ms = outcome.now_ms
        used = dict(zip([limit.name for limit in limits], outcome.used_units, strict=True))
        for heard in all_heard:
            if heard.until_ms > now_ms and heard.changes(used):
                self._count(heard, used)
        if granted := self._granted_anew(all_heard):
            standing = project.state.facts().grants
            project.state.grant(wanted_grants(self._limits, granted, standing, now_ms, BELIEVED_MS))

    def _count(self, heard: Heard, used: dict[str, int]) -> None:
        """Count what others used beyond these used units, by limit; then the limits have it as used, too."""
        project, bucket, period = self._project, heard.level.bucket, (heard.since_ms, heard.until_ms)
        name = others_name(bucket, heard.since_ms)
        counts = {limit.name: others_units(project.others(limit.view), name) for limit in heard.alone}
        units = max(heard.counted_units(limit) - used[limit.name] + counts[limit.name] for limit in heard.alone)
        if units <= max(counts.values()):
            return
        # The entry counts in the limits that have this window.
        window_ms = max(limit.view.window.longest_ms for limit in heard.limits)
        noun = CALLS if any(limit.view.selector.count == "calls" for limit in heard.limits) else ""
        key = project.keys.next()
        count_others(project, Entry.of_others(key, bucket, units, name, period, window_ms=window_ms, noun=noun))
        named = {"bucket": bucket, "units": units, "until": rfc3339(heard.until_ms)}
        _log.info("%s", line("used_by_others", **named))
        used.update({limit: used[limit] + units - before for limit, before in counts.items()})


def charged_ms(decision: Decision) -> int:
    """The time of the charge, as its id has it; for any other id, the time of the decision."""
    return parts_of_id(decision.id or "")[0] or decision.decided_at_ms
