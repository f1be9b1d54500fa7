"""The commands of `quota` that run something, beside `run` itself: schedule, plan, serve, demo, emulate.

The work is elsewhere.
"""

from __future__ import annotations

import signal
import sys
from datetime import date
from pathlib import Path
from string import Template
from typing import Any, Literal

import click

import quota
from quota.cli.options import PATH, Listen, Options, duration_ms, listen_option, shared
from quota.cli.output import announce, log_to_stderr, now_and_then, print_as, print_parts, say, temporary_folder
from quota.common.text import many, number_in, show
from quota.jobs.interruption import interruptible
from quota.jobs.progress import watching
from quota.jobs.tick import How, configured, print_report
from quota.terms.limits import MAX_UNITS

API_LISTENS = Listen("127.0.0.1", 8080)
EMULATOR_LISTENS = Listen("127.0.0.1", 8765)

FROM: dict[str, Literal["next"] | None] = {"now": None, "empty": "next"}
"""What a plan takes for the first day, by the words of --from."""


@click.command("schedule")
@click.option("--crontab", "prints", is_flag=True, help="Print crontab lines that run the jobs, and nothing else.")
@shared(Options.textfile, Options.config)
def schedule(prints: bool, textfile: str | None, config: str | None) -> int:
    """Run all jobs on their schedules until a signal arrives.

    A line on stderr says when a tick (a scheduled start) begins or ends, or why it does not run. SIGTERM (status 0) and
    Ctrl-C end it once the requested pages are stored. If schedulers share a Redis ledger, only one fetches a region.

    \b
    Example:
      quota schedule
      quota schedule --config /etc/quota.toml
      quota schedule --crontab | crontab -    # replaces your crontab
    """
    if prints:
        from quota.jobs.ticks import crontab

        with configured(config) as session:
            say(*crontab(session.settings))
        return 0
    from quota.jobs.scheduler import log_schedule, run_schedule

    with interruptible({signal.SIGTERM: 0}, says=False) as stop, configured(config, textfile) as session:
        log_schedule()
        return run_schedule(session, stop=stop)


@click.command("plan", short_help="Simulate the schedule: does it fit?")
@click.option(
    "--days",
    type=int,
    metavar="N",
    help="Simulate the rest of today, then N whole days, in upstream's zone.  [default: 7, more for longer windows]",
)
@click.option("--from", "begin", default="now", metavar="now|empty|DATE", help="Where to begin.  [default: now]")
@shared(Options.format, Options.config)
def plan(days: int | None, begin: str, form: str, config: str | None) -> int:
    """Simulate the schedule over the coming days: does it fit into the budget?

    It begins now, with what the ledger and the store have. --from empty begins at upstream's next midnight, with
    nothing spent, and without the ledger and the store; --from DATE does the same, from that day's midnight.

    If the schedule fits, the exit status is 0. If it does not fit, the status is 1, and the output has the smallest
    changes that make it fit. A refusal caused only by units already spent leaves the status at 0.

    \b
    Example:
      quota plan
      quota plan --from 2026-11-01
      quota plan --from empty --json    # for CI: it needs no ledger and no key
    """
    from quota.common.clock import host_clock
    from quota.jobs.plan.plan import make_plan, plan_parts
    from quota.jobs.plan.simulation import EMPTY, read_state

    try:
        first_day = FROM[begin] if begin in FROM else date.fromisoformat(begin)
    except ValueError:
        raise quota.UsageError(f"--from {begin!r}: write now, empty, or a date such as 2026-11-01") from None
    if (
        isinstance(first_day, date) and not 1970 < first_day.year <= 5000
    ):  # a plan looks ahead, and calendars end in 5138
        raise quota.UsageError(f"--from {begin!r}: the year must be from 1971 to 5000")
    say_progress, is_seen = now_and_then(), sys.stderr.isatty()

    def progress(ticks: int) -> None:
        if is_seen:
            say_progress(f"{ticks:,} ticks simulated")

    with configured(config) as session:
        settings, state = session.settings, EMPTY if first_day else read_state(session)
        answer = make_plan(settings, host_clock(), days=days, first_day=first_day, state=state, progress=progress)
    print_as(form, answer.as_json(), parts=plan_parts(answer))
    return 0 if answer.fits else 1


@click.command("serve", short_help="Serve the fetched data as an HTTP API.")
@listen_option(API_LISTENS)
@click.option("--hostname", "names", multiple=True, metavar="NAME", help="A name for this server; may be repeated.")
@click.option("--unlimited", is_flag=True, help="Serve other machines without a rule.")
@shared(Options.config)
def serve(listen_at: Listen, names: tuple[str, ...], unlimited: bool, config: str | None) -> None:
    """Serve the local store as an HTTP API: rankings, search and channels, with upstream's field names.

    It spends no quota. It prints its address as soon as it listens; `/` lists the paths. SIGTERM and Ctrl-C end it
    within 5 s, with status 0.

    The rules in [inbound.NAME] limit how often a client may ask. If other machines can reach the address, each path
    under /api needs a rule, unless you set --unlimited. On loopback, a request must name localhost or the address as
    its host. If a proxy forwards another name, set that name with --hostname.

    \b
    Example:
      pip install 'quota-ledger[web]'           # once: it needs the extra `web`
      quota serve
      quota serve --listen 127.0.0.1:0
      quota serve --hostname api.example.org    # behind a proxy on this machine
    """
    from quota.web.serving import require_web

    require_web("jinja2")
    from quota.jobs.api.app import run_api

    log_to_stderr()
    run_api(config, listen_at, names, unlimited=unlimited)


def _duration(_: click.Context, param: click.Parameter, value: str | None) -> int:
    """The value of an option that is a duration, in ms; 0 without it."""
    return 0 if value is None else duration_ms(param.opts[0], value)


