"""What charge.lua answers, taken apart."""

from __future__ import annotations

from typing import Any


def words_of(reply: Any) -> Any:
    """A reply as a list: outcome, id, now_ms, last, what is said of a refusal, epoch, unlogged usage (a line for each
    limit), used units for each limit; behind them the policy by which the server may drop our keys. What there is not
    is empty. An error is what it is."""
    if not isinstance(reply, str):
        return reply
    line, *seldom = reply.split("\n")
    outcome, ids, now_ms, last, epoch, *words = line.split(" ")
    said = dict(one.split(" ", 1) for one in seldom if not one.startswith("unlogged "))
    half = len(words) // 2 if outcome == "REFUSED" else len(words)
    used, leaving = words[:half], words[half:]
    unlogged = dict(one.split(" ", 2)[1:] for one in seldom if one.startswith("unlogged "))
    lines = [unlogged.get(str(place), "") for place in range(1, len(used) + 1)] if unlogged else []
    evicts = [said["evicts"]] if "evicts" in said else []
    of_it = said.get("exhaustion") or said.get("granted") or " ".join(leaving)
    ids, epoch = ("" if word == "-" else word for word in (ids, epoch))
    return [outcome, ids.replace(",", " "), now_ms, last, of_it, epoch, "\n".join(lines), *used, *evicts]
