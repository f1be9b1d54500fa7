"""The page as people have it: in a real browser, by keyboard, narrow and wide, in the light and in the dark."""

from __future__ import annotations

import json
import re
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from quota.cli.program import cli
from quota.terms.limits import DAY_MS
from support.page import LONG, RIGHT_TO_LEFT, SCRIPT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, Page

    from support.commands import Quota
    from support.web import Served

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: the extra `browser`")

FLAGS = [
    *("--no-sandbox", "--no-first-run", "--disable-gpu", "--disable-quic", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
]
SIZES = [(360, "dark"), (1280, "light")]

CONTRASTS = """() => {
  const channels = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (rgb) => {
    const linear = (c) => c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4;
    const [r, g, b] = rgb.slice(0, 3).map((c) => linear(c / 255));
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const ground = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const c = channels(getComputedStyle(e).backgroundColor);
      if (c.length < 4 || c[3] > 0) return c;
    }
    return channels(getComputedStyle(document.body).backgroundColor);
  };
  const low = [];
  for (const e of document.querySelectorAll('body *')) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    const box = e.getBoundingClientRect();
    if (!own || box.width < 2 || e.closest('title, desc')) continue;
    const style = getComputedStyle(e), text = channels(e.tagName === 'text' ? style.fill : style.color);
    let behind = ground(e);
    if (e.classList.contains('in-band')) {
      const bands = [...e.closest('svg').querySelectorAll('.band')].map((b) => channels(getComputedStyle(b).fill));
      behind = bands.reduce((a, b) => Math.abs(light(a) - light(text)) < Math.abs(light(b) - light(text)) ? a : b);
    }
    const [dim, bright] = [light(text), light(behind)].sort((a, b) => a - b);
    const size = parseFloat(style.fontSize), large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
    if ((bright + .05) / (dim + .05) < (large ? 3 : 4.5)) low.push([e.tagName, e.textContent.trim().slice(0, 40)]);
  }
  return low;
}"""

WIDE_CELLS = """() => [...document.querySelectorAll('th, td')]
  .filter((one) => one.scrollWidth > one.clientWidth + 1).map((one) => one.textContent.trim())"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("chromium is not installed")
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=program, args=FLAGS)
        yield launched
        launched.close()


class Visit:
    """A visit to the page, with all that the browser asked for and complained of."""

    def __init__(self, browser: Browser, served: Served, width: int = 1280, mode: str = "light") -> None:
        self.asked: list[str] = []
        self.complaints: list[str] = []
        scheme: Any = mode
        self.context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        self.page: Page = self.context.new_page()
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.complaints.append(dialog.message), dialog.dismiss()))
        self.served = served
        self.go("/")

    def go(self, path: str) -> None:
        self.page.goto(f"{self.served.address}{path}")

    def __enter__(self) -> Visit:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()


def paths_of(visit: Visit) -> list[str]:
    """The page, an explanation, and a run."""
    paths = ["/"]
    for section in ("#refusals", "#runs"):
        link = visit.page.locator(f"section:has({section}) tbody a").first.get_attribute("href")
        assert link is not None
        paths.append(link)
    return paths


@pytest.mark.parametrize(("width", "mode"), SIZES)
def test_the_dashboard_fits_and_loads_no_foreign_files(browser: Browser, page: Served, width: int, mode: str) -> None:
    with Visit(browser, page, width, mode) as visit:
        for path in [*paths_of(visit), "/no-such-page"]:
            visit.go(path)
            visit.page.evaluate("document.querySelectorAll('details').forEach((one) => one.open = true)")
            assert visit.page.evaluate("document.documentElement.scrollWidth") <= width, path
            assert visit.page.evaluate(WIDE_CELLS) == [], path
            assert visit.page.evaluate(CONTRASTS) == [], path
        assert {url.startswith(f"{page.address}/") for url in visit.asked} == {True}
        assert [text for text in visit.complaints if "404" not in text] == []
        assert len([text for text in visit.complaints if "404" in text]) <= 1


def test_a_hostile_name_stays_text(browser: Browser, page: Served) -> None:
    with Visit(browser, page) as visit:
        shown = visit.page.inner_text("main")
        for name in (SCRIPT, LONG, RIGHT_TO_LEFT, "<b>", "quotaExceeded: <i>used up</i>"):
            assert name in shown, name
        assert visit.page.locator("main script, main b, main i").count() == 0
        assert visit.complaints == []


def printed(house: Quota, *args: str) -> Any:
    """What a command prints as JSON."""
    done = CliRunner().invoke(cli, [*args, "--json", "--config", str(house.folder / "quota.toml")])
    return json.loads(done.stdout)


def test_the_page_has_the_numbers_of_status_spend_and_plan(browser: Browser, page: Served, house: Quota) -> None:
    before = printed(house, "plan", "--days", "1")
    with Visit(browser, page) as visit:
        assert visit.page.locator("[data-day-units]").count()  # also on a first visit
        status = printed(house, "status")
        for card in status["credentials"]:
            section = visit.page.locator(
                ".verdict", has=visit.page.locator(".of bdi", has_text=re.compile(card["name"]))
            )
            headline = section.locator(".headline").inner_text()
            assert headline.startswith("Open") == card["open"]
            assert headline.startswith("Closed by upstream") == (card["closed_by"] is not None)
            if card["next_at"] is not None:
                (until,) = [each["until"] for each in card["exhausted"]] or [card["next_at"]]
                assert section.locator(".headline time").get_attribute("datetime") == until
            for words in (each["evidence"] for each in card["exhausted"]):
                assert words in section.locator(".lead").inner_text()
        rows = [row for card in status["credentials"] for row in card["limits"]]
        cards = visit.page.locator("article.card")
        assert cards.count() == len(rows) == 5
        for n, row in enumerate(rows):
            used = cards.nth(n).locator(".used").inner_text()
            assert [int(number.replace(",", "")) for number in re.findall(r"[\d,]+", used)] == [
                row["used_units"],
                row["limit_units"],
                row["remaining_units"],
            ]
            if row["next_capacity_at"] is not None and row["remaining_units"]:
                times = cards.nth(n).locator(".facts time")
                assert row["next_capacity_at"] in [each.get_attribute("datetime") for each in times.all()]
            counted = cards.nth(n).locator(".key .number").all_inner_texts()
            assert sum(int(each.replace(",", "")) for each in counted) == row["used_units"]
        _spending_is_the_same(visit.page, house)
        after = printed(house, "plan", "--days", "1")
        shown = [int(text.replace(",", "")) for text in visit.page.locator("[data-day-units]").all_inner_texts()]
        assert shown in [[row["days"][0]["used_units"] for row in each["limits"]] for each in (before, after)]


def _spending_is_the_same(page: Page, house: Quota) -> None:
    tables = page.locator("table.spending").all()
    for table, credential in zip(tables, ("main", "partner"), strict=True):
        read: dict[tuple[str, ...], list[int]] = {}
        for row in table.locator("tbody tr").all():
            who = tuple(row.locator("th bdi").all_inner_texts())
            read[who] = [int(text.replace(",", "")) for text in row.locator("td").all_inner_texts()]
        totals = [int(text.replace(",", "")) for text in table.locator("[data-total]").all_inner_texts()]
        for n, span_ms in enumerate((DAY_MS, 7 * DAY_MS, 35 * DAY_MS)):
            since = f"{span_ms // DAY_MS}d"
            by = "job,region,method"
            spent = printed(house, "spend", "--credential", credential, "--by", by, "--since", since)
            rows = {tuple(filter(None, (r["job"], r["region"], r["method"]))): r["units"] for r in spent["rows"]}
            assert {who: units[n] for who, units in read.items() if units[n]} == rows
            assert totals[n] == spent["total_units"]


def test_the_keyboard_reaches_everything_in_order_and_shows_where_it_is(browser: Browser, page: Served) -> None:
    with Visit(browser, page, 360) as visit:
        seen: list[dict[str, Any]] = []
        for _ in range(60):
            visit.page.keyboard.press("Tab")
            stops = visit.page.evaluate(
                "() => { const e = document.activeElement, s = getComputedStyle(e), b = e.getBoundingClientRect();"
                " return {text: e.textContent.trim().slice(0, 40), tag: e.tagName, top: b.top + scrollY, left: b.left,"
                " shown: s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) >= 2 && b.top >= -1"
                " && b.top < innerHeight}; }"
            )
            if stops["tag"] == "BODY":
                break
            seen.append(stops)
        assert seen[0]["text"] == "Skip to the content"
        assert [each["text"] for each in seen if not each["shown"]] == []
        names = [each["text"] for each in seen]
        assert names[2:7] == ["Limits", "Spending", "Freshness", "Refusals", "Runs"]
        assert {"What is a unit?", "As a table", "Metrics"} <= set(names)
        tops = [each["top"] for each in seen[2:]]
        assert tops == sorted(tops), json.dumps(seen)
