"""One opened configuration: its ledger and its budgets. `quota.open()` makes it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any, TypeVar, overload
from zlib import crc32

from quota.budget import Budget
from quota.clients.instrument import TALLY
from quota.common.clock import host_clock, rfc3339
from quota.common.fork import OfOneProcess, start_here_and_in_child
from quota.common.log import warn
from quota.common.text import listed, nearest, show
from quota.deciding.allowance import say_used
from quota.deciding.keys import Keys, machine_mark
from quota.deciding.project import Project
from quota.deciding.recorder import Recorder, close_all
from quota.errors import ConfigError, QuotaError, SessionClosedError, UnusableLedger, UsageError
from quota.journal.journal import Journal, left_behind
from quota.ledger.factory import Identity, open_ledger
from quota.ledger.log import Log
from quota.ledger.state import begin
from quota.settings.load import given_settings, load_settings
from quota.settings.model import CredentialSettings, Settings, make_state_folder, state_folder
from quota.settings.references import read_key
from quota.settings.tables import A_CREDENTIAL
from quota.terms.arguments import instance, run_under_way, text
from quota.terms.limits import DAY_MS, Limit

if TYPE_CHECKING:
    from httpx import Client as HttpxClient
    from requests import Session as RequestsSession

    from quota.clients.caller import Caller

C = TypeVar("C", bound=Any)

JITTER_MS = 60_000
SERVICE = "quota.clients.google.service(budget, key=...)"


class Session(OfOneProcess):
    """An open configuration. Close it, or use it in a `with` block. Opening it contacts nothing.

    After `close`, its ledger, budgets and services raise UsageError. Threads may share it after the first read of
    `ledger` or the first budget.
    """

    def __init__(self, settings: Settings, *, clock: Callable[[], int] | None = None) -> None:
        self.settings = instance(settings, Settings, "settings", "open a session with quota.open(path)")
        self.clock = clock
        self._closed = False
        start_here_and_in_child(self)
        self._ledger: Log | None = None
        self._budgets: dict[str, Budget] = {}
        self._projects: dict[Identity, Project] = {}
        self.warns_of_projects_left = True
        self._services: list[Any] = []
        self._leaves: dict[str, dict[str, Mapping[str, int]]] = {}
        """What each job leaves to others, by project, because the credentials of a project share one budget."""
        for job in settings.jobs.values():
            self._leaves.setdefault(settings.credentials[job.credential].project, {})[job.name] = job.leave

    def start_over_in_child(self) -> None:
        """Make the lock for budgets and for closing, which one thread at a time holds, also in a signal handler, and a
        lock for each credential, which the run that listens to its budget holds. A forked child has new locks, because
        the thread that held the old ones is not there."""
        self._lock = RLock()
        self.listening = {name: RLock() for name in self.settings.credentials}

    def __repr__(self) -> str:
        closed = ", closed" if self._closed else ""
        return f"<quota.Session of {self.settings.source}: {listed(self.settings.credentials)}{closed}>"

    @cached_property
    def keys(self) -> Keys:
        """Makes the keys of this process's charges."""
        return Keys(run_under_way.get(), self._state_folder)

    @property
    def run(self) -> str:
        """The 8-character id of this process's run. Every key of its charges begins with it."""
        return self.keys.run

    @cached_property
    def _state_folder(self) -> Path:
        return state_folder()

    @property
    def ledger(self) -> Log:
        """The one ledger of this session, opened on first access."""
        with self._lock:  # if several threads call, one opens it
            self._check_open()
            if self._ledger is None:
                settings = self.settings.ledger
                if (settings.file or "").startswith(f"{state_folder()}{os.sep}"):
                    make_state_folder()
                self._ledger = open_ledger(settings.url, clock=self.clock)
            return self._ledger

    def credential(self, name: str | None = None) -> CredentialSettings:
        """The credential with this name; without a name, the only credential. Raises UsageError if none or several
        fit."""
        credentials = self.settings.credentials
        if name is None:
            if len(credentials) > 1:
                raise UsageError(
                    f"which credential? {self.settings.source} has {listed(credentials)}; name one (--credential)"
                )
            return next(iter(credentials.values()))
        name = text(name, "credential")
        if name not in credentials:
            raise UsageError(f"{self.settings.source} has no credential {show(name)}; {nearest(name, credentials)}")
        return credentials[name]

    def budget(self, credential: str | None = None) -> Budget:
        """The budget of a credential (None: the only credential). Returns the same object each time."""
        with self._lock:  # if several threads call, one makes it
            self._check_open()
            chosen = self.credential(credential)
            if (budget := self._budgets.get(chosen.name)) is not None:
                return budget
            project = self.project(chosen.name)
            budget = Budget(
                credential=chosen.name,
                book=chosen.book,
                limits=chosen.limits,
                project=project,
                leave=self._leaves.get(chosen.project),
                allowance=self.settings.ledger.unavailable,
                hosts=chosen.hosts,
            )
            if folder := os.environ.get(TALLY):
                from quota.clients.instrument.processes import tally_in

                budget.tally = tally_in(folder)
            self._budgets[chosen.name] = budget
            return budget

    def project(self, credential: str | None = None) -> Project:
        """The log of a credential's project, as this process reads it. Credentials of one project share it."""
        with self._lock:
            self._check_open()
            chosen = self.credential(credential)
            identity = self._identity(chosen)
            if identity not in self._projects:
                longest_ms = _longest_ms(chosen.limits)
                project = Project(
                    self.ledger,
                    chosen.project,
                    journal=self._open_journal(identity, longest_ms),
                    keys=Keys(self.run, self._state_folder, identity.hash),
                    clock=self.clock,
                    longest_ms=longest_ms,
                    jitter_ms=machine_jitter_ms(),
                    api=chosen.book.api,
                )
                project.recorder = Recorder(project.state)
                self._projects[identity] = project
            return self._projects[identity]

    def _identity(self, credential: CredentialSettings) -> Identity:
        """The identity of the budget that a credential spends, wherever the ledger is."""
        ledger = self.settings.ledger.identity or self.ledger.label
        return Identity(ledger, credential.project, credential.endpoint or "", credential.book.api)

    def _open_journal(self, identity: Identity, longest_ms: int) -> Journal | None:
        """What this machine has seen of a project's log. A ledger in memory has no journal, because nobody shares that
        ledger."""
        if self.settings.ledger.file == "":
            return None
        journal = Journal(self._state_folder, identity, keep_ms=longest_ms)
        # A new project may be an older project under a new name.
        if self.warns_of_projects_left and not journal.exists:
            self.warns_of_projects_left = False
            for name, until_ms in projects_left(self):
                why = "it was charged here, and no credential has it any more; if you renamed a credential, "
                warn("project_left", f'{why}add project = "{name}" to it', project=name, until=rfc3339(until_ms))
        return journal

    def check_key(self, credential: str | None = None) -> None:
        """Raise ConfigError if the configuration names a secret of the credential that cannot be read. Never shows
        it."""
        chosen = self.credential(credential)
        if self._key(chosen) is None and chosen.auth_ref != "adc":
            login_of(chosen)

    def _key(self, chosen: CredentialSettings) -> str | None:
        """The secret of a credential, registered for redaction; None if the configuration names no secret."""
        self._check_open()
        if chosen.key_ref is None:
            return None
        from quota.common.log_lines import install
        from quota.common.redact import register

        secret = read_key(chosen.key_ref)
        register(secret)
        install()
        return secret

    def google(
        self, credential: str | None = None, api: str | None = None, version: str | None = None, **options: Any
    ) -> Any:
        """A `googleapiclient` service whose every HTTP attempt is charged to the credential's budget. `api` and
        `version` are by default those of its cost book. Raises UsageError if the book is not of one of Google's APIs.

        It calls with the credential's `key`, else with the login in `auth`.

        `execute()` raises `quota.Refused` on a refusal. `options` go to `quota.clients.google.service`. The service
        works while the session is open.
        """
        self._check_open()
        from quota.clients.google import service

        for name in ("budget", "key"):
            if name in options:
                raise UsageError(f"q.google() takes the {name} of its credential; for another one call {SERVICE}")
        chosen = self.credential(credential)
        if not chosen.book.googles:
            others = f"q.requests({chosen.name!r}) and q.httpx({chosen.name!r}) are clients for it"
            raise UsageError(f"credential {chosen.name!r} is for {chosen.book.api}, no API of Google's; {others}")
        if api is None:
            api, version = chosen.book.api, version or chosen.book.version
        if "endpoint" not in options:
            options["endpoint"] = chosen.endpoint
            options.setdefault("insecure_endpoint", chosen.insecure_endpoint)
        key = self._key(chosen)
        if key is None and options.get("credentials") is None:
            options["credentials"] = login_of(chosen, chosen.scopes)
        made = service(self.budget(chosen.name), api, version or "v3", key=key, **options)
        return self._kept(made)

    def requests(
        self,
        credential: str | None = None,
        *,
        max_units: int | None = None,
        timeout_s: float | None = None,
        max_body_mb: int | None = None,
    ) -> RequestsSession:
        """A `requests.Session` that charges every HTTP attempt to the hosts of the cost book to the credential's
        budget, by the routes of the book. An `endpoint` replaces the hosts; a call to them raises `quota.UsageError`.

        It calls those hosts with the credential's `key`, in the place that the book names, or with the login in `auth`.
        No other host sees a secret. A refusal raises `quota.Refused`, an answer above `max_body_mb` raises
        `quota.BadAnswer`. Requests without a timeout get `timeout_s`, and at most 10 s of it for a connection if
        they send no long body. The client works while this session is open, and takes no other adapter.
        """
        from quota.clients.requests import MeteredSession, SignedSession, requests_adapter

        chosen = self.credential(credential)
        budget, caller = self.budget(chosen.name), self._caller(chosen, chosen.hosts)
        adapter = requests_adapter(
            budget, max_units=max_units, timeout_s=timeout_s, max_body_mb=max_body_mb, caller=caller
        )
        made = SignedSession() if caller.signs else MeteredSession()
        for scheme in ("https://", "http://"):
            made.mount(scheme, adapter)
        return self._kept(made)

    @overload
    def httpx(self, credential: str | None = None, *, max_units: int | None = None, **options: Any) -> HttpxClient: ...

    @overload
    def httpx(self, credential: str | None = None, *, library: str, **options: Any) -> Any: ...

    def httpx(
        self, credential: str | None = None, *, max_units: int | None = None, library: str = "httpx", **options: Any
    ) -> Any:
        """Like `requests`, as an `httpx.Client`; with `library="httpx2"` as one of httpx2, as newer SDKs want it.
        `options` are the client's own, except `transport`, `mounts` and `proxy`."""
        from quota.clients.gate import MAX_REDIRECTS
        from quota.clients.httpx import httpx_transport, imported

        for name in ("transport", "mounts", "proxy"):
            if name in options:
                raise UsageError(f"q.httpx() makes its own transport, which charges; leave {name} out")
        chosen = self.credential(credential)
        caller = self._caller(chosen, chosen.hosts)
        transport = httpx_transport(self.budget(chosen.name), max_units=max_units, caller=caller, library=library)
        made = imported(library).Client(transport=transport, **{"max_redirects": MAX_REDIRECTS, **options})
        return self._kept(made)

    def _caller(self, chosen: CredentialSettings, hosts: tuple[str, ...]) -> Caller:
        """The signer of requests to these hosts: with the credential's key, or with the login in `auth`."""
        from quota.clients.caller import Caller
        from quota.clients.discovery import description, scopes_of

        key, login = self._key(chosen), None
        if key is None and chosen.auth_ref is not None:
            scopes: Sequence[str] = chosen.scopes
            if not scopes and not chosen.book.has_session:
                scopes = scopes_of(description(chosen.book.api, chosen.book.version))
            login = login_of(chosen, scopes)
        place, googles = chosen.book.key, chosen.book.googles
        insecure = chosen.insecure_endpoint
        return Caller(hosts, key=key, place=place, credentials=login, insecure=insecure, googles=googles)

    def _kept(self, made: C) -> C:
        """A client that `close` closes. Raises SessionClosedError if the session was closed meanwhile."""
        with self._lock:
            if not self._closed:
                self._services.append(made)
                return made
        made.close()
        raise SessionClosedError

    def close(self) -> None:
        """Close the ledger and the connections, for good. Several threads may call it, and more than once.

        First the process writes to the ledger what it still owes, for all projects together within a second.
        """
        with self._lock:  # a second thread that closes it waits here
            self._closed = True
            while self._services:
                self._services.pop().close()
            ends_s = close_all(project.recorder for project in self._projects.values())
            self._budgets = {}
            while self._projects:
                project = self._projects.popitem()[1]
                say_used(project)
                project.close(ends_s)
            ledger, self._ledger = self._ledger, None
            if ledger is not None:
                ledger.close()

    def _check_open(self) -> None:
        if self._closed:
            raise SessionClosedError

    def __enter__(self) -> Session:
        self._check_open()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def open_session(
    config: str | Path | None = None,
    *,
    settings: Mapping[str, Any] | None = None,
    clock: Callable[[], int] | None = None,
) -> Session:
    """Open the configuration in the file `config`, else the configuration that the command line would find.

    `settings` has the tables of a configuration instead; then neither a file nor the environment is read. `clock` (ms
    since 1970) replaces the clocks of the host and the ledger, for tests and simulation. Raises ConfigError for an
    unusable configuration.
    """
    if settings is not None and config is not None:
        raise UsageError("give the path of a configuration or settings, not both")
    checked = load_settings(config) if settings is None else given_settings(settings)
    if not checked.credentials:
        raise ConfigError(f"{checked.source}: credentials: missing; {A_CREDENTIAL}")
    return Session(checked, clock=clock)


