"""The configuration as typed, frozen values; and the folder for the state of one machine."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

from quota.common.files import doubt_at, make_folder
from quota.common.text import one_line, show
from quota.decision import Allowance
from quota.errors import ConfigError
from quota.ledger.factory import file_of
from quota.ledger.files import path_of
from quota.settings.toml import TomlTable
from quota.terms.costs import CostBook
from quota.terms.limits import Limit

BUILT_IN_FETCHES = {
    "trending": "videos.list",
    "search": "search.list",
    "channels": "channels.list",
    "uploads": "playlistItems.list",
    "videos": "videos.list",
    "comments": "commentThreads.list",
}
"""The built-in fetch functions, each with the API method that it calls first."""

DEFAULT_HEADROOM_PERCENT = 5
BUILT_IN = "built-in configuration"
GIVEN = "settings"
"""What messages call a configuration that a program made."""

NO_FILE = "no quota.toml was found"
BUILT_IN_NOTICE = f"{NO_FILE}: the built-in one is used; `quota init` writes one"


class LedgerSettings(NamedTuple):
    """`url` has absolute paths. `unavailable` is None if nothing may be spent without the ledger.

    `identity` says which ledger the configuration means, whatever its url: the `name` that the owner gave it, else the
    configuration's path. It is empty if neither lasts, as for a pipe: then the ledger's label is its identity.
    `secrets` has the origin of each password in `url`, see `quota.settings.references.Address`.
    """

    url: str
    unavailable: Allowance | None
    identity: str = ""
    secrets: tuple[tuple[str, str], ...] = ()

    @property
    def file(self) -> str | None:
        """The path of its file; empty in memory; None for a server."""
        return file_of(self.url)

    def __repr__(self) -> str:
        """Without the url: it may hold a password."""
        return f"<LedgerSettings {self.url.partition(':')[0]} {self.identity}>"


OnRefusal = Literal["error", "429"]
"""What an instrumented program gets for a refused call: an error of its library, or an answer of 429."""


class CredentialSettings(NamedTuple):
    """One credential. `key_ref` says where its key is (`env:NAME`, `file:/path`), and `auth_ref` who calls without a
    key (`adc`, `service-account:PATH`, `authorized-user:PATH`, `bearer:env:NAME`). Both are None for the emulator.

    `endpoint` is None for the API's own address. Credentials of one project have the same limits. `cloud_project` is
    the project's id or number at upstream: `quota reconcile` reads its figures, as the account of `auth_ref`.
    `insecure_endpoint`: secrets may go to an `http://` endpoint on another machine. A service account asks for
    `scopes`; without scopes, Google's client asks for those of its API. `on_refusal` is for instrumented programs. The
    limits are in the table of the credential `limited_by`; "": the cost book has them.
    """

    name: str
    api: str
    book: CostBook
    project: str
    key_ref: str | None
    endpoint: str | None
    limits: tuple[Limit, ...]
    cloud_project: str | None = None
    auth_ref: str | None = None
    insecure_endpoint: bool = False
    scopes: tuple[str, ...] = ()
    on_refusal: OnRefusal = "error"
    limited_by: str = ""

    @property
    def hosts(self) -> tuple[str, ...]:
        """Where its calls go: the host of its `endpoint`, else the hosts of the cost book."""
        return self.book.hosts if self.endpoint is None else (urlsplit(self.endpoint).netloc,)


UNKNOWN_IDS = "unknown_ids"
"""The table of ids for which upstream has nothing."""

PLACES_OF_THE_STORE = ("places_of_uploads", "places_of_comments", UNKNOWN_IDS)
"""Tables of rows in which built-in jobs keep their places, and runs the unknown ids."""

TABLES_OF_THE_STORE = frozenset(
    (*PLACES_OF_THE_STORE, "videos", "rankings", "channels", "history", "rows", "store", "runs", "past_runs",
     "checkpoints", "cursors", "bought", "charts", "videos_words", "videos_text")
)  # fmt: skip
"""Names that a job's own tables cannot have."""


