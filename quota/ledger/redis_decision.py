"""A decision in the words of Redis: what is asked of charge.lua, and how its reply is read.

    arguments, call_of_charge           a question, and the call that asks it
    Question                            the same, packed once for all that ask the like
    result_of, result_of_line           a reply, as a ChargeResult
    says_more, is_unfinished            whether the script is to be asked again (L21)

The head of `lua/charge.lua` describes the arguments and the reply.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quota.common.clock import LATEST_MS, NEVER
from quota.errors import LedgerError
from quota.ledger.contract import ChargeResult, asked_again
from quota.ledger.grants import read_grants
from quota.ledger.redis_fields import units_text
from quota.ledger.redis_scripts import keys_of, script
from quota.ledger.resp import pack
from quota.ledger.state_fields import read_epoch, read_exhaustion, read_id, read_usages
from quota.limits import Sliding

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from quota.ledger.contract import ChargeOutcome, ChargeRequest, Expected, LimitCheck
    from quota.ledger.unlogged import UnloggedUsage

RETRY_AGE_MS = 8
"""The index of retry_age_ms among the arguments of charge.lua."""

FIRST_TRY = "-1"
"""The retry_age_ms of a first try."""

BEFORE_USED = 7
"""So many words stand before the used units in a reply of charge.lua."""


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
        "\n".join([charge.idempotency_key for charge in charges]),
        FIRST_TRY,
        str(request.retention_ms),
        str(request.jitter_ms),
        ",".join(request.closed_by),
        _expected(request.expected, request.granted),
    ]
    for check in request.checks:
        words += (check.view.name, str(check.cap_units), str(check.cost_units), str(_span(check)))
    return words


def call_of_charge(project: str, args: Sequence[str], *, whole: bool = False) -> bytes:
    """A packed call of charge.lua by its name; `whole`: with its text."""
    text, sha = script("charge")
    keys, head = keys_of(project), ("EVAL", text) if whole else ("EVALSHA", sha)
    return pack((*head, str(len(keys)), *keys, *args))


class Question:
    """A call of charge.lua, packed but for the words that each decision has of its own.

    Whatever it says is said by `arguments` too. To pack that anew takes longer than the server needs to answer.
    """

    __slots__ = ("_after", "_before", "_commit", "_granted", "_how", "_longer", "_request", "_what")

    def __init__(self, request: ChargeRequest, commit: bool) -> None:
        self._request, self._commit = request, commit
        keys, args = keys_of(request.project), arguments(request, "0", commit)
        head = ("EVALSHA", script("charge")[1], str(len(keys)), *keys)
        self._before = f"*{len(head) + len(args)}\r\n{_bulks(head)}"
        self._what, self._how = f"{_bulks(args[2:7])}$", f"{_bulks(args[8:12])}$"
        self._after = f"\r\n{_bulks(args[13:])}"
        self._granted = request.granted
        fixed = f"{self._before}{self._what}{self._how}{self._after}"
        self._longer = len(fixed.encode()) - len(fixed)

    def words(self, now: str, caller_ms: int, idempotency_key: str, expected: Expected) -> bytes:
        at, seen = str(caller_ms), _expected(expected, self._granted)
        words = (
            f"{self._before}${len(now)}\r\n{now}\r\n${len(at)}\r\n{at}\r\n{self._what}{len(idempotency_key)}\r\n"
            f"{idempotency_key}\r\n{self._how}{len(seen)}\r\n{seen}{self._after}"
        )
        packed = words.encode()
        if len(packed) - len(words) != self._longer:  # a word's length is that of its bytes
            request = asked_again(self._request, caller_ms, idempotency_key, expected)
            return call_of_charge(request.project, arguments(request, now, self._commit))
        return packed


def _bulks(words: Iterable[str]) -> str:
    """Words of a command as they stand in what is sent."""
    return pack((*words,)).decode().partition("\r\n")[2]


def _expected(expected: Expected, granted: str | None) -> str:
    """`EPOCH ID ID @GRANTS`: what the caller has seen of this ledger, and the grants that its caps go by."""
    words, ids = expected
    for ms, seq in ids:  # mostly one; half the time of `join` and a generator
        words += f" {ms}-{seq}"
    return words if granted is None else f"{words} @{granted}"


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


def is_unfinished(request: ChargeRequest, reply: Any) -> bool:
    """Whether a refusal has more to read before it can say when there is room."""
    if isinstance(reply, str):
        return reply[:8] == "REFUSED " and "+" in reply.split(" ")[-len(request.checks) :]
    return isinstance(reply, list) and reply[:1] == ["REFUSED"] and "+" in str(reply[4:5])


def still_counting(reply: Any) -> list[str]:
    """The answer of a ledger that has more to read, instead of a refusal that cannot say yet when there is room."""
    if isinstance(reply, str):
        _, now_ms, last, epoch, *_ = reply.split(" ")
    else:
        _, _, now_ms, last, _, epoch, *_ = reply
    return ["MORE", "", now_ms, last, "", epoch, ""]


def _leaving_ms(checks: Sequence[LimitCheck], words: list[str]) -> tuple[int | None, ...]:
    """A word for each limit."""
    leaving_ms = tuple([None if word in ("-", "+") else int(word) for word in words])
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
