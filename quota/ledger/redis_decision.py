"""A decision in the words of Redis: what is asked of charge.lua, and how its reply is read.

    arguments                           what charge.lua is asked
    Question                            the call that asks it, packed once for all calls of a kind
    result_of                           a reply, as a ChargeResult
    policy_in                           how the server may drop our keys, where a reply says it

The head of `lua/charge.lua` describes the arguments and the reply.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from quota.common.clock import LATEST_MS, NEVER
from quota.errors import LedgerError
from quota.ledger.contract import ChargeOutcome, ChargeRequest, ChargeResult, Exhaustion, LimitCheck
from quota.ledger.grants import read_grants
from quota.ledger.redis_fields import units_text
from quota.ledger.redis_scripts import keys_of, script
from quota.ledger.state_fields import read_epoch, read_exhaustion, read_id, read_usages
from quota.ledger.unlogged import UnloggedUsage
from quota.terms.limits import Sliding

FIRST_TRY = "-1"
"""The retry_age_ms of a first try."""

NOTHING = "-"
"""The word of a reply of charge.lua for what there is not."""

EVICTS = "\nevicts "
"""Begins the last line of a reply that names the server's policy, once a day."""

_OUTCOMES: dict[str, tuple[ChargeOutcome, int]] = {
    "ADMITTED": ("admitted", 1),
    "REFUSED": ("refused", 2),
    "EXHAUSTED": ("exhausted", 1),
    "CLOCK": ("clock", 0),
    "MORE": ("counting", 0),
    "BEHIND": ("behind", 0),
    "GRANTED": ("granted", 0),
}
"""What the script answers, as the contract names it, and how many words it then has for each limit."""


def arguments(request: ChargeRequest, now: str, commit: bool) -> list[str]:
    """The arguments of charge.lua, for a first try."""
    charges = (request.charge, *request.also)
    words = [
        now,
        str(request.caller_ms),
        "1" if commit else "0",
        "\n".join(map(units_text, charges)),
        "\n".join([charge.method for charge in charges]),
        "\n".join([charge.job for charge in charges]),
        "\n".join([charge.region for charge in charges]),
        _keys(request),
        FIRST_TRY,
        str(request.retention_ms),
        str(request.jitter_ms),
        ",".join(request.closed_by),
        _expected(request),
    ]
    for check in request.checks:
        words += (check.view.name, str(check.cap_units), str(check.cost_units), str(_span(check)))
    return words


class Question:
    """A call of charge.lua for one kind of charge, packed except for the words that each decision has of its own: to
    pack all of them anew takes longer than the server needs to answer. `whole`: with the script's text."""

    __slots__ = ("_before", "_checked", "_how", "_what", "checks", "whole")

    def __init__(self, request: ChargeRequest, commit: bool, *, whole: bool = False) -> None:
        self.checks, self.whole = request.checks, whole
        text, sha = script("charge")
        keys, args = keys_of(request.project), arguments(request, "0", commit)
        head = (*(("EVAL", text) if whole else ("EVALSHA", sha)), str(len(keys)), *keys)
        self._before = b"*%d\r\n%b" % (len(head) + len(args), _bulks(head))
        self._what, self._how, self._checked = _bulks(args[2:7]), _bulks(args[9:12]), _bulks(args[13:])

    def words(self, request: ChargeRequest, now: str, age: str = FIRST_TRY) -> list[bytes]:
        """The packed words for a request of this kind. `age`: of a retry, in ms since the first try."""
        clock, caller, keys = now.encode(), b"%d" % request.caller_ms, _keys(request).encode()
        since, expected = age.encode(), _expected(request).encode()
        parts = self._before, len(clock), clock, len(caller), caller, self._what, len(keys), keys
        return [_QUESTION % (*parts, len(since), since, self._how, len(expected), expected, self._checked)]


_QUESTION = b"%b$%d\r\n%b\r\n$%d\r\n%b\r\n%b$%d\r\n%b\r\n$%d\r\n%b\r\n%b$%d\r\n%b\r\n%b"
"""What is packed already, and between it the words that each decision has of its own."""


