"""What `quota check` asks about `[inbound]`: an entry point of the group `quota.checks`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quota.common.text import show
from quota.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from quota.inbound.rules import Rule, Rules
    from quota.settings.model import Settings


def examine(settings: Settings) -> Iterator[tuple[str, str]]:
    """Each rule that cannot be used or that no request reaches: its place, what is wrong, and what to do."""
    if settings.inbound is None:  # most configurations; nothing is imported for them
        return
    from quota.inbound.configured import rule_names, rule_of, rules_of, table_of

    table = table_of(settings)
    assert table is not None  # noqa: S101  # see above
    wrong = []
    for name in rule_names(table):
        try:
            rule_of(table, name)
        except ConfigError as error:
            wrong.append(error)
    if not wrong:
        try:
            rules = rules_of(settings)
        except ConfigError as error:
            wrong.append(error)
        else:
            assert rules is not None  # noqa: S101  # see above
            yield from _together(rules)
    for one in wrong:
        location, _, message = str(one).removeprefix(f"{settings.source}: ").partition(": ")
        yield location, message


def _together(rules: Rules) -> Iterator[tuple[str, str]]:
    for number, rule in enumerate(rules.rules):
        location = f"inbound.{rule.name}"
        before = next((one for one in rules.rules[:number] if one.hides(rule)), None)
        if before is not None:
            yield location, f"no request reaches it: {_takes(before)}; put {rule.name} before it"
        elif any(pattern.covers(rule.pattern) for pattern in rules.exempt):
            yield location, "no request reaches it: exempt has all of its paths; remove the one or the other"
    if rules.any_key:
        yield (
            "inbound.key_field",
            f"{show(rules.key_field)} has no effect: nobody knows which keys are valid, and a client could invent one "
            'for each request; add keys = "file:/path", one key on each line',
        )
    yield from _storage(rules)


def _takes(rule: Rule) -> str:
    if rule.path is None:
        return f"rule {rule.name} before it has no path, so it takes every request"
    return f"rule {rule.name} before it takes {show(rule.path)}"


def _storage(rules: Rules) -> Iterator[tuple[str, str]]:
    if rules.url is None:
        return
    from quota.inbound.storage import open_storage

    try:
        open_storage(rules.url).close()
    except ConfigError as error:
        yield "inbound.url", str(error)
