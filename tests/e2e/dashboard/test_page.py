"""The page without a browser: what it answers, to whom, and what it shows while something is away."""

from __future__ import annotations

import itertools
import re
import signal
import socket
import time
from contextlib import closing
from datetime import datetime
from html.parser import HTMLParser
from pathlib import Path

import httpx
import pytest

import quota
from quota.common.clock import NEVER, host_clock
from quota.dashboard.app import Dashboard
from quota.reports.metrics import FAMILIES
from quota.web.documents import Check
from support.commands import Quota, one_line
from support.page import CHARTS, HOUSE, SCRIPT, overview, serve
from support.servers import RedisServer, until
from support.web import Served

ONLY_OF_A_FILE = "quota_textfile_written_timestamp_seconds"


def get(served: Served, path: str = "/", **headers: str) -> httpx.Response:
    return httpx.get(f"{served.address}{path}", headers=headers, timeout=30)


class Outline(HTMLParser):
    """What makes a page usable without eyes or a mouse, as far as the markup tells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.unclosed: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def all(self, *names: str) -> list[dict[str, str | None]]:
        return [attrs for tag, attrs in self.tags if tag in names]


def links(text: str, folder: str) -> list[str]:
    return re.findall(rf'href="(/{folder}/[^"]+)"', text)


def pages(served: Served) -> dict[str, str]:
    """Every page that the first one leads to, by its path."""
    first = get(served).text
    paths = ["/", *links(first, "refusals")[:2], *links(first, "runs")[:2], "/no-such-page"]
    return {path: get(served, path).text for path in paths}


def test_every_page_loads_nothing_from_elsewhere(page: Served) -> None:
    for path, text in pages(page).items():
        outline = Outline(text)
        outside = [value for _, attrs in outline.tags for name, value in attrs.items() if name in ("href", "src")]
        assert [value for value in outside if not re.match(r"[/#](?!/)", value or "")] == [], path
        assert outline.all("script", "style", "iframe", "object", "form") == []
        assert [attrs for _, attrs in outline.tags if any(name == "style" or name[:2] == "on" for name in attrs)] == []
    answer = get(page)
    assert answer.headers["content-security-policy"] == "default-src 'self'; frame-ancestors 'none'"
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_every_page_has_landmarks_one_heading_captions_and_ids_of_its_own(page: Served) -> None:
    for path, text in pages(page).items():
        outline = Outline(text)
        assert [len(outline.all(tag)) for tag in ("main", "h1", "title")][:2] == [1, 1], path
        assert {attrs.get("lang") for attrs in outline.all("html")} == {"en"}
        levels = [int(tag[1]) for tag, _ in outline.tags if re.fullmatch(r"h[1-6]", tag)]
        assert [two for each, two in itertools.pairwise(levels) if two > each + 1] == [], path
        ids = [attrs["id"] for _, attrs in outline.tags if "id" in attrs]
        assert len(ids) == len(set(ids))
        assert len(outline.all("caption")) == len(outline.all("table"))
        assert all(attrs.get("scope") in ("col", "row") for attrs in outline.all("th"))
        named = {name for attrs in outline.all("section", "article", "svg") for name in _labels(attrs)}
        assert named <= set(ids)


def _labels(attrs: dict[str, str | None]) -> list[str]:
    return (attrs.get("aria-labelledby") or "").split()


def test_a_request_under_another_name_is_turned_away(page: Served) -> None:
    for path in ("/", "/metrics", "/healthz", "/style.css"):
        assert get(page, path, host=f"rebound.example:{page.port}").status_code == 421
        assert get(page, path, host=f"localhost:{page.port}").status_code == 200


def test_the_dashboard_takes_only_reading_requests(page: Served) -> None:
    for path in ("/", "/refusals/x", "/runs/1", "/metrics", "/healthz"):
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            assert httpx.request(method, f"{page.address}{path}").status_code == 405
    assert httpx.head(page.address).status_code == 200
    assert get(page, "/runs/no-such-run").status_code == get(page, "/refusals/0").status_code == 404
    assert get(page, "/favicon.ico").headers["location"] == "/icon.svg"
    assert get(page, "/icon.svg").headers["content-type"] == "image/svg+xml"


@pytest.mark.parametrize(("asked", "seconds"), [("30", 30), ("1", 5), ("99999", 3600), ("-1", None), ("x<", None)])
def test_the_page_reloads_only_on_request(page: Served, asked: str, seconds: int | None) -> None:
    refreshes = re.findall(r'http-equiv="refresh" content="(\d+)"', get(page, f"/?refresh={asked}").text)
    assert refreshes == ([] if seconds is None else [str(seconds)])


def test_metrics_have_the_families_and_the_values_of_the_textfile(page: Served, house: Quota) -> None:
    answer = get(page, "/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    scraped = _series(answer.text)
    assert {name.partition("{")[0] for name in scraped} <= set(FAMILIES)
    (house.folder / "metrics").mkdir()
    ran = house("run", SCRIPT, "--quiet", "--textfile", "metrics")
    assert ran.returncode == 0, ran.stderr
    written: dict[str, str] = {}
    for file in (house.folder / "metrics").iterdir():
        written |= _series(file.read_text(encoding="utf-8"))
    kinds = ("quota_charge", "quota_limit_units", "quota_region_completed", "quota_run_last_exit")
    same = {name: value for name, value in written.items() if name.startswith(kinds)}
    assert len(same) >= 8
    until(lambda: same.items() <= _series(get(page, "/metrics").text).items())
    after = _series(get(page, "/metrics").text)
    assert {name for name in written if name not in after and not name.startswith(ONLY_OF_A_FILE)} == set()


def _series(text: str) -> dict[str, str]:
    lines = [line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#")]
    return {name: value for name, _, value in lines}


def since_when(text: str) -> str:
    """Since when the ledger cannot be used, as the page says it."""
    return re.findall(r'cannot be used</strong> since <time datetime="([^"]+)"', text)[0]


def age_s(text: str) -> int:
    """How old is what the page shows."""
    minutes, seconds = re.findall(r"its last state, read\s+(?:(\d+)m )?(\d+)s ago", text)[0]
    return 60 * int(minutes or 0) + int(seconds)


def test_the_page_shows_its_last_state_while_the_ledger_is_away(tmp_path: Path) -> None:
    server = RedisServer()
    try:
        house = Quota(tmp_path)
        house.env["KEY"] = "a-key"
        config = HOUSE.replace("sqlite:///ledger.db", server.url).replace("ENDPOINT", "http://127.0.0.1:9")
        with quota.open(house.configure(config)) as session:
            session.budget("partner").exhaust("units", host_clock(), NEVER, "spent")
        (tmp_path / "charts.py").write_text(CHARTS)
        assert house("charge", "search.list", "--credential", "main", "--job", "charts").returncode == 0
        with serve(house) as served:
            until(lambda: "1,900 left" in get(served).text)
            assert get(served, "/healthz").json()["status"] == "pass"
            before_s = int(time.time())
            server.kill()
            until(lambda: "cannot be used" in get(served).text)
            text, noticed_s = get(served).text, time.time()
            until(lambda: re.search(r"(?s)charts</bdi></th>.*could not go on now: ledger redis:", get(served).text))
            assert "1,900 left" in text
            assert "<title>Last known: closed by upstream until it grants quota (1 of 2 credentials)" in text
            since = since_when(text)
            assert before_s <= datetime.fromisoformat(since).timestamp() <= noticed_s
            until(lambda: age_s(get(served).text) >= age_s(text) + 3)  # it was asked again, in vain
            assert since_when(get(served).text) == since
            assert get(served, "/healthz").json()["checks"]["ledger"]["status"] == "warn"
            assert get(served, "/healthz").status_code == 200
            assert 'quota_ledger_up{project="video-research"} 0' in get(served, "/metrics").text
            server.start()
            until(lambda: "cannot be used" not in get(served).text)
            assert served.end(signal.SIGTERM)[0] == 0
    finally:
        server.close()


def test_a_ledger_that_never_answered_is_shown(tmp_path: Path) -> None:
    """It accepts connections and says nothing: every reading hangs."""
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        house = Quota(tmp_path)
        house.env["KEY"] = "a-key"
        port = silent.getsockname()[1]
        config = HOUSE.replace("sqlite:///ledger.db", f"redis://127.0.0.1:{port}")
        house.configure(config.replace("ENDPOINT", "https://x"))
        with serve(house) as served:
            text = get(served).text
            assert "Not known" in text
            assert "<title>No answer" in text
            assert served.end(signal.SIGTERM) == (0, "")


def test_a_store_that_cannot_be_read_is_one_notice(tmp_path: Path, state_dir: Path) -> None:
    (tmp_path / "videos.db").write_bytes(b"no database at all" * 100)
    with quota.open(Quota(tmp_path).configure(HOUSE.replace("ENDPOINT", "http://127.0.0.1:9"))) as session:
        dashboard = Dashboard(session)
        text = overview(dashboard)
        assert text.count('class="notice"') == 1
        assert "videos.db" in text
        assert "May calls leave now?" in text
        assert Check("jobs", "warn", "jobs cannot be read") in dashboard.checks()


def test_the_reason_for_a_failed_dashboard_start_is_one_line(tmp_path: Path) -> None:
    house = Quota(tmp_path)
    for host in ("0.0.0.0", "192.0.2.7", "example.org", "[::]"):  # noqa: S104  # refused
        assert "this machine only" in one_line(house("dashboard", "--listen", f"{host}:0"), 2), host
    (tmp_path / "jinja2.py").write_text("raise ImportError(name='jinja2')")
    missing = one_line(house("dashboard", "--listen", "127.0.0.1:0", PYTHONPATH=str(tmp_path)), 2)
    assert missing.startswith("jinja2 is not installed: pip install 'quota-ledger[web]'")
    (tmp_path / "jinja2.py").unlink()
    house.configure("[credentials.main]\napi = 7\n")
    assert "quota.toml" in one_line(house("dashboard", "--listen", "127.0.0.1:0"), 78)


def test_the_page_marks_a_shadow_limit_and_its_refusals(page: Served) -> None:
    text = get(page).text
    assert len(re.findall(r"700 units in any 24h, only [^<]*; a shadow, which refuses no call", text)) == 1
    assert re.search(
        r"\d+ calls would have been refused by a shadow limit: <bdi>\d+ by limit &#39;trial&#39;</bdi>\.", text
    )
    assert "trial: a shadow: it counts and refuses no call, and would refuse calls now" in text


def test_the_page_shows_the_requested_refusal(page: Served) -> None:
    paths = links(get(page).text, "refusals")
    assert len(paths) == len(set(paths)) >= 2
    texts = [get(page, path).text for path in paths]
    assert all("REFUSED: " in text for text in texts)
    closed = [text for text in texts if "quotaExceeded: &lt;i&gt;used up&lt;/i&gt;" in text]
    assert len(closed) == 1
