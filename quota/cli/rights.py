"""`quota doctor --acl`: the least rights, as commands that give them to users of the servers. It contacts nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence

from quota.errors import UsageError
from quota.ledger.factory import backend_of
from quota.ledger.redis_rights import COMMANDS, OF_A_CLUSTER, OF_A_SENTINEL, acl_line, pattern_of
from quota.ledger.redis_url import database_of, sentinels_user_of, user_of
from quota.settings.model import Settings

USER, INBOUND_USER, SENTINEL_USER = "quota", "inbound", "quota"
"""Where a url names nobody."""


def acl_lines(settings: Settings, projects: Sequence[str], *, cluster: bool) -> list[str]:
    """A line for the user of the ledger, and for those of its sentinels and of the inbound storage, where there are."""
    for project in projects:
        if not re.fullmatch(r"[A-Za-z0-9._:-]{1,64}", project):
            raise UsageError(f"project {project!r}: a name in Redis is 1 to 64 of A-Z a-z 0-9 . _ : -")
    url, inbound = _of_redis(settings.ledger.url), _inbound_url(settings)
    keys = [pattern_of(project) for project in projects or ("*",)]
    commands = [*COMMANDS, *_of_the_way(url, cluster=cluster)]
    user, beside = _user(url, USER), []
    if inbound:
        from quota.inbound.redis_storage import COMMANDS as OF_INBOUND
        from quota.inbound.redis_storage import KEYS as INBOUND_KEYS

        its_user, its_commands = _user(inbound, INBOUND_USER), [*OF_INBOUND, *_of_the_way(inbound, cluster=False)]
        if its_user == user:  # one user, on whichever server
            keys, commands = [*keys, INBOUND_KEYS], [*dict.fromkeys((*commands, *its_commands))]
        else:
            beside.append(acl_line(its_user, [INBOUND_KEYS], its_commands))
    sentinels = [acl_line(sentinels_user_of(url) or SENTINEL_USER, [], OF_A_SENTINEL)] if "+sentinel:" in url else []
    return [acl_line(user, keys, commands), *sentinels, *beside]


def _inbound_url(settings: Settings) -> str:
    """Of the inbound storage, if that is a Redis server; else empty."""
    if settings.inbound is None:
        return ""
    from quota.inbound.configured import rules_of

    rules = rules_of(settings)
    return "" if rules is None else _of_redis(rules.url or "")


def _of_redis(url: str) -> str:
    """The url, if it is one of Redis. A user with a file may be about to move."""
    return url if url and backend_of(url).has_acl else ""


def _of_the_way(url: str, *, cluster: bool) -> list[str]:
    """What it takes to come where the keys of a url are."""
    found = OF_A_CLUSTER if cluster or "+cluster:" in url else ()
    return [*found, *(("select",) if database_of(url) else ())]


def _user(url: str, otherwise: str) -> str:
    """Whom a url names. One word alone before the @ may be a password, by mistake: it is not shown."""
    named, userinfo = user_of(url), url.partition("?")[0].partition("://")[2].rpartition("@")[0]
    return otherwise if named == "default" or (userinfo and ":" not in userinfo) else named
