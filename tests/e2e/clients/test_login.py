"""A credential without a key calls as whom its `auth` names. Tokens are fetched for free, and never shown."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from tenacity import wait_none

import quota
from quota.jobs.runner import run_job
from support.plain_http import Answer, Arrived, PlainServer
from support.setup import charges_at

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PAGE = json.dumps({"items": [], "kind": "youtube#videoListResponse"}).encode()
UNAUTHORIZED = json.dumps(
    {"error": {"code": 401, "message": "Invalid Credentials", "errors": [{"reason": "authError"}]}}
).encode()


class Site:
    """An API that wants the newest token, and a server that grants tokens."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.granted = 0
        self.wanted = "Bearer token-1"
        self.denied: str | None = None
        self.api = PlainServer(self.answer)
        self.tokens = PlainServer(self.grant)

    def answer(self, request: Arrived) -> Answer:
        return Answer(200, PAGE) if request.headers.get("authorization") == self.wanted else Answer(401, UNAUTHORIZED)

    def grant(self, request: Arrived) -> Answer:
        if self.denied is not None:
            return Answer(400, json.dumps({"error": "invalid_grant", "error_description": self.denied}).encode())
        self.granted += 1
        token = {"access_token": f"token-{self.granted}", "expires_in": 3_600, "token_type": "Bearer"}
        return Answer(200, json.dumps(token).encode())

    def configure(self, auth: str) -> Path:
        config = self.folder / "quota.toml"
        config.write_text(
            f'[ledger]\nurl = "sqlite:///ledger.db"\n[credentials.main]\napi = "youtube-v3"\nauth = "{auth}"\n'
            f'endpoint = "{self.api.address}"\n[store]\nurl = "sqlite:///videos.db"\n[jobs.t]\nfetch = "trending"\n'
        )
        return config

    def account(self) -> str:
        key = rsa.generate_private_key(public_exponent=65_537, key_size=2_048).private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        info = {"client_email": "a@b.example", "token_uri": f"{self.tokens.address}/x", "private_key": key.decode()}
        (self.folder / "account.json").write_text(json.dumps(info))
        return key.decode()

    def user(self) -> None:
        """A user's file, with a token that still holds: a new one would be asked of Google itself."""
        info = {"client_id": "c", "client_secret": "secret", "refresh_token": "r", "token": "token-1"}
        (self.folder / "user.json").write_text(json.dumps({**info, "expiry": "2999-01-01T00:00:00Z"}))


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    with made.api, made.tokens:
        yield made


def spent(session: quota.Session) -> int:
    return sum(entry.units for entry in charges_at(session.ledger, "main"))


def listed(session: quota.Session) -> Any:
    return session.google().videos().list(part="id", chart="mostPopular").execute()


def test_a_job_calls_as_its_service_account_and_its_token_costs_nothing(site: Site) -> None:
    site.account()
    with quota.open(site.configure("service-account:account.json")) as session:
        report = run_job(session, "t", wait=wait_none())
        assert (report.outcome, report.units, site.granted) == ("done", 1, 1)
        assert [request.headers["authorization"] for request in site.api.arrived] == ["Bearer token-1"]
        assert (spent(session), len(site.tokens.arrived)) == (1, 1)


def test_a_401_renews_the_token_once_and_both_attempts_are_charged(site: Site) -> None:
    site.account()
    site.wanted = "Bearer token-2"
    with quota.open(site.configure("service-account:account.json")) as session:
        assert listed(session)["items"] == []
        assert (site.granted, len(site.api.arrived), spent(session)) == (2, 2, 2)


def test_a_user_calls_with_the_token_of_the_file(site: Site) -> None:
    site.user()
    with quota.open(site.configure("authorized-user:user.json")) as session:
        assert listed(session)["items"] == []
        assert spent(session) == 1


def test_a_bearer_token_is_sent_as_it_stands(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_TOKEN", "token-1")
    with quota.open(site.configure("bearer:env:A_TOKEN")) as session:
        assert listed(session)["items"] == []
    monkeypatch.delenv("A_TOKEN")
    with quota.open(site.configure("bearer:env:A_TOKEN")) as session:
        with pytest.raises(quota.ConfigError, match="environment variable A_TOKEN is not set; put the token into it"):
            listed(session)
        with pytest.raises(quota.ConfigError, match="A_TOKEN is not set"):
            session.check_key()


def test_a_key_comes_before_it(site: Site) -> None:
    site.account()
    config = site.configure("service-account:account.json")
    (site.folder / "key").write_text("token-1")
    config.write_text(config.read_text().replace("auth =", 'key = "file:key"\nauth ='))
    with quota.open(config) as session, pytest.raises(Exception, match="401"):
        listed(session)
    assert (site.granted, site.api.arrived[0].headers["x-goog-api-key"]) == (0, "token-1")


def test_a_login_that_is_refused_ends_the_run_in_one_line_without_a_secret(site: Site) -> None:
    secret = site.account().splitlines()[3]
    site.denied = f"Token has been expired or revoked: {secret}"
    with quota.open(site.configure("service-account:account.json")) as session:
        report = run_job(session, "t", wait=wait_none())
        assert (report.outcome, report.exit_status, spent(session)) == ("failed", 78, 0)
    assert report.why.startswith("auth was not accepted (invalid_grant")
    assert report.why.endswith("; renew it")
    assert "\n" not in report.why
    assert secret not in report.why


def test_a_token_that_is_refused_ends_the_run_with_the_remedy(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_TOKEN", "an-old-one")
    with quota.open(site.configure("bearer:env:A_TOKEN")) as session:
        report = run_job(session, "t", wait=wait_none())
        assert (report.outcome, report.exit_status) == ("failed", 78)
        assert len(site.api.arrived) == spent(session) == 1
    assert report.why == "auth was not accepted (upstream refused the token); renew it"
    assert "an-old-one" not in report.why
