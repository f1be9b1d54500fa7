"""Nothing that says who asked lies in the storage or in the log."""

from __future__ import annotations

import logging
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

import pytest
import redis

from quota.inbound import Limit, Rule, Rules, asgi
from support.inbound_http import Client, answer, running
from support.servers import RedisServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

KEY = "sk-a-very-secret-api-key"
USER = "ada.lovelace@example.com"
ADDRESSES = ["203.0.113.77", "2001:db8:aa:bb:cc::1"]


@pytest.fixture(params=["sqlite", "redis"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """A url, and all bytes that are stored there."""
    if request.param == "sqlite":
        yield (
            f"sqlite:///{tmp_path / 'inbound.db'}",
            lambda: b"".join(path.read_bytes() for path in sorted(tmp_path.glob("inbound.db*"))),
        )
        return
    server = RedisServer("--rdbcompression", "no")

    def dump() -> bytes:
        with redis.Redis(port=server.port) as client:
            client.save()
        return (server.folder / "dump.rdb").read_bytes()

    yield server.url, dump
    server.close()


def forms(secret: str) -> list[bytes]:
    """How a secret might lie there."""
    found = [secret.encode(), secret.encode("utf-16-le"), secret.encode().hex().encode()]
    try:
        address = ip_address(secret)
    except ValueError:
        return found
    return [*found, address.packed, address.packed.hex().encode(), str(int(address)).encode()]


def test_no_address_key_or_user_is_stored_or_logged(
    storage: tuple[str, Callable[[], bytes]], caplog: pytest.LogCaptureFixture
) -> None:
    url, dump = storage
    caplog.set_level(logging.DEBUG)
    limits = [Limit(3, 60_000), Limit(50, 3_600_000)]
    rules = Rules(
        [
            Rule("counter", limits, path="/counter"),
            Rule("log", limits, path="/log", algorithm="log"),
            Rule("gcra", [one._replace(burst=2) for one in limits], path="/gcra", algorithm="gcra"),
        ],
        url=url,
        trusted_proxies=["127.0.0.1"],
        key_field="X-API-Key",
        keys=[KEY],
        user=lambda scope: dict(scope["headers"]).get(b"x-user", b"").decode(),
    )
    app = asgi(answer, rules)
    statuses = []
    with running(app) as port:
        client = Client(port)
        who: list[dict[str, Any]] = [{"X_API_Key": KEY}, {"X_User": USER}, *({"X_Forwarded_For": a} for a in ADDRESSES)]
        for headers in who:
            for path in ("/counter", "/log", "/gcra"):
                statuses += [client(path, **headers).status for _ in range(4)]
        client.close()
    app._decider.hand_over()
    assert statuses.count(429) >= 12
    stored = dump()
    assert len(stored) > 1_000
    assert b"requests|log|refused" in stored, "the scan would find what is there"
    for secret in (KEY, USER, "ada.lovelace", *ADDRESSES, "2001:db8:aa:bb::"):
        assert [form for form in forms(secret) if form in stored] == [], secret
        assert secret not in caplog.text
