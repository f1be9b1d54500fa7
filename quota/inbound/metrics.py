"""Metrics of inbound limits: the totals of all workers, from the storage that they share.

Report       requests by rule and outcome, and identities by rule
read_report  reads a report from a storage
exposition   writes it in Prometheus' text format
metrics_app  an ASGI application that serves it
"""

from __future__ import annotations

from asyncio import get_running_loop
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from quota.errors import StorageAway
from quota.inbound.contract import Storage
from quota.inbound.deciding import BUCKETS_S, REQUESTS, TOOK, TOOK_US
from quota.inbound.rules import Rule, Rules, opened
from quota.reports.metrics import COUNTER, GAUGE, MEDIA_TYPE, Sample
from quota.reports.metrics import exposition as as_text

FAMILIES: Mapping[str, tuple[str, str]] = {
    "quota_inbound_requests_total": (COUNTER, "Requests by rule and outcome."),
    "quota_inbound_identities": (GAUGE, "Identities that a rule counted in its longest window or the window before."),
    "quota_inbound_storage_up": (GAUGE, "1 if the storage answered this scrape, else 0."),
}
SECONDS = "quota_inbound_decision_seconds"


class Report(NamedTuple):
    """Totals from the storage, and identities by rule. Workers add to the totals every 10 s."""

    totals: Mapping[str, int]
    identities: Mapping[str, int]

    def ended(self, rule: str, outcome: str) -> int:
        """The number of requests of a rule with this outcome."""
        return self.totals.get(f"{REQUESTS}|{rule}|{outcome}", 0)


def read_report(storage: Storage, rules: Sequence[Rule]) -> Report:
    """Read the totals from the storage. Raises StorageAway."""
    return Report(storage.totals(), {rule.name: storage.alive(rule.policy) for rule in rules})


def exposition(report: Report | None) -> str:
    """The report in Prometheus' text format. None: the storage did not answer."""
    if report is None:
        return as_text([Sample("quota_inbound_storage_up", {}, 0)], FAMILIES)
    samples = [Sample("quota_inbound_storage_up", {}, 1)]
    for name, number in sorted(report.totals.items()):
        kind, _, rest = name.partition("|")
        if kind == REQUESTS:
            rule, _, outcome = rest.partition("|")
            samples.append(Sample("quota_inbound_requests_total", {"rule": rule, "outcome": outcome}, number))
    for rule, count in report.identities.items():
        samples.append(Sample("quota_inbound_identities", {"rule": rule}, count))
    lines = [f"# HELP {SECONDS} How long decisions took.", f"# TYPE {SECONDS} histogram"]
    decisions = list(accumulate(report.totals.get(name, 0) for name in TOOK))
    bounds = [*map(str, BUCKETS_S), "+Inf"]
    lines += [f'{SECONDS}_bucket{{le="{at}"}} {n}' for at, n in zip(bounds, decisions, strict=True)]
    decision_s = report.totals.get(TOOK_US, 0) / 1e6
    lines += [f"{SECONDS}_sum {decision_s}", f"{SECONDS}_count {decisions[-1]}"]
    return as_text(samples, FAMILIES) + "".join(f"{line}\n" for line in lines)


def metrics_app(rules: Rules | Sequence[Rule]) -> Callable[..., Awaitable[None]]:
    """An ASGI application that serves the metrics. Mount it where only your Prometheus can reach it."""
    whole, storage = opened(rules)

    def text() -> str:
        try:
            return exposition(read_report(storage, whole.rules))
        except StorageAway:
            return exposition(None)

    async def answer(scope: Any, _receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            raise NotImplementedError(scope["type"])  # servers expect this from an application without lifespan
        body = (await get_running_loop().run_in_executor(None, text)).encode()
        headers = [(b"content-type", MEDIA_TYPE.encode()), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    return answer
