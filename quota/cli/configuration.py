"""The commands about configuration: init, check, doctor."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from typing import TYPE_CHECKING

import click

import quota
from quota.cli.options import config_option, json_option
from quota.cli.output import print_json, print_rich, say
from quota.common.files import path_of, read_text, readable
from quota.common.text import listed, many
from quota.errors import ConfigError, QuotaError
from quota.settings.books import book_names, load_book
from quota.settings.limits import as_written, default_limits
from quota.settings.model import DEFAULT_HEADROOM_PERCENT
from quota.settings.toml import in_toml
from quota.terms.api import GOOGLES_KEY, KeyPlace
from quota.terms.costs import CostBook
from quota.terms.limits import Limit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from quota.common.findings import Finding

ELSEWHERE = "https://api.example.com"
"""For an API whose host is another one for each customer."""


@click.command()
@click.argument("path", default="quota.toml", type=click.Path())
@click.option("--force", is_flag=True, help="Replace an existing file.")
@click.option("--api", metavar="NAME", help="For the API of this cost book; `quota costs --list` has them.")
def init(path: str, force: bool, api: str | None) -> None:
    """Write a commented configuration to PATH [default: quota.toml].

    Its first line names the JSON Schema of this installation: editors that know TOML complete and check by it.

    \b
    Example:
      quota init && $EDITOR quota.toml && quota check
      quota init --api github && $EDITOR quota.toml && quota check
    """
    from shlex import quote

    if api is None:
        text = read_text("quota.config", "quota.toml")
    else:
        book = load_book(api)
        if os.path.dirname(path) and api not in book_names():
            api = os.path.abspath(api)  # a configuration names it from where it lies itself
        text = configuration_for(api, book)
    try:
        _write_whole(path, f"#:schema {path_of('quota.config', 'quota.schema.json').as_uri()}\n{text}", replace=force)
    except FileExistsError:
        raise QuotaError(f"{path} exists already; name another file, or use --force to replace it") from None
    except OSError as error:
        raise QuotaError(f"{path} cannot be written: {error.strerror}") from None
    say(f"wrote {path}; set your key and project in it, then run: quota check --config {quote(path)}")


def _write_whole(path: str, text: str, *, replace: bool) -> None:
    """Write all of a file, or leave what was there: a disk may be full. Raises OSError."""
    mode = None
    if replace:
        with suppress(FileNotFoundError), open(path, "rb", opener=readable) as before:
            mode = os.fstat(before.fileno()).st_mode & 0o777
    written = f"{path}.{os.getpid()}" if replace else path
    with open(written, "x", encoding="utf-8", opener=readable) as file:
        try:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            file.write(text)
            file.flush()
            if replace:
                os.replace(written, path)
        except BaseException:
            os.unlink(written)
            raise


@click.command("check")
@click.option("--schema", is_flag=True, help="Only print the JSON Schema of a configuration, for an editor.")
@click.option("--show", is_flag=True, help="Only print each value in force, and where it comes from.")
@json_option
@config_option
def check_(schema: bool, show: bool, as_json: bool, config: str | None) -> int:
    """Check the configuration for errors and surprises. Errors exit with 78.

    It also asks the ledger: a ledger that does not answer is a warning, one that every command will refuse is an error.
    An allowance's journal that cannot be used is a warning.
    `quota doctor` examines the ledger and this machine. The last lines say which credentials `quota proxy`
    serves, and where.

    \b
    Example:
      quota check --config quota.toml
      quota check --schema > quota.schema.json
      quota check --show      # and what QUOTA__LEDGER__URL and the like say
    """
    if schema and show:
        raise click.UsageError("--schema and --show stand alone; leave one out")
    if schema and config is not None:
        raise click.UsageError("--schema is that of any configuration; leave --config out")
    if schema:
        from quota.settings.tables import json_schema

        click.echo(json_schema(), nl=False)
        return 0
    if show:
        from quota.settings.origins import in_force

        settings, values = in_force(config)
        if as_json:
            print_json({"config": settings.source, "values": [value.as_json() for value in values]})
        else:
            say(f"# {settings.source}", *map(str, values))
        return 0
    from quota.cli.doctor import check
    from quota.cli.serving import BIND
    from quota.clients.upstream import passes_on
    from quota.session import Session
    from quota.settings.load import load_settings

    with Session(load_settings(config)) as session:  # inbound limits alone need no credential
        findings = check(session)
        source = session.settings.source
        credentials = session.settings.credentials
        passed = [name for name, each in credentials.items() if passes_on(each.book, each.endpoint)]
        served = [f"http://{BIND}/{name}" for name in passed]
        left_out = [name for name in credentials if name not in passed]

    def shown() -> None:
        for finding in findings:
            say(str(finding), err=finding.level == "error")
        if not any(finding.level == "error" for finding in findings):
            warnings = f", {many(len(findings), 'warning')}" if findings else ""
            say(f"{source}: no errors{warnings}")
            if served:
                say(f"`quota proxy` serves {listed(served)}")
            if left_out:
                say(f"`quota proxy` does not serve {listed(left_out)}: the cost book lacks [routes] or hosts")

    return _tell(source, findings, as_json, shown, ConfigError.exit_status)


def _tell(source: str, findings: Sequence[Finding], as_json: bool, shown: Callable[[], None], on_error: int) -> int:
    """Print findings, for people as `shown` does. Returns the exit status: `on_error` if one of them is an error."""
    if as_json:
        print_json({"config": source, "findings": [finding.as_json() for finding in findings]})
    else:
        shown()
    return on_error if any(finding.level == "error" for finding in findings) else 0


@click.command()
@click.option("--call", is_flag=True, help="Also try each key with one call, of a unit or so.")
@click.option("--acl", is_flag=True, help="Only print the least rights on a Redis server. Nothing is contacted.")
@click.option("--project", "projects", metavar="P", multiple=True, help="With --acl: of this project alone.")
@click.option("--cluster", is_flag=True, help="With --acl: on a cluster, whatever the configuration says.")
@json_option
@config_option
def doctor(call: bool, acl: bool, projects: tuple[str, ...], cluster: bool, as_json: bool, config: str | None) -> int:
    """Examine the ledger, this machine and the keys. Errors exit with 1.

    Each line says what was found and, where something is wrong, what to do. `quota check` examines the
    configuration.

    With --acl, stdout has the least rights of the user that the ledger's url names, else of `quota`: a command for
    redis-cli, with PASSWORD for you to replace. Further lines are for the users of its sentinels and of the inbound
    storage, where there are such.

    \b
    Example:
      quota doctor
      quota doctor --acl --project research
      quota doctor --call --json | jq '.findings[] | select(.level != "ok")'
    """
    if acl and call:
        raise click.UsageError("--acl and --call cannot be combined: --acl contacts nothing")
    if acl:
        _print_rights(projects, cluster, as_json, config)
        return 0
    if projects or cluster:
        raise click.UsageError("--project and --cluster belong to --acl; add it")
    from quota.cli.doctor import examine, render_findings

    with quota.open(config) as session:
        findings = examine(session, call=call)
        source = session.settings.source
    return _tell(source, findings, as_json, lambda: print_rich(render_findings(findings)), 1)


def _print_rights(projects: tuple[str, ...], cluster: bool, as_json: bool, config: str | None) -> None:
    from quota.cli.doctor import acl_lines
    from quota.settings.load import load_settings

    lines = acl_lines(load_settings(config), projects, cluster=cluster)
    if as_json:
        print_json({"acl": lines})
        return
    say(*lines)
    say("In a users.acl, write `user` for `ACL SETUSER`. For `quota ledger move --all`, add +scan.", err=True)
    say("+info may be left out: then nobody sees whether the server's maxmemory-policy is noeviction.", err=True)


# -- init --api: a provider's limits, and a first call in its comments -------------------------------------------------


def configuration_for(api: str, book: CostBook) -> str:
    """The text of a configuration whose one credential has this cost book; `api` is how the user named it."""
    name = re.sub(r"[^A-Za-z0-9_-]", "-", book.name)
    secret = f"{re.sub('[^A-Z0-9]', '_', book.api.upper())}_{'TOKEN' if book.has_session else 'KEY'}"
    parts = [
        "# Configuration of quota-ledger. `quota check` reports errors and surprises in it.\n"
        "# `quota init` without --api writes one with every setting there is, and with jobs.\n",
        "# What the cost book says of its numbers, and which of them are yours to set:\n#\n" + _comment(api),
        "# Where charges are kept. Machines that share a token must share a ledger, a redis:// one for example.\n"
        "# Without a url it is SQLite in your state folder.\n"
        '[ledger]\n# url = "redis://127.0.0.1:6379/0"\n',
        f"[credentials.{name}]\napi = {in_toml(api)}\n\n"
        "# Upstream counts by this. Tokens that share a budget upstream have the same project here, others another.\n"
        f'project = "{re.sub("[^A-Za-z0-9._:-]", "-", book.api)}"\n\n' + _login(book, secret),
        "# The limits that the book alone gives: 5% of each stays unspent. Set `quota` to what your plan grants.\n\n"
        + "\n".join(_limit(name, limit) for limit in default_limits(book)),
        _first_call(name, book),
    ]
    return "\n".join(parts)


def _comment(api: str) -> str:
    """What a shipped book says before its first key."""
    if api not in book_names():
        return "# See the comment in its file.\n"
    return read_text("quota.config", f"costs/{api}.toml").partition("\napi = ")[0].rstrip() + "\n"


def _login(book: CostBook, secret: str) -> str:
    where = ""
    if book.routes and not book.hosts:
        where = f'# The API has no host that is the same for all: name yours.\nendpoint = "{ELSEWHERE}"\n\n'
    if not book.has_session or book.key not in (KeyPlace(), GOOGLES_KEY):
        return f'{where}# Where to find the key, never the key itself.\nkey = "env:{secret}"\n'
    account = '# Or log in as an account: auth = "adc" or "service-account:PATH".\n' if book.scopes else ""
    return (
        f"{where}# Whose token goes along, and where it is; never the token itself.\n{account}"
        f'auth = "bearer:env:{secret}"\n'
    )


def _limit(credential: str, limit: Limit) -> str:
    lines = {
        "name": in_toml(limit.name),
        "bucket": in_toml(limit.view.selector.buckets[0]),
        "quota": f"{limit.quota_units:_}",
        "headroom": f'"{DEFAULT_HEADROOM_PERCENT}%"',
        "window": as_written(limit.view.window),
    }
    return f"[[credentials.{credential}.limits]]\n" + "".join(f"{key} = {value}\n" for key, value in lines.items())


def _first_call(name: str, book: CostBook) -> str:
    """What to try first: on the command line, and from Python."""
    route = next((route for route in book.routes if route.verb in ("GET", "")), None)
    route = route or next(iter(book.routes), None)
    if route is None:
        method = book.probe.method if book.probe else next(iter(book.methods), "METHOD")
        call = f'q.google("{name}", "{book.api}", "{book.version}")  # each call of it is charged'
    else:
        method = route.method
        address = (book.address or ELSEWHERE) + route.path.removesuffix("**")
        call = f'q.requests("{name}").{(route.verb or "GET").lower()}("{address}")'
    return (
        "# A first call. A shell asks before it calls:\n"
        "#\n"
        f"#   quota peek {method}\n"
        f"#   quota exec {method} -- COMMAND\n"
        "#\n"
        "# A program in Python runs as it is, and one in any other language asks `quota proxy`:\n"
        "#\n"
        "#   quota exec --auto --summary -- python etl.py\n"
        "#\n"
        "# Python is charged by itself, for each request that leaves, and a refusal raises quota.Refused:\n"
        "#\n"
        "#   with quota.open() as q:\n"
        f"#       answer = {call}\n"
    )
