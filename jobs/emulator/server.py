"""The upstream emulator: YouTube Data API v3 on loopback, for development without spending quota.

    with Emulator(allocation="pool", quota=10_000) as upstream:
        ...                                   # point a client at upstream.address
        upstream.usage()                      # {"requests": 3, "by_method": {...}, "units": {...}}

The emulator counts every request that it has read to its end. It counts and charges the request
before it acts on it, because upstream charges invalid and failed requests too. A refusal for lack of
quota therefore does not make a request free. The emulator does not count a request that a client wrote
to a connection that had already closed, because nobody read it. A client that charges each attempt may
therefore book more than the emulator counts, but never less.

The emulator also serves calls of Cloud Monitoring. It counts them separately, as "free": they spend no units.

A request without a usable key counts as a request, but is charged to no project. The emulator accepts
any key and any token that does not start with "invalid" or "disabled", in Google's places: a key in the
header X-Goog-Api-Key or the query's `key`, a token as a bearer or as `access_token`. A secret is a key if
it starts with "AIza", has a project here, or came as a key before. The emulator also accepts writes with
only a key; upstream requires a token for them. It takes an upload's first request for the whole upload,
and ignores its content.
"""

import hashlib
import json
import threading
import time
from collections.abc import Callable, Mapping
from email.message import Message
from pathlib import Path
from typing import Any, ClassVar, Self

from quota.common.clock import host_clock
from quota.common.text import many
from quota.jobs.emulator import replies
from quota.jobs.emulator.api import Api, Call, is_upload, method_of
from quota.jobs.emulator.catalogue import GeneratedCatalogue, RecordedCatalogue
from quota.jobs.emulator.monitoring import project_of, time_series
from quota.jobs.emulator.replies import Json, Rejected, Reply
from quota.jobs.emulator.usage import UNKNOWN, Allocation, Charge, Meter
from quota.jobs.emulator.wire import Request, Server

_CONTROL = "/emulator/"
_POLL_SECONDS = 0.02
_MAX_SECRETS = 10_000


