"""Finds valid but unwise settings in a configuration. Changes nothing and contacts nobody.

An `error` makes work fail or spends too much; a `warning` may be intended. `lint` opens the ledger as a command does,
and runs the entry points of the group `quota.checks`.
`quota.cli.doctor` adds the findings that need the ledger's contents.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from urllib.parse import parse_qs

from quota.common.clock import host_clock, utc
from quota.common.files import doubt_of_way
from quota.common.findings import Finding, file_system, finding_of, problem, ranked, warning
from quota.common.text import listed, many, one_line
from quota.decision import Allowance
from quota.errors import ConfigError
from quota.ledger.factory import open_ledger
from quota.ledger.redis_url import FALSE
from quota.settings.books import as_written
from quota.settings.environment import REMEDY, almost
from quota.settings.model import BUILT_IN_FETCHES, CredentialSettings, JobSettings, Settings, state_folder
from quota.settings.references import address_of, read_address, read_key
from quota.settings.toml import read_file
from quota.terms.costs import Bucket, CostBook, Quota, covers, headrooms, unlimited
from quota.terms.limits import DAY_MS, SECOND_MS, Calendar, Limit, format_duration

STORE_FETCHES = frozenset(("uploads", "videos", "comments"))
"""The built-in fetch functions that keep their place in the store."""

EXAMPLE_PROJECT = "my-project"
"""`quota init --full` writes this value."""

OLD_DAYS = 180
SOON_DAYS = 30


def lint(settings: Settings) -> list[Finding]:
    """All findings about these settings, by today's prices: errors first, otherwise in the file's order."""
    books = {id(c.book): c.book for c in settings.credentials.values()}
    credentials = {name: c._replace(book=c.book.at(host_clock())) for name, c in settings.credentials.items()}
    settings = settings._replace(credentials=credentials)
    findings = [
        *_ledger(settings),
        *_server(settings),
        *_store(settings),
        *_ways(settings),
        *_variables(settings),
        *(finding for book in books.values() for finding in lint_book(book)),
    ]
    built_in = {job.credential for job in settings.jobs.values() if job.fetch in BUILT_IN_FETCHES}
    jobs: dict[str, dict[str, None]] = {}
    for job in settings.jobs.values():
        jobs.setdefault(settings.credentials[job.credential].project, {})[job.name] = None
    for credential in settings.credentials.values():
        if credential.limited_by in (credential.name, ""):
            findings += _limits(credential)
            findings += _limited_jobs(credential, jobs.get(credential.project, {}))
        findings += _key(credential, credential.name in built_in)
        if credential.project == EXAMPLE_PROJECT:
            message = f"still {EXAMPLE_PROJECT!r}: all users of this ledger who kept that name spend one budget"
            location = f"credentials.{credential.name}.project"
            findings.append(warning(location, message, "name it after the project of your key"))
        findings += _auth(credential)
    findings += _shared(settings)
    limits = {c.name: {limit.name: limit for limit in c.limits} for c in settings.credentials.values()}
    for job in settings.jobs.values():
        findings += _job(settings, job, limits[job.credential])
    if settings.notify is not None and settings.notify.url_ref is not None:
        insecure = settings.notify.insecure_endpoint
        findings += _secret("notify.url", settings.notify.url_ref, "address", setting="url", insecure=insecure)
    # Findings of other packages: an entry point is a function `(settings) -> iterable of Finding`.
    for point in entry_points(group="quota.checks"):
        findings += point.load()(settings)
    return ranked(findings)


# -- ledger and store --------------------------------------------------------------------------------------------------


def _ledger(settings: Settings) -> Iterator[Finding]:
    try:
        open_ledger(settings.ledger.url).close()  # opening contacts nothing; the first use does
    except ConfigError as error:
        yield finding_of("error", "ledger.url", str(error).removeprefix("ledger url "), "correct the url")
    yield from _path("ledger.url", settings.ledger.file)
    if settings.ledger.url == "memory:":
        yield warning("ledger.url", "is for tests: the charges end with each process", "name a file or a server")
    outage = settings.ledger.unavailable
    if outage is None:
        return
    if outage.machines > 1 and settings.ledger.file is not None:
        message = f"each of the {outage.machines} machines has an embedded ledger and a budget of its own"
        yield warning("ledger.url", message, "give all machines one redis:// ledger")
    if settings.store.name or settings.store.places_in_ledger:
        message = "a machine whose state folder does not last has a whole allowance again, and loses what it drew"
        yield warning("ledger.unavailable", message, "keep QUOTA_STATE_DIR on a volume that lasts, or remove the key")
    together = outage.machines * outage.allowance_units
    for credential, limit, headroom in exceeded_headrooms(settings, outage):
        most = headroom // outage.machines
        lower = f"lower allowance to {most}, or " if most else ""
        yield problem(
            "ledger.unavailable",
            f"{many(outage.machines, 'machine')} may spend {many(together, 'unit')} while the ledger is away, but "
            f"limit {limit.name!r} of project {credential.project!r} leaves {headroom:,} unspent",
            f"{lower}raise that limit's headroom to {together}",
        )


def exceeded_headrooms(settings: Settings, outage: Allowance) -> Iterator[tuple[CredentialSettings, Limit, int]]:
    """The limits whose headroom an allowance exceeds. The ledger does not see what the machines draw, so together it
    must fit into the headroom of each limit that counts such calls."""
    for credential in {c.project: c for c in settings.credentials.values()}.values():
        fits = headrooms(credential.limits, credential.book, outage.max_cost_units)
        headroom, limit = min(fits, key=lambda fit: fit[0], default=(0, None))
        if limit is not None and outage.machines * outage.allowance_units > headroom:
            yield credential, limit, headroom


def _ways(settings: Settings) -> Iterator[Finding]:
    """A user who may rename a folder on the way to the ledger may put an empty folder in its place."""
    files = {"ledger.url": settings.ledger.file, "store.url": settings.store.file}
    folders = {os.path.dirname(os.path.abspath(file)): at for at, file in files.items() if file}
    for folder, location in {**folders, str(state_folder()): "QUOTA_STATE_DIR"}.items():
        try:
            why = doubt_of_way(folder)
        except OSError:  # the folder is not there yet
            continue
        if why:
            message = f"others could put another folder in the place of {one_line(folder)}, because {why}"
            yield warning(location, message, "change that (chmod, chown), or choose another folder")


def _variables(settings: Settings) -> Iterator[Finding]:
    """Findings about variables that look like keys; not about those that the file names, as in env:NAME."""
    written = read_file(settings.path) if settings.path is not None and settings.path.is_file() else ""  # no pipe
    for name in almost(os.environ, written):
        yield warning(f"environment variable {name}", "sets no key of the configuration", REMEDY)


def _server(settings: Settings) -> Iterator[Finding]:
    """Findings about the way to a server: of the ledger, and of the storage of inbound limits."""
    yield from _trust("ledger", settings.ledger.url, settings.ledger.secrets, settings)
    if settings.path is None or settings.inbound is None:
        return
    try:
        address = address_of(settings.inbound)
    except ConfigError:  # the check of `[inbound]` reports it
        return
    if address is not None:
        yield from _trust("inbound", address.url, address.secrets, settings)


def _trust(place: str, url: str, secrets: Sequence[tuple[str, str]], settings: Settings) -> Iterator[Finding]:
    """Findings about others who may read the password of a server, or pretend to be the server."""
    for key, ref in secrets:
        location = f"{place}.{key}"
        kind, _, path = ref.partition(":")
        in_file = not ref and settings.variables.keys().isdisjoint((place, location))
        if in_file and settings.path is not None and _everybody_reads(settings.path):
            message = "a password stands here, and every user of this machine can read this file"
            yield warning(location, message, f'write {key} = "env:NAME" or "file:PATH", or chmod 600 this file')
        elif kind == "file":
            yield from _exposed(location, path, f"{one_line(path)}, which holds a password")
    if "ssl" not in url:
        return
    options = {name: values[0] for name, values in parse_qs(url.partition("?")[2]).items()}
    unproven = {
        "ssl_cert_reqs": options.get("ssl_cert_reqs") == "none",
        "ssl_check_hostname": options.get("ssl_check_hostname", "true").upper() in FALSE,
        "sentinel_ssl": url.startswith("rediss") and options.get("sentinel_ssl") == "false",
    }
    for key in [key for key, is_unproven in unproven.items() if is_unproven]:
        yield warning(
            f"{place}.{key}",
            "whoever is between this machine and the server can read the password and change the answers",
            'remove it; to trust your own CA, set ssl_ca_certs = "PATH"',
        )
    if private := options.get("ssl_keyfile"):
        yield from _exposed(f"{place}.ssl_keyfile", private, f"the private key {one_line(private)}")


def _exposed(location: str, path: str, what: str) -> Iterator[Finding]:
    """A finding for a file with a secret that others can read."""
    if _everybody_reads(path):
        yield warning(location, f"every user of this machine can read {what}", "chmod 600 the file")


def _everybody_reads(path: str | Path) -> bool:
    try:
        return bool(os.stat(path).st_mode & 0o004)
    except OSError:  # the reader reports it
        return False


def _store(settings: Settings) -> Iterator[Finding]:
    yield from _path("store.url", settings.store.file)
    yield from _fleeting(settings)
    if settings.jobs and settings.store.retention_ms < DAY_MS:
        message = "the pages of a refused run are deleted before it goes on a day later"
        yield warning("store.retention", message, 'set retention = "2d" or more')
    for credential in settings.credentials.values():
        allowed_ms = credential.book.retention_ms
        if allowed_ms is not None and settings.store.retention_ms > allowed_ms:
            days = allowed_ms // DAY_MS
            message = f"after {many(days, 'day')} the terms of {credential.book.api} want data fetched again or deleted"
            yield warning("store.retention", message, f'set retention = "{days}d", or fetch everything older again')
            return


def _fleeting(settings: Settings) -> Iterator[Finding]:
    """A store without a name, in a pod's own file system, ends with the pod. The next pod has a new store."""
    shared = [job for job in settings.jobs.values() if not job.on_each_machine]
    if settings.store.name or settings.store.places_in_ledger or not shared or settings.ledger.file is not None:
        return
    kind = file_system(settings.store.file) if "KUBERNETES_SERVICE_HOST" in os.environ else ""
    if kind in ("overlay", "tmpfs"):
        message = "the store ends with this pod, and the jobs of the next pod would wait for it"
        yield warning("store.name", message, 'name it, for example name = "cluster", or keep it on a volume')


