"""TLS over real sockets: each fault is one line, under every scheme, awaited or not, and of inbound limits."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from urllib.parse import quote

import pytest
import redis

import quota
from quota.errors import ConfigError, StorageAway
from quota.inbound.rules import open_storage
from quota.ledger import redis_errors
from quota.ledger.factory import open_ledger
from support.certificates import Certificates
from support.clusters import Sentinels
from support.servers import RedisServer, executables, free_port, has_tls, redis_executable
from support.users import not_root

SCHEMES = {"rediss": "/0", "rediss+sentinel": "/main/0", "rediss+cluster": ""}
"""With what follows the address."""

WAYS = ("blocking", "awaited", "inbound")
each_way_and_scheme = pytest.mark.parametrize(
    ("way", "scheme"), [("inbound", "rediss"), ("blocking", "rediss+sentinel"), ("awaited", "rediss+cluster")]
)


class Servers:
    """One for each kind of trouble, with the ports at which they speak TLS."""

    def __init__(self, stack: ExitStack, certificates: Certificates) -> None:
        self.certificates = certificates
        shown = {
            "good": certificates.server,
            "other_host": certificates.other_host,
            "expired": certificates.expired,
            "mutual": certificates.server,
        }
        self.ports: dict[str, int] = {}
        for name, pair in shown.items():
            port = self.ports[name] = free_port()
            options = certificates.options(port, pair, wants_clients=name == "mutual")
            server = stack.enter_context(RedisServer(*options, executable=executable()))
            self.ports["plain"] = server.port

    def url(self, scheme: str, name: str, **options: str) -> str:
        asked = "&".join(f"{option}={quote(text, safe='')}" for option, text in options.items())
        return f"{scheme}://localhost:{self.ports[name]}{SCHEMES[scheme]}{'?' if asked else ''}{asked}"


def executable() -> str:
    tls_executable = next((path for path in (redis_executable(), *executables().values()) if has_tls(path)), None)
    if tls_executable is None:
        pytest.skip("no Redis at hand was built with TLS")
    return tls_executable


@pytest.fixture(scope="module")
def servers(certificates: Certificates) -> Iterator[Servers]:
    with ExitStack() as stack:
        yield Servers(stack, certificates)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch, state_dir: Path) -> None:
    monkeypatch.setattr(redis_errors, "TLS_WAIT_S", 20.0)


def said_by(way: str, url: str) -> str:
    """What is said of one decision; "" if it was admitted."""
    if way == "inbound":
        with closing(open_storage(url)) as storage:
            try:
                storage.totals()
            except StorageAway as error:
                return str(error)
        return ""
    path = "quota.toml"
    with open(path, "w") as file:
        file.write(f'[ledger]\nname = "tls"\nurl = "{url}"\n[credentials.main]\napi = "youtube-v3"\nproject = "p"\n')
    if way == "blocking":
        with quota.open(path) as session:
            return session.budget().charge("search.list").detail

    async def awaited() -> str:
        async with quota.open_async(path) as session:
            decision = await session.budget().charge("search.list")
            return decision.detail

    return asyncio.run(awaited())


REFUSED, OWN = "its certificate is not accepted: ", "correct ssl_ca_certs or the host, or renew it"
FAILED, CLIENTS = "TLS failed: ", "correct ssl_certfile and ssl_keyfile, or see the server's log"

FAULTS = [
    ("good", {}, f"{REFUSED}.*certificate.*; {OWN}"),
    ("other_host", {"ca": "ca"}, f"{REFUSED}hostname mismatch, certificate is not valid for 'localhost'.; {OWN}"),
    ("expired", {"ca": "ca"}, f"{REFUSED}certificate has expired; {OWN}"),
    ("mutual", {"ca": "ca"}, f"{FAILED}.*certificate required; {CLIENTS}"),
    ("mutual", {"ca": "ca", "pair": "foreign"}, f"{FAILED}.*unknown ca; {CLIENTS}"),
]


def options_of(certificates: Certificates, which: dict[str, str]) -> dict[str, str]:
    options = {}
    if "ca" in which:
        options["ssl_ca_certs"] = str(getattr(certificates, which["ca"]))
    if "pair" in which:
        pair = getattr(certificates, which["pair"])
        options |= {"ssl_certfile": str(pair.certificate), "ssl_keyfile": str(pair.key)}
    return options


@each_way_and_scheme
@pytest.mark.parametrize(("name", "which", "message"), FAULTS)
def test_a_fault_is_a_line_of_its_own(
    servers: Servers, way: str, scheme: str, name: str, which: dict[str, str], message: str
) -> None:
    url = servers.url(scheme, name, **options_of(servers.certificates, which))
    line = said_by(way, url)
    assert re.search(f": {message}$", line), line
    place = f"localhost:{servers.ports[name]}"
    assert f"{scheme}://{place}" in line
    assert (f"sentinel {place}: " in line) == (scheme == "rediss+sentinel")
    assert "\n" not in line


@pytest.mark.usefixtures("real_walls")
@each_way_and_scheme
def test_a_server_without_tls_is_named_with_its_url(servers: Servers, way: str, scheme: str) -> None:
    line = said_by(way, servers.url(scheme, "plain", ssl_ca_certs=str(servers.certificates.ca)))
    alone = ", or sentinel_ssl = false where only the sentinels differ" if "sentinel" in scheme else ""
    assert line.endswith(f": it speaks no TLS; write {scheme.replace('rediss', 'redis')}://{alone}"), line


@pytest.mark.parametrize(
    ("way", "place", "name"),
    [
        ("blocking", "redis://{}/0", "good"),
        ("awaited", "redis://{}/1", "mutual"),
        ("inbound", "redis+sentinel://{}/main", "mutual"),
        ("blocking", "redis+cluster://{}", "good"),
    ],
)
def test_a_url_without_tls_is_named_with_its_correction(servers: Servers, way: str, place: str, name: str) -> None:
    """With a database the server is told something while we connect, without one only after that."""
    line = said_by(way, place.format(f"localhost:{servers.ports[name]}"))
    alone = ", or sentinel_ssl = true where only the sentinels differ" if "sentinel" in place else ""
    scheme = place.partition("://")[0].replace("redis", "rediss")
    assert line.endswith(f": it speaks TLS; write {scheme}://{alone}"), line


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("name", "which", "more"),
    [
        ("good", {"ca": "ca"}, {}),
        ("mutual", {"ca": "ca", "pair": "client"}, {}),
        ("other_host", {"ca": "ca"}, {"ssl_check_hostname": "false"}),
        ("expired", {}, {"ssl_cert_reqs": "none"}),
    ],
)
def test_a_good_url_is_admitted(
    servers: Servers, way: str, name: str, which: dict[str, str], more: dict[str, str]
) -> None:
    assert said_by(way, servers.url("rediss", name, **options_of(servers.certificates, which), **more)) == ""


@pytest.fixture(scope="module", params=[True, False], ids=["the servers", "the sentinels"])
def halves(request: pytest.FixtureRequest, certificates: Certificates) -> Iterator[tuple[Sentinels, bool]]:
    """Sentinels that name a server's port with TLS, or its plain one. Each of them can be asked in both ways."""
    secure = bool(request.param)
    with Sentinels(executable=executable(), certificates=certificates, links_are_secure=secure) as started:
        yield started, secure


