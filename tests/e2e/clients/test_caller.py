"""Who signs a request of q.requests, q.httpx and q.google: no other host gets a secret. Tokens are fetched for free,
and never shown."""

from __future__ import annotations

import base64
import gzip
import json
import traceback
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import httpx
import httpx2
import pytest
import requests

import quota
from quota.clients.login import login
from quota.clients.upstream import upstream_of
from quota.jobs.runner import run_job
from support.certificates import private_key
from support.emulator import Emulator
from support.plain_http import Answer, Arrived, PlainServer
from support.proxying import BOOK, CONFIG
from support.servers import free_port
from support.setup import charges_at

ACCOUNT = 'auth = "service-account:account.json"'
LEDGER = "sqlite:///ledger.db"
SECRET = "s-e-c-r-e-t-0123456789"  # noqa: S105 - of the test


class Site:
    """The API, another host to which it redirects, and a server that grants tokens."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.granted = 0
        self.denied: str | None = None
        self.refuse = 0
        self.large = Answer()
        self.api, self.tokens = PlainServer(self.answer), PlainServer(self.grant)
        self.other = PlainServer(lambda _: Answer(200))

    def answer(self, request: Arrived) -> Answer:
        if request.target.startswith("/things/away"):
            asked = request.target.partition("?")[2]
            return Answer(302, headers={"Location": f"{self.other.address}/there?{asked}"})
        if request.target.startswith("/things/circle"):
            return Answer(302, headers={"Location": request.target})
        if request.target.startswith("/things/large"):
            return self.large
        if self.refuse:
            self.refuse -= 1
            return Answer(401, b'{"error": "no"}')
        return Answer(200, b'{"ok": true}')

    def grant(self, request: Arrived) -> Answer:
        if self.denied is not None:
            return Answer(400, json.dumps({"error": "invalid_grant", "error_description": self.denied}).encode())
        self.granted += 1
        token = {"access_token": f"token-{self.granted}", "expires_in": 3_600, "token_type": "Bearer"}
        return Answer(200, json.dumps(token).encode())

    def open(self, key: str = "", auth: str = 'key = "file:key"', address: str = "") -> quota.Session:
        text = CONFIG.format(auth=auth, address=address or self.api.address, limit=1_000, ledger=LEDGER, more="")
        (self.folder / "key").write_text(SECRET)
        (self.folder / "things.toml").write_text(f"{key}\n{BOOK}")
        (self.folder / "quota.toml").write_text(text)
        return quota.open(self.folder / "quota.toml")

    def account(self) -> str:
        info = {"client_email": "a@b.example", "token_uri": f"{self.tokens.address}/x", "private_key": private_key()}
        info["type"] = "service_account"
        (self.folder / "account.json").write_text(json.dumps(info))
        return ACCOUNT


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    made = Site(tmp_path)
    (tmp_path / "netrc").write_text("default login a password b\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with made.api, made.other, made.tokens:
        yield made


KINDS = ["requests", "httpx", "httpx2"]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def client_of(session: quota.Session, kind: str, **options: Any) -> Any:
    if kind == "requests":
        return session.requests(**options)
    return session.httpx(follow_redirects=True, library=kind, **options)


def spent(session: quota.Session) -> list[tuple[str, int]]:
    return [(entry.method, entry.units) for entry in charges_at(session.ledger, "main")]


def test_a_client_that_is_not_for_the_api_or_unknown_is_refused(site: Site) -> None:
    """Google's would send the key to YouTube."""
    with site.open() as session:
        with pytest.raises(quota.UsageError, match="no API of Google's"):
            session.google()
        with pytest.raises(quota.UsageError, match="library 'htpx': write 'httpx' or 'httpx2'"):
            session.httpx(library="htpx")


@pytest.mark.parametrize("auth", ["key", "bearer", "account"])
def test_a_credential_of_google_authenticates_alike_through_every_seam(site: Site, auth: str) -> None:
    named = {"key": 'key = "file:key"', "bearer": 'auth = "bearer:file:key"', "account": site.account()}[auth]
    with Emulator() as google:
        site.open(auth=named, address=google.address).close()
        file = site.folder / "quota.toml"
        file.write_text(file.read_text().replace("things.toml", "youtube-v3"))
        asked = {"part": "snippet", "chart": "mostPopular"}
        url = f"{google.address}/youtube/v3/videos"
        with quota.open(file) as session:
            session.google().videos().list(**asked).execute()
            asked["key"] = "of-the-program-before"
            assert [client_of(session, kind).get(url, params=asked).status_code for kind in KINDS] == [200] * len(KINDS)
        by_project = google.usage()["by_project"]
        assert [project["units"] for project in by_project.values()] == (
            [{"units": 4}] if auth != "account" else [{"units": 1}] * 4  # each asks for a token of its own
        )
    assert len({asked_for(request) for request in site.tokens.arrived}) == (auth == "account")
    assert not any("authorization" in request.headers for request in site.tokens.arrived), "the login of ~/.netrc left"


