"""Who a request is from, whatever it says about itself."""

from __future__ import annotations

import re
from typing import Any

import pytest

from quota.errors import ConfigError
from quota.inbound.identity import CF_CONNECTING_IP, FORWARDED, MAX_CHARS, MAX_HOPS, Identify, Proxies, as_text

PROXIES = ["10.0.0.0/8", "fd00::/8", "unix"]


def xff(peer: str | None, *lines: str, trusted: list[str] = PROXIES) -> str:
    return Proxies(trusted).client(peer, lambda: lines)


@pytest.mark.parametrize(
    ("peer", "lines", "client"),
    [
        ("10.0.0.1", ("2001:db8:1:2:3::4",), "a:2001:db8:1:2::"),
        # Cloudflare sends one; of several the last was written last.
        ("10.0.0.1", ("1.1.1.1", "203.0.113.7"), "a:203.0.113.7"),
    ],
)
def test_cloudflares_field_has_the_client(peer: str, lines: tuple[str, ...], client: str) -> None:
    proxies = Proxies(PROXIES, CF_CONNECTING_IP)
    assert proxies.client(peer, lambda: lines) == client
    headers = [(b"cf-connecting-ip", line.encode()) for line in lines] + [(b"x-forwarded-for", b"1.2.3.4")]
    assert Identify(proxies).asgi({"client": (peer, 1), "headers": headers}) == client


@pytest.mark.parametrize(
    ("peer", "lines", "client"),
    [
        # Whoever is no proxy of ours may write what it likes.
        ("203.0.113.7", ("10.0.0.1",), "a:203.0.113.7"),
        # Through one proxy: what it appended counts, not what the client had sent.
        ("10.0.0.1", ("10.9.9.9, 203.0.113.7",), "a:203.0.113.7"),
        # Through several.
        ("10.0.0.1", ("1.1.1.1, 203.0.113.7, 10.0.0.2, 10.0.0.3",), "a:203.0.113.7"),
        # The proxy sent nothing, or no address: it answers itself.
        ("10.0.0.1", ("1.2.3.4, " + "9" * 9_999,), "a:10.0.0.1"),
        # Ports, brackets, zones, IPv4 inside IPv6, a customer's network.
        ("10.0.0.1", ("203.0.113.7:4711",), "a:203.0.113.7"),
        ("10.0.0.1", ("[2001:db8:1:2:3::4]:4711",), "a:2001:db8:1:2::"),
        ("10.0.0.1", ("::ffff:203.0.113.7",), "a:203.0.113.7"),
        ("10.0.0.1", ("64:ff9b::203.0.113.7",), "a:203.0.113.7"),
        ("fe80::1%eth0", (), "a:fe80::"),
        # A unix socket has no address.
        (None, ("203.0.113.7",), "a:203.0.113.7"),
    ],
)
def test_the_address_is_counted_from_the_right(peer: str | None, lines: tuple[str, ...], client: str) -> None:
    assert xff(peer, *lines) == client


@pytest.mark.parametrize(
    ("lines", "client"),
    [
        (("For=203.0.113.7;proto=https;by=10.0.0.1",), "a:203.0.113.7"),
        (('for="[2001:db8::1]:4711"',), "a:2001:db8::"),
        (("for=1.1.1.1, for=203.0.113.7, for=10.0.0.2",), "a:203.0.113.7"),
        # A quote that never closes must not swallow what our proxy wrote behind it.
        (('for="1.1.1.1, for=203.0.113.7',), "a:203.0.113.7"),
        (('for="1.1.1.1\\", for="203.0.113.7:1"',), "a:203.0.113.7"),
        (('for="', "for=203.0.113.7"), "a:203.0.113.7"),
        (("for=1.1.1.1, for=_hidden",), "a:10.0.0.1"),
        (('for="' + "a," * 5_000,), "a:10.0.0.1"),
        # A text of the client's in our own proxy's element: very long, or with a backslash at its end.
        ((f'for=1.1.1.1;a=b, proto=http;host="{"a" * 2_000}";for=203.0.113.7',), "a:10.0.0.1"),
        (('for=1.1.1.1;a=b, proto=http;host="a\\\\";for=203.0.113.7',), "a:203.0.113.7"),
        (('host="a;for=1.1.1.1";for=203.0.113.7',), "a:10.0.0.1"),
    ],
)
def test_the_field_of_rfc_7239_is_read_from_the_right_too(lines: tuple[str, ...], client: str) -> None:
    assert Proxies(PROXIES, FORWARDED).client("10.0.0.1", lambda: lines) == client


def test_a_flood_of_entries_costs_little_and_ends_at_a_proxy() -> None:
    assert xff("10.0.0.1", "203.0.113.7" + ", 10.0.0.2" * (MAX_HOPS - 1)) == "a:203.0.113.7"
    assert xff("10.0.0.1", "203.0.113.7" + ", 10.0.0.2" * MAX_HOPS) == "a:10.0.0.2"
    assert xff("10.0.0.1", ", ".join(["10.0.0.2"] * 10_000)) == "a:10.0.0.2"
    assert xff("10.0.0.1", *["10.0.0.2"] * 10_000) == "a:10.0.0.2"
    assert xff("10.0.0.1", "," * 60_000) == "a:10.0.0.1"


class User:
    def __init__(self, name: str, authenticated: bool = True) -> None:
        self.is_authenticated = authenticated
        self.display_name = name

    @property
    def identity(self) -> str:
        raise NotImplementedError