def _path(location: str, file: str | None) -> Iterator[Finding]:
    """A relative path that reads like an absolute one: `sqlite:///var/lib/x` has one slash too few."""
    if not file:
        return
    path = Path(file)
    if os.path.isdir(path.parent) or path.parent == state_folder():  # the state folder is created when it is needed
        return
    for index in range(1, len(path.parts) - 1):
        meant = Path("/", *path.parts[index:])
        if len(meant.parts) > 2 and os.path.isdir(meant.parent):
            yield warning(
                location,
                f"means {one_line(path)}, in a folder that is not there",
                f"write sqlite:///{one_line(meant)} for the absolute path",
            )
            return
    if location == "store.url":  # the ledger creates its own folder
        yield warning(location, f"folder {one_line(path.parent)} is not there", "make it, or correct the path")


# -- limits ------------------------------------------------------------------------------------------------------------


def _limits(credential: CredentialSettings) -> Iterator[Finding]:
    book = credential.book
    for index, limit in enumerate(credential.limits):
        if limit.shadow:
            continue
        location, selector = f"credentials.{credential.name}.limits[{index}]", limit.view.selector
        costs = {method: book.least_units(replace(selector, methods=(method,))) for method in selector.methods}
        for what, units in (costs or {"the cheapest call": book.least_units(selector)}).items():
            if limit.limit_units < units:
                message = f"limit {limit.name!r} holds {limit.limit_units:,}, and {what} costs {units:,}: it never fits"
                yield problem(location, message, f"raise the limit to {units:_} or more")
        units_of = {method: book.price(method).counted_by(selector) for method in book.methods}
        dear = [method for method, units in units_of.items() if limit.limit_units < units <= limit.quota_units]
        if dear and not selector.methods:  # upstream would admit them
            costs_units = f"{'reserves' if book.price(dear[0]).reserved else 'costs'} {units_of[dear[0]]:,}"
            message = f"limit {limit.name!r} holds {limit.limit_units:,}, and {dear[0]} {costs_units}: it never fits"
            yield warning(location, message, "lower the headroom, or ignore this if nobody makes this call")
    for bucket in book.buckets.values():
        yield from _uncovered(bucket, credential)


