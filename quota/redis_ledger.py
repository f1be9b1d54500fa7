"""The shared ledger: Redis 6.2 or newer, or Valkey, through `lua/`. The contract is `quota.ledger.Ledger`.

One decision is one script call, one round trip. The three keys of a project are built in `_keys` and described at the
head of `lua/charge.lua`; nothing else is stored.
"""

from __future__ import annotations

import json
import re
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit, urlunsplit

import redis
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from quota.errors import ConfigError, LedgerError
from quota.ledger import DEFAULT_BUCKET, KEEP_MS, NEVER, Entry, Exhaustion, Verdict
from quota.limits import Sliding
from quota.scripts import script

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from quota.ledger import Ask, Question
    from quota.limits import View

TIMEOUT_S = 0.35
"""How long one connect or one answer may take. With one repeat, a question ends within a second."""

REPEAT_WITHIN_S = 0.5
"""A lost answer is asked for again only if the first try ended within this time."""

_LOST = (RedisConnectionError, RedisTimeoutError)
_PROJECT = re.compile(r"[A-Za-z0-9._:-]{1,64}")


class RedisLedger:
    """A ledger shared by every machine that reaches the server."""

    shared = True

    def __init__(self, url: str, *, clock: Callable[[], int] | None = None) -> None:
        self.label = _without_secrets(url)
        self._clock = clock
        try:
            self._client = _client(url)
        except (ValueError, RedisError) as error:
            raise ConfigError(f"ledger url {self.label}: {error}") from None

    def now_ms(self) -> int:
        if self._clock is not None:
            return self._clock()
        seconds, micros = self._ask("TIME")
        return int(seconds) * 1000 + int(micros) // 1000

    # -- the decision ------------------------------------------------------------------------------------------------

    def decide(self, question: Question, *, commit: bool) -> Verdict:
        charge = question.charge
        args: list[str | int] = [
            0 if self._clock is None else self._clock(),
            question.caller_ms,
            1 if commit else 0,
            charge.units if charge.bucket == DEFAULT_BUCKET else f"{charge.bucket}={charge.units}",
            charge.method,
            charge.job,
            charge.region,
            charge.token,
            -1,
            question.keep_ms,
            question.jitter_ms,
            ",".join(question.closed_by),
        ]
        for ask in question.asks:
            args += (ask.view.name, ask.cap_units, ask.cost_units, _span(ask))
        return _verdict(self._charge(_keys(question.project), args))

    def _charge(self, keys: Sequence[str], args: list[str | int]) -> list[Any]:
        """Run charge.lua to a verdict. A repeat after a lost answer says so, and so never charges twice."""
        started = time.monotonic()
        while True:
            try:
                reply: list[Any] = self._run("charge", keys, args)
            except _LOST as error:
                age_s = time.monotonic() - started
                if args[8] != -1 or age_s > REPEAT_WITHIN_S:
                    raise LedgerError(self._explain(error)) from error
                args[8] = int(age_s * 1000)
                continue
            except RedisError as error:
                raise LedgerError(self._explain(error)) from error
            if reply[0] != "MORE":
                return reply

    # -- corrections and reading -------------------------------------------------------------------------------------

    def settle(self, project: str, charge_id: str, units: int, views: Sequence[View]) -> Entry | None:
        reply = self._script("settle", project, [charge_id, units, *(view.name for view in views)])
        return _entry([charge_id, *reply]) if reply else None

    def read(self, project: str, after: tuple[int, int], until_ms: int, count: int) -> Sequence[Entry]:
        since = f"{after[0] + 1}-0" if after[1] == NEVER else f"({after[0]}-{after[1]}"
        return [_entry(row) for row in self._script("read", project, [since, until_ms, count])]

    def exhaust(self, project: str, exhaustion: Exhaustion) -> Exhaustion:
        record = f"{exhaustion.until_ms} {exhaustion.since_ms} " + json.dumps(
            {"bucket": exhaustion.bucket, "evidence": exhaustion.evidence, "reported_by": exhaustion.reported_by}
        )
        now_ms = 0 if self._clock is None else self._clock()
        # Kept past its own end, so that the lifetime of the keys never lifts it.
        reply = self._script("exhaust", project, [now_ms, exhaustion.bucket, record, KEEP_MS])
        return _exhaustion(reply)

    def exhaustions(self, project: str) -> Sequence[Exhaustion]:
        state: dict[str, str] = self._ask("HGETALL", _keys(project)[1])
        return [_exhaustion(record) for field, record in sorted(state.items()) if field.startswith("closed:")]

    def reopen(self, project: str, bucket: str) -> bool:
        return bool(self._ask("HDEL", _keys(project)[1], f"closed:{bucket}"))

    # -- the connection ----------------------------------------------------------------------------------------------

    def _run(self, name: str, keys: Sequence[str], args: Sequence[str | int]) -> Any:
        text, sha = script(name)
        try:
            return self._client.execute_command("EVALSHA", sha, len(keys), *keys, *args)
        except NoScriptError:
            return self._client.execute_command("EVAL", text, len(keys), *keys, *args)

    def _script(self, name: str, project: str, args: Sequence[str | int]) -> Any:
        """Run a script that may be repeated freely: it reads, or sets what is absolute."""
        return self._repeat(lambda: self._run(name, _keys(project), args))

    def _ask(self, *command: str) -> Any:
        return self._repeat(lambda: self._client.execute_command(*command))

    def _repeat(self, work: Callable[[], Any]) -> Any:
        started = time.monotonic()
        for last in (False, True):
            try:
                return work()
            except RedisError as error:
                repeat = isinstance(error, _LOST) and time.monotonic() - started <= REPEAT_WITHIN_S
                if last or not repeat:
                    raise LedgerError(self._explain(error)) from error
        raise AssertionError("unreachable")

    def _explain(self, error: RedisError) -> str:
        if isinstance(error, RedisTimeoutError):
            return f"ledger {self.label} did not answer within {TIMEOUT_S:g} s; nothing more was sent upstream"
        if isinstance(error, redis.AuthenticationError):
            return f"ledger {self.label} refused the password; check the url"
        if isinstance(error, RedisConnectionError):
            return f"ledger {self.label} cannot be reached; is the server running there?"
        if isinstance(error, ResponseError) and "unknown command" in str(error).lower():
            return f"ledger {self.label} is older than Redis 6.2; upgrade it"
        return f"ledger {self.label}: {str(error).splitlines()[0][:200]}"

    def close(self) -> None:
        self._client.close()


