"""A decision in the words of Redis: what is asked of charge.lua, and how its reply is read.

    arguments                           what charge.lua is asked
    Question                            the call that asks it, packed once for all calls of a kind
    result_of, result_of_line           a reply, as a ChargeResult
    says_more                           whether the script is to be asked again (L21)

The head of `lua/charge.lua` describes the arguments and the reply.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quota.common.clock import LATEST_MS, NEVER
from quota.errors import LedgerError
from quota.ledger.contract import ChargeResult
from quota.ledger.grants import read_grants
from quota.ledger.redis_fields import units_text
from quota.ledger.redis_scripts import keys_of, script
from quota.ledger.state_fields import read_epoch, read_exhaustion, read_id, read_usages
from quota.terms.limits import Sliding

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from quota.ledger.contract import ChargeOutcome, ChargeRequest, LimitCheck
    from quota.ledger.unlogged import UnloggedUsage

FIRST_TRY = "-1"
"""The retry_age_ms of a first try."""

BEFORE_USED = 7
"""How many words stand before the used units in a reply of charge.lua."""


def arguments(request: ChargeRequest, now: str, commit: bool) -> list[str]:
    """The arguments of charge.lua, for a first try."""
    charges = (request.charge, *request.also)
    words = [
        now,
        str(request.caller_ms),
        "1t" if commit else "0t",
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


def _bulk(word: str) -> bytes:
    """A word of a command as it is sent."""
    data = word.encode()
    return b"$%d\r\n%b\r\n" % (len(data), data)


def _bulks(words: Iterable[str]) -> bytes:
    return b"".join(map(_bulk, words))


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


def result_of(request: ChargeRequest, reply: Any, *, commit: bool) -> ChargeResult:
    """Raises one of UNREADABLE where the reply is none of ours."""
    if type(reply) is str:
        return result_of_line(request.checks, request.expected.epoch, reply, commit)
    return _result_of_list(request, reply)


def _result_of_list(request: ChargeRequest, reply: list[Any]) -> ChargeResult:
    outcome, ids, now_ms, last, closed, epoch, unlogged, *used = reply
    charge_id, *also = ids.split(" ")
    if ids and len(also) != len(request.also):
        raise ValueError("an id for each charge")
    if len(used) > len(request.checks):
        raise ValueError("more numbers than limits")
    if outcome == "RETRIED":  # only a first try that comes after its own retry sees this, and nobody waits for it
        raise LedgerError("the ledger answered a call that was given up; run again")
    if outcome == "GRANTED":
        read_grants(closed)
        return ChargeResult("granted", None, int(now_ms), read_id(last), (), epoch=read_epoch(epoch), granted=closed)
    return ChargeResult(
        "counting" if outcome == "MORE" else outcome.lower(),
        charge_id or None,
        int(now_ms),
        read_id(last),
        _used_units(request.checks, outcome, used),
        read_exhaustion(closed) if closed and outcome != "REFUSED" else None,
        read_epoch(epoch),
        _usages(request.checks, unlogged) if unlogged else (),
        leaving_ms=_leaving_ms(request.checks, closed.split(" ")) if closed and outcome == "REFUSED" else (),
        also=tuple(also),
    )


def result_of_line(checks: Sequence[LimitCheck], known_epoch: str, line: str, commit: bool) -> ChargeResult:
    """The result of an ordinary decision, which comes as one line of text."""
    words = line.split(" ")
    outcome, now_ms, last, epoch = words[:4]
    end = 4 + len(checks)
    ms, _, seq = last.partition("-")
    return ChargeResult(
        _ORDINARY[outcome],
        last if commit and outcome == "ADMITTED" else None,
        int(now_ms),
        (int(ms), int(seq)),
        _used_units(checks, outcome, words[4:end]),
        None,
        epoch if epoch == known_epoch else read_epoch(epoch),
        (),
        0,
        "",
        _leaving_ms(checks, words[end:]) if len(words) > end else (),
        (),
    )


_ORDINARY: dict[str, ChargeOutcome] = {"ADMITTED": "admitted", "REFUSED": "refused"}


def _used_units(checks: Sequence[LimitCheck], outcome: str, words: Sequence[str]) -> tuple[int, ...]:
    used_units = tuple(map(int, words))
    for units in used_units:
        if not 0 <= units < NEVER:
            raise ValueError("less than nothing is used, or more than can be counted")
    if outcome == "REFUSED":
        for units, check in zip(used_units, checks, strict=True):
            if units + check.cost_units > check.cap_units:
                break
        else:
            raise ValueError("a refusal of what fits")
    return used_units


def _leaving_ms(checks: Sequence[LimitCheck], words: list[str]) -> tuple[int | None, ...]:
    """A word for each limit."""
    leaving_ms = tuple([None if word == "-" else int(word) for word in words])
    for at_ms in leaving_ms:
        if at_ms is not None and not 0 <= at_ms < LATEST_MS:
            raise ValueError("a charge in the far future")
    if len(leaving_ms) != len(checks):
        raise ValueError("a word for each limit")
    return leaving_ms


def _usages(checks: Sequence[LimitCheck], text: str) -> tuple[tuple[UnloggedUsage, ...], ...]:
    """A line for each limit."""
    return tuple(read_usages(check.view.name, line) for check, line in zip(checks, text.split("\n"), strict=True))


def says_more(reply: Any) -> bool:
    """Whether the script has more to read, and is to be called again (L21)."""
    return isinstance(reply, list) and reply[:1] == ["MORE"]
