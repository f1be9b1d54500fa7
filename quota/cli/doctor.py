"""The findings of `quota check` and `quota doctor`, about the configuration, the ledger, this machine and the keys.

    check       the findings of `quota check`
    examine     the findings of `quota doctor`. Only with `call` does it spend anything
    acl_lines   the commands of `quota doctor --acl`, which give Redis users the rights that they need

None of them changes anything, but for charges that the ledger has lost: whoever looks first puts them back.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from importlib.metadata import entry_points

from quota.cli.output import quiet_libraries
from quota.clients.upstream_errors import answer_in, classify
from quota.common.clock import host_clock, moment, stamp
from quota.common.findings import Finding, Level, examine_folder, finding_of, obstacle, problem, ranked, warning
from quota.common.redact import redact
from quota.common.text import describe, many, one_line
from quota.deciding.history import entries
from quota.deciding.repairs import ahead as ahead_of
from quota.errors import BadAnswer, ConfigError, LedgerError, QuotaError, Refused, UnusableLedger, UsageError
from quota.journal.journal import Journal
from quota.ledger.factory import backend_of
from quota.ledger.log import MAX_READ
from quota.ledger.redis_needs import COMMANDS, OF_A_CLUSTER, OF_A_SENTINEL, acl_line, pattern_of
from quota.ledger.redis_url import database_of, sentinels_user_of, user_of
from quota.reports.status import allowances
from quota.rules.entry import just_before
from quota.rules.facts import merged
from quota.rules.spent import spent
from quota.session import Session, begin_to_read, login_of, projects_left, projects_of
from quota.settings.lint import ageing, lint
from quota.settings.model import NO_FILE, CredentialSettings, NotifySettings, Settings, state_folder
from quota.settings.references import read_address
from quota.terms.costs import CostBook
from quota.terms.limits import DAY_MS, MINUTE_MS, SECOND_MS, Selector
from quota.wording import Line, Part, Tone, lost

PEEKS = 20
SLOW_MS = 100
"""A job of 30 pages waits 3 s for a ledger that answers no faster."""

CLOCK_WARNING_MS, CLOCK_ERROR_MS = 1_000, 5_000

CALL_WITHIN_S = 20
USER, INBOUND_USER, SENTINEL_USER = "quota", "inbound", "quota"
"""The users for a url without a user."""

UNAVAILABLE = "ledger.unavailable"
"""The place of findings on an allowance that cannot be drawn."""

_LEVEL_TONE: dict[Level, Tone] = {"error": "verdict", "warning": "note", "ok": "good"}


# -- check -------------------------------------------------------------------------------------------------------------


def check(session: Session) -> list[Finding]:
    """All findings about a session's configuration, its ledger and its allowance, errors first."""
    session.warns_of_projects_left = False  # a finding says that
    return ranked(
        [
            *_of_file(session),
            *ask_ledger(session),
            *_journals(session),
            *(finding for finding in _allowances(session) if finding.location == UNAVAILABLE),
            *_accounts(session.settings),
            *_after_runs(session.settings),
            *(finding for book in _books(session) for finding in ageing(book, host_clock())),
        ]
    )


def _of_file(session: Session) -> list[Finding]:
    """The findings about the configuration file itself, which `quota doctor` only counts."""
    missing = [] if session.settings.path else [warning("configuration", NO_FILE, "run `quota init`")]
    return [*missing, *lint(session.settings), *_renamed(session)]


def _accounts(settings: Settings) -> Iterator[Finding]:
    """The files of accounts that no call can use. The account of `adc` is looked for when a run begins."""
    for name, credential in settings.credentials.items():
        if credential.auth_ref is not None and credential.auth_ref.startswith(("service-account:", "authorized-user:")):
            try:
                login_of(credential)
            except ConfigError as error:
                why = str(error).partition(": auth: ")[2]
                yield finding_of("warning", f"credentials.{name}.auth", why, "make it readable")


def _after_runs(settings: Settings) -> Iterator[Finding]:
    """The folder and the program that a run needs when it ends, if they are missing: nobody would notice before."""
    keys = {"textfile folder": "textfile", "notify command": "notify.command"}
    named = () if settings.notify is None else _named(settings.notify)
    for finding in (*_textfile(settings.textfile), *named):
        if finding.level == "error" and finding.location in keys:
            yield replace(finding, level="warning", location=keys[finding.location])


