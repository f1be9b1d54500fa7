"""A newcomer's way with a shipped book: init, a metered call that upstream answers as in the evidence, a refusal."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import quota
from quota.cli.configuration import configuration_for
from quota.common.clock import host_clock
from quota.rules.facts import MAX_WAIT_MS
from quota.settings.books import book_names, load_book
from support.book_evidence import evidence_of
from support.plain_http import Answer, PlainServer

LONG = timedelta(seconds=10)
"""A closing that lasts at least as long is over for no test that follows it."""


def closing(row: dict[str, Any]) -> timedelta | None:
    """For how long an answer closes a bucket, where it says so."""
    until = next(iter(row["means"].get("closes", {}).values()), None)
    return None if until is None else datetime.fromisoformat(until) - datetime.fromisoformat(row["at"])


def closings() -> list[tuple[str, dict[str, Any]]]:
    """An answer of each book that has one by which upstream closes a bucket for long."""
    rows_by_name = []
    for name in book_names():
        rows = [row for row in evidence_of(name)[1] if "request" in row and (closing(row) or timedelta()) >= LONG]
        rows_by_name += [(name, rows[0])] if rows else []
    return rows_by_name


def test_at_least_ten_books_have_a_closing_answer() -> None:
    assert len(closings()) >= 10


@pytest.mark.parametrize(("name", "row"), closings())
def test_an_answer_of_the_evidence_refuses_the_next_call(tmp_path: Path, name: str, row: dict[str, Any]) -> None:
    body = row["body"] if isinstance(row["body"], str) else json.dumps(row["body"])
    verb, _, url = row["request"].partition(" ")
    path = url.removeprefix(f"https://{urlsplit(url).netloc}")
    headers = {
        "Date": format_datetime(datetime.fromisoformat(row["at"]).astimezone(UTC), usegmt=True),
        **row["headers"],
    }
    with PlainServer(lambda request: Answer(row["status"], body.encode(), headers)) as server:
        text = configuration_for(name, load_book(name)).replace('"my-project"', '"mine"')
        text = re.sub(r'(?m)^(?:auth|key|endpoint) = ".*"\n', "", text)
        text = text.replace("limits = [", f'endpoint = "{server.address}"\nlimits = [', 1)
        (tmp_path / "quota.toml").write_text(text.replace("[ledger]", '[ledger]\nurl = "sqlite:///ledger.db"'))
        with quota.open(tmp_path / "quota.toml") as session:
            client = session.requests()
            before_ms = host_clock()
            assert client.request(verb, server.address + path).status_code == row["status"]
            after_ms = host_clock()
            with pytest.raises(quota.Refused) as refused:
                client.request(verb, server.address + path)
        assert len(server.arrived) == 1
    lasts = closing(row)
    assert lasts is not None
    retry_at_ms = refused.value.decision.retry_at_ms
    assert retry_at_ms is not None
    lasts_ms = lasts / timedelta(milliseconds=1)
    late_ms = 60_000 if lasts_ms > MAX_WAIT_MS else 2
    assert before_ms + lasts_ms <= retry_at_ms <= after_ms + lasts_ms + late_ms, "a client that waits as asked goes on"
