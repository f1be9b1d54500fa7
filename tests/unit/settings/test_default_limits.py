"""The limits of a credential that names none: those of its cost book, for each window in which upstream counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from quota.settings.books import default_limits
from quota.settings.lint import lint
from quota.settings.load import load_settings
from support.books import parse_book

HEAD = 'api = "shop"\nsource = "the tests"\nread_on = 2026-01-02\ndefault = { get = 1, other = 1 }\nmethods = {}\n'
EXAMPLE = [
    '{ quota = 40_000, resets = "1h" }',
    '{ quota = 200_000, resets = { calendar = "day", zone = "America/Los_Angeles" } }',
]


def book_text(*windows: str) -> str:
    return f"{HEAD}[buckets.tokens]\nwindows = [{', '.join(windows)}]\n"


@pytest.mark.parametrize(
    ("windows", "limits"),
    [
        (
            EXAMPLE,
            {"hour": ("1h", 38_000), "day": ("24h", 190_000), "pacific-day": ("day@America/Los_Angeles", 190_000)},
        ),
        (
            ['{ quota = 100, resets = { calendar = "quarter-hour", zone = "UTC" } }', '{ quota = 9, resets = "1s" }'],
            {"quarter-hour": ("15m", 95), "utc-quarter-hour": ("quarter-hour@UTC", 95), "1s": ("1s", 8)},
        ),
        # Two billing days: any stretch of 31 days holds the smaller number.
        (
            [
                '{ quota = 200, resets = { calendar = "month", day = 15, zone = "UTC" } }',
                '{ quota = 100, resets = { calendar = "month", zone = "UTC" } }',
            ],
            {"month": ("744h", 95), "utc-month-15": ("month-15@UTC", 190), "utc-month": ("month@UTC", 95)},
        ),
        # A sliding day beside a calendar day is one limit, not two of one name.
        (
            ['{ quota = 50, resets = "24h" }', '{ quota = 100, resets = { calendar = "day", zone = "UTC" } }'],
            {"day": ("24h", 47), "utc-day": ("day@UTC", 95)},
        ),
    ],
)
def test_each_window_of_a_bucket_has_its_limits(windows: list[str], limits: dict[str, tuple[str, int]]) -> None:
    made = default_limits(parse_book(book_text(*windows), "shop"))
    assert {limit.name: (limit.view.window.name, limit.limit_units) for limit in made} == limits
    assert all(limit.view.selector.buckets == ("tokens",) for limit in made)
    assert len({limit.name for limit in made}) == len(made)


@pytest.mark.parametrize(
    ("limits", "windows", "findings"),
    [
        ("", EXAMPLE, []),
        (
            'limits = [{ name = "hour", units = 40_000, window = "1h" }]',
            EXAMPLE,
            [
                "1,000,000 units of bucket 'tokens' fit into one day in America/Los_Angeles, and upstream grants "
                '200,000 -> add or lower a limit with window = { calendar = "day", zone = "America/Los_Angeles" }, or '
                "ignore this if upstream granted more"
            ],
        ),
        (
            'limits = [{ name = "hour", units = 50_000, window = "1h" }]',
            ['{ quota = 40_000, resets = "1h" }'],
            [
                "50,000 units of bucket 'tokens' fit into any 1h, and upstream grants 40,000 -> "
                'add or lower a limit with window = "1h", or ignore this if upstream granted more'
            ],
        ),
        (
            'limits = [{ name = "month", units = 100, window = "30d" }]',
            ['{ quota = 100, resets = { calendar = "month", day = 15, zone = "UTC" } }'],
            [
                "200 units of bucket 'tokens' fit into one month from day 15 on in UTC, and upstream grants 100 -> "
                'add or lower a limit with window = { calendar = "month", zone = "UTC", day = 15 }, or ignore this if '
                "upstream granted more"
            ],
        ),
    ],
)
def test_quota_check_compares_the_limits_with_each_window(
    tmp_path: Path, limits: str, windows: list[str], findings: list[str]
) -> None:
    reported = lint(load_settings(written(tmp_path, book_text(*windows), limits)))
    assert [f"{x.message} -> {x.remedy}" for x in reported if "limit" in x.location] == findings


def written(folder: Path, book: str, limits: str) -> Path:
    (folder / "shop.toml").write_text(book)
    path = folder / "quota.toml"
    path.write_text(f'[credentials.main]\napi = "./shop.toml"\nendpoint = "http://127.0.0.1:1"\n{limits}\n')
    return path


def test_a_limit_of_methods_counts_the_bucket_that_stands_first_in_their_price(tmp_path: Path) -> None:
    text = book_text('{ quota = 9, resets = "1h" }').replace(
        "methods = {}\n",
        'methods = { write = [{ units = 1 }, { bucket = "tokens", units = 5 }], status = 0, '
        'read = { bucket = "tokens", units = 1 } }\n[buckets.calls]\nquota = 9\nresets = "1h"\n',
    )
    limits = {
        '["write"]': ("calls",),
        '["read"]': ("tokens",),
        '["read", "status", "write"]': ("calls", "tokens"),
        '["status"]': ("calls",),
    }
    rows = [f'{{ name = "{n}", methods = {methods}, units = 9, window = "1h" }}' for n, methods in enumerate(limits)]
    made = load_settings(written(tmp_path, text, f"limits = [{', '.join(rows)}]")).credentials["main"].limits
    assert [limit.view.selector.buckets for limit in made] == list(limits.values())
