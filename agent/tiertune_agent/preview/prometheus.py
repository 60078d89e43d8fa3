"""Queries a Prometheus over its HTTP interface."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from tiertune_agent.network import CallError, asked_whole, calling, http_client, json_of
from tiertune_connector.units import parse_duration

TIMEOUT_S = 30.0
"""Of one operation; a whole answer has twice as long."""
USUAL_SCRAPE_S = 15.0
OUR_JOBS = "tiertune-"
_PART = re.compile(r"\d+(?:ms|s|m|h)")


@dataclass(frozen=True)
class Series:
    """One series of an answer: Unix seconds and values, finite ones only."""

    labels: Mapping[str, str]
    points: tuple[tuple[float, float], ...]


class Prometheus:
    def __init__(self, url: str, transport: httpx.BaseTransport | None = None) -> None:
        """``transport`` may replace the network. Queries raise CallError if no Prometheus answers, or it refuses."""
        self._url = str(httpx.URL(url).copy_with(userinfo=b""))
        """Without a password, for messages."""
        self._http = http_client(base_url=url, timeout=TIMEOUT_S, transport=transport)

    def close(self) -> None:
        self._http.close()

    def query(self, expression: str, **when: float) -> list[Series]:
        """What it is at a ``time``, or from ``start`` to ``end`` by ``step``; times in Unix seconds."""
        data = self._get("query" if "time" in when else "query_range", query=expression, **when)
        return [_series(row["metric"], row["values"] if "values" in row else [row["value"]]) for row in data["result"]]

    def scrape_s(self) -> float:
        """Longest time between scrapes of our jobs, or of all if none is ours; ``USUAL_SCRAPE_S`` if none is known."""
        told = [
            (target.get("labels", {}).get("job", ""), _seconds(target["scrapeInterval"]))
            for target in self._get("targets", state="active")["activeTargets"]
            if "scrapeInterval" in target
        ]
        ours = [seconds for job, seconds in told if job.startswith(OUR_JOBS)]
        return max(ours or [seconds for _, seconds in told], default=USUAL_SCRAPE_S)

    def _get(self, path: str, **parameters: Any) -> Any:  # noqa: ANN401 (JSON)
        with calling("Prometheus", self._url):
            answer = asked_whole(self._http, "GET", f"/api/v1/{path}", params=parameters)
            document = json_of(answer)
            if not isinstance(document, dict) or document.keys().isdisjoint(("data", "error")):
                answer.raise_for_status()
                raise ValueError("no answer of a Prometheus")
        if "error" in document:
            raise QueryError(str(document["error"]))
        return document["data"]


class QueryError(CallError):
    """Prometheus answers, but refuses this query."""


def _series(labels: Mapping[str, str], values: list[list[Any]]) -> Series:
    points = ((float(at), float(value)) for at, value in values)
    return Series(labels, tuple((at, value) for at, value in points if math.isfinite(value)))


def _seconds(text: str) -> float:
    """Seconds of a Go duration such as ``1m30s``."""
    return sum(map(parse_duration, _PART.findall(text))) or USUAL_SCRAPE_S
