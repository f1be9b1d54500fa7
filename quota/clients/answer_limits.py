"""Limits on an answer of upstream, for every client."""

from __future__ import annotations

from typing import NamedTuple

from quota.errors import BadAnswer
from quota.terms.arguments import seconds, whole

MB = 1_000_000
MAX_BODY_MB = 1_000
MAX_ITEMS = 1_000_000


class AnswerLimits(NamedTuple):
    """The largest body (also when unpacked), the longest time for an answer, and the longest list in it."""

    max_body_mb: int | None = None
    max_answer_s: float | None = None
    max_items: int | None = None

    def validated(self) -> AnswerLimits:
        """The limits, each a number above 0 or None. Raises UsageError."""
        mb, answer_s, items = self
        return AnswerLimits(
            None if mb is None else whole(mb, "MB: max_body_mb", 1, MAX_BODY_MB),
            None if answer_s is None else seconds(answer_s, "max_answer_s"),
            None if items is None else whole(items, "items: max_items", 1, MAX_ITEMS),
        )

    @property
    def max_bytes(self) -> int | None:
        return None if self.max_body_mb is None else self.max_body_mb * MB

    def too_large(self) -> BadAnswer:
        return BadAnswer(
            f"upstream's answer is larger than {self.max_body_mb} MB; if this is expected, raise max_body_mb"
        )
