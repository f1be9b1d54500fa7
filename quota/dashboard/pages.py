"""The pages: turns the state into words and shapes for the templates.

State     everything that the overview shows, as it was last read
Site      the templates and the style sheet; its methods make the pages
verdict   whether calls may leave, in words
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from itertools import groupby
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from quota.common.clock import local, moment, rfc3339, stamp
from quota.common.files import read_text
from quota.common.text import listed, many, spaced, spell
from quota.dashboard.charts import Band, Curve, chart, colours_of
from quota.dashboard.reading import SPANS, SPANS_MS, Curves, Now, Reading, Spent, forecast_of, key_of
from quota.reports.refusal import RefusalExplained
from quota.reports.runs import Contribution, Forecast, Region, Run
from quota.reports.spending import KeptRefusal, Spending, refused_by
from quota.reports.status import CredentialRow, LimitRow
from quota.settings.model import BUILT_IN_NOTICE, Settings
from quota.terms.limits import DAY_MS, MINUTE_MS, SECOND_MS, Calendar, Sliding, format_duration
from quota.wording import Part, Table, early_of, notes_of, refusal_parts, stopped_jobs_of, verdict_of

ROWS = 12
"""The most rows of a table that show at once; the rest unfolds."""

REFUSALS = RUNS = 10

NAME_CHARACTERS = 64

NEAR_MS = MINUTE_MS
"""The least time between two rows of a limit's table."""

TYPICAL = ("videos.list", "search.list", "videos.insert")
"""Their prices explain what a unit is. For another API, the first methods of its cost book take their place."""