def at(halves: tuple[Sentinels, bool], scheme: str, *, securely: bool, option: str) -> str:
    """A url of one of the sentinels: its port with TLS, or the plain one."""
    sentinels, _ = halves
    port = sentinels.sentinels[0].port
    place = f"127.0.0.1:{sentinels.tls_ports[port] if securely else port}"
    query = f"?sentinel_ssl={option}" if option else ""
    if "rediss" in scheme or option == "true":
        query += f"{'&' if query else '?'}ssl_ca_certs={sentinels.certificates.ca}"
    return f"{scheme}://{place}/main/0{query}"


@pytest.mark.parametrize("way", WAYS)
def test_sentinels_may_speak_tls_where_servers_do_not_or_the_reverse(halves: tuple[Sentinels, bool], way: str) -> None:
    _, secure = halves
    scheme, same, other = ("rediss+sentinel", "true", "false") if secure else ("redis+sentinel", "false", "true")
    assert said_by(way, at(halves, scheme, securely=not secure, option=other)) == ""
    assert said_by(way, at(halves, scheme, securely=secure, option=same)) == ""


def test_the_certificate_of_sentinels_alone_is_checked_too(servers: Servers) -> None:
    for name, which, message in FAULTS:
        options = {"sentinel_ssl": "true", **options_of(servers.certificates, which)}
        url = servers.url("rediss+sentinel", name, **options).replace("rediss", "redis")
        assert re.search(f": sentinel localhost:{servers.ports[name]}: {message}$", said_by("blocking", url))