def _books(session: Session) -> Collection[CostBook]:
    """The cost books of a session's credentials, each once."""
    return {c.book.name: c.book for c in session.settings.credentials.values()}.values()


def _journals(session: Session) -> Iterator[Finding]:
    """What the journals of this machine show: one that cannot be used stops no call while the ledger answers, and
    nobody would notice before an outage; and a project that is counted apart."""
    for name in (settings.name for settings in projects_of(session).values()):
        try:
            project = session.project(name)
        except ConfigError:  # `_state_folder` says why
            return
        journal = project.journal
        if journal is None:
            continue
        if not journal.exists:  # a lock would make it
            journal.check_writable()
            yield from _unusable(journal, project.name)
            continue
        try:
            with journal.locked():
                journal.newest("")
                journal.notes()
                journal.check_writable()
            for owner, units in journal.draws.owed_by_others().items():
                why = f"the configuration {one_line(owner)} owes {many(units, 'unit')} that it drew without the ledger"
                yield warning(f"project {project.name}", why, "run `quota status` with that configuration")
        except LedgerError as error:
            yield finding_of("warning", f"journal of {project.name}", error, "let the process that holds it end")
        yield from _unusable(journal, project.name)
        with suppress(LedgerError, OSError):
            apart = journal.apart(project.log.begin(project.name).epoch)
            for last in [*apart]:  # a moved or repaired log has a new epoch and the same entry
                if any(
                    entry.id == last for entry in project.log.read(project.name, just_before(last[0]), last, MAX_READ)
                ):
                    del apart[last]
            apart_ms = max(apart.values(), default=0)
            if apart_ms > host_clock() - project.longest_ms:
                why = f"another configuration charged it in another ledger at {stamp(apart_ms)}; upstream sees the sum"
                yield warning(f"project {project.name}", why, "name one ledger in both, or another project in each")


def _unusable(journal: Journal, project: str) -> Iterator[Finding]:
    if journal.trouble:
        why = f"{journal.trouble}; entries are kept in memory, so a loss of the ledger may stay unnoticed"
        yield warning(f"journal of {project}", why, "mend that folder or disk")


def _allowances(session: Session) -> Iterator[Finding]:
    """The allowance of this machine. Nobody would notice before an outage that it is used up or cannot be drawn."""
    for project, allowance in allowances(session).items():
        if allowance.trouble:
            yield finding_of("warning", UNAVAILABLE, allowance.trouble)
        elif allowance.remaining_units:
            yield Finding("ok", f"allowance of {project}", str(allowance))
        else:
            yield warning(f"allowance of {project}", str(allowance), "until then no call leaves without the ledger")


def _renamed(session: Session) -> Iterator[Finding]:
    """A credential without `project` that gets another name charges a new budget from then on."""
    for name, until_ms in projects_left(session):
        yield warning(
            "credentials",
            f"charges for project {name!r} count here until {moment(until_ms)}, but no credential has that project "
            "now: a renamed credential has a new budget, its jobs begin anew, and upstream counts both together",
            f'if you renamed a credential, add project = "{name}" to it',
        )


def _in_other_buckets(session: Session) -> Iterator[Finding]:
    """Charges from before the present cost book, in another bucket than it has for their method: its limits may miss
    them. Raises LedgerError."""
    for settings in projects_of(session).values():
        project, book = session.project(settings.name), settings.book.at(host_clock())
        misses = _misses([limit.view.selector for limit in settings.limits], book)
        since = just_before(project.now_ms() - project.longest_ms)
        missed: dict[tuple[str, str], list[int]] = {}
        for charge in spent(x for x in entries(project, since) if misses(x.bucket, x.method, x.job)):
            if charge.units:
                missed.setdefault((charge.method, charge.bucket), []).append(charge.id[0])
        for (method, bucket), times in missed.items():
            yield warning(
                f"credentials.{settings.name}.api",
                f"bucket {bucket!r} has {many(len(times), 'charge')} of {method}, which cost book {book.name} charges "
                f"elsewhere: limits there miss them until {moment(times[-1] + project.longest_ms)}",
                "make that many fewer calls until then: upstream may count them",
            )