def _bulks(words: Iterable[str]) -> bytes:
    """Words of a command as they are sent."""
    return b"".join([b"$%d\r\n%b\r\n" % (len(data), data) for data in map(str.encode, words)])


def _keys(request: ChargeRequest) -> str:
    first = request.charge.idempotency_key
    return "\n".join([first, *(charge.idempotency_key for charge in request.also)]) if request.also else first


def _expected(request: ChargeRequest) -> str:
    """`EPOCH ID ID @GRANTS`: what the caller has seen of this ledger, and the grants that its caps go by."""
    words, ids = request.expected
    for ms, seq in ids:
        words += f" {ms}-{seq}"
    return words if request.granted is None else f"{words} @{request.granted}"


def _span(check: LimitCheck) -> str | int:
    window = check.view.window
    if isinstance(window, Sliding):
        return window.window_ms
    assert check.edges is not None  # noqa: S101  # a calendar limit comes with its edges
    return f"{check.edges[0]} {check.edges[1]} {check.edges[2]}"


def result_of(request: ChargeRequest, reply: Any) -> ChargeResult:
    """Raises one of UNREADABLE where the reply is none of ours."""
    line, *seldom = reply.split("\n")
    answer, ids, now_ms, last, epoch, *words = line.split(" ")
    if answer == "RETRIED":  # only a first try that comes after its own retry sees this, and nobody waits for it
        raise LedgerError("the ledger answered a call that was given up; run again")
    outcome, for_each = _OUTCOMES[answer]
    checks = request.checks
    limits = len(checks)
    if len(words) != for_each * limits:
        raise ValueError("words for each limit")
    charge_id, *also = (None,) if ids == NOTHING else ids.split(",")
    if charge_id and len(also) != len(request.also):
        raise ValueError("an id for each charge")
    exhaustion, granted, unlogged = _seldom_said(checks, seldom) if seldom else (None, "", ())
    return ChargeResult(
        outcome,
        charge_id,
        int(now_ms),
        read_id(last),
        _used_units(checks, outcome, words[:limits]),
        exhaustion,
        epoch if epoch == request.expected.epoch else read_epoch(epoch) if epoch != NOTHING else "",
        unlogged,
        0,
        granted,
        _leaving_ms(words[limits:]),
        tuple(also),
    )


def _seldom_said(
    checks: Sequence[LimitCheck], lines: Sequence[str]
) -> tuple[Exhaustion | None, str, tuple[tuple[UnloggedUsage, ...], ...]]:
    """The exhaustion, the grants, and the unlogged usage for each limit, from the lines of a reply behind its first."""
    exhaustion, granted = None, ""
    records = [""] * len(checks)
    for line in lines:
        name, _, text = line.partition(" ")
        if name == "exhaustion":
            exhaustion = read_exhaustion(text)
        elif name == "granted":
            read_grants(text)
            granted = text
        elif name == "unlogged":
            place, _, record = text.partition(" ")
            records[int(place) - 1] = record
        elif name != EVICTS.strip():
            raise ValueError("a line that says nothing")
    usages = zip(checks, records, strict=True)
    unlogged = tuple([read_usages(check.view.name, record) for check, record in usages]) if any(records) else ()
    return exhaustion, granted, unlogged


def _used_units(checks: Sequence[LimitCheck], outcome: ChargeOutcome, words: Sequence[str]) -> tuple[int, ...]:
    used_units = tuple(map(int, words))
    for units in used_units:
        if not 0 <= units < NEVER:
            raise ValueError("less than nothing is used, or more than can be counted")
    if outcome == "refused":
        for units, check in zip(used_units, checks, strict=True):
            if units + check.cost_units > check.cap_units:
                break
        else:
            raise ValueError("a refusal of what fits")
    return used_units


def _leaving_ms(words: Sequence[str]) -> tuple[int | None, ...]:
    leaving_ms = tuple([None if word == NOTHING else int(word) for word in words])
    for at_ms in leaving_ms:
        if at_ms is not None and not 0 <= at_ms < LATEST_MS:
            raise ValueError("a charge in the far future")
    return leaving_ms


def policy_in(reply: str) -> str:
    """The server's maxmemory-policy, where a reply says that it may drop our keys; else empty."""
    return reply.partition(EVICTS)[2]