def login_of(chosen: CredentialSettings, scopes: Sequence[str] = ()) -> Any:
    """The google-auth credentials that `auth` of a credential names, for these `scopes`; None without `auth`."""
    ref = chosen.auth_ref
    if ref is None:
        return None
    from quota.clients.login import bearer, login

    kind, _, token_ref = ref.partition(":")
    if kind == "bearer":
        return bearer(read_key(token_ref, "token"))
    return login(ref, f"credential {chosen.name!r}", scopes)


def projects_of(session: Session, credential: str | None = None) -> dict[str, CredentialSettings]:
    """The first credential of each project, in the configuration's order; with a name, only that credential."""
    chosen = session.settings.credentials.values() if credential is None else [session.credential(credential)]
    projects: dict[str, CredentialSettings] = {}
    for each in chosen:
        projects.setdefault(each.project, each)
    return projects


def budgets_of(session: Session, credential: str | None = None) -> list[Budget]:
    """The budget of each project, in the configuration's order; with a name, only of that credential's project."""
    return [session.budget(chosen.name) for chosen in projects_of(session, credential).values()]


def projects_left(session: Session) -> list[tuple[str, int]]:
    """The projects that this configuration charged on this machine and that no credential has any more, each with the
    time in ms at which its last charge stops counting. A new project may be one of these under a new name."""
    if not session.settings.ledger.identity:  # without a file nobody can rename a project
        return []
    credentials = session.settings.credentials.values()
    identities = [session._identity(credential) for credential in credentials]
    longest_ms = _longest_ms(limit for credential in credentials for limit in credential.limits)
    return left_behind(session._state_folder, identities, (session.clock or host_clock)(), longest_ms)


