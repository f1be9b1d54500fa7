"""No secret reaches a log or a message."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Iterator
from html import escape

import pytest

from quota.common import redact as redact_module
from quota.common.log_lines import LineFormatter, RedactingFilter
from quota.common.redact import MIN_PIECE_LENGTH, REDACTED, redact, register
from quota.common.text import describe, one_line, shorten, show


@pytest.fixture(autouse=True)
def _forget_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redact_module, "_secrets", ())


@pytest.fixture
def log() -> Iterator[tuple[logging.Logger, io.StringIO]]:
    """A logger of its own whose one handler redacts, and what that handler wrote."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.addFilter(RedactingFilter())
    logger = logging.getLogger("test_redact")
    logger.propagate = False
    logger.addHandler(handler)
    yield logger, stream
    logger.removeHandler(handler)


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        # A URL's query.
        ("GET https://h/videos?part=id&key=s3cret&alt=json", f"GET https://h/videos?part=id&key={REDACTED}&alt=json"),
        ("api_key=s3cret", f"api_key={REDACTED}"),
        # Headers: as text, as a dict, as bytes in a repr, as JSON, as JSON in JSON.
        ("{'x-goog-api-key': 's3cret', 'a': 'b'}", f"{{'x-goog-api-key': '{REDACTED}', 'a': 'b'}}"),
        (r"b'GET /\r\nx-goog-api-key: s3cret\r\n'", rf"b'GET /\r\nx-goog-api-key: {REDACTED}\r\n'"),
        ('{"Authorization": "Bearer s3cret"}', f'{{"Authorization": "Bearer {REDACTED}"}}'),
        (r"{\"X-Goog-Api-Key\": \"s3cret\"}", rf"{{\"X-Goog-Api-Key\": \"{REDACTED}\"}}"),
        ("Authorization: Basic czNjcmV0", f"Authorization: Basic {REDACTED}"),
        ("sent bearer s3cret-token", f"sent bearer {REDACTED}"),
        # What gives itself away by its form.
        ("the key AIzaSyA0123456789012345678901234567890 is", f"the key {REDACTED} is"),
        ("token ya29.a0AfH6SMB_x-y", f"token {REDACTED}"),
        ("redis://user:s3cret@host/0", f"redis://user:{REDACTED}@host/0"),
        ("refresh_Token=s3cret", f"refresh_Token={REDACTED}"),
        # What only looks similar.
        ("min(rows, key=len)", "min(rows, key=len)"),
        ("monkey=1 turnkey=2", "monkey=1 turnkey=2"),
        ("http://host:80/path@x", "http://host:80/path@x"),
        ("a bearer of news", "a bearer of news"),
        # Letters outside of ASCII that stand for one of it where case does not matter.
        ("author\u0131zation: s3cret", f"author\u0131zation: {REDACTED}"),
        ("client_\u017fecret=s3cret", f"client_\u017fecret={REDACTED}"),
    ],
)
def test_a_text_like_a_secret_is_replaced_once(text: str, clean: str) -> None:
    assert redact(text) == clean
    assert redact(clean) == clean


def test_a_registered_secret_is_replaced_wherever_it_stands() -> None:
    register("pass word/1")
    register("pass word/1 and more")
    for text in ("pass word/1", "pass%20word%2F1", "pass%20word/1", "pass+word%2f1", "pass word/1 and more"):
        assert redact(f"<{text}>") == f"<{REDACTED}>"


def test_a_value_too_short_for_a_secret_is_not_hunted_for() -> None:
    for value in ("on", "", None):
        register(value)
    assert redact("one connection") == "one connection"


def test_a_record_loses_its_secrets_in_message_arguments_fields_and_traceback(
    log: tuple[logging.Logger, io.StringIO],
) -> None:
    logger, stream = log
    logger.handlers[0].setFormatter(logging.Formatter("%(message)s %(uri)s"))
    register("registered-1")
    try:
        raise ValueError("GET https://h/?key=s3cret1")
    except ValueError:
        logger.exception("%s of %s", "registered-1", {"x-goog-api-key": "s3cret2"}, extra={"uri": "/?key=s3cret3"})
    written = stream.getvalue()
    assert "s3cret" not in written
    assert "registered-1" not in written
    assert "ValueError: GET https://h/?key=[redacted]" in written


def test_a_message_that_does_not_fit_its_arguments_is_still_redacted(
    log: tuple[logging.Logger, io.StringIO], capsys: pytest.CaptureFixture[str]
) -> None:
    """Logging itself would print message and arguments to stderr."""
    logger, stream = log
    logger.warning("one %s, not two", "?key=s3cret", "?key=s3cret")
    assert "s3cret" not in stream.getvalue() + capsys.readouterr().err


def test_a_log_line_is_one_line_and_a_traceback_keeps_its_own() -> None:
    record = logging.makeLogRecord({"msg": "said %s", "args": ("\x1b[31m\x9bred\nquota: all is well",)})
    assert LineFormatter("quota: %(message)s").format(record) == r"quota: said \x1b[31m\x9bred\nquota: all is well"
    try:
        raise ValueError("\x1b[31m")
    except ValueError:
        record.exc_info = sys.exc_info()
    lines = LineFormatter().format(record).split("\n")
    assert "Traceback (most recent call last):" in lines
    assert lines[-1] == r"ValueError: \x1b[31m"


def test_a_secret_that_was_cut_is_replaced_too() -> None:
    """Messages are cut before they are shown, and a cut may go through a secret."""
    hidden = "n0t-of~the+usual/shape"
    register(hidden)
    for before in (*range(25, 65), *range(165, 205), *range(265, 305)):  # around the places of the cuts
        text = f"{'-' * before}{hidden}{'-' * 420}"
        for cut in (shorten(text, 300), one_line(text), show(text), describe(ValueError(text))):
            shown = redact(cut)
            for at in range(len(hidden) - MIN_PIECE_LENGTH + 1):
                assert hidden[at : at + MIN_PIECE_LENGTH] not in shown, (before, cut)
    assert redact("this and... that") == "this and... that"


@pytest.mark.parametrize("secret", ['p"ss&+word', "p\\ss-word", "p'ss-\"word", "pässwörd", "p\U0001f600ss-word"])
def test_a_secret_that_was_escaped_is_replaced_too(secret: str) -> None:
    register(secret)
    in_json = json.dumps(secret)
    for_html = (escape(secret), in_json.replace("&", r"\u0026").replace("+", r"\u002B"))
    for text in (in_json, json.dumps(secret, ensure_ascii=False), repr(secret), repr([secret]), *for_html):
        assert "ss" not in redact(text), text
