"""What the errors of a Redis server mean, one line for an operator each."""

from __future__ import annotations

from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    InvalidResponse,
    MasterDownError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

FAILED = (RedisError, RedisClusterException)
"""Everything the driver raises; the second does not derive from the first."""


def explained(error: Exception, where: str, timeout_s: float) -> str:
    """What went wrong at `where`, and what to do, without the driver's own words where these could quote the url."""
    said = (str(error).splitlines() or [""])[0][:200]
    if isinstance(error, RedisTimeoutError):
        waited = f"{timeout_s:g} s"
        return f"{where} did not answer within {waited}; see whether the server is busy or the network slow"
    if "Authentication required" in said or "authenticated" in said:
        return f"{where} wants a password; put it into the url"
    if isinstance(error, AuthenticationError):
        return f"{where} refused the password; check the url"
    if isinstance(error, BusyLoadingError):
        return f"{where} is loading its data; run again in a moment"
    if isinstance(error, InvalidResponse):
        return f"{where} is something else than Redis; check the url"
    if isinstance(error, RedisConnectionError) and "number of clients" in said:
        return f"{where} has too many clients; raise its maxclients"
    if isinstance(error, RedisClusterException) and ("not enabled" in said or "support disabled" in said):
        return f"{where} is no cluster; write redis:// for a single server"
    if isinstance(error, (RedisConnectionError, RedisClusterException)):
        return f"{where} cannot be reached; see whether the server is running there"
    # Redis 6 wraps what stopped a script into a text of its own.
    if isinstance(error, ReadOnlyError) or "-READONLY " in said:
        return f"{where} is a replica, which cannot be written to; name the primary"
    if isinstance(error, OutOfMemoryError) or "-OOM " in said:
        return f"{where} is out of memory; raise its maxmemory"
    if "DB index is out of range" in said or "invalid DB index" in said:
        return f"{where} has no database of that number; take a lower one, or raise the server's `databases`"
    if "MISCONF " in said:
        return f"{where} cannot save its data and takes no charge until it can; see the server's log"
    if said.startswith("BUSY") or "-BUSY " in said:
        return f"{where} is busy with another program's script; it goes on after that, or after SCRIPT KILL"
    if isinstance(error, NoPermissionError) or "can't run this command" in said:
        return f"{where} does not let this user run a command that the scripts need; see `Rights` in lua/README.md"
    if isinstance(error, (TryAgainError, ClusterDownError, MasterDownError)):
        return f"{where} is moving its data or choosing a primary; run again in a moment"
    if "WRONGTYPE " in said:
        owner = where.rpartition(" ")[0]
        return (
            f"{where} has a key quota:{{...}} of a type that is not ours; delete it, or give the {owner} a database of "
            "its own"
        )
    if "unknown command" in said and "SENTINEL" in said:
        return f"{where} is no sentinel; name the sentinels' own addresses, or write redis:// for a single server"
    if isinstance(error, ResponseError) and "unknown command" in said.lower():
        return f"{where} is older than Redis 6.2; upgrade it"
    return f"{where}: {said}"