def _misses(selectors: Sequence[Selector], book: CostBook) -> Callable[[str, str, str], bool]:
    """Whether a limit counts the calls of a method and a job now, and misses their charges in this bucket. Asked once
    for each charge of a long log, so it keeps its answers."""

    @cache
    def misses(bucket: str, method: str, job: str) -> bool:
        buckets = [part.bucket for price in book.methods.get(method, ()) for part in price.parts]
        missing = [selector for selector in selectors if not selector.counts(bucket, method, job)]
        return bucket not in buckets and any(x.counts(now, method, job) for x in missing for now in buckets)

    return misses


def ask_ledger(session: Session) -> list[Finding]:
    """What is wrong with the ledger, as far as `begin_to_read` tells.

    A ledger that no command can use, for example of another format, is an error. A ledger that does not answer now is a
    warning. Does not create a missing ledger file.
    """
    settings = session.settings
    path = settings.ledger.file
    if path is not None:
        prevented = obstacle(path)
        if prevented is not None:
            why, remedy = prevented
            return [warning("ledger.url", f"ledger {one_line(settings.ledger.url)} cannot be opened: {why}", remedy)]
        if not os.path.lexists(path):
            return []
    try:
        unwritable = begin_to_read(session)
        findings = [*_in_other_buckets(session)]
    except ConfigError:  # `lint` reports it
        return []
    except LedgerError as error:
        level: Level = "error" if isinstance(error, UnusableLedger) else "warning"
        return [finding_of(level, "ledger.url", error, "see `quota doctor`")]
    return [finding_of("warning", "ledger.url", unwritable, "see `quota doctor`")] if unwritable else findings


# -- doctor ------------------------------------------------------------------------------------------------------------


def examine(session: Session, *, call: bool = False, notify: bool = False) -> list[Finding]:
    """All findings about a session, errors first. With `call`, each credential makes one cheap call; with `notify`, a
    test event is sent."""
    findings = [*_configuration(session)]
    if session.settings.credentials:  # inbound limits alone need none
        findings += _ledger(session, [credential.name for credential in projects_of(session).values()])
    for credential in session.settings.credentials.values():
        findings += _key(session, credential, call=call)
    for book in _books(session):
        fine = Finding("ok", f"cost book {book.name}", f"read on {book.read_on}")
        findings += list(ageing(book, host_clock())) or [fine]
    findings += _state_folder()
    findings += _journals(session)
    findings += _allowances(session)
    findings += _textfile(session.settings.textfile)
    findings += _notified(session.settings, notify)
    # Findings of other packages: an entry point is a function `(session) -> iterable of Finding`.
    for point in entry_points(group="quota.doctor"):
        findings += point.load()(session)
    return ranked(findings)


def _configuration(session: Session) -> Iterator[Finding]:
    settings = session.settings
    if settings.path is None:
        yield _of_file(session)[0]
        return
    levels = [finding.level for finding in _of_file(session)]
    errors, warnings = levels.count("error"), levels.count("warning")
    if levels:
        counts = ", ".join(many(n, what) for n, what in ((errors, "error"), (warnings, "warning")) if n)
        yield Finding("error" if errors else "warning", "configuration", counts, "run `quota check`")
    else:
        yield Finding("ok", "configuration", settings.source)


# -- the ledger --------------------------------------------------------------------------------------------------------


def _ledger(session: Session, names: list[str]) -> Iterator[Finding]:
    try:
        ledger = session.ledger
    except ConfigError as error:
        yield finding_of("error", "ledger", error)
        return
    path = session.settings.ledger.file or ""
    prevented = obstacle(path) if os.path.lexists(path) else None
    reported = prevented is not None
    if prevented:
        why, remedy = prevented
        yield problem("ledger", f"{ledger.label} accepts no charges: {why}", remedy)
    if path and not os.path.exists(path):
        if not prevented:
            yield from _missing(session, names)
        yield from ledger.examine(session.credential(names[0]).project)
        return
    try:
        for name in names:  # first: a peek gives a key the lifetime that it lacks
            for finding in ledger.examine(session.credential(name).project):
                if name == names[0] or finding.location == "server keys":  # the rest is the same for every project
                    reported |= finding.level == "error" and finding.location == "ledger file"
                    yield finding
        yield _clock(session)  # before a peek, which clocks that disagree refuse
        yield _speed(session, names[0])
        for name in names:
            yield from _ahead(session, session.credential(name).project)
            yield from _lost(session, name)
        yield from _in_other_buckets(session)
    except LedgerError as error:
        if not reported:
            admits = "no call is" if session.settings.ledger.unavailable is None else "only calls on the allowance are"
            yield finding_of("error", "ledger", error, f"{admits} admitted until it answers")