class State(NamedTuple):
    """The parts as they were last read. `now_ms` is the time of the page. `alone` has the jobs, as `quota status` shows
    them while the ledger cannot be used."""

    now_ms: int
    now: Reading[Now]
    curves: Reading[Curves]
    spent: Reading[Spent]
    added: Sequence[tuple[str, Reading[Contribution]]]
    alone: Sequence[Part] = ()

    @property
    def parts(self) -> list[Contribution]:
        """The parts of other packages that were read."""
        return [reading.value for _, reading in self.added if reading.value is not None]

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
            "name": short_name,
            "units": lambda number: f"{number:,}",
            "many": many,
            "plain": spaced,
            "percent": lambda state: percent(state.used_units, state.limit_units),
            "coded": _coded,
        }
        self.style, self.icon = (read_text("quota.dashboard", f"static/{name}") for name in ("style.css", "icon.svg"))
        self._jinja.globals |= {
            "source": settings.source,
            "ledger": ledger,
            "shared": shared,
            "style_version": blake2b(self.style.encode(), digest_size=6).hexdigest(),
            "built_in": BUILT_IN_NOTICE if settings.path is None else "",
        }

    def _render(self, template: str, now_ms: int, **context: object) -> str:
        at, zone = partial(when, now_ms=now_ms), local(now_ms).tzname()
        return self._jinja.get_template(template).render(context, when=at, zone=zone)

    # -- the overview -------------------------------------------------------------------------------------------------

    def overview(self, state: State, refresh_s: int | None = None) -> str:
        """The verdict, the limits, who spent it, freshness, refusals and runs."""
        now, now_ms = state.now.value, state.now_ms
        down = state.now.error is not None
        curves = state.curves.value or Curves({}, forecast_of(reading for _, reading in state.added))
        credentials = [] if now is None else [self._credential(row, now, down) for row in now.status.credentials]
        title = _title([] if now is None else [verdict(row, now.status.at_ms) for row in now.status.credentials])
        return self._render(
            "overview.html",
            now_ms,
            title=f"Last known: {title[0].lower()}{title[1:]}" if down and now is not None else title,
            refresh_s=refresh_s,
            notices=_notices(state),
            credentials=credentials,
            alone=state.alone,
            projects=[] if now is None else self._projects(now, curves),
            read_ms=state.now.read_ms,
            spending=[_spending(project, spans) for project, spans in (state.spent.value or {}).items()],
            spans=SPANS,
            jobs=_freshness(region for part in state.parts for region in part.regions),
            notes=[note for part in state.parts for note in part.notes],
            refusals=_folded([{"kept": kept, "key": key_of(kept)} for kept in now.refusals] if now else [], REFUSALS),
            runs=_folded(state.runs, RUNS),
            knows_jobs=bool(state.added),
            several_projects=now is not None and len({row.settings.project for row in now.status.credentials}) > 1,
            prices=[] if now is None else self._prices(now),
        )

    def _credential(self, row: CredentialRow, now: Now, down: bool) -> dict[str, Any]:
        return {
            "row": row,
            "shared_with": listed(map(short_name, row.shared_with)),
            "verdict": verdict(row, now.status.at_ms, down=down),
            "notes": [*early_of(row), *stopped_jobs_of(row), *notes_of(row)],
        }

    def _projects(self, now: Now, read: Curves) -> list[dict[str, Any]]:
        projects, at_ms = dict[str, dict[str, Any]](), now.status.at_ms
        for row in now.status.credentials:
            project = row.settings.project
            if project in projects:
                continue
            curves = [read.of.get((project, limit.limit.name)) for limit in row.limits]
            colours = colours_of(self._by_size(curve for curve in curves if curve is not None))
            limits = [
                {
                    "key": f"limit-{len(projects)}-{n}",
                    **_limit(limit, at_ms, curves[n], colours, read.forecast, project),
                }
                for n, limit in enumerate(row.limits)
            ]
            used = [limit for limit in limits if limit["in_use"]] or limits
            unused = [limit for limit in limits if limit not in used]
            projects[project] = {"name": project, "used": used, "unused": unused}
        return list(projects.values())

    def _by_size(self, curves: Iterable[Curve]) -> list[str]:
        """The jobs of a project, the largest use first; equal jobs in the order of the configuration."""
        largest: dict[str, int] = {}
        for curve in curves:
            for job, units in curve.jobs.items():
                largest[job] = max(largest.get(job, 0), max(units))
        order = list(self._settings.jobs)
        return sorted(largest, key=lambda job: (-largest[job], order.index(job) if job in order else len(order), job))

    def _prices(self, now: Now) -> list[tuple[str, int]]:
        """The prices of a few calls, for a reader who does not know units."""
        book = next(iter(self._settings.credentials.values())).book.at(now.status.at_ms)
        typical = [method for method in TYPICAL if method in book.methods]
        return [(name, book.price(name).units) for name in typical or list(book.methods)[: len(TYPICAL)]]

    # -- other pages ---------------------------------------------------------------------------------------------------

    def refusal(self, explained: RefusalExplained, now_ms: int) -> str:
        """Why one call was refused, as in `quota explain`."""
        paragraphs = groupby(refusal_parts(explained), lambda part: isinstance(part, Table) or bool(part.text))
        groups = [[*group] for has_words, group in paragraphs if has_words]  # an empty line begins a new group
        title = "Why it was refused"
        return self._render("explanation.html", now_ms, title=title, kept=explained.kept, groups=groups)

    def run(self, run: Run, refusals: Sequence[KeptRefusal], now_ms: int) -> str:
        """One run, and the refusal that stopped it."""
        stopped = next((kept for kept in refusals if kept.run == run.run and kept.job == run.job), None)
        return self._render(
            "run.html",
            now_ms,
            title=f"Run of {short_name(run.job)}",
            run=run,
            took=None if run.ended_ms is None else spell(run.ended_ms - run.began_ms),
            refusal=None if stopped is None else key_of(stopped),
        )

    def error(self, title: str, text: str, now_ms: int) -> str:
        """A page with an error."""
        return self._render("error.html", now_ms, title=title, text=text)


def _coded(text: str) -> Markup:
    """A line of ours, with the text in backquotes as code."""
    pieces = re.split(r"`([^`]+)`", spaced(text))
    return Markup().join(Markup("<code>{}</code>").format(piece) if n % 2 else piece for n, piece in enumerate(pieces))


