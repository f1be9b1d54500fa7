"""The pages: turns the state into words and shapes for the templates.

Site     the templates and the style sheet; its methods make the pages
State    everything that the overview shows, as it was last read
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from importlib.resources import files
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from quota.common.clock import local
from quota.common.text import listed, many, spaced
from quota.dashboard import words
from quota.dashboard.charts import Band, Curve, chart, colours_of
from quota.dashboard.contract import Contribution, Forecast, LimitAhead, Region
from quota.dashboard.reading import SPANS_MS, Curves, Now, Reading, Spent, key_of
from quota.explain.refusal import RefusalExplained
from quota.reports.runs import Run
from quota.reports.spending import KeptRefusal, refused_by
from quota.reports.status import CredentialRow, LimitRow
from quota.rules.refusals import RefusedSum
from quota.settings.model import BUILT_IN_NOTICE, Settings
from quota.terms.limits import DAY_MS, MINUTE_MS, Calendar, Sliding
from quota.wording import Part, Table, early_of, notes_of, refusal_parts, stopped_jobs_of

ROWS = 12
"""The most rows of a table that show at once; the rest unfolds."""

REFUSALS = RUNS = 10

NEAR_MS = 10 * MINUTE_MS
"""The least time between two rows of a limit's table."""

TYPICAL = ("videos.list", "search.list", "videos.insert")
"""Their prices explain what a unit is. For another API, the first methods of its cost book take their place."""


class State(NamedTuple):
    """The parts as they were last read. `now_ms` is the time of the page."""

    now_ms: int
    now: Reading[Now]
    curves: Reading[Curves]
    spent: Reading[tuple[Spent, ...]]
    added: Sequence[tuple[str, Reading[Contribution]]]

    @property
    def parts(self) -> list[Contribution]:
        """The parts of other packages that were read."""
        return [reading.value for _, reading in self.added if reading.value is not None]

    @property
    def forecast(self) -> Forecast | None:
        return next((part.forecast for part in self.parts if part.forecast is not None), None)

    @property
    def regions(self) -> list[Region]:
        return [region for part in self.parts for region in part.regions]

    @property
    def runs(self) -> list[Run]:
        return [run for part in self.parts for run in part.runs]