def asgi(user: object = None, **headers: str) -> str:
    fields = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]
    scope: dict[str, Any] = {"client": ("203.0.113.7", 1), "headers": fields, "user": user}
    return IDENTIFY.asgi(scope)


IDENTIFY = Identify(Proxies(), key_field="X-API-Key", knows_key={"good", "k" * 9_999}.__contains__)


def test_a_key_goes_before_a_user_and_a_user_before_an_address() -> None:
    assert re.fullmatch("k:[0-9a-f]{32}", asgi(User("ada"), x_api_key="good"))
    assert asgi(User("ada")) == "u:ada"
    assert asgi(User("ada", authenticated=False)) == "a:203.0.113.7"


def test_an_invented_key_names_no_visitor() -> None:
    """Else each new one would have a new allowance."""
    assert asgi(x_api_key="invented") == "a:203.0.113.7"
    assert asgi(x_api_key="") == "a:203.0.113.7"


@pytest.mark.parametrize("key", ["schl\u00fcssel", "schl\u00c3\u00bcssel", "voil\u00e0"])
def test_a_key_is_one_visitor_whether_its_letters_come_as_utf_8_or_as_latin_1(key: str) -> None:
    """The application has it as it is written, or as its framework shows the bytes of the field."""
    identify = Identify(Proxies(), key_field="X-API-Key", knows_key={key}.__contains__)
    written = as_text(key)
    sent = [written.encode(), written.encode("latin-1")] if key == written else [key.encode("latin-1")]
    scopes = [{"client": ("203.0.113.7", 1), "headers": [(b"x-api-key", value)]} for value in sent]
    environs = [{"REMOTE_ADDR": "203.0.113.7", "HTTP_X_API_KEY": value.decode("latin-1")} for value in sent]
    (identity,) = {*map(identify.asgi, scopes), *map(identify.wsgi, environs)}
    assert identity.startswith("k:")


def test_two_different_keys_name_no_visitor() -> None:
    scope = {"client": ("203.0.113.7", 1), "headers": [(b"x-api-key", b"good"), (b"x-api-key", b"bad")]}
    assert IDENTIFY.asgi(scope) == "a:203.0.113.7"


def test_a_long_identity_is_hashed() -> None:
    assert len(asgi(x_api_key="k" * 9_999)) <= MAX_CHARS
    hashed = asgi(User("u" * 9_999))
    assert re.fullmatch("u#[0-9a-f]{32}", hashed)
    assert hashed not in (asgi(User("u" * 9_998)), asgi(User(hashed.removeprefix("u#"))))
    assert len(xff("x" * 9_999)) <= MAX_CHARS


def test_wsgi_identifies_callers_like_asgi() -> None:
    environ = {"REMOTE_ADDR": "10.0.0.1", "HTTP_X_FORWARDED_FOR": "1.1.1.1, 203.0.113.7", "HTTP_X_API_KEY": "good"}
    assert Identify(Proxies(PROXIES)).wsgi(environ) == "a:203.0.113.7"
    assert IDENTIFY.wsgi(environ) == asgi(x_api_key="good")
    assert IDENTIFY.wsgi({"REMOTE_USER": "ada", "REMOTE_ADDR": "10.0.0.1"}) == "u:ada"


@pytest.mark.parametrize("peer", ["", "localhost", "unix", "<local>", "0.0.0.0"])  # noqa: S104
def test_a_unix_socket_is_one_whatever_the_server_calls_it(peer: str) -> None:
    environ = {"REMOTE_ADDR": peer, "HTTP_X_FORWARDED_FOR": "1.1.1.1, 203.0.113.7"}
    assert Identify(Proxies(PROXIES)).wsgi(environ) == "a:203.0.113.7"
    assert Identify(Proxies(["10.0.0.0/8"])).wsgi(environ) == "a:unix"


@pytest.mark.parametrize(
    ("trusted", "peers", "lines", "remedy"),
    [
        ([], (None, ""), [], 'add "unix" to trusted_proxies, and have the proxy send'),
        (["unix"], (None, ""), [], "have the proxy"),
        (["10.9.0.0/16"], ("8.8.8.8", "127.0.0.1", "10.8.0.1"), ["1.1.1.1"], "if that is your proxy, add it to"),
    ],
)
def test_the_log_warns_once_that_callers_behind_a_proxy_share_a_limit(
    trusted: list[str], peers: tuple[str | None], lines: list[str], remedy: str, caplog: pytest.LogCaptureFixture
) -> None:
    proxies = Proxies(trusted)
    assert {proxies.client(peer, lambda: lines) for peer in peers} == {f"a:{peer or 'unix'}" for peer in peers}
    (line,) = caplog.messages
    assert line.startswith("inbound_one_visitor: ")
    assert f"share one limit; {remedy}" in line


def test_the_applications_function_names_the_user() -> None:
    identify = Identify(Proxies(), user=lambda scope: scope["session"].get("name"))
    assert identify.asgi({"session": {"name": "ada"}, "headers": []}) == "u:ada"
    assert identify.asgi({"session": {}, "client": ("203.0.113.7", 1), "headers": []}) == "a:203.0.113.7"


@pytest.mark.parametrize(
    ("trusted", "message"),
    [
        (["10.0.0.1/8"], "its last bits zero"),
        (["proxy.internal"], "not an address"),
        ("10.0.0.0/8", "a list"),
        (["::ffff:10.0.0.0/104"], "write the IPv4 address"),
        ([167772161], "not an address"),
    ],
)
def test_a_proxy_that_is_none_is_an_error(trusted: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Proxies(trusted)


def test_an_unknown_proxy_field_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'forwarded'"):
        Proxies(field="forward")
