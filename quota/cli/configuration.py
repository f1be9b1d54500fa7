"""The commands about configuration: init, check, doctor, prove."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

import click

import quota
from quota.cli.options import config_option, json_option
from quota.cli.output import print_json, print_rich, say
from quota.common.text import listed, many
from quota.errors import ConfigError, QuotaError
from quota.terms.limits import DAY_MS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from quota.common.findings import Finding


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

    from quota.common.resources import path_of, read_text

    if api is None:
        text = read_text("quota.config", "quota.toml")
    else:
        from quota.cli.starting import configuration_for
        from quota.settings.books import book_names, load_book

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
    from quota.common.folders import readable

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
    `quota doctor` examines the ledger and this machine. The last line is where `quota proxy` serves each credential.

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
    from quota.cli.check import check
    from quota.cli.proxy import BIND
    from quota.session import Session
    from quota.settings.load import load_settings

    with Session(load_settings(config)) as session:  # inbound limits alone need no credential
        findings = check(session)
        source = session.settings.source
        served = [f"http://{BIND}/{name}" for name in session.settings.credentials]

    def shown() -> None:
        for finding in findings:
            say(str(finding), err=finding.level == "error")
        if not any(finding.level == "error" for finding in findings):
            warnings = f", {many(len(findings), 'warning')}" if findings else ""
            say(f"{source}: no errors{warnings}")
            if served:
                say(f"`quota proxy` serves {listed(served)}")

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
    from quota.cli.doctor import examine
    from quota.cli.render import render_findings

    with quota.open(config) as session:
        findings = examine(session, call=call)
        source = session.settings.source
    return _tell(source, findings, as_json, lambda: print_rich(render_findings(findings)), 1)


def _print_rights(projects: tuple[str, ...], cluster: bool, as_json: bool, config: str | None) -> None:
    from quota.cli.rights import acl_lines
    from quota.settings.load import load_settings

    lines = acl_lines(load_settings(config), projects, cluster=cluster)
    if as_json:
        print_json({"acl": lines})
        return
    say(*lines)
    say("In a users.acl, write `user` for `ACL SETUSER`. For `quota ledger move --all`, add +scan.", err=True)
    say("+info may be left out: then nobody sees whether the server's maxmemory-policy is noeviction.", err=True)


@click.command("prove")
@click.option("--http", "over_http", is_flag=True, help="Bursts of requests against the inbound limits, over HTTP.")
@json_option
def prove_(over_http: bool, as_json: bool) -> None:
    """Show how a fixed window can admit twice its limit; ours cannot.

    With --http a server is started on loopback, for some 5 s, and each algorithm of the inbound limits meets the same
    two bursts as a fixed window.

    \b
    Example:
      quota prove
      quota prove --http
    """
    if over_http:
        _prove_over_http(as_json)
        return
    from quota.cli.prove import MIDNIGHT_MS, prove

    proof = prove()
    if as_json:
        print_json(proof.as_json())
        return
    limit = many(proof.limit_units, "unit")
    click.echo(f"Searches of 100 units around midnight, against a limit of {limit} in 24 hours:\n")
    click.echo(f"{'time':>16}  {'asked':>6}  {'fixed window':>13}  {'sliding window':>14}")
    for row in proof.rows:
        clock_ms = (row.at_ms - MIDNIGHT_MS) % DAY_MS
        minutes, millis = divmod(clock_ms, 60_000)
        day = "Mon" if row.at_ms < MIDNIGHT_MS else "Tue"
        at = f"{day} {minutes // 60:02}:{minutes % 60:02}:{millis // 1000:02}.{millis % 1000:03}"
        click.echo(f"{at:>16}  {row.asked_units:>6}  {row.fixed_units:>13}  {row.sliding_units:>14}")
    click.echo(
        f"\nMost in any 24 hours: fixed {proof.fixed_peak_units:,}, sliding {proof.sliding_peak_units:,}; "
        f"the limit is {proof.limit_units:,}."
    )


def _prove_over_http(as_json: bool) -> None:
    from quota.cli.prove_http import LIMIT, prove_http
    from quota.cli.tables import Column, FirstThatFits, tables

    proof = prove_http()
    if as_json:
        print_json(proof.as_json())
        return
    window = f"{proof.window_ms // 1000} s"
    click.echo(f"{LIMIT} requests, and half a window later {LIMIT} again, against a limit of {LIMIT} in {window}:\n")
    columns = [Column("algorithm"), Column("first", number=True), Column("then", number=True)]
    columns.append(Column(f"most in any {window}", number=True))
    shown = [(row.kind, str(row.first), str(row.second), str(row.most)) for row in proof.rows]
    print_rich(FirstThatFits(tables(columns, shown)))