def _percent(_: click.Context, param: click.Parameter, value: str | None) -> int:
    """The value of an option that is a share, in whole percent; 0 without it."""
    percent = 0 if value is None else number_in(value.strip().removesuffix("%"), 0, 100)
    if percent is None:
        raise click.UsageError(f"{param.opts[0]} {show(value)}: write a whole number of percent from 0% to 100%")
    return percent


@click.command("emulate", short_help="Serve the emulated upstream, for development.")
@listen_option(EMULATOR_LISTENS)
@click.option("--port", type=click.IntRange(0, 65_535), hidden=True)  # before --listen: other programs call it so
@click.option("--recorded", metavar="DIR", type=PATH, help="Serve the recorded pages in this folder.")
@click.option(
    "--allocation",
    type=click.Choice(["pool", "buckets"]),
    default="pool",
    show_default=True,
    help="One bucket, or separate buckets for searches and uploads.",
)
@click.option("--quota", default=10_000, show_default=True, metavar="N", help="Units granted per day, to each key.")
@click.option(
    "--delay", "delay_ms", metavar="DURATION", callback=_duration, help="Delay each answer, for example by 200ms."
)
@click.option(
    "--errors",
    "errors_percent",
    metavar="PERCENT",
    callback=_percent,
    help="Answer this share of calls with 503, for example 5%.",
)
def emulate(listen_at: Listen, port: int | None, **options: Any) -> None:
    """Serve an emulator of the upstream API on loopback, for development without spending quota.

    It prints its address as soon as it listens. GET /emulator/usage returns the number of requests that it received.
    SIGTERM and Ctrl-C end it.

    \b
    Example:
      quota emulate --listen 127.0.0.1:9000 --quota 100
      quota emulate --delay 200ms --errors 5%    # slow, with some errors
    """
    from quota.jobs.emulator import Emulator

    if listen_at.host not in ("127.0.0.1", "localhost"):
        raise quota.UsageError(
            f"--listen {listen_at}: the emulator listens on 127.0.0.1 only; write {EMULATOR_LISTENS}"
        )
    port = listen_at.port if port is None else port
    # SIGTERM from a supervisor is the regular way to end it. Ctrl-C exits with the same status as everywhere else.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGINT, lambda number, _: sys.exit(128 + number))
    try:
        emulator = Emulator(port=port, **options)
    except ValueError as error:
        raise quota.UsageError(str(error)) from error
    except OSError as error:
        raise quota.QuotaError(f"127.0.0.1:{port}: {error.strerror or error}; choose another port") from error
    late = f", each answer {emulator.delay_ms:,} ms late" if emulator.delay_ms else ""
    errors = f", {emulator.errors_percent}% errors" if emulator.errors_percent else ""
    buckets = "one bucket" if emulator.allocation == "pool" else "separate buckets"
    granted = f"{buckets}, {many(emulator.quota, 'unit')} a day{late}{errors}"
    announce(f"YouTube Data API v3 emulator: {emulator.address} ({granted})")
    emulator.serve_forever()


@click.command("demo", short_help="Show the whole product, without a key.")
@click.option("--keep", metavar="DIR", type=PATH, help="Keep configuration, ledger and store in this folder.")
@click.option(
    "--units",
    type=click.IntRange(1, MAX_UNITS),
    default=9_500,
    show_default=True,
    metavar="N",
    help="Enforce a limit of N units a day.",
)
@shared(Options.format)
def demo(keep: str | None, units: int, form: str) -> int:
    """Show the whole product: an emulated upstream, eight regions, the real client, the embedded ledger.

    It needs no key, and nothing leaves this machine.

    \b
    Example:
      quota demo
      quota demo --units 10 --keep /tmp/demo    # stops; a day later it resumes
    """
    from quota.cli.rehearsal import variables
    from quota.jobs.emulator import Emulator
    from quota.jobs.runner import RunOptions, run_job

    if keep == "":
        raise quota.UsageError("--keep '' is not the path of a folder")
    with temporary_folder("demo") as temporary, interruptible(says=True) as stop:
        folder = Path(keep or temporary).absolute()
        with Emulator() as upstream, variables(QUOTA_STATE_DIR=str(folder / "state")):
            config = _demo_config(folder, upstream.address, units)
            with quota.open(config) as session:
                with watching("trending") as watcher:
                    report = run_job(session, "trending", RunOptions(stop=stop, watcher=watcher))
                print_report(session, report, How(form))
                if form == "text":
                    from quota.reports.status import read_status
                    from quota.wording import status_parts

                    print_parts(status_parts(read_status(session, next_capacity=False)))
                    requests = upstream.usage()["requests"]
                    say(f"upstream counted {many(requests, 'request')}, the ledger charged {report.attempts:,}")
        if keep and form == "text":
            say(f"kept: {config}")
        if form == "text":
            say("next, with your own key: quota init")
    return report.exit_status


def _demo_config(folder: Path, address: str, units: int) -> Path:
    from quota.common.files import make_folder, open_alone, read_text, readable

    config = folder / "quota.toml"
    try:
        make_folder(folder)
        if config.exists() and not config.read_text(encoding="utf-8").startswith("# Written by `quota demo`"):
            raise quota.UsageError(f"--keep {folder}: it has a quota.toml that is not the demo's; name another folder")
        with open(config, "w", encoding="utf-8", opener=readable) as file:
            file.write(Template(read_text("quota.jobs.emulator", "demo.toml")).substitute(address=address, units=units))
        with open(folder / "demo.key", "w", encoding="utf-8", opener=open_alone) as file:
            file.write("demo-key\n")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise quota.UsageError(f"--keep {folder}: {why}; name a folder that this user may write") from error
    return config