def _missing(session: Session, names: list[str]) -> Iterator[Finding]:
    """A missing ledger file: no charge has made it yet, or somebody took it away."""
    journals = [journal for name in names if (journal := session.project(name).journal) is not None]
    seen = {entry.key for journal in journals for _, entry in journal.records() if entry.kind == "charge"}
    label = session.ledger.label
    if seen:
        lost = f"{label} is gone, with {many(len(seen), 'charge')} that this machine saw; the next call puts them back"
        yield warning("ledger", lost, f"{_needs_after(journals)}; find out who deleted or moved the file")
    else:
        yield Finding("ok", "ledger", f"{label} is not there yet; the first charge makes it")


def _state_folder() -> Iterator[Finding]:
    named, folder = os.environ.get("QUOTA_STATE_DIR", ""), state_folder()
    if named and not os.path.isabs(os.path.expanduser(named)):
        yield warning(
            "state folder",
            f"QUOTA_STATE_DIR={one_line(named)} is relative: a command that starts in another folder uses another "
            "state folder, and does not see this state",
            f"QUOTA_STATE_DIR={one_line(folder)}",
        )
    yield from examine_folder("state folder", folder, "what this machine saw, and what it owes")


def _speed(session: Session, name: str) -> Finding:
    from statistics import median

    budget, took_ms = session.budget(name), []
    for _ in range(PEEKS):
        started_s = time.perf_counter()
        budget.usage()
        took_ms.append((time.perf_counter() - started_s) * 1000)
    p50_ms = median(took_ms)
    message = f"{session.ledger.label} answers in {p50_ms:.1f} ms (median of {PEEKS} peeks)"
    if p50_ms > SLOW_MS:
        return warning("ledger", message, "find out what keeps the server busy, or move it nearer")
    return Finding("ok", "ledger", message)


def _clock(session: Session) -> Finding:
    if not session.ledger.shared:
        return Finding("ok", "clock", "the ledger uses the clock of this machine")
    before_ms = host_clock()
    ledger_ms = session.ledger.now_ms()
    after_ms = host_clock()
    # The ledger read its clock somewhere between our two readings.
    off_ms = max(before_ms - ledger_ms, 0) - max(ledger_ms - after_ms, 0)
    if abs(off_ms) < CLOCK_WARNING_MS:
        return Finding("ok", "clock", "the clocks of this machine and of the ledger agree to the second")
    way = "ahead of" if off_ms > 0 else "behind"
    return Finding(
        "error" if abs(off_ms) >= CLOCK_ERROR_MS else "warning",
        "clock",
        f"this machine's clock ({stamp(after_ms)}) is {abs(off_ms) / SECOND_MS:,.1f} s {way} the ledger's",
        "synchronize both by NTP",
    )


def _ahead(session: Session, project: str) -> Iterator[Finding]:
    """The charges that a wrong clock dated in the future."""
    ahead = ahead_of(session.ledger, project)
    if ahead.newest_ms - ahead.now_ms > MINUTE_MS:  # clocks of machines may differ a little
        charges = f"{many(ahead.charges, 'charge')} of {many(ahead.units, 'unit')}"
        yield warning(
            f"project {project}",
            f"a clock was wrong and dated {charges} ahead, the newest {stamp(ahead.newest_ms)}",
            "if the clocks are right now, run `quota ledger repair`",
        )


def _lost(session: Session, name: str) -> Iterator[Finding]:
    """The charges that the ledger lost in the last week. They are back, but it may happen again."""
    session.budget(name).usage()  # the first to look puts back what the ledger has lost
    project, cause = session.project(name), "the file was deleted or replaced by an old copy"
    if session.ledger.shared:
        cause = "the server was emptied (FLUSHALL), evicted keys, restarted without its data or got an old copy"
    since_ms = project.now_ms() - 7 * DAY_MS
    if recent := [loss for loss in merged(project.reading.facts.losses) if loss.at_ms > since_ms]:
        needs = _needs_after([] if project.journal is None else [project.journal])
        remedy = f"{needs}; find out whether {cause}, or ledger.url was changed"
        yield warning(f"project {project.name}", lost(recent), remedy)