class Emulator:
    """The upstream, on loopback. It listens from the start, and serves inside `with` or `serve_forever`.

    `port` 0 takes a free port. `recorded` is a folder of saved pages to serve instead of generated
    ones (ValueError when it holds none). `quota` is the number of units that each project has per
    day in the bucket `units`. `projects` maps keys to projects; any other key is a project of its
    own. `clock` gives milliseconds since 1970; the quota resets when it passes Pacific midnight. Cloud
    Monitoring, which it serves too (see `quota.jobs.emulator.monitoring`), knows of a call after `lag_ms`.
    Each answer comes `delay_ms` late. `errors_percent` of the calls get a 503, spread evenly.
    """

    _server_class: ClassVar[type[Server]] = Server

    def __init__(
        self,
        *,
        port: int = 0,
        recorded: Path | None = None,
        allocation: Allocation = "pool",
        quota: int = 10_000,
        projects: Mapping[str, str] | None = None,
        clock: Callable[[], int] = host_clock,
        lag_ms: int = 0,
        delay_ms: int = 0,
        errors_percent: int = 0,
    ) -> None:
        if allocation not in ("pool", "buckets"):
            raise ValueError(f"allocation must be 'pool' or 'buckets', not {allocation!r}")
        if quota < 0:
            raise ValueError(f"quota must be 0 or more, not {quota}")
        if lag_ms < 0:
            raise ValueError(f"lag_ms must be 0 or more, not {lag_ms}")
        if delay_ms < 0:
            raise ValueError(f"delay_ms must be 0 or more, not {delay_ms}")
        if not 0 <= errors_percent <= 100:
            raise ValueError(f"errors_percent must be from 0 to 100, not {errors_percent}")
        self._projects = dict(projects or {})
        self._keys = set(self._projects)
        self._tokens: set[str] = set()
        self._api = Api(RecordedCatalogue(recorded) if recorded else GeneratedCatalogue())
        self._lock = threading.RLock()  # of the meter
        self._meter = Meter(allocation, quota, clock)
        self._lag_ms = lag_ms
        self._delay_ms = delay_ms
        self._errors_percent = errors_percent
        self._calls = 0
        self._thread: threading.Thread | None = None
        self._serving = False
        self._server = self._server_class(port, self._serve)

    # --- start and stop ------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """The address, without a slash at the end. A client's `rootUrl` needs one."""
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def announcement(self) -> str:
        """One line that says where the emulator listens and what it grants."""
        units = many(self._meter.quota_units["units"], "unit")
        late = f", each answer {self._delay_ms:,} ms late" if self._delay_ms else ""
        errors = f", {self._errors_percent}% errors" if self._errors_percent else ""
        return f"YouTube Data API v3 emulator: {self.address} ({self._meter.allocation}, {units} a day{late}{errors})"

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self.serve_forever, name="emulator", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def serve_forever(self, ready: Callable[[str], object] | None = None) -> None:
        """Serve in this thread until interrupted or stopped. `ready` gets the announcement first."""
        self._serving = True
        try:
            if ready is not None:
                ready(self.announcement)
            self._server.serve_forever(_POLL_SECONDS)
        finally:
            self._serving = False
            self._server.close()

    def stop(self) -> None:
        """Stop serving and close open connections. Call it from another thread than the serving one."""
        if self._thread is not None or self._serving:
            self._server.shutdown()
        if self._thread is not None:
            self._thread.join()
        self._server.close()

    # --- counts --------------------------------------------------------------------------------------

    def usage(self) -> Json:
        """The requests counted since the start or the last reset, as GET /emulator/usage returns them.

        `units` holds the units of every charged call, by bucket. `refused_units` is the part of them
        that the day's quota did not cover.
        """
        with self._lock:
            return self._meter.usage()

    def reset(self) -> None:
        """Reset all counts, as on a new day."""
        with self._lock:
            self._meter.reset()

    # --- one request ---------------------------------------------------------------------------------

    def _serve(self, request: Request) -> Reply:
        if request.path.startswith(_CONTROL):
            return self._control(request)
        project = project_of(request) if request.verb == "GET" else None
        if project is None:
            return self._serve_call(request)
        with self._lock:
            self._meter.count_free("monitoring")
        return self._serve_monitoring(request, project)

    def _serve_call(self, request: Request) -> Reply:
        method, charge = self._arrive(request)
        return self._answer(request, method, charge)

    def _serve_monitoring(self, request: Request, project: str) -> Reply:
        """Answer Cloud Monitoring's timeSeries.list from the emulator's own count."""
        token = _token(request.params, request.headers)
        if not token or not self._is_token(token):
            return replies.error("401 authError")
        if project.startswith("denied"):
            return replies.error("permission_denied", project=project)
        with self._lock:
            return time_series(request, project, self._meter, self._lag_ms)

    def _arrive(self, request: Request) -> tuple[str, Charge | Reply]:
        """Count and charge a call before anything else. Returns its method, and its charge, or upstream's answer if
        there is nobody to charge."""
        method = method_of(request.verb, request.path) or UNKNOWN
        caller = self._identify(request.params, request.headers)
        with self._lock:
            self._meter.count(method)
            return method, self._meter.charge(caller, method) if isinstance(caller, str) else caller

    def _identify(self, params: Mapping[str, str], headers: Message) -> str | Reply:
        """The project, or upstream's reply to a caller that it does not know."""
        key, token = params.get("key") or headers.get("X-Goog-Api-Key") or "", _token(params, headers)
        if token and not self._is_token(token):
            return replies.error("401 authError")
        if key and not self._is_key(key):
            return replies.error("key_invalid")
        secret = key or token
        if not secret:
            return replies.error("unregistered_caller")
        # Everybody who reads the usage sees the project's name, but never the key.
        digest = hashlib.blake2b(secret.encode("utf-8", "replace"), digest_size=4).hexdigest()
        project = self._projects.get(secret) or f"key-{digest}"
        if secret.startswith("disabled"):
            return replies.error("service_disabled", number=replies.project_number(project))
        return project

    def _is_token(self, secret: str) -> bool:
        with self._lock:
            if secret.startswith(("invalid", "AIza")) or secret in self._keys:
                return False
            if len(self._tokens) < _MAX_SECRETS:
                self._tokens.add(secret)
            return True

    def _is_key(self, secret: str) -> bool:
        with self._lock:
            if secret.startswith(("invalid", "ya29.")) or secret in self._tokens:
                return False
            if len(self._keys) < _MAX_SECRETS:
                self._keys.add(secret)
            return True

    def _answer(self, request: Request, method: str, charge: Charge | Reply) -> Reply:
        """The answer to a counted call. Raises Rejected."""
        time.sleep(self._delay_ms / 1_000)
        if self._fails():
            return replies.error("backend_error")
        if request.malformed:
            return replies.bad_request("Bad Request")
        if isinstance(charge, Reply):
            return charge
        if charge.refused and charge.bucket == "units":
            return replies.error("403 quotaExceeded")
        if charge.refused:
            return replies.daily_limit(charge.bucket, charge.project, self._meter.quota_units[charge.bucket])
        if method == UNKNOWN:
            return replies.error("method_not_found")
        return self._perform(request, method)

    def _fails(self) -> bool:
        """Whether this call gets an error."""
        with self._lock:
            before, self._calls = self._calls, self._calls + 1
        return (before + 1) * self._errors_percent // 100 > before * self._errors_percent // 100

    def _perform(self, request: Request, method: str) -> Reply:
        body = {} if request.verb == "GET" or is_upload(request.path) else json_object(request.body)
        return self._api.answer(Call(method, request.params, body))

    # --- paths under /emulator -----------------------------------------------------------------------

    def _control(self, request: Request) -> Reply:
        match request.verb, request.path.removeprefix(_CONTROL):
            case "GET", "usage":
                return Reply(200, self.usage())
            case "POST", "reset":
                self.reset()
                return Reply(200, self.usage())
            case _:
                return replies.error("method_not_found")


def _token(params: Mapping[str, str], headers: Message) -> str:
    """The token of a request; empty if it has none."""
    scheme, _, token = headers.get("Authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else params.get("access_token", "")


def json_object(body: bytes) -> Json:
    """The JSON object in a body, {} if that is empty. Raises Rejected."""
    try:
        document: Any = json.loads(body) if body.strip() else {}
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise Rejected(replies.bad_request("Invalid JSON payload received."))
    return document
