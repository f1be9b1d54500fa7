"""The url of a ledger and what is told to its server: where each may stand, and that no secret is seen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from urllib.parse import parse_qs

import pytest

from quota.errors import ConfigError
from quota.inbound.configured import load_rules
from quota.inbound.redis_storage import RedisStorage
from quota.ledger.factory import open_ledger
from quota.ledger.redis_url import target_of
from quota.session import open_session
from quota.settings.lint import lint
from quota.settings.load import load_settings
from quota.settings.references import Address, completed, read_address

SECRET = "s3cret/p@ss:w%rd é"  # noqa: S105  # what the tests look for in every output
CREDENTIAL = '\n[credentials.main]\napi = "youtube-v3"\nkey = "env:HOME"\n'
RULE = '\n[inbound.all]\nlimit = 5\nwindow = "60s"\n'


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", SECRET)
    monkeypatch.setenv("WITH_BREAK", f"{SECRET}\n")
    monkeypatch.setenv("URL", "redis://h:1/2")
    monkeypatch.setenv("EMPTY", "")
    (tmp_path / "secret").write_text(f"{SECRET}\r\n")
    (tmp_path / "url").write_text("rediss://:inside@h/0?ssl_ca_certs=ca.pem\n")
    (tmp_path / "secret").chmod(0o600)
    (tmp_path / "url").chmod(0o600)


def write(tmp_path: Path, *lines: str, table: str = "ledger") -> Path:
    path = tmp_path / "quota.toml"
    path.write_text("\n".join([f"[{table}]", *lines]) + "\n" + (RULE if table == "inbound" else "") + CREDENTIAL)
    path.chmod(0o600)
    return path


def url_of(path: Path, table: str) -> str:
    if table == "ledger":
        return load_settings(path).ledger.url
    url = load_rules(path).url
    assert url is not None
    return url


ALIASES = (("redis+unix", "unix"), ("valkey+unix", "unix"), ("valkey", "redis"), ("valkeys+cluster", "rediss+cluster"))

ADDRESSES = [
    (('url = "redis://h/0"',), "redis://h/0", {}),
    (('url = "env:URL"',), "redis://h:1/2", {}),
    (('url = "file:url"',), "rediss://:inside@h/0", {"ssl_ca_certs": "{}/ca.pem"}),
    (('url = "redis://h/0"', 'password = "env:WITH_BREAK"'), "redis://h/0", {"password": SECRET}),
    (('url = "redis://h/0"', 'password = "file:secret"'), "redis://h/0", {"password": SECRET}),
    (
        ('url = "redis://h/0?db=3"', 'username = "file:secret"', 'password = "env:SECRET"'),
        "redis://h/0",
        {"db": "3", "username": SECRET, "password": SECRET},
    ),
    (
        (
            'url = "rediss+sentinel://a:1,b:2/main"',
            'sentinel_username = "me"',
            'sentinel_password = "env:SECRET"',
            'ssl_ca_certs = "tls/ca.pem"',
            'ssl_certfile = "/etc/c.pem"',
            'ssl_keyfile = "../k.pem"',
            'ssl_password = "file:secret"',
            'ssl_cert_reqs = "none"',
            "ssl_check_hostname = false",
            "sentinel_ssl = false",
        ),
        "rediss+sentinel://a:1,b:2/main",
        {
            "sentinel_username": "me",
            "sentinel_password": SECRET,
            "ssl_ca_certs": "{}/tls/ca.pem",
            "ssl_certfile": "/etc/c.pem",
            "ssl_keyfile": "{}/../k.pem",
            "ssl_password": SECRET,
            "ssl_cert_reqs": "none",
            "ssl_check_hostname": "false",
            "sentinel_ssl": "false",
        },
    ),
    *((((f'url = "{alias}://h/0"'),), f"{ours}://h/0", {}) for alias, ours in ALIASES),
]


@pytest.mark.parametrize(
    ("table", "lines", "url", "options"), [*(("ledger", *row) for row in ADDRESSES), ("inbound", *ADDRESSES[6])]
)
def test_keys_beside_the_url_reach_the_server(
    tmp_path: Path, table: str, lines: tuple[str, ...], url: str, options: dict[str, str]
) -> None:
    address, _, query = url_of(write(tmp_path, *lines, table=table), table).partition("?")
    assert address == url
    in_url = {name: values[0] for name, values in parse_qs(query, strict_parsing=bool(query)).items()}
    assert in_url == {name: text.replace("{}", str(tmp_path)) for name, text in options.items()}


MISTAKES = [
    (('url = "env:NOT_SET"',), "url: environment variable NOT_SET is not set; put the url into it, or write file:/"),
    (('url = "file:none"',), "url: url file {}/none cannot be read: No such file or directory"),
    (('url = "env:not a name"',), 'url: do not write the url itself here; write "env:VARIABLE" or "file:/path"'),
    (('url = "redis://h"', 'password = "file:none"'), "password: password file {}/none cannot be read: No such"),
    (('url = "rediss://h?ssl_ca_certs=~nobody-is-called-so/x"',), "url: ~nobody-is-called-so/x: this home"),
    (('url = "sqlite:////srv/l-${USER}.db"',), "url: /srv/l-${USER}.db: no variable is replaced in a path; write"),
    (('url = "sqlite:///l.db "',), "url: a path does not begin or end with a space"),
    (('url = "redis://h"', "password = 5"), "password: a non-empty string is needed"),
    (('url = "redis://h"', 'password = "s3cret\\n"'), "password: a password has no control characters"),
    (('url = "redis://h"', 'pasword = "s3cret"'), "pasword: unknown key; did you mean 'password'?"),
    (('url = "redis://:s3cret@h"', 'password = "s3cret"'), "password: the url has one too; keep one of them"),
    (('url = "sqlite:///l.db"', 'password = "s3cret"'), "password: an embedded ledger has no server; remove this key"),
    (('password = "s3cret"',), "password: has no effect without a url of Redis; add one, or remove this key"),
]


@pytest.mark.parametrize(
    ("table", "lines", "wanted"), [*(("ledger", *mistake) for mistake in MISTAKES), ("inbound", *MISTAKES[0])]
)
def test_a_mistake_names_the_key_and_shows_no_secret(
    tmp_path: Path, table: str, lines: tuple[str, ...], wanted: str
) -> None:
    path = write(tmp_path, *lines, table=table)
    with pytest.raises(ConfigError) as caught:
        url_of(path, table)
    message = str(caught.value)
    assert message.startswith(f"{path}: {table}.{wanted.replace('{}', str(tmp_path))}")
    assert "\n" not in message
    assert "s3cret" not in message


@pytest.mark.parametrize(
    "lines",
    [
        (f'url = "redis://:{"s3cret"}@h:1/2"',),
        ('url = "redis://h:1/2"', 'password = "s3cret"'),
        ('url = "redis://h:1/2"', 'password = "env:SECRET"', 'username = "me"'),
        ('url = "valkey://h:1/2"',),
    ],
)
def test_the_ledger_is_the_same_wherever_its_password_stands(tmp_path: Path, lines: tuple[str, ...]) -> None:
    path = write(tmp_path, *lines)
    with open_session(path) as session:
        assert session.ledger.label == "redis://h:1/2"
        assert session.settings.ledger.identity == str(path)
        held = [value for value in vars(session.ledger).values() if not isinstance(value, str)]
        address = Address(session.settings.ledger.url)
        for shown in (session, session.settings, session.settings.ledger, session.ledger, address, *held):
            assert "s3cret" not in repr(shown)


CLEAR = "a password stands here, and every user of this machine can read this file; "
READABLE = "every user of this machine can read {}/secret, which holds a password; chmod 600 the file"
UNPROVEN = "whoever is between this machine and the server can read the password and change the answers; "

WARNINGS = [
    (('url = "redis://h"', 'password = "s3cret"'), 0o644, f"password: {CLEAR}"),
    (('url = "redis://:s3cret@h"',), 0o644, f"url: {CLEAR}"),
    (('url = "redis://h"', 'password = "env:SECRET"'), 0o644, ""),
    (('url = "redis://h"', 'password = "file:secret"'), 0o600, f"password: {READABLE}"),
    (('url = "rediss://h?ssl_cert_reqs=none"',), 0o600, f"ssl_cert_reqs: {UNPROVEN}"),
    (('url = "rediss://h"', "ssl_check_hostname = false"), 0o600, f"ssl_check_hostname: {UNPROVEN}"),
    (('url = "rediss+sentinel://h/main"', "sentinel_ssl = false"), 0o600, f"sentinel_ssl: {UNPROVEN}"),
    (('url = "redis+sentinel://h/main"', "sentinel_ssl = false"), 0o600, ""),
    (
        ('url = "rediss://h"', 'ssl_certfile = "secret"', 'ssl_keyfile = "secret"'),
        0o600,
        "ssl_keyfile: every user of this machine can read the private key {}/secret; chmod 600 the file",
    ),
]


@pytest.mark.parametrize(
    ("table", "lines", "mode", "message"), [*(("ledger", *row) for row in WARNINGS), ("inbound", *WARNINGS[0])]
)
def test_an_exposed_secret_is_a_warning(
    tmp_path: Path, table: str, lines: tuple[str, ...], mode: int, message: str
) -> None:
    path = write(tmp_path, *lines, table=table)
    path.chmod(mode)
    (tmp_path / "secret").chmod(0o644)
    findings = [str(finding) for finding in lint(load_settings(path))]
    warnings = [finding for finding in findings if f"{table}." in finding and "warning" in finding]
    wanted = f"warning: {table}.{message.replace('{}', str(tmp_path))}"
    assert [line for line in warnings if line.startswith(wanted)] == warnings
    assert len(warnings) == bool(message)
    assert "s3cret" not in "".join(warnings)


OPTIONS = [
    *(
        (f"{url}?sock_timeout=1", "it has no option 'sock_timeout'; did you mean 'socket_timeout'?")
        for url in ("redis://h/0", "unix:///s.sock", "rediss+sentinel://h/main", "redis+cluster://h")
    ),
    ("redis://h/0?ssl_ca_certs=x", "ssl_ca_certs is an option of TLS, which this url does not speak; write rediss://"),
    ("redis://h/0?sentinel_password=s3cret", "sentinel_password is an option of redis+sentinel:// only; remove it"),
    ("rediss://h/0?ssl_check_hostname=off", "ssl_check_hostname is true (by default) or false"),
    ("redis+sentinel://h/main?sentinel_ssl=yes", "sentinel_ssl is true or false (by default as the scheme says)"),
    ("redis+sentinel://h/main?sentinel_ssl=true&ssl_ca_certs=/none", "ssl_ca_certs: /none is no file that this"),
    ("sqlite:///a#b/ledger.db#s3cret", "url sqlite:///a#b/ledger.db: an SQLite url ends with its path; remove #"),
    ("sqlite:///ledger.db?s3cret", "an SQLite url ends with its path; remove ?"),
    ("sqlite:///ledger.db?timeout=5", "it has no option 'timeout'; an SQLite url has none, so remove it"),
]
WITH_XX = (
    "one of its parts cannot be read; write redis://HOST:PORT/DB, a password as USER:PASSWORD@ before HOST and with"
)
UNCLEAR = [
    # A password with the characters that end a host, or stand before one.
    *(f"redis://:7711{mark}s3cret@192.0.2.1:6379/0" for mark in "#/?"),
    "redis://:7711?password=s3cret@192.0.2.1:6379/0",
    "redis+sentinel://me:7711/s3cret@192.0.2.1:26379/0",
    "unix://me:pass#s3cret@/run/redis.sock",
    *("redis://user:12?s3cret=x@h/0", "redis://h/0?s3cret@x=1", "redis://h/0?x%20s3cret=1", "redis://h/0?s3cret"),
    *("redis://u:s3cret:192.0.2.1:6379/0", "redis:u:s3cret@h/0"),
    # What redis-py, or Python's parser, would drop.
    *("redis+cluster://me:s3cret@h:1,me:s3cret@i:1", "redis://me:s3cret@h:1,me:s3cret@i:1/0"),
    *("redis://h:6379/0#s3cret", "unix:///run/redis#s3cret.sock", "redis+cluster://h:6379#s3cret"),
    *("redis://a[::1]:6379/0", "redis://[::1]a:6379/0", "redis+sentinel://h,[::1]a:26379/main", "redis://h;i/0"),
    *("redis://h:0/0", "redis://s3\tcret:6379/0"),
]
TWICE = [
    *(
        (url, "it names no host; write redis://HOST:PORT/DB")
        for url in ("redis:///0", "redis://:6379/0", "redis://u:p@", "redis://:s3cret192.0.2.1:6379/0")
    ),
    ("redis://h/s3cret", "its database is not a number"),
    ("redis://$HOST/0", "no variable is replaced in it; write url = "),
    ("redis://h/0?db=3", "it has two of db"),
    ("redis://h,i:6379/0", "it names several hosts; write redis+sentinel:// or redis+cluster://, or one host"),
    ("redis://:s3cret@h/0?password=s3cret", "it has two of password"),
    ("redis://h/0?host=i", "it has no option 'host'"),
    ("unix://run/redis.sock", "a socket is on this machine and has no host; write unix:///PATH"),
    ("redis+cluster://h:6379/1", "a cluster has no database numbers; remove this one"),
]


@pytest.mark.parametrize(
    ("opened", "url", "message"),
    [
        *((open_ledger, url, WITH_XX) for url in UNCLEAR),
        *((open_ledger, *row) for row in (*OPTIONS, *TWICE)),
        (RedisStorage, UNCLEAR[0], WITH_XX),
    ],
)
def test_a_url_with_a_part_that_would_be_dropped_or_misread_is_refused(
    tmp_path: Path, url: str, message: str, opened: Callable[[str], object]
) -> None:
    with pytest.raises(ConfigError) as caught:
        opened(url)
    assert message in str(caught.value)
    assert "s3cret" not in str(caught.value)
    assert list(tmp_path.glob("*?timeout*")) == []


@pytest.mark.parametrize(
    ("url", "node"),
    [("redis://:77%2311%2Fs%40x@[::1]:6379/0", ("::1", 6379)), ("redis+sentinel://a:1,[::1]:2/main", ("a", 1))],
)
def test_a_url_that_says_each_part_once_is_taken(url: str, node: tuple[str, int]) -> None:
    assert target_of(url, 1.0).nodes[0] == node


def test_a_url_of_our_server_gets_only_what_it_lacks() -> None:
    ours = "rediss://u:p@h/2?ssl_ca_certs=ca"
    assert completed("rediss://h/3", ours) == "rediss://u:p@h/3?ssl_ca_certs=ca"
    assert completed("valkeys://v:q@h?ssl_ca_certs=x", f"{ours}&y=1") == "rediss://v:q@h?ssl_ca_certs=x&y=1"
    assert completed("rediss://h?username=v", "rediss://h?username=u&password=p&db=1") == "rediss://h?username=v"
    for other in ("redis://h/2", "rediss://i/2", "sqlite:///h", "rediss://:p@ss?w@h/2"):
        assert completed(other, ours) == other


@pytest.mark.parametrize("url", ["https://$HOST/x", "https://h\\@i/x", "https://h,i/x"])
def test_an_address_names_one_host(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOK", url)
    with pytest.raises(ConfigError, match=r"^env:HOOK holds no https:// address"):
        read_address("env:HOOK", "url", insecure=False)


def test_a_password_of_any_characters_arrives_as_it_is(tmp_path: Path) -> None:
    path = write(tmp_path, 'url = "redis://h"', 'password = "env:SECRET"')
    target = target_of(load_settings(path).ledger.url, 1.0)
    assert (target.options["password"], SECRET in repr(target)) == (SECRET, False)


@pytest.mark.parametrize("url", ["env:STORE", "file:store-url"])
def test_the_url_of_a_store_may_stand_elsewhere_too(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORE", "sqlite:///videos.db")
    (tmp_path / "store-url").write_text("sqlite:///videos.db\n")
    assert (
        load_settings(write(tmp_path, f'url = "{url}"', table="store")).store.url == f"sqlite:///{tmp_path}/videos.db"
    )


@pytest.mark.parametrize("url", ["env:NOT_SET", "env:EMPTY", "file:nothing", "env:URL"])
def test_a_url_of_a_store_that_cannot_be_had_is_an_error_in_one_line(tmp_path: Path, url: str) -> None:
    with pytest.raises(ConfigError, match=r"store\.url: [^\n]+$"):
        load_settings(write(tmp_path, f'url = "{url}"', table="store"))