def _needs_after(journals: Sequence[Journal]) -> str:
    """What the budget needs after a loss, as far as this machine's journals tell."""
    for journal in journals:
        with suppress(LedgerError), journal.locked():
            journal.check_writable()
    if any(journal.trouble for journal in journals):
        return "charges that this machine could not note may be missing: compare with `quota reconcile`"
    return "the budget needs nothing"


# -- credentials -------------------------------------------------------------------------------------------------------


def _key(session: Session, credential: CredentialSettings, *, call: bool) -> Iterator[Finding]:
    location = f"key of {credential.name}"
    try:
        session.check_key(credential.name)
    except ConfigError as error:
        yield finding_of("error", location, error)
        return
    if credential.key_ref is credential.auth_ref is credential.endpoint is None:
        yield warning(location, "the credential has no key", 'add key = "env:NAME" or "file:/path"')
    elif call:
        yield _call(session, credential, location)
    else:
        logins = {None: f"none, for {credential.endpoint}", "adc": "an account that the first call looks for"}
        there = "there" if credential.key_ref else logins.get(credential.auth_ref, "there")
        tries = "" if credential.book.described else "; `quota doctor --call` tries it with one call"
        yield Finding("ok", location, f"{there}{tries}")


def _call(session: Session, credential: CredentialSettings, location: str) -> Finding:
    """Make the cost book's probe: one charged attempt."""
    quiet_libraries()
    book = credential.book.at(host_clock())
    if book.described:
        return warning(location, "not tried: only Google's clients make such a call", "make a call of your own")
    if book.probe is None:
        return warning(location, f"not tried: cost book {book.name} has no [probe]", "add [probe] to it")
    method, parameters = book.probe
    charged = [f"{part.units:,} of bucket {part.bucket}" for part in book.price(method).parts]
    cost = f"{method}, {' and '.join(charged) or 'free'}"
    resource = session.google(credential.name, book.api, book.version, max_body_mb=1, max_answer_s=CALL_WITHIN_S)
    *path, verb = method.split(".")
    try:
        for part in path:
            resource = getattr(resource, part)()
        getattr(resource, verb)(**parameters).execute()
    except Refused as refusal:
        return warning(location, f"not tried: {refusal.decision.sentence()}", "see `quota status`")
    except BadAnswer as error:
        return problem(location, redact(str(error)), "check `endpoint`, and the proxies of this machine")
    except QuotaError as error:
        return finding_of("error", location, error, "see `quota status`")
    except Exception as error:  # whatever the client raises
        reason, answer = redact(describe(error)), answer_in(error)
        if answer is None:
            return problem(location, f"upstream did not answer: {reason}", "check network and `endpoint`")
        cause = classify(answer.status, answer.body, method=method, book=book)
        if cause.kind == "transient_server":
            return warning(location, f"upstream is in trouble: {reason}", "run it again later")
        if cause.kind == "project_blocked":
            return problem(location, f"upstream does not accept it: {reason}", "ask upstream for quota")
        if cause.kind in ("config", "request"):
            remedy = cause.remedy or "check the key and what it may call"
            return problem(location, f"upstream does not accept it: {reason}", remedy)
        return warning(location, f"upstream admits no call now: {reason}", "see `quota status`")
    return Finding("ok", location, f"upstream accepts it ({cost})")


# -- notices, and the findings of other packages -----------------------------------------------------------------------


def _textfile(folder: str | None) -> Iterator[Finding]:
    if folder is not None and not os.path.isdir(folder):
        yield problem("textfile folder", f"{one_line(folder)} is not a folder", "make it, or correct the path")
    elif folder is not None:
        yield from examine_folder("textfile folder", folder, "the metrics", alone=False)


def _notified(settings: Settings, test: bool) -> Iterator[Finding]:
    """Whether each notice can arrive: nobody would notice a wrong address before it is needed. With `test`, a test
    event is sent each way."""
    notify = settings.notify
    if notify is None and test:
        yield problem("notify", "the configuration has no [notify]", 'add it, for example command = ["PROGRAM"]')
    elif notify is not None and not test:
        yield from _named(notify)
    elif notify is not None:
        from quota.reports.notify import TEST, send_test

        projects = ", ".join(dict.fromkeys(c.project for c in settings.credentials.values()))
        for way, failure in send_test(notify, projects, "a test by `quota doctor --notify`: nothing is wrong"):
            if failure:
                yield problem(f"notify {way}", f"the test event did not arrive: {failure}", "correct it, try again")
            else:
                took = "took the test event" if way == "url" else "read the test event and exited with 0"
                yield Finding("ok", f"notify {way}", f"it {took} (event {TEST!r})")
    for job in settings.jobs.values():
        if job.ping_ref is not None:
            yield _address(f"ping of {job.name}", job.ping_ref, "ping", insecure=job.insecure_endpoint)