def _uncovered(bucket: Bucket, credential: CredentialSettings) -> Iterator[Finding]:
    """Findings for a bucket that no limit covers, or whose limits allow too much inside upstream's own window."""
    location = f"credentials.{credential.name}.limits"
    whole = [limit for limit in credential.limits if covers(limit, bucket.name, credential.book)]
    if not whole:
        some = bucket not in unlimited(credential.limits, credential.book)
        message = f"no limit counts {'all calls' if some else 'any call'} of bucket {bucket.name!r}"
        yield Finding("warning" if some else "error", location, message, bucket.limit_to_add)
        return
    for quota in bucket.quotas:
        yield from _uncounted(bucket, quota, whole, location)


def _uncounted(bucket: Bucket, quota: Quota, whole: Sequence[Limit], location: str) -> Iterator[Finding]:
    """A finding if the limits that cover a bucket allow too much inside one of upstream's windows."""
    window = quota.window

    def most_units(limit: Limit) -> int:
        """One of upstream's periods can overlap several windows of the limit, and each of them can be full."""
        own = limit.view.window
        if own == window:
            return limit.limit_units
        windows = -(-window.longest_ms // own.longest_ms)
        if isinstance(own, Calendar):
            windows += 1
        return windows * limit.limit_units

    most = min(map(most_units, whole))
    if most > quota.units:
        period = f"one {window.spelled_out()}" if isinstance(window, Calendar) else f"any {window.name}"
        yield warning(
            location,
            f"{many(most, 'unit')} of bucket {bucket.name!r} fit into {period}, and upstream grants {quota.units:,}",
            f"add or lower a limit with window = {as_written(window)}, or ignore this if upstream granted more",
        )


def _limited_jobs(credential: CredentialSettings, jobs: Mapping[str, None]) -> Iterator[Finding]:
    for index, limit in enumerate(credential.limits):
        for name in limit.view.selector.jobs:
            if name not in jobs:
                yield warning(
                    f"credentials.{credential.name}.limits[{index}].jobs",
                    f"no job {name!r} is configured for this project",
                    f"ignore this if scripts charge under that name; its jobs: {listed(jobs) or 'none'}",
                )


# -- keys --------------------------------------------------------------------------------------------------------------


def _key(credential: CredentialSettings, built_in: bool) -> Iterator[Finding]:
    """`built_in`: a built-in job calls with this credential."""
    location, ref = f"credentials.{credential.name}.key", credential.key_ref
    if ref is not None:
        yield from _secret(location, ref, "key")
    elif credential.endpoint is None and credential.auth_ref is None:
        message = "there is no key, so the API answers only programs that bring their own"
        yield Finding("error" if built_in else "warning", location, message, 'add key = "env:NAME" or "file:/path"')


def _secret(location: str, ref: str, what: str, *, setting: str = "", insecure: bool = False) -> Iterator[Finding]:
    """Findings about a secret that each call sends, or about the address of a webhook or of a health check, which is at
    a `setting`: whether it is there, and who else can read it."""
    try:
        if setting:
            read_address(ref, setting, insecure=insecure)
        else:
            read_key(ref, what)
    except ConfigError as error:
        yield finding_of("warning", location, error, "make it readable")
        return
    if ref.startswith("file:"):
        yield from _exposed(location, ref.removeprefix("file:"), f"the {what} file")


def _shared(settings: Settings) -> Iterator[Finding]:
    """Findings for one key, token or `cloud_project` under two project names: upstream sees one project, so both would
    spend its quota. And for one project with two of `cloud_project`: their counts would mix."""
    first: dict[tuple[str, ...], CredentialSettings] = {}
    clouds: dict[str, CredentialSettings] = {}
    for credential in settings.credentials.values():
        location, ref = f"credentials.{credential.name}", credential.key_ref or credential.auth_ref or ""
        shared: list[tuple[str, ...]] = []
        if ref.startswith(("env:", "file:", "bearer:")):  # an account may call for any project
            shared.append(("token" if ref.startswith("bearer:") else "key", credential.book.api, ref))
        if credential.cloud_project is not None:
            shared.append(("cloud_project", credential.cloud_project))
            same = clouds.setdefault(credential.project, credential)
            if same.cloud_project != credential.cloud_project:
                yield problem(
                    f"{location}.cloud_project",
                    f"credential {same.name!r} of the same project {credential.project!r} has another one",
                    "give both the same, or different projects",
                )
        for what, *value in shared:
            other = first.setdefault((what, *value), credential)
            if other.project != credential.project:
                yield problem(
                    f"{location}.project",
                    f"the same {what} as credential {other.name!r}, whose project is {other.project!r}: upstream "
                    "counts them as one",
                    f"give both the same project, for example {other.project!r}",
                )


# -- reconciling -------------------------------------------------------------------------------------------------------


def _auth(credential: CredentialSettings) -> Iterator[Finding]:
    """Findings about credentials without a key, and about the needs of `quota reconcile`."""
    location, ref = f"credentials.{credential.name}", credential.auth_ref or ""
    kind, _, path = ref.partition(":")
    if kind == "bearer":
        yield from _secret(f"{location}.auth", path, "token")
    elif path:
        yield from _exposed(f"{location}.auth", path, "this file")
    asks = credential.key_ref is None and kind in ("adc", "service-account")
    if credential.scopes != credential.book.scopes and not asks:
        remedy = 'remove them, or add auth = "adc" or "service-account:PATH"'
        yield warning(f"{location}.scopes", "have no effect: only an account asks for them", remedy)
    if credential.cloud_project is None:
        if ref and credential.key_ref is not None:
            yield warning(f"{location}.auth", "has no effect beside a key", "add cloud_project, or remove auth")
        return
    if credential.book.monitoring is None:
        message = f"`quota reconcile` can compare nothing: cost book {credential.book.name!r} has no [monitoring]"
        yield warning(f"{location}.cloud_project", message, "remove the key, or add the table to the book")
    if not ref and credential.endpoint is None:
        remedy = 'add "adc", "service-account:PATH" or "authorized-user:PATH"'
        yield warning(f"{location}.auth", "missing: `quota reconcile` may not read the project's figures", remedy)


# -- jobs --------------------------------------------------------------------------------------------------------------


def _job(settings: Settings, job: JobSettings, limits: Mapping[str, Limit]) -> Iterator[Finding]:
    location, book = f"jobs.{job.name}", settings.credentials[job.credential].book
    for name, left in job.leave.items():
        limit = limits[name]
        least = book.least_units(limit.view.selector)
        if not limit.shadow and limit.limit_units - left < least <= limit.limit_units:
            yield problem(
                f"{location}.leave",
                f"leaves {left:,} of the {limit.limit_units:,} of limit {name!r}: no call of this job fits",
                f"leave {limit.limit_units - least:_} or less",
            )
    method = BUILT_IN_FETCHES.get(job.fetch)
    # Another check names an unknown method.
    dearest = book.price(method).units if method is not None and method in book.methods else 0
    if job.max_units is not None and dearest > job.max_units:
        yield problem(
            f"{location}.max_units",
            f"a call of this job costs {many(dearest, 'unit')}, more than {job.max_units:,}: it could never be made",
            f"raise it to {dearest:_} or more",
        )
    if job.schedule is not None and job.misfire_grace_ms < SECOND_MS:
        grace = format_duration(job.misfire_grace_ms)
        message = f"a tick starts some milliseconds late, and after {grace} it is dropped"
        yield warning(f"{location}.misfire_grace", message, 'set "1m" or more')
    if job.ping_ref is not None:
        insecure = job.insecure_endpoint
        yield from _secret(f"{location}.ping", job.ping_ref, "address", setting="ping", insecure=insecure)
    if job.on_each_machine and settings.ledger.file is not None:
        remedy = "give all machines one redis:// ledger, or remove the key"
        yield warning(f"{location}.machines", "has no effect with an embedded ledger", remedy)
    elif job.on_each_machine and settings.machines_of(job) == 1:
        message = '"each" without the number of machines: `quota plan` counts the job once'
        yield warning(f"{location}.machines", message, "give their number in unavailable = { machines = N }")
    if settings.store.places_in_ledger and job.fetch in STORE_FETCHES:
        message = f'{job.fetch!r} keeps its place in its own store: with places = "ledger" another machine begins anew'
        yield warning(f"{location}.fetch", message, 'keep its store on a disk that lasts, with places = "store"')


# -- a cost book -------------------------------------------------------------------------------------------------------


def lint_book(book: CostBook) -> Iterator[Finding]:
    """Findings about a cost book that has no errors."""
    location = f"cost book {book.name}"
    priced = {**book.methods, "default.get": (book.default_get,), "default.other": (book.default_other,)}
    bounds = [method for method, prices in priced.items() if any(price.reserved for price in prices)]
    if bounds and book.answers.units is None:  # unsettled bounds would soon fill the budget
        message = f"{', '.join(bounds[:3])}: `answers` has no `units` that say what a call with `reserve` cost"
        remedy = 'add for example units = { json = "/usage/total" }, or settle each call in your program'
        yield warning(location, message, remedy)
    if book.answers.units is not None and not bounds:
        message = "`units` of `answers` changes nothing: it settles calls with `reserve`, and every price is fixed"
        yield warning(location, message, "write { reserve = { default = UNITS } } in place of the price of such a call")
    for number, match in enumerate(book.answers.free):
        if match.status == 200 and not match.reads_body:
            message = f"answers.free[{number}]: every good answer has status 200, so no call would count"
            yield warning(location, message, "add `body` or `json` to match only those that upstream does not count")
    for number, rule in enumerate(book.answers.closed):
        named = [book.buckets[rule.bucket]] if rule.bucket in book.buckets else [*book.buckets.values()]
        window = max((bucket.window for bucket in named), key=lambda window: window.longest_ms)
        if isinstance(rule.lasts, int) and rule.lasts > max(DAY_MS, window.longest_ms):
            lasts = f"answers.closed[{number}]: lasts = {format_duration(rule.lasts)!r}"
            message = f"{lasts} closes a bucket for longer than a day, and than its longest window of {window.name}"
            yield warning(location, message, "write a shorter time; ignore this if upstream refuses calls for so long")
    for method, prices in book.methods.items():
        for part in prices[-1].parts:
            quota = min(book.buckets[part.bucket].quotas, key=lambda quota: quota.units)
            if part.units > quota.units:
                does = "reserves" if part.reserve else "costs"
                costs = f"{method} {does} {many(part.units, 'unit')} of bucket {part.bucket!r}"
                message = f"{costs}, and the quota is {quota.units:,} per {quota.window.name}: it never fits"
                yield warning(location, message, "correct one of them; ignore this if upstream granted you more")


def age_days(book: CostBook, at_ms: int) -> int:
    """How many days ago a book was read at its source."""
    return (utc(at_ms).date() - book.read_on).days


def ageing(book: CostBook, at_ms: int) -> Iterator[Finding]:
    """`book_old` for a book that was read more than 180 days ago, and each price that changes within 30 days."""
    location, days = f"cost book {book.name}", age_days(book, at_ms)
    if days > OLD_DAYS:
        message = f"book_old: its prices were read {many(days, 'day')} ago, on {book.read_on}"
        remedy = f"compare it with {book.source}, and write today's date into a book of your own"
        yield warning(location, message, remedy)
    if days < -1:  # somewhere it may be tomorrow already
        message = f"{book.read_on} is yet to come"
        yield warning(location, message, "write into read_on the day when you read its prices")
    for method in book.methods:
        price, _ = book.price_at(method, at_ms)
        for since_ms, coming in book.coming(method, at_ms):
            if since_ms <= at_ms + SOON_DAYS * DAY_MS:
                message = f"{method} costs {coming} from {coming.since} on, and {price} until then"
                yield warning(location, message, "see whether its limits still fit")
            price = coming