def _title(verdicts: Sequence[Verdict]) -> str:
    """The title for the browser's tab: the worst verdict, and how many credentials have it."""
    order = ("closed", "full", "near", "open")
    worst = min(verdicts, key=lambda verdict: order.index(verdict.state), default=None)
    if worst is None:
        return "No answer"
    end = "" if worst.until is None else f" {worst.until.clock}"
    if len(verdicts) == 1:
        return f"{worst.headline}{end}"
    alike, of_all = sum(verdict.state == worst.state for verdict in verdicts), many(len(verdicts), "credential")
    if alike < len(verdicts):
        of_all = f"{alike} of {of_all}"
    return f"{worst.headline}{end} ({of_all})"


def _notices(state: State) -> list[dict[str, Any]]:
    """The parts that cannot be read now, each error once."""
    readings: list[tuple[str, Reading[Any]]] = [("The ledger cannot be used", state.now)]
    if state.now.error is None and state.now.value is not None and (why := state.now.value.status.unwritable):
        readings = [("The ledger accepts no charges", state.now._replace(error=why))]
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
    row: LimitRow, at_ms: int, curve: Curve | None, colours: Mapping[str, int], forecast: Forecast, project: str
) -> dict[str, Any]:
    limit, state, window = row.limit, row.state, row.limit.view.window
    reset_ms = window.edges(at_ms)[1] if isinstance(window, Calendar) else row.resets_ms
    shapes = None
    if curve is not None:
        shapes = chart(curve, max(state.limit_units, row.enforced_units), colours, row.next_capacity_ms)
    use = () if curve is None else curve.ahead
    end_ms, end_units = use[-1] if use else (at_ms - 1, state.used_units)
    ahead = forecast.limits.get((project, limit.name)) if forecast.scheduled else None
    longer = []
    if ahead is not None and not ahead.refused_ticks and row.level != "open" and not limit.shadow:
        # If several limits stop a run, the forecast counts it for the limit that stops it longest.
        longer = [name for (of, name), other in forecast.limits.items() if of == project and other.refused_ticks]
    return {
        "row": row,
        "window": _window(row),
        "reset_ms": reset_ms,
        "own_reset": isinstance(window, Calendar),
        "ahead": ahead,
        "longer": longer,
        "charted": use[0] if use else (at_ms, state.used_units),
        "ahead_end": end_units,
        "ahead_end_ms": end_ms + 1,
        "forecast": forecast,
        "chart": shapes,
        "in_use": state.used_units or row.level != "open" or (shapes is not None and shapes.bands),
        "table": None if curve is None or shapes is None else _hours(curve, shapes.bands),
    }


def _window(row: LimitRow) -> str:
    """The window of a limit in words, and whether the limit is on trial."""
    window, selector = row.limit.view.window, row.limit.view.selector
    if isinstance(window, Sliding):
        text = f"in any {format_duration(window.window_ms)}"
    else:
        text = f"in each {window.spelled_out()}"
    only = [f"only {listed(map(short_name, names))}" for names in (selector.methods, selector.jobs) if names]
    return ", ".join([text, *only]) + ("; a shadow, which refuses no call" if row.limit.shadow else "")


def _hours(curve: Curve, bands: Sequence[Band]) -> dict[str, Any]:
    """The curve as a table: now, and the fullest moment of about each hour, the newest first. A new period has few
    rows."""
    rows: list[tuple[int, list[int], int]] = []
    moments = range(len(curve.times_ms))
    for hour in (moments[-1:], *(moments[max(0, n - 5) : n + 1] for n in moments[-2::-6])):
        total, n = max((sum(band.past_units[n] for band in bands), n) for n in hour)
        if not rows or rows[-1][0] - curve.times_ms[n] >= NEAR_MS:
            rows.append((curve.times_ms[n], [band.past_units[n] for band in bands], total))
    return {"jobs": [band.job for band in bands], "rows": rows}


# -- spending ----------------------------------------------------------------------------------------------------------