def _named(notify: NotifySettings) -> Iterator[Finding]:
    if notify.command:
        program = one_line(notify.command[0])
        if shutil.which(notify.command[0]) is None:
            yield problem("notify command", f"{program} is not a program", "correct the path, or chmod +x it")
        else:
            yield Finding("ok", "notify command", program)
    if notify.url_ref is not None:
        yield _address("notify url", notify.url_ref, "url", insecure=notify.insecure_endpoint)


def _address(location: str, ref: str, setting: str, *, insecure: bool) -> Finding:
    try:
        read_address(ref, setting, insecure=insecure)
    except ConfigError as error:
        return finding_of("error", location, error, "until then, no notice arrives")
    return Finding("ok", location, "there")


def finding_parts(findings: Sequence[Finding]) -> Iterator[Part]:
    """A paragraph for each finding, with its remedy on a line of its own, and the numbers at the end."""
    for finding in findings:
        yield Line(f"{finding.level:<8}{finding.location}", _LEVEL_TONE[finding.level])
        yield Line(f"        {finding.message}")
        if finding.remedy:
            yield Line(f"        -> {finding.remedy}")
    levels = [finding.level for finding in findings]
    errors, warnings = (many(levels.count(level), level) for level in ("error", "warning"))
    yield Line(f"{errors}, {warnings}, {levels.count('ok')} ok", "strong")


# -- doctor --acl: it contacts nothing ---------------------------------------------------------------------------------


def acl_lines(settings: Settings, projects: Sequence[str]) -> list[str]:
    """A line for the user of the ledger, and for the users of its sentinels and of the inbound storage, if any."""
    for project in projects:
        if not re.fullmatch(r"[A-Za-z0-9._:-]{1,64}", project):
            raise UsageError(f"project {project!r}: a name in Redis is 1 to 64 of A-Z a-z 0-9 . _ : -")
    url, inbound = _of_redis(settings.ledger.url), ""
    if settings.inbound is not None:
        from quota.inbound.configured import rules_of

        rules = rules_of(settings)
        inbound = "" if rules is None else _of_redis(rules.url or "")
    servers: list[tuple[str, str, list[str], Sequence[str]]] = []
    if settings.credentials or not inbound:
        servers.append((url, USER, [pattern_of(project) for project in projects or ("*",)], COMMANDS))
    if inbound:
        from quota.inbound.redis_storage import COMMANDS as OF_INBOUND
        from quota.inbound.redis_storage import KEYS as INBOUND_KEYS

        servers.append((inbound, INBOUND_USER, [INBOUND_KEYS], OF_INBOUND))
    rights: dict[str, tuple[list[str], list[str]]] = {}
    for server, default, keys, commands in servers:
        user, userinfo = user_of(server), server.partition("?")[0].partition("://")[2].rpartition("@")[0]
        # A single word before the @ may be a password by mistake, so it is not shown.
        user = default if user == "default" or (userinfo and ":" not in userinfo) else user
        # The commands that a client needs before it reaches the keys.
        way = (*(OF_A_CLUSTER if "+cluster:" in server else ()), *(("select",) if database_of(server) else ()))
        other_keys, other_commands = rights.get(user, ([], []))  # one user, maybe on two servers
        rights[user] = [*other_keys, *keys], [*dict.fromkeys((*other_commands, *commands, *way))]
    lines = [acl_line(user, *of_user) for user, of_user in rights.items()]
    if "+sentinel:" in url:
        lines.insert(1, acl_line(sentinels_user_of(url) or SENTINEL_USER, [], OF_A_SENTINEL))
    return lines


def _of_redis(url: str) -> str:
    """The url, if its server has an ACL; else empty: a user with a file may prepare a move to Redis."""
    return url if url and backend_of(url).is_server else ""