def check_table(name: object) -> str:
    """The name of a job's own table. Raises ValueError."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,63}", name):
        raise ValueError(f"{show(name)}: a table's name has 1 to 64 characters out of A-Z a-z 0-9 _, a letter first")
    if name.lower() in TABLES_OF_THE_STORE or name.lower().startswith(("sqlite_", "videos_text")):
        raise ValueError(f"{name!r} is a table of the store itself; choose another name")
    return name


class TableSettings(NamedTuple):
    """A table of jobs' own: the fields that are a row's key, and the fields whose changes the store keeps."""

    key: tuple[str, ...] = ("id",)
    history: tuple[str, ...] = ()


class JobSettings(NamedTuple):
    """One job. `leave` is in units by limit name; `options` are keyword arguments for the fetch function.

    Without `regions` the job makes one pass without a region. `schedule` is a cron line on the wall clock of
    `timezone`, or an interval ("every 45m"), see `quota.settings.schedules`; None: run by hand. Each region starts
    `stagger_ms` after the region before; 0: all in one tick. A start is late by up to `jitter_ms`. A tick or run
    that cannot start within `misfire_grace_ms` is dropped. `max_body_mb`, `max_answer_s` and `max_items` limit an
    answer, see `quota.clients.google.service`; `max_items` also limits a page that your own fetch function returns.
    No run spends more than `max_units`; None: a run spends what the limits allow. `ping_ref` says where the address of
    a health check is; with `insecure_endpoint` that may be an `http://` address on another machine. `on_each_machine`:
    every machine runs the whole job into its own store; otherwise machines share its regions. `tables` has the
    tables of all jobs whose key is not `id`, or that keep a history; this job declares `own_tables` of them. The
    function `sink` gets each page; empty: none.
    """

    name: str
    credential: str
    fetch: str
    regions: tuple[str, ...]
    pages: int
    schedule: str | None
    stagger_ms: int
    leave: Mapping[str, int]
    options: Mapping[str, object]
    misfire_grace_ms: int
    max_body_mb: int
    max_answer_s: int
    max_items: int
    timezone: str = "UTC"
    jitter_ms: int = 0
    on_each_machine: bool = False
    ping_ref: str | None = None
    insecure_endpoint: bool = False
    max_units: int | None = None
    tables: Mapping[str, TableSettings] = MappingProxyType({})
    own_tables: frozenset[str] = frozenset()
    sink: str = ""


class StoreSettings(NamedTuple):
    """Where fetched items are kept, and for how long. A shared ledger knows the store by its `name`, else by an id in
    the store's file. `places_in_ledger`: the ledger keeps the place of each region, and the store does not."""

    url: str
    retention_ms: int
    name: str = ""
    places_in_ledger: bool = False

    @property
    def file(self) -> str:
        """The path of its file; empty in memory."""
        return path_of(self.url)


class NotifySettings(NamedTuple):
    """Who gets messages: a command with its arguments (empty: none), and the reference to an address.

    A region is stale if its last complete pass, or else the first run of its job, was `stale_ms` ago; None: no region
    is stale. `insecure_endpoint`: the address may be an `http://` address on another machine.
    """

    command: tuple[str, ...]
    url_ref: str | None
    stale_ms: int | None
    insecure_endpoint: bool = False


class Settings(NamedTuple):
    """A whole configuration. `path` is its file; None for the built-in one. `textfile` is the folder for metrics.

    `inbound` is the table of that name, which `quota.inbound` reads. `variables` has the environment
    variable of each path that a variable set. Messages call it `source`.
    """

    path: Path | None
    ledger: LedgerSettings
    credentials: Mapping[str, CredentialSettings]
    jobs: Mapping[str, JobSettings]
    store: StoreSettings
    textfile: str | None = None
    notify: NotifySettings | None = None
    inbound: TomlTable | None = None
    variables: Mapping[str, str] = MappingProxyType({})
    source: str = BUILT_IN

    def __repr__(self) -> str:
        """Without the table `[inbound]`: it may hold a password."""
        return f"<Settings {self.source}>"

    def machines_of(self, job: JobSettings) -> int:
        """How many machines run the whole job: 1, or with `on_each_machine` the `machines` of `unavailable`."""
        unavailable = self.ledger.unavailable
        return unavailable.machines if job.on_each_machine and unavailable is not None else 1


# -- the state folder --------------------------------------------------------------------------------------------------

_OWN_FOLDER = "set QUOTA_STATE_DIR to a folder of your own"


def state_folder() -> Path:
    """The folder for what must survive a reboot: QUOTA_STATE_DIR, else the platform's. This does not create it.

    Raises ConfigError if others could change the folder, or the user has no home.
    """
    named = os.environ.get("QUOTA_STATE_DIR")
    try:
        if named:
            folder = Path(named).expanduser().absolute()
        else:
            from platformdirs import user_state_path  # late: it takes 8 ms

            folder = user_state_path("quota-ledger").expanduser()
    except RuntimeError as error:
        raise ConfigError(f"this user has no home for a state folder; {_OWN_FOLDER}") from error
    except FileNotFoundError as error:
        raise ConfigError(f"QUOTA_STATE_DIR is relative, and the current folder is gone; {_OWN_FOLDER}") from error
    why = doubt_at(folder)
    if why:
        remedy = f"run this as that user, or {_OWN_FOLDER}" if why.startswith("belongs to") else _OWN_FOLDER
        raise ConfigError(f"state folder {one_line(folder)} {why}; {remedy}")
    return folder


def make_state_folder() -> Path:
    """The state folder; if it is missing, this creates it for this user alone. Raises ConfigError."""
    folder = state_folder()
    if os.path.isdir(folder):
        return folder
    try:
        make_folder(folder)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"state folder {one_line(folder)} cannot be made: {reason}; {_OWN_FOLDER}") from error
    return state_folder()  # somebody else may have made it meanwhile
