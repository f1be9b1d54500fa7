"""The google-auth credentials that `auth` of a credential names. Nothing here contacts upstream."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import google.auth
from google.auth.credentials import with_scopes_if_required
from google.auth.exceptions import DefaultCredentialsError, GoogleAuthError
from google.oauth2 import credentials as user_credentials
from google.oauth2 import service_account

from quota.common.files import read_named
from quota.common.log_lines import install
from quota.common.redact import register
from quota.common.text import one_line
from quota.errors import ConfigError


def login(ref: str, where: str, scopes: Sequence[str]) -> Any:
    """The credentials behind `adc`, `service-account:PATH` or `authorized-user:PATH`.

    A service account requests `scopes`. A user has already granted theirs; upstream refuses a token for others. `where`
    is for messages. Raises ConfigError, which shows no secret.
    """
    install()
    kind, _, path = ref.partition(":")
    try:
        if kind == "adc":
            credentials, _ = google.auth.default()
        elif kind == "service-account":
            credentials = service_account.Credentials.from_service_account_info(_secret_file(path, where))  # type: ignore[no-untyped-call]
        else:
            credentials = user_credentials.Credentials.from_authorized_user_info(_secret_file(path, where))  # type: ignore[no-untyped-call]
        return with_scopes_if_required(credentials, list(scopes) or None)  # type: ignore[no-untyped-call]
    except (ValueError, KeyError, TypeError, AttributeError, GoogleAuthError) as error:
        # Their messages may quote the file.
        if kind != "adc":
            raise ConfigError(
                f"{where}: auth: {one_line(path)} is no {kind} file; download it again from Google Cloud"
            ) from None
        if not isinstance(error, DefaultCredentialsError):
            raise ConfigError(f'{where}: auth = "adc": its credentials cannot be read; renew them') from None
        raise ConfigError(
            f'{where}: auth = "adc" finds no credentials; run `gcloud auth application-default login`, or set '
            "GOOGLE_APPLICATION_CREDENTIALS"
        ) from None


def bearer(token: str) -> Any:
    """Credentials that consist of this token. They cannot be renewed."""
    install()
    register(token)
    credentials: Any = user_credentials.Credentials(token)  # type: ignore[no-untyped-call]
    credentials.renewable = False  # for `Caller`
    return credentials


def _secret_file(path: str, where: str) -> dict[str, Any]:
    try:
        data = read_named(path, 1 << 20)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{where}: auth: {one_line(path)} cannot be read: {getattr(error, 'strerror', None) or 'no such name'}"
        ) from None
    info = json.loads(data)
    if not isinstance(info, dict):
        raise TypeError
    for name in ("private_key", "refresh_token", "client_secret", "token"):
        if isinstance(secret := info.get(name), str):
            for line in secret.splitlines():
                register(line)
    return info