def _spending(project: str, spans: Sequence[Spending]) -> dict[str, Any]:
    """Who spent a project's units in each of SPANS_MS, the largest recent spending first."""
    by_who = [{who: units for who, _, units in spending.rows} for spending in spans]
    spent = {who: [units.get(who, 0) for units in by_who] for units in by_who for who in units}
    totals, longest = [spending.total_units for spending in spans], spans[-1]
    leading = next((n for n, total in enumerate(totals) if total), 0)
    largest = max((units[leading] for units in spent.values()), default=0) or 1
    ordered = sorted(spent.items(), key=lambda row: ([-units for units in row[1]], row[0]))
    rows = [(who, units, round(units[leading] * 100 / largest, 1)) for who, units in ordered]
    refusals: dict[str, Any] = {}
    for name, sums in (("refused", longest.refused), ("would_refuse", longest.would_refuse)):
        refusals[name] = sum(refusal.calls for refusal in sums)
        refusals[f"{name}_by"] = listed(f"{calls:,} by {short_name(by)}" for by, calls in refused_by(sums).items())
    begins_late = longest.since_ms > longest.until_ms - SPANS_MS[-1] + DAY_MS
    return {
        "project": project,
        "rows": _folded(rows, ROWS),
        "totals": totals,
        "since_ms": longest.since_ms if begins_late else None,
        **refusals,
    }


def _freshness(regions: Iterable[Region]) -> list[dict[str, Any]]:
    jobs: dict[tuple[str, str], list[Region]] = {}
    for region in regions:
        jobs.setdefault((region.project, region.job), []).append(region)
    return [{"job": job, "project": project, "rows": _folded(rows, ROWS)} for (project, job), rows in jobs.items()]


def _folded(rows: Sequence[Any], shown: int) -> dict[str, Any]:
    """Rows, of which the first show at once. A single further row is not folded away."""
    shown = shown if len(rows) > shown + 1 else len(rows)
    return {"first": rows[:shown], "rest": rows[shown:], "count": len(rows)}


# -- the verdict -------------------------------------------------------------------------------------------------------


class Verdict(NamedTuple):
    """Whether calls may leave. `state` is one of open, near, full, closed, unknown; `headline` is the
    large text, with its end `until`; `lead` explains it."""

    state: str
    headline: str
    until: ShownTime | None
    lead: str


def verdict(row: CredentialRow, now_ms: int, *, down: bool = False) -> Verdict:
    """The verdict of a credential, as in `quota status`. `down`: the ledger cannot be used."""
    word, lead, end_ms, more = verdict_of(row)
    state: str = "full" if word == "stopped" else word
    headline = f"{word.capitalize()}{more}"
    lead = f"calls are admitted: {lead}" if word == "open" else lead
    if word == "open" and any(limit.level != "open" for limit in row.limits if row.counts_all(limit)):
        state, headline = "near", "Open, nearly used up"
    if down:
        state, headline = "unknown", f"Last known: {headline.lower()}"
        lead = "While the ledger cannot be used, calls are refused, or drawn on the local allowance if there is one"
    end = None if end_ms is None else when(end_ms, now_ms)
    return Verdict(state, headline if end is None else f"{headline} until", end, f"{lead[:1].upper()}{lead[1:]}.")


# -- times, names, shares ----------------------------------------------------------------------------------------------


class ShownTime(NamedTuple):
    """A time: by the local clock, as a distance from now, and exact, for programs and a tooltip."""

    clock: str
    away: str
    exact: str


def when(at_ms: int, now_ms: int) -> ShownTime:
    return ShownTime(moment(at_ms) if at_ms > now_ms else stamp(at_ms), away(at_ms, now_ms), rfc3339(at_ms))


def away(at_ms: int, now_ms: int) -> str:
    """`in 2h 10m`, `4m 00s ago`, `just now`."""
    if at_ms > now_ms:
        return f"in {spell(at_ms - now_ms)}"
    return f"{spell(now_ms - at_ms)} ago" if now_ms - at_ms >= SECOND_MS else "just now"


def short_name(text: str) -> str:
    """A name from outside, without control and direction characters, and shortened."""
    plain = spaced(text)
    return plain if len(plain) <= NAME_CHARACTERS else f"{plain[: NAME_CHARACTERS - 1]}\N{HORIZONTAL ELLIPSIS}"


def percent(part: int, whole: int) -> int:
    """A share in whole percent: 100 only if all is used, and 0 only if nothing is."""
    if not whole or part >= whole:
        return 100
    return min(99, max(1, round(part * 100 / whole))) if part > 0 else 0