def _longest_ms(limits: Iterable[Limit]) -> int:
    return max((limit.view.window.longest_ms for limit in limits), default=DAY_MS)


def begin_to_read(session: Session) -> str:
    """Begin to read the log of every project, as each program does first. Returns why the ledger accepts no charges; ""
    if it does. Raises LedgerError."""
    why = ""
    for project, api in sorted({(each.project, each.book.api) for each in session.settings.credentials.values()}):
        begin(session.ledger, project, api=api)
        why = why or session.ledger.unwritable(project)
    return why


def ledger_trouble(session: Session) -> str | None:
    """Why the ledger cannot be used, for strangers; empty if it can. None if nothing was charged yet: a question would
    create its file."""
    path = session.settings.ledger.file
    if path is not None and not os.path.exists(path):
        return None
    try:
        return "the ledger accepts no charges" if begin_to_read(session) else ""
    except UnusableLedger:
        return "the ledger cannot be used; if it has moved, restart"
    except QuotaError:
        return "the ledger cannot answer"


@cache
def machine_jitter_ms() -> int:
    """A delay in ms of up to a minute, constant on each machine until it restarts, and different between machines. It
    spreads the machines that wait for an exhausted bucket, so that they do not all return in the same second."""
    return crc32(machine_mark(None).encode()) % JITTER_MS