def test_a_certificate_renewed_in_place_is_used_by_the_next_connection(servers: Servers, tmp_path: Path) -> None:
    certificates = servers.certificates
    certificate, key = tmp_path / "client.pem", tmp_path / "client.key"

    def use(pair: object) -> None:
        shutil.copy(pair.certificate, certificate)  # type: ignore[attr-defined]
        shutil.copy(pair.key, key)  # type: ignore[attr-defined]

    use(certificates.foreign)
    url = servers.url(
        "rediss", "mutual", ssl_ca_certs=str(certificates.ca), ssl_certfile=str(certificate), ssl_keyfile=str(key)
    )
    with closing(open_storage(url)) as storage:
        with pytest.raises(StorageAway, match=r"TLS failed: .*; correct ssl_certfile"):
            storage.totals()
        use(certificates.client)
        assert storage.totals() == {}


PAIR = "ssl_certfile and ssl_keyfile are no PEM certificate with its key, or ssl_password is wrong; correct them"

FILES = [
    ({"ssl_ca_certs": "none.pem"}, "ssl_ca_certs: {}/none.pem is no file that this user can read"),
    ({"ssl_ca_certs": "pipe"}, "ssl_ca_certs: {}/pipe is no file that this user can read"),
    ({"ssl_ca_certs": "text"}, "ssl_ca_certs is no file of certificates in PEM; name one"),
    ({"ssl_certfile": "others.key"}, "ssl_certfile: {}/others.key is no file that this user can read"),
    ({"ssl_certfile": "client.pem", "ssl_keyfile": "server.key"}, PAIR),
    ({"ssl_keyfile": "client.key"}, "ssl_keyfile has no effect without ssl_certfile; name the certificate too"),
    ({"ssl_cert_reqs": "s3cret"}, r"ssl_cert_reqs is required \(by default\) or none"),
]


@pytest.fixture
def files(certificates: Certificates, tmp_path: Path) -> Path:
    from cryptography.hazmat.primitives import serialization

    folder = tmp_path / "files"
    shutil.copytree(certificates.folder, folder)
    (folder / "text").write_text("not a certificate\n")
    os.mkfifo(folder / "pipe")
    (folder / "others.key").touch(0)
    key = serialization.load_pem_private_key((folder / "client.key").read_bytes(), None)
    locked = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"pass-word"),
    )
    (folder / "locked.key").write_bytes(locked)
    return folder


@pytest.mark.parametrize(("options", "message"), FILES)
def test_an_unusable_file_is_an_error_in_the_configuration(files: Path, options: dict[str, str], message: str) -> None:
    """Before anything is contacted, under every scheme."""
    named = {k: v if k == "ssl_cert_reqs" else os.path.normpath(files / v) for k, v in options.items()}
    query = "&".join(f"{name}={text}" for name, text in named.items())
    for scheme, path in SCHEMES.items():
        url = f"{scheme}://localhost:1{path}"
        for what, opening in (("ledger url", open_ledger), ("inbound storage", open_storage)):
            with not_root(), pytest.raises(ConfigError) as caught:
                opening(f"{url}?{query}")
            line = re.escape(f"{what} {scheme}://...: ") + message.replace("{}", str(files))
            assert re.fullmatch(line, str(caught.value)), caught.value


def test_an_encrypted_key_is_opened_with_its_password_and_nobody_is_asked_for_it(servers: Servers, files: Path) -> None:
    options = {"ca_certs": "ca.pem", "certfile": "client.pem", "keyfile": "locked.key"}
    named = {f"ssl_{name}": str(files / path) for name, path in options.items()}
    url = servers.url("rediss", "mutual", **named) + "&ssl_password="
    assert said_by("inbound", url + "pass-word") == ""
    for wrong in ("wrong", ""):
        with pytest.raises(ConfigError, match="or ssl_password is wrong"):
            open_ledger(url + wrong)


def test_a_ledger_of_tls_is_the_same_by_either_name(servers: Servers) -> None:
    ca = str(servers.certificates.ca)
    with closing(open_storage(servers.url("rediss", "good", ssl_ca_certs=ca))) as storage:
        storage.add_totals({"a": 1})
        with closing(open_storage(f"valkeys://localhost:{servers.ports['good']}/0?ssl_ca_certs={ca}")) as other:
            assert other.totals() == storage.totals() == {"a": 1}
            assert other.label == storage.label
        with redis.Redis(port=servers.ports["good"], ssl=True, ssl_ca_certs=ca) as client:
            client.flushall()