class Site:
    """The templates, and the values that every page needs."""

    def __init__(self, settings: Settings, ledger: str, *, shared: bool) -> None:
        self._settings = settings
        self._jinja = Environment(
            loader=PackageLoader("quota.dashboard"),
            autoescape=select_autoescape(default=True, default_for_string=True),
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._jinja.filters |= {
            "name": words.name,
            "units": lambda number: f"{number:,}",
            "many": many,
            "plain": spaced,
            "percent": lambda state: words.percent(state.used_units, state.limit_units),
            "coded": _coded,
        }
        self.style = files("quota.dashboard").joinpath("static/style.css").read_bytes()
        self.icon = files("quota.dashboard").joinpath("static/icon.svg").read_bytes()
        self._jinja.globals |= {
            "source": settings.source,
            "ledger": ledger,
            "shared": shared,
            "style_version": blake2b(self.style, digest_size=6).hexdigest(),
            "built_in": BUILT_IN_NOTICE if settings.path is None else "",
        }

    def _render(self, template: str, now_ms: int, **context: object) -> str:
        when, zone = partial(words.when, now_ms=now_ms), local(now_ms).tzname()
        return self._jinja.get_template(template).render(context, when=when, zone=zone)

    # -- the overview -------------------------------------------------------------------------------------------------

    def overview(self, state: State, refresh_s: int | None = None) -> str:
        """The verdict, the limits, who spent it, freshness, refusals and runs."""
        now, now_ms = state.now.value, state.now_ms
        down = state.now.error is not None
        credentials = [] if now is None else [self._credential(row, now, down) for row in now.status.credentials]
        verdicts = [credential["verdict"] for credential in credentials]
        return self._render(
            "overview.html",
            now_ms,
            title=_title(verdicts),
            refresh_s=refresh_s,
            notices=_notices(state),
            credentials=credentials,
            projects=[] if now is None else self._projects(now, state.curves.value or {}, state.forecast),
            read_ms=state.now.read_ms,
            spending=[_spending(spent) for spent in state.spent.value or ()],
            spans=[words.duration(span_ms) for span_ms in SPANS_MS],
            jobs=_freshness(state.regions),
            notes=[note for part in state.parts for note in part.notes],
            refusals=_folded([{"kept": kept, "key": key_of(kept)} for kept in now.refusals] if now else [], REFUSALS),
            runs=_folded(state.runs, RUNS),
            knows_jobs=bool(state.added),
            several_projects=now is not None and len({row.project for row in now.status.credentials}) > 1,
            prices=list(self._prices(now)),
        )

    def _credential(self, row: CredentialRow, now: Now, down: bool) -> dict[str, Any]:
        at_ms, calls = now.status.at_ms, now.calls.get(row.name)
        verdict = words.verdict(row, calls, at_ms)
        return {
            "row": row,
            "shared_with": listed(map(words.name, row.shared_with)),
            "verdict": words.last_known(verdict) if down else verdict,
            "calls": calls,
            "notes": [*early_of(row), *stopped_jobs_of(row), *notes_of(row)],
        }

    def _projects(self, now: Now, read: Curves, forecast: Forecast | None) -> list[dict[str, Any]]:
        projects: dict[str, dict[str, Any]] = {}
        for row in now.status.credentials:
            if row.project in projects:
                continue
            curves = [read.get((row.project, limit.limit.name)) for limit in row.limits]
            colours = colours_of(self._by_size(curve for curve in curves if curve is not None))
            limits = [
                _limit(limit, now.status.at_ms, curves[n], colours, forecast, row.project, f"limit-{len(projects)}-{n}")
                for n, limit in enumerate(row.limits)
            ]
            used = [limit for limit in limits if limit["in_use"]] or limits
            unused = [limit for limit in limits if limit not in used]
            projects[row.project] = {"name": row.project, "used": used, "unused": unused}
        return list(projects.values())

    def _by_size(self, curves: Iterable[Curve]) -> list[str]:
        """The jobs of a project, the largest use first; equal jobs in the order of the configuration."""
        largest: dict[str, int] = {}
        for curve in curves:
            for job, units in curve.jobs.items():
                largest[job] = max(largest.get(job, 0), max(units))
        order = list(self._settings.jobs)
        return sorted(largest, key=lambda job: (-largest[job], order.index(job) if job in order else len(order), job))

    def _prices(self, now: Now | None) -> Iterator[tuple[str, int]]:
        """The prices of a few calls, for a reader who does not know units."""
        if now is None:
            return
        first = next(iter(self._settings.credentials.values()))
        book = first.book.at(now.status.at_ms)
        typical = [method for method in TYPICAL if method in book.methods]
        for method in typical or list(book.methods)[: len(TYPICAL)]:
            yield method, book.price(method).units

    # -- other pages ---------------------------------------------------------------------------------------------------

    def refusal(self, explained: RefusalExplained, now_ms: int) -> str:
        """Why one call was refused, as in `quota explain`."""
        kept = explained.kept
        parts = _parts(refusal_parts(explained))
        return self._render("explanation.html", now_ms, title="Why it was refused", kept=kept, parts=parts)

    def run(self, run: Run, refusals: Sequence[KeptRefusal], now_ms: int) -> str:
        """One run, and the refusal that stopped it."""
        stopped = next((kept for kept in refusals if kept.run == run.run and kept.job == run.job), None)
        return self._render(
            "run.html",
            now_ms,
            title=f"Run of {words.name(run.job)}",
            run=run,
            took=None if run.ended_ms is None else words.duration(run.ended_ms - run.began_ms),
            refusal=None if stopped is None else key_of(stopped),
        )

    def error(self, title: str, text: str, now_ms: int) -> str:
        """A page with an error."""
        return self._render("error.html", now_ms, title=title, text=text)


def _coded(text: str) -> Markup:
    """A line of ours, with the text in backquotes as code."""
    pieces = re.split(r"`([^`]+)`", spaced(text))
    return Markup().join(Markup("<code>{}</code>").format(piece) if n % 2 else piece for n, piece in enumerate(pieces))


def _title(verdicts: Sequence[words.Verdict]) -> str:
    """The title for the browser's tab: the worst verdict, and how many credentials have it."""
    order = ("unknown", "closed", "full", "near", "open")
    worst = min(verdicts, key=lambda verdict: order.index(verdict.state), default=None)
    if worst is None:
        return "No answer"
    until = "" if worst.until is None else f" {worst.until.clock}"
    alike, all_of_them = sum(verdict.state == worst.state for verdict in verdicts), many(len(verdicts), "credential")
    count = "" if len(verdicts) == 1 else f" ({all_of_them if alike == len(verdicts) else f'{alike} of {all_of_them}'})"
    return f"{worst.headline}{until}{count}"


def _notices(state: State) -> list[dict[str, Any]]:
    """The parts that cannot be read now, each error once."""
    readings: list[tuple[str, Reading[Any]]] = [("The ledger does not answer", state.now)]
    if state.now.error is None:
        readings.append(("The spending cannot be read", state.spent))
    readings += [(f"{what.capitalize()} cannot be read", reading) for what, reading in state.added]
    notices: dict[str, dict[str, Any]] = {}
    for what, (_, read_ms, error, failing_ms) in readings:
        if error is not None and error not in notices:
            notices[error] = {"what": what, "since_ms": failing_ms, "read_ms": read_ms, "error": spaced(error)}
    return list(notices.values())


# -- limits ------------------------------------------------------------------------------------------------------------


def _limit(
    row: LimitRow,
    at_ms: int,
    curve: Curve | None,
    colours: Mapping[str, int],
    forecast: Forecast | None,
    project: str,
    key: str,
) -> dict[str, Any]:
    limit, state, window = row.limit, row.state, row.limit.view.window
    reset_ms = window.edges(at_ms)[1] if isinstance(window, Calendar) else row.resets_ms
    shapes = None
    if curve is not None:
        shapes = chart(curve, max(state.limit_units, row.enforced_units), colours, row.next_capacity_ms)
    use = () if curve is None else curve.ahead
    end_ms, end_units = use[-1] if use else (at_ms - 1, state.used_units)
    ahead = None if forecast is None or not forecast.scheduled else forecast.limits.get((project, limit.name))
    return {
        "key": key,
        "row": row,
        "name": limit.name,
        "window": _window(row),
        "noun": limit.view.selector.noun,
        "reset_ms": reset_ms,
        "own_reset": isinstance(window, Calendar),
        "ahead": ahead,
        "longer": _longer(row, ahead, forecast, project),
        "ahead_end": end_units,
        "ahead_end_ms": end_ms + 1,
        "scheduled": forecast is not None and forecast.scheduled,
        "forecast_until_ms": None if forecast is None else forecast.until_ms,
        "chart": shapes,
        "in_use": state.used_units or row.level != "open" or (shapes is not None and shapes.bands),
        "table": None if curve is None or shapes is None else _hours(curve, shapes.bands),
    }


def _longer(row: LimitRow, ahead: LimitAhead | None, forecast: Forecast | None, project: str) -> list[str]:
    """The limits that will stop runs for longer than this nearly used limit. If several limits stop a run, the forecast
    counts it for the limit that stops it longest."""
    if forecast is None or ahead is None or ahead.refused_ticks or row.level == "open":
        return []
    return [name for (of, name), limit in forecast.limits.items() if of == project and limit.refused_ticks]


def _window(row: LimitRow) -> str:
    """The window of a limit in words, and whether the limit is on trial."""
    window, selector = row.limit.view.window, row.limit.view.selector
    if isinstance(window, Sliding):
        text = f"in any {words.spelled_out(window.window_ms)}"
    else:
        text = f"in each {window.spelled_out()}"
    only = [f"only {listed(map(words.name, names))}" for names in (selector.methods, selector.jobs) if names]
    return ", ".join([text, *only]) + ("; a shadow, which refuses no call" if row.limit.shadow else "")


def _hours(curve: Curve, bands: Sequence[Band]) -> dict[str, Any]:
    """The curve as a table, a row for about an hour, the newest first. A new period has few rows."""
    rows: list[tuple[int, list[int], int]] = []
    jobs = [band.job for band in bands]
    for n in range(len(curve.times_ms) - 1, -1, -6):
        if rows and rows[-1][0] - curve.times_ms[n] < NEAR_MS:
            continue
        own = [curve.jobs[band.job][n] if band.colour else None for band in bands]
        total = sum(units[n] for units in curve.jobs.values())
        rest = total - sum(units for units in own if units is not None)
        rows.append((curve.times_ms[n], [rest if units is None else units for units in own], total))
    return {"jobs": jobs, "rows": rows}


# -- spending ----------------------------------------------------------------------------------------------------------


def _spending(spent: Spent) -> dict[str, Any]:
    leading = next((n for n, total in enumerate(spent.totals) if total), 0)
    largest = max((row.units[leading] for row in spent.rows), default=0) or 1
    rows = [{"row": row, "share": round(row.units[leading] * 100 / largest, 1)} for row in spent.rows]
    since_ms = spent.since_ms[-1]
    return {
        "spent": spent,
        "rows": _folded(rows, ROWS),
        "since_ms": since_ms if since_ms > spent.at_ms - SPANS_MS[-1] + DAY_MS else None,
        "refused": sum(refusal.calls for refusal in spent.refused),
        "refused_by": _by(spent.refused),
        "would_refuse": sum(refusal.calls for refusal in spent.would_refuse),
        "would_refuse_by": _by(spent.would_refuse),
    }


def _by(refusals: Sequence[RefusedSum]) -> str:
    return listed(f"{calls:,} by {words.name(by)}" for by, calls in refused_by(refusals).items())


# -- freshness, explanations -------------------------------------------------------------------------------------------


def _freshness(regions: Sequence[Region]) -> list[dict[str, Any]]:
    jobs: dict[tuple[str, str], list[Region]] = {}
    for region in regions:
        jobs.setdefault((region.project, region.job), []).append(region)
    return [{"job": job, "project": project, "rows": _folded(rows, ROWS)} for (project, job), rows in jobs.items()]


def _folded(rows: Sequence[Any], shown: int) -> dict[str, Any]:
    """Rows, of which the first show at once. A single further row is not folded away."""
    shown = shown if len(rows) > shown + 1 else len(rows)
    return {"first": rows[:shown], "rest": rows[shown:], "count": len(rows)}


def _parts(parts: Iterator[Part]) -> list[dict[str, Any]]:
    """An explanation in groups: an empty line begins a new group."""
    groups: list[dict[str, Any]] = [{"parts": []}]
    for part in parts:
        if isinstance(part, Table):
            groups[-1]["parts"].append({"table": part})
        elif part.text:
            groups[-1]["parts"].append({"text": part.text, "tone": part.tone})
        else:
            groups.append({"parts": []})
    return [group for group in groups if group["parts"]]
