"""`quota inbound`: shows an operator the rate limits of an application."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

import click

from quota.cli.options import Group, Options, limit_option, shared
from quota.cli.output import print_as, print_parts, say
from quota.common.clock import moment, rfc3339
from quota.common.text import members, nearest, show
from quota.errors import QuotaError
from quota.inbound.configured import load_rules
from quota.inbound.deciding import Outcome
from quota.inbound.metrics import Report, read_report
from quota.inbound.rules import Rule, is_there, opened
from quota.terms.limits import format_duration
from quota.wording import Table

if TYPE_CHECKING:
    from collections.abc import Sequence


@click.group("inbound", cls=Group)
def inbound() -> None:
    """Show the rate limits of your own application.

    [inbound.NAME] in quota.toml has the rules, and `quota check` checks them. docs/inbound.md shows how an application
    uses them.

    \b
    Example:
      quota inbound status
      quota inbound top login
    """


@inbound.command(short_help="Show each rule and how its requests ended.")
@shared(Options.format, Options.config)
def status(form: str, config: str | None) -> None:
    """Show each rule, how its requests ended, and how many identities it counts.

    Your application's workers store their counts every 10 s. If the storage does not answer, the exit status is 69.

    \b
    Example:
      quota inbound status
      quota inbound status --json | jq '.rules[] | select(.refused > 0)'
    """
    rules, storage = opened(load_rules(config))
    nothing_yet = Report({}, dict.fromkeys((rule.name for rule in rules.rules), 0))
    report = read_report(storage, rules.rules) if is_there(rules) else nothing_yet
    data = {"storage": storage.label, "rules": [_as_json(rule, report) for rule in rules.rules]}
    if not print_as(form, data, parts=[_table(rules.rules, report)]):
        say(f"storage {storage.label}" + ("" if storage.shared else ", shared by this machine only"))


@inbound.command(short_help="Show a rule's most frequent clients, by hashed identity.")
@click.argument("rule")
@limit_option(default=10, most=1_000)
@shared(Options.format, Options.config)
def top(rule: str, limit: int, form: str, config: str | None) -> None:
    """Show the heaviest users of a rule, by hashed identities.

    The hash does not reveal the identity. The hash changes every day (`counter`) or with `quota inbound rotate`
    (`gcra`, `log`).

    \b
    Example:
      quota inbound top search
      quota inbound top login --limit 3 --json
    """
    rules, storage = opened(load_rules(config))
    chosen = next((each for each in rules.rules if each.name == rule), None)
    if chosen is None:
        raise click.UsageError(f"no rule {show(rule)}; {nearest(rule, [each.name for each in rules.rules])}")
    consumers = storage.top(chosen.policy, limit) if is_there(rules) else []
    number, window_ms, _ = chosen.policy.longest
    identities = [{"name": name, "used": used, "limit": number, "window_ms": window_ms} for name, used in consumers]
    if print_as(form, {"rule": chosen.name, "identities": identities}):
        return
    if consumers:
        rows = [(name, f"{used:,}", f"{number:,}", format_duration(window_ms)) for name, used in consumers]
        print_parts([Table(("identity", "used", "limit", "window"), rows, numbers=(1, 2))])
    else:
        say(f"rule {chosen.name} has counted no request since its window of {format_duration(window_ms)} began")


@inbound.command(short_help="Change the salt of identity hashes (algorithms gcra, log).")
@shared(Options.format, Options.config)
def rotate(form: str, config: str | None) -> None:
    """Give the algorithms `gcra` and `log` a new salt for the hashes of identities, effective in one minute.

    The salt of `counter` changes every day by itself. A new salt resets no limit: a refused visitor stays refused.

    \b
    Example:
      quota inbound rotate
    """
    rules, storage = opened(load_rules(config))
    if not is_there(rules):
        raise QuotaError(f"{storage.label} does not exist yet: no request was counted, so there is no salt to change")
    from_ms = storage.rotate()
    if not print_as(form, {"storage": storage.label, "from": rfc3339(from_ms)}):
        say(f"identities get new names in windows that begin at {moment(from_ms)} or later")


def _as_json(rule: Rule, report: Report) -> dict[str, object]:
    return {
        **members(rule, "name path cost fail shadow"),
        "methods": sorted(rule.methods),
        **members(rule.policy, "algorithm count_rejected"),
        "limits": [
            {"name": name, "limit": limit.number, "window_ms": limit.window_ms, "burst": limit.burst or None}
            for name, limit in zip(rule.policies, rule.limits, strict=True)
        ],
        "identities": report.identities[rule.name],
        **{outcome: report.ended(rule.name, outcome) for outcome in get_args(Outcome)},
    }


def _table(rules: Sequence[Rule], report: Report) -> Table:
    rows = []
    for rule in rules:
        admitted = report.ended(rule.name, "admitted")
        refused = report.ended(rule.name, "refused") + report.ended(rule.name, "shadowed")
        unasked = report.ended(rule.name, "failed_open") + report.ended(rule.name, "failed_closed")
        limits = ", ".join(f"{limit.number:,} in {format_duration(limit.window_ms)}" for limit in rule.limits)
        rows.append(
            (
                rule.name,
                f"{' '.join(sorted(rule.methods))} {rule.path or 'any path'}".strip(),
                limits,
                f"{rule.policy.algorithm}{', shadow' if rule.shadow else ''}",
                *(f"{number:,}" for number in (report.identities[rule.name], admitted, refused, unasked)),
            )
        )
    headings = ("rule", "requests", "limits", "algorithm", "identities", "admitted", "refused", "no answer")
    return Table(headings, rows, numbers=(4, 5, 6, 7), without=(3, 1, 4, 2))
