"""Names and texts for generated videos, and upstream's own lists of regions and categories: `words.toml`."""

import tomllib

from quota.common.resources import read_text

_WORDS = tomllib.loads(read_text("quota.jobs.emulator", "words.toml"))

REGIONS: dict[str, str] = _WORDS["regions"]
CATEGORIES: dict[str, str] = _WORDS["categories"]
LANGUAGES: dict[str, str] = {
    region: language for language, regions in _WORDS["languages"].items() for region in regions
}
NAMES: list[str] = _WORDS["names"]
TAGS: list[str] = _WORDS["tags"]
DESCRIPTIONS: list[str] = _WORDS["descriptions"]

# Ordinary titles are repeated until they make up most of a chart.
TITLES: dict[str, list[str]] = {
    language: ordinary * (24 // len(ordinary)) + _WORDS["titles_everywhere"]
    for language, ordinary in _WORDS["titles"].items()
}