def _keys(project: str) -> tuple[str, str, str]:
    """The three keys of a project, in one Cluster slot."""
    if not _PROJECT.fullmatch(project):
        raise ConfigError(f"project {project!r}: a name in Redis is 1 to 64 of A-Z a-z 0-9 . _ : -")
    return f"quota:{{{project}}}:log", f"quota:{{{project}}}:state", f"quota:{{{project}}}:amended"


def _span(ask: Ask) -> str | int:
    window = ask.view.window
    if isinstance(window, Sliding):
        return window.window_ms
    assert ask.edges is not None  # noqa: S101  # calendar asks carry their edges
    return f"{ask.edges[0]} {ask.edges[1]} {ask.edges[2]}"


def _verdict(reply: list[Any]) -> Verdict:
    outcome, charge_id, now_ms, last_ms, closed, *used = reply
    if outcome == "REPEAT":  # only a first try that comes after its own repeat sees this, and nobody waits for it
        raise LedgerError("the ledger answered a call that was given up; run again")
    return Verdict(
        outcome=outcome.lower(),
        id=charge_id or None,
        now_ms=int(now_ms),
        last_ms=int(last_ms),
        used_units=tuple(map(int, used)),
        exhaustion=_exhaustion(closed) if closed else None,
    )


def _exhaustion(record: str) -> Exhaustion:
    until_ms, since_ms, rest = record.split(" ", 2)
    data = json.loads(rest)
    return Exhaustion(data["bucket"], int(since_ms), int(until_ms), data["evidence"], data["reported_by"])


def _entry(row: Sequence[str]) -> Entry:
    charge_id, u, method, job, region, token, amended = row
    ms, seq = charge_id.split("-")
    bucket, equals, units = u.rpartition("=")
    charged = int(units)
    return Entry(
        ms=int(ms),
        seq=int(seq),
        units=int(amended) if amended else charged,
        charged_units=charged,
        bucket=bucket if equals else DEFAULT_BUCKET,
        method=method,
        job=job,
        region=region,
        token=token,
    )


def _client(url: str) -> redis.Redis:
    options: dict[str, Any] = {
        "decode_responses": True,
        "socket_timeout": TIMEOUT_S,
        "socket_connect_timeout": TIMEOUT_S,
        # The client's own retries would send the same charge twice.
        "retry": Retry(NoBackoff(), 0),
    }
    scheme, _, rest = url.partition("://")
    if scheme == "redis+cluster":
        cluster: Any = redis.RedisCluster.from_url(f"redis://{rest}", cluster_error_retry_attempts=0, **options)
        return cluster  # type: ignore[no-any-return]  # the commands used here are the same
    if scheme == "redis+sentinel":
        return _sentinel_client(rest, options)
    return redis.Redis.from_url(url, **options)


def _sentinel_client(rest: str, options: dict[str, Any]) -> redis.Redis:
    """`redis+sentinel://host:port,host:port/SERVICE[/DB][?password=...]`."""
    from redis.sentinel import Sentinel

    hosts, _, path = rest.partition("/")
    path, _, query = path.partition("?")
    service, _, db = path.partition("/")
    if not service:
        raise ValueError("name the service: redis+sentinel://HOST:PORT,HOST:PORT/SERVICE")
    userinfo, _, hosts = hosts.rpartition("@")
    if userinfo:
        options["password"] = userinfo.rpartition(":")[2]
    options.update({key: values[-1] for key, values in parse_qs(query).items()})
    nodes = [(host, int(port or 26379)) for host, _, port in (node.partition(":") for node in hosts.split(","))]
    sentinel = Sentinel(nodes, sentinel_kwargs={"socket_timeout": TIMEOUT_S}, **options)
    master: redis.Redis = sentinel.master_for(service, db=int(db or 0))
    return master


def _without_secrets(url: str) -> str:
    try:
        parts = urlsplit(url)
    except ValueError:
        return "(unreadable url)"
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