@pytest.mark.parametrize(
    ("key", "place", "value"),
    [
        ("", "authorization", f"Bearer {SECRET}"),
        ('key = { header = "X-Api-Key" }', "x-api-key", SECRET),
        ('key = { header = "Authorization", scheme = "token" }', "authorization", f"token {SECRET}"),
    ],
)
def test_a_key_stands_where_the_book_says(site: Site, kind: str, key: str, place: str, value: str) -> None:
    with site.open(key) as session:
        client = client_of(session, kind)
        assert client.get(f"{site.api.address}/things/1?a&&=b").status_code == 200
        assert client.post(f"{site.api.address}/things", json={"a": 1}).status_code == 200
        assert spent(session) == [("read", 1), ("write", 5)]
    for request in site.api.arrived:
        assert (request.headers.get(place), request.headers.get("authorization", value)) == (value, value)
    assert (site.api.arrived[0].target, site.api.arrived[1].body.replace(b" ", b"")) == ("/things/1?a&&=b", b'{"a":1}')


def test_a_key_in_the_query_is_in_no_answer_and_no_error_of_the_client(
    site: Site, kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(HTTPConnection, "debuglevel", 1)  # prints what is sent
    with site.open('key = { query = "token" }') as session:
        answer = client_of(session, kind).get(f"{site.api.address}/things/1?a=1&token=mine")
    assert site.api.arrived[0].target == f"/things/1?a=1&token={SECRET}"
    raw = vars(getattr(answer, "raw", answer))
    assert SECRET not in f"{answer.url} {answer.request.url} {answer.request.headers} {answer!r} {raw}"
    assert SECRET not in capsys.readouterr().out
    address = f"http://127.0.0.1:{free_port()}"
    with site.open('key = { query = "token" }', address=address) as session:
        with pytest.raises((requests.ConnectionError, httpx.ConnectError, httpx2.ConnectError)) as error:
            client_of(session, kind).get(f"{address}/things/1?a=1")
        assert spent(session)[-1] == ("read", 0), "no byte left"
    shown = "".join(traceback.format_exception(error.value))
    assert SECRET not in f"{error.value} {error.value!r} {error.value.request.url} {shown}"


@pytest.mark.parametrize("key", ["", 'key = { header = "X-Api-Key" }', 'key = { query = "token" }'])
def test_a_redirect_to_another_host_takes_no_key_along_and_costs_nothing_there(site: Site, kind: str, key: str) -> None:
    with site.open(key) as session:
        assert client_of(session, kind).get(f"{site.api.address}/things/away").status_code == 200
        assert spent(session) == [("read", 1)]
        with pytest.raises(Exception, match="redirects"):
            client_of(session, kind).get(f"{site.api.address}/things/circle")
        assert len(spent(session)) == 1 + 6, "five redirects"
    [arrived] = site.other.arrived
    assert SECRET not in f"{arrived.target} {arrived.headers}"
    assert "authorization" not in arrived.headers


def test_a_401_renews_the_token_once_and_each_attempt_is_charged(
    site: Site, kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(HTTPConnection, "debuglevel", 1)  # prints what is sent
    with site.open(auth=site.account()) as session:
        client = client_of(session, kind)
        site.refuse = 1
        assert client.get(f"{site.api.address}/things/1").status_code == 200
        assert (site.granted, spent(session)) == (2, [("read", 1)] * 2)
        site.refuse = 5
        assert client.get(f"{site.api.address}/things/1").status_code == 401
        assert (site.granted, len(spent(session))) == (3, 4), "once, not for ever"
    tokens = [request.headers["authorization"] for request in site.api.arrived]
    assert tokens == [f"Bearer token-{n}" for n in (1, 2, 2, 3)]
    assert "assertion" not in capsys.readouterr().out


def asked_for(request: Arrived) -> str:
    """The scope in what an account signed to get a token."""
    signed = parse_qs(request.body.decode())["assertion"][0].split(".")[1]
    return str(json.loads(base64.urlsafe_b64decode(signed + "=" * (-len(signed) % 4))).get("scope", ""))


@pytest.mark.parametrize(
    ("kind", "auth", "of_the_book", "scope"),
    [
        ("requests", ACCOUNT, 'scopes = ["https://a.example/b", "openid"]', "https://a.example/b openid"),
        ("httpx", 'auth = "adc"', 'scopes = ["openid"]', "openid"),
        ("requests", 'auth = "adc"\nscopes = ["email"]', 'scopes = ["openid"]', "email"),
    ],
)
def test_an_account_asks_for_the_scopes_of_its_credential_or_of_the_book(
    site: Site, kind: str, auth: str, of_the_book: str, scope: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.account()
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(site.folder / "account.json"))
    with site.open(of_the_book, auth) as session:
        assert client_of(session, kind).get(f"{site.api.address}/things/1").status_code == 200
    assert [asked_for(request) for request in site.tokens.arrived] == [scope]


@pytest.mark.parametrize("auth", ["authorized-user:user.json", "adc"])
def test_a_user_keeps_the_scopes_that_were_granted(site: Site, auth: str, monkeypatch: pytest.MonkeyPatch) -> None:
    info = {"client_id": "c", "client_secret": "secret", "refresh_token": "r", "type": "authorized_user"}
    file = site.folder / "user.json"
    file.write_text(json.dumps({**info, "scopes": ["https://scopes.example/granted"]}))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
    credentials = login(auth.replace("user.json", str(file)), "here", ["https://scopes.example/others"])
    assert credentials.scopes == ["https://scopes.example/granted"]


def test_a_token_as_it_stands_is_not_renewed(site: Site, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_TOKEN", "mine")
    site.refuse = 5
    with site.open(auth='auth = "bearer:env:A_TOKEN"') as session:
        assert client_of(session, kind).get(f"{site.api.address}/things/1").status_code == 401
        assert len(spent(session)) == 1
    assert site.api.arrived[0].headers["authorization"] == "Bearer mine"


@pytest.mark.parametrize("host", ["api.things.example", "things.googleapis.com"])
def test_google_headers_go_to_no_other_api(site: Site, kind: str, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    site.account()
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(site.folder / "account.json"))
    monkeypatch.setenv("GOOGLE_CLOUD_QUOTA_PROJECT", "billed")
    site.open(auth='auth = "adc"').close()
    book = site.folder / "things.toml"
    book.write_text(book.read_text().replace("api.things.example", host))
    with quota.open(site.folder / "quota.toml") as session:
        own = dict.fromkeys(("Authorization", "X-Goog-User-Project", "X-Allowed-Locations"), "of-the-program")
        client_of(session, kind).get(f"{site.api.address}/things/1", headers=own)
    fields = site.api.arrived[0].headers
    assert fields["authorization"].startswith("Bearer ")
    of_google = [fields.get(name) for name in ("x-goog-user-project", "x-allowed-locations")]
    assert of_google == (["billed", None] if host == "things.googleapis.com" else ["of-the-program"] * 2)
    assert ("x-goog-api-client" in fields) == (host == "things.googleapis.com")


def test_a_secret_never_goes_anywhere_in_plain_text(site: Site, kind: str) -> None:
    site.open().close()
    config = site.folder / "quota.toml"
    config.write_text(config.read_text().replace(f'endpoint = "{site.api.address}"\n', ""))
    with quota.open(config) as session:
        with pytest.raises(quota.ConfigError, match="would get the secret in plain text"):
            client_of(session, kind).get("http://api.things.example/things/1")
        assert spent(session) == []


def test_a_run_spends_at_most_max_units(site: Site, kind: str) -> None:
    with site.open() as session:
        client = client_of(session, kind, max_units=2)
        for _ in range(2):
            client.get(f"{site.api.address}/things/1")
        with pytest.raises(quota.Refused) as refused:
            client.get(f"{site.api.address}/things/1")
    assert refused.value.decision.reason == "run"
    assert len(site.api.arrived) == 2


LARGEST = b"x" * 1_000_000
GZIP = {"Content-Encoding": "gzip"}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("status", [200, 500])
def test_a_body_is_no_larger_than_a_job_allows(site: Site, packed: bool, status: int) -> None:
    def body_of(unpacked: bytes) -> Answer:
        return Answer(status, gzip.compress(unpacked), GZIP) if packed else Answer(status, unpacked)

    url, limits = f"{site.api.address}/things/large", {"max_body_mb": 1, "max_answer_s": 60, "max_units": 10}
    with site.open() as session:
        client = upstream_of(session.budget().book).client(session, "main", **limits, max_items=10, waiting=None)
        site.large = body_of(LARGEST)
        assert client.get(url).content == LARGEST
        site.large = body_of(LARGEST + b"x")
        with pytest.raises(quota.BadAnswer, match="larger than 1 MB; if this is expected, raise max_body_mb"):
            client.get(url)
        with pytest.raises(quota.BadAnswer):
            list(client.get(url, stream=True).iter_content(1_000))
        assert spent(session) == [("read", 1)] * 3, "upstream answered, so it counts"
        assert len(session.requests().get(url).content) > len(LARGEST), "nobody asked"
        site.large = Answer(302, 2 * LARGEST, GZIP | {"Location": "/things/1"})  # which does not unpack
        with pytest.raises(quota.BadAnswer):
            client.get(url)
        with pytest.raises(quota.UsageError, match="max_body_mb"):
            session.requests(max_body_mb=0)
        with pytest.raises(quota.UsageError, match="takes no other adapter: its requests would leave uncharged"):
            client.mount(url, requests.adapters.HTTPAdapter(max_retries=3))


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ('key = { header = "X-Key", query = "k" }', "key: name one place"),
        ('key = { query = "k", scheme = "Bearer" }', "key.scheme: is only for a key in a header; remove it"),
        ('scopes = ["two scopes"]', "scopes[0]: not a scope; write for example"),
        ('scopes = ["a", "a"]', "scopes[1]: 'a' appears twice"),
        ('key = { heeder = "X-Key" }', "key.heeder: unknown key; did you mean 'header'?"),
    ],
)
def test_an_invalid_place_or_scope_is_one_line(site: Site, key: str, message: str) -> None:
    with pytest.raises(quota.ConfigError) as error:
        site.open(key)
    assert message in str(error.value)


# -- Google's client and its jobs --------------------------------------------------------------------------------------

PAGE = json.dumps({"items": [], "kind": "youtube#videoListResponse"}).encode()
UNAUTHORIZED = json.dumps(
    {"error": {"code": 401, "message": "Invalid Credentials", "errors": [{"reason": "authError"}]}}
).encode()


class Google(Site):
    """YouTube, which takes one token."""

    def answer(self, request: Arrived) -> Answer:
        is_right = request.headers.get("authorization") == "Bearer token-1"
        return Answer(200, PAGE) if is_right else Answer(401, UNAUTHORIZED)

    def configure(self, auth: str) -> Path:
        config = self.folder / "quota.toml"
        config.write_text(
            f'[ledger]\nurl = "{LEDGER}"\n[credentials.main]\napi = "youtube-v3"\nauth = "{auth}"\n'
            f'endpoint = "{self.api.address}"\n[store]\nurl = "sqlite:///videos.db"\n[jobs.t]\nfetch = "trending"\n'
        )
        return config


@pytest.fixture
def google(tmp_path: Path) -> Iterator[Google]:
    made = Google(tmp_path)
    with made.api, made.other, made.tokens:
        yield made


def units(session: quota.Session) -> int:
    return sum(units for _, units in spent(session))


def listed(session: quota.Session) -> Any:
    return session.google().videos().list(part="id", chart="mostPopular").execute()


def test_a_bearer_token_that_is_not_there_is_one_line(google: Google, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("A_TOKEN", raising=False)
    with quota.open(google.configure("bearer:env:A_TOKEN")) as session:
        with pytest.raises(quota.ConfigError, match="environment variable A_TOKEN is not set; put the token into it"):
            listed(session)
        with pytest.raises(quota.ConfigError, match="A_TOKEN is not set"):
            session.check_key()


def test_a_key_comes_before_an_account(google: Google) -> None:
    google.account()
    config = google.configure("service-account:account.json")
    (google.folder / "key").write_text("token-1")
    config.write_text(config.read_text().replace("auth =", 'key = "file:key"\nauth ='))
    with quota.open(config) as session, pytest.raises(Exception, match="401"):
        listed(session)
    assert (google.granted, google.api.arrived[0].headers["x-goog-api-key"]) == (0, "token-1")


def test_a_login_that_is_refused_ends_the_run_in_one_line_without_a_secret(google: Google) -> None:
    google.account()
    secret = private_key().splitlines()[3]
    google.denied = f"Token has been expired or revoked: {secret}"
    with quota.open(google.configure("service-account:account.json")) as session:
        report = run_job(session, "t")
        assert (report.outcome, report.exit_status, units(session)) == ("failed", 78, 0)
    assert report.why.startswith("auth was not accepted (invalid_grant")
    assert report.why.endswith("; renew it")
    assert "\n" not in report.why
    assert secret not in report.why


def test_a_token_that_is_refused_ends_the_run_with_the_remedy(google: Google, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_TOKEN", "an-old-one")
    with quota.open(google.configure("bearer:env:A_TOKEN")) as session:
        report = run_job(session, "t")
        assert (report.outcome, report.exit_status) == ("failed", 78)
        assert len(google.api.arrived) == units(session) == 1
    assert report.why.endswith("; the key or token is wrong or has expired, or this method needs OAuth access")
    assert "an-old-one" not in report.why
