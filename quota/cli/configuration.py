"""The commands about configuration: init, check, doctor."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import replace
from string import Template
from typing import TYPE_CHECKING

import click

from quota.cli.options import PATH, Options, apart, shared
from quota.cli.output import fail_each, print_as, say, unwound
from quota.common.files import path_of, read_text, readable
from quota.common.findings import Finding
from quota.common.text import listed, many
from quota.errors import ConfigError, QuotaError
from quota.reports.metrics import write_file
from quota.session import Session
from quota.settings.books import as_written, book_names, default_limits, load_book
from quota.settings.load import load_settings
from quota.settings.model import DEFAULT_HEADROOM_PERCENT
from quota.settings.toml import in_toml
from quota.terms.api import GOOGLES_KEY, KeyPlace
from quota.terms.costs import CostBook

if TYPE_CHECKING:
    from collections.abc import Sequence

ELSEWHERE = "https://api.example.com"
"""The address for an API that has another host for each customer."""


@click.command()
@click.argument("path", default="quota.toml", type=click.Path())
@click.option("--force", is_flag=True, help="Replace an existing file.")
@click.option("--api", metavar="NAME", type=PATH, help="A cost book: a name of `quota book list`, or a file.")
@click.option("--full", is_flag=True, help="Write every setting.")
def init(path: str, force: bool, api: str | None, full: bool) -> None:
    """Write a commented configuration to PATH [default: quota.toml].

    The file has the settings that most people need. Its first line names the JSON Schema of this installation, so an
    editor with TOML support completes and checks the file.

    \b
    Example:
      quota init && $EDITOR quota.toml && quota check
      quota init --api github && $EDITOR quota.toml && quota check
      quota init --full every-key.toml
    """
    from shlex import quote

    if path in ("", "-"):
        raise click.UsageError(f"{path!r} is not the path of a file")
    apart(full=full, api=api)
    if full:
        text = read_text("quota.config", "quota.toml")
    elif api is None:
        text = configuration_for("youtube-v3", load_book("youtube-v3"), "main")
    else:
        book = load_book(api)
        if os.path.dirname(path) and api not in book_names():
            api = os.path.abspath(api)  # a configuration names it from where it lies itself
        text = configuration_for(api, book)
    try:
        mode = None
        with suppress(FileNotFoundError), open(path, "rb", opener=readable) as before:
            if not force:
                raise QuotaError(f"{path} exists already; name another file, or use --force to replace it")
            mode = os.fstat(before.fileno()).st_mode & 0o777
        schema = path_of("quota.config", "quota.schema.json").as_uri()
        with unwound():
            write_file(os.path.dirname(path), os.path.basename(path), f"#:schema {schema}\n{text}", mode)
    except OSError as error:
        raise QuotaError(f"{path} cannot be written: {error.strerror}") from None
    say(f"wrote {path}; follow its comments, then run: quota check --config {quote(path)}")


@click.command("check")
@click.option("--schema", is_flag=True, help="Only print the JSON Schema of a configuration.")
@click.option("--show", is_flag=True, help="Only print each value in force, and its source.")
@shared(Options.format, Options.config)
def check_(schema: bool, show: bool, form: str, config: str | None) -> int:
    """Check the configuration for errors and surprises. Exit with 78 on an error.

    It also opens the ledger. It warns if the ledger does not answer or accepts no charges, or if the state folder
    cannot record draws on the allowance. It reports an error if the ledger moved away, or has another API's charges or
    an older format. The last lines list the addresses of `quota proxy`. `quota doctor` examines the ledger and this
    machine.

    \b
    Example:
      quota check --config quota.toml
      quota check --schema > quota.schema.json
      quota check --show    # includes variables such as QUOTA__LEDGER__URL
    """
    apart(schema=schema, show=show)
    apart(schema=schema, config=config)
    if schema:
        from quota.settings.tables import json_schema

        click.echo(json_schema(), nl=False)
        return 0
    if show:
        from quota.settings.origins import in_force

        settings, values = in_force(config)
        if not print_as(form, {"config": settings.source, "values": [value.as_json() for value in values]}):
            say(f"# {settings.source}", *map(str, values))
        return 0
    from quota.cli.doctor import check
    from quota.cli.serving import PROXY_LISTENS
    from quota.clients.upstream import passes_on

    try:
        settings = load_settings(config)
    except ConfigError as error:
        return fail_each(error)
    credentials = settings.credentials
    passed = [name for name, each in credentials.items() if passes_on(each.book, each.endpoint)]
    with Session(settings) as session:  # inbound limits alone need no credential
        findings = check(session)
        keyless = [name for name in passed if not _may_call(session, name)]
    served = [f"http://{PROXY_LISTENS}/{name}" for name in passed if name not in keyless]
    left_out = [name for name in credentials if name not in passed]
    late = [name for name in passed if credentials[name].key_ref is None and credentials[name].auth_ref == "adc"]
    errors, warnings = (sum(finding.level == level for finding in findings) for level in ("error", "warning"))
    status = ConfigError.exit_status if errors else 0
    if print_as(form, _in_json(settings.source, findings)):
        return status
    for finding in findings:
        if variable := settings.variables.get(finding.location):
            finding = replace(finding, location=f"environment variable {variable}")
        say(str(finding), err=finding.level == "error")
    counted = [many(errors, "error") if errors else "no errors", *([many(warnings, "warning")] if warnings else [])]
    say(f"{settings.source}: {', '.join(counted)}")
    for says, names in (
        ("serves {}", served),
        ("looks for the account of {} when it starts", late),
        ("does not serve {}: the key or account cannot be read", keyless),
        ("does not serve {}: the cost book lacks [routes] or hosts", left_out),
    ):
        if names and not errors:
            say(f"`quota proxy` {says.format(listed(names))}")
    return status


def _may_call(session: Session, credential: str) -> bool:
    """Whether the key or account that a credential refers to, if any, can be read here."""
    with suppress(ConfigError):
        session.check_key(credential)
        return True
    return False


def _in_json(source: str, findings: Sequence[Finding]) -> dict[str, object]:
    return {"config": source, "findings": [finding.as_json() for finding in findings]}


@click.command()
@click.option("--call", is_flag=True, help="Also try each key with one call, of about one unit.")
@click.option("--notify", is_flag=True, help="Also send a test event through [notify].")
@click.option("--acl", is_flag=True, help="Only print the rights that a Redis user needs.")
@click.option("--project", "projects", metavar="P", multiple=True, help="With --acl: only the rights for this project.")
@shared(Options.format, Options.config)
def doctor(*, call: bool, notify: bool, acl: bool, projects: tuple[str, ...], form: str, config: str | None) -> int:
    """Examine the ledger, this machine and the keys. Exit with 1 on an error.

    Each line is one finding. If something is wrong, the line says what to do. `quota check` examines the configuration.

    --acl prints a command for redis-cli: it gives the user in the ledger's url (default: `quota`) the rights that are
    needed, and no more. Replace PASSWORD in the command. For sentinels and the storage of `[inbound]` it prints more
    commands.

    \b
    Example:
      quota doctor
      quota doctor --notify    # does an alert arrive?
      quota doctor --acl --project research
      quota doctor --call --json | jq '.findings[] | select(.level != "ok")'
    """
    apart(acl=acl, call=call)
    apart(acl=acl, notify=notify)
    if not acl and projects:
        raise click.UsageError("--project belongs to --acl; add it")
    from quota.cli.doctor import acl_lines, examine, finding_parts

    if acl:
        lines = acl_lines(load_settings(config), projects)
        if print_as(form, {"acl": lines}):
            return 0
        say(*lines)
        say("In a users.acl, write `user` for `ACL SETUSER`.", err=True)
        if any("+info" in line for line in lines):  # the ledger's
            say("For `quota ledger move --all`, add +scan.", err=True)
            say("You may leave +info out: then quota cannot check that the maxmemory-policy is noeviction.", err=True)
        return 0
    with Session(load_settings(config)) as session:  # inbound limits alone need no credential
        findings = examine(session, call=call, notify=notify)
    print_as(form, _in_json(session.settings.source, findings), parts=finding_parts(findings))
    return int(any(finding.level == "error" for finding in findings))


# -- init: the keys that most people need ------------------------------------------------------------------------------


def configuration_for(api: str, book: CostBook, credential: str = "") -> str:
    """The text of a configuration with one credential of this cost book; `api` is how the user named the book, and
    `credential` what the credential is called: as the book, if it is empty."""
    name = credential or re.sub(r"[^A-Za-z0-9_-]", "-", book.name)
    limits = []
    for limit in default_limits(book):
        values = {
            "name": in_toml(limit.name),
            "bucket": in_toml(limit.view.selector.buckets[0]) if len(book.buckets) > 1 else "",
            "quota": f"{limit.quota_units:_}",
            "headroom": f'"{DEFAULT_HEADROOM_PERCENT}%"',
            "window": as_written(limit.view.window),
        }
        limits.append(f"    {{ {', '.join(f'{key} = {value}' for key, value in values.items() if value)} }},")
    method, call = _first_call(name, book)
    return Template(read_text("quota.config", "new.toml.in")).substitute(
        _TRENDING if book.api == "youtube" else _OWN_JOB,
        remarks="" if credential else _remarks(api),
        name=name,
        api=in_toml(api),
        project=in_toml(re.sub("[^A-Za-z0-9._:-]", "-", book.api)),
        login=_login(book),
        limits="\n".join(limits),
        method=method,
        call=call,
    )


_TRENDING = {
    "hash": "",
    "does": "fetches pages for each region",
    "job": "trending",
    "fetch": "trending",
    "regions": '["US", "GB", "DE", "FR", "IN", "BR", "AU", "CA"]',
}
_OWN_JOB = {
    "hash": "# ",
    "does": "calls a function of yours for each page of each region",
    "job": "mine",
    "fetch": "my_module:fetch",
    "regions": '["one", "two"]',
}
"""What stands in the file of a job that is built in, and of any other, whose lines are remarks: after a `hash`."""


def _remarks(api: str) -> str:
    """The remarks of a shipped book about its numbers."""
    if api not in book_names():
        return "# The cost book says what its numbers mean.\n\n"
    text = read_text("quota.config", f"costs/{api}.toml").partition("\napi = ")[0]
    of_numbers = text.partition("# Not expressed")[0].rstrip("# \n")
    return f"# The cost book says:\n#\n{of_numbers}\n\n"


def _login(book: CostBook) -> str:
    """The lines of the key or the token, and of the address."""
    where = '# The address of a test server, such as `quota emulate` for YouTube:\n# endpoint = "http://127.0.0.1:8765"'
    if book.routes and not book.hosts:
        where = (
            "# The API has another host for each customer: name yours. `quota emulate` does not play it.\n"
            f'endpoint = "{ELSEWHERE}"'
        )
    variable = re.sub("[^A-Z0-9]|^(?=[0-9])", "_", book.api.upper())
    if not book.has_session or book.key not in (KeyPlace(), GOOGLES_KEY):
        secret = f"{variable}_{'TOKEN' if book.has_session else 'API_KEY'}"
        return f'# Where the key is, never the key itself: env:NAME or file:PATH.\nkey = "env:{secret}"\n{where}'
    account = " An account is adc or service-account:PATH." if book.scopes else ""
    return (
        f"# Where the token is, never the token itself: bearer:env:NAME or bearer:file:PATH.{account}\n"
        f'auth = "bearer:env:{variable}_TOKEN"\n{where}'
    )


def _first_call(name: str, book: CostBook) -> tuple[str, str]:
    """The method of a first call, and the call from Python."""
    readings = [route for route in book.routes if route.verb in ("GET", "")]
    route = next(iter([*readings, *book.routes]), None)
    if route is None:
        method = book.probe.method if book.probe else next(iter(book.methods), "METHOD")
        return method, f'q.google("{name}", "{book.api}", "{book.version}")'
    address = (book.address or ELSEWHERE) + route.path.removesuffix("**")
    return route.method, f'q.requests("{name}").{(route.verb or "GET").lower()}("{address}")'
