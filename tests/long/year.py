"""A year of a fleet's history, made in minutes: rows as a real store's (``store.json``, of the demo), in bulk.

Figures vary from row to row, as real ones do. What is left after a year of pruning and folding: windows of
six hours, hours of a fortnight, days before them; decisions of all the year.
"""

import json
import os
import random
from collections.abc import Iterator
from datetime import datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, insert

from tiertune_agent.history.models import (
    AnswerRow,
    AuditRow,
    Base,
    DecisionRow,
    HourRow,
    IncidentRow,
    LedgerRow,
    PolicyRevisionRow,
    ProspectRow,
    StageWindowRow,
    StoreRow,
    VerdictRow,
    WindowRow,
)
from tiertune_agent.history.retention import FORTNIGHT, YEAR
from tiertune_agent.history.rollup import hourly
from tiertune_agent.history.rows import hour_row, window_of
from tiertune_agent.records import State, Window
from tiertune_agent.tuners.tier_size import TierSizeSettings

SAMPLE = json.loads((Path(__file__).parent / "store.json").read_text())
STORES = int(os.environ.get("TIERTUNE_LONG_STORES", "50"))
"""Fewer are quicker; a result tells how many they were."""
WINDOW_S, KEEP = 15, timedelta(hours=6)
HOUR, DAY = timedelta(hours=1), timedelta(days=1)
VARIANTS, AT_ONCE = 40, 20_000
TUNERS = ("remote_fetch", "gate_settings", "holdout", "tier_size", "eviction", "admission")

Row = dict[str, Any]
"""Of a table, by the names of its columns."""
Rows = Iterator[Row]


def places() -> list[Row]:
    """What one store tells of each tier and pool; the demo has no disk, so its rows are made of those of DRAM."""
    told = list(SAMPLE["windows"])
    return told + [{**place, "tier": "disk"} for place in told if place["tier"] == "dram"]


def varied(values: Any, chance: random.Random) -> Any:
    """Other figures of the same kind."""
    if isinstance(values, dict):
        return {name: varied(value, chance) for name, value in values.items()}
    by = values * chance.uniform(0.5, 1.5)
    return float(round(by)) if float(values).is_integer() else by


class Year:
    def __init__(self, now: datetime) -> None:
        self._now, self._chance = now, random.Random(1)
        self._names = [f"host-{number:02}" for number in range(STORES)]

    def write(self, engine: Engine) -> dict[str, int]:
        """Fill an empty, migrated database; how many rows there are of each kind."""
        counts = {}
        for model, rows in self._tables():
            counts[model.__tablename__] = self._insert(engine, model, rows)
        return counts

    def _tables(self) -> Iterator[tuple[type[Base], Rows]]:
        now = self._now
        begin = (now - YEAR).replace(hour=0, minute=0, second=0, microsecond=0)
        fortnight = (now - FORTNIGHT).replace(hour=0, minute=0, second=0, microsecond=0)
        days = [begin + number * DAY for number in range((fortnight - begin).days)]
        hours = [fortnight + number * HOUR for number in range(int((now - fortnight) / HOUR))]
        starts = [
            now - KEEP + timedelta(seconds=WINDOW_S) * number for number in range(int(KEEP.total_seconds() / WINDOW_S))
        ]
        yield StoreRow, self._stores()
        yield WindowRow, self._windows(starts)
        yield HourRow, self._hours([*days, *hours])
        yield LedgerRow, self._ledger([*days, *hours])
        yield StageWindowRow, self._stages(starts)
        yield ProspectRow, self._prospects()
        yield DecisionRow, self._decisions(begin)
        yield VerdictRow, self._verdicts(begin)
        yield AnswerRow, self._answers()
        yield IncidentRow, self._incidents(begin)
        yield AuditRow, self._audit(begin)
        yield (
            PolicyRevisionRow,
            iter([{"digest": "d", "source": "policy.yaml", "text": "version: 1\n" * 30, "loaded_at": begin}]),
        )

    @staticmethod
    def _insert(engine: Engine, model: type[Base], rows: Rows) -> int:
        count = 0
        while batch := list(islice(rows, AT_ONCE)):
            with engine.begin() as connection:
                connection.execute(insert(model), batch)
            count += len(batch)
        return count

    def _columns(self, place: Row, store: str, start: datetime) -> Row:
        return {"store": store, "start": start, **{name: place[name] for name in ("namespace", "model", "tier")}}

    def _windows(self, starts: list[datetime]) -> Rows:
        told = [(place, [varied(place["values"], self._chance) for _ in range(VARIANTS)]) for place in places()]
        for start in starts:
            for store in self._names:
                for place, variants in told:
                    row = self._columns(place, store, start)
                    yield {**row, "seconds": WINDOW_S, "counters": self._chance.choice(variants)}

    def _hours(self, starts: list[datetime]) -> Rows:
        told = [(place, [self._hour(place) for _ in range(VARIANTS)]) for place in places()]
        for start in starts:
            for store in self._names:
                for place, variants in told:
                    row = self._columns(place, store, start)
                    yield {**row, "seconds": 3600.0, "counters": self._chance.choice(variants)}

    def _hour(self, place: Row) -> Row:
        """As the sum of many windows: histograms fill more buckets."""
        windows: list[Window] = []
        for index in range(60):
            counters = varied(place["values"], self._chance)
            for value in counters.values():
                if isinstance(value, dict):
                    value["buckets"] = {
                        str(int(bucket) + self._chance.randint(-3, 3)): n for bucket, n in value["buckets"].items()
                    }
            start = self._now.replace(minute=index, second=0, microsecond=0)
            windows.append(window_of(WindowRow(**self._columns(place, "x", start), seconds=60.0, counters=counters)))
        (hour,) = hourly(windows)
        return hour_row(hour).counters

    def _ledger(self, hours: list[datetime]) -> Rows:
        draw = self._chance.random
        for hour in hours:
            for store in self._names:
                for place in places():
                    if place["tier"]:
                        key = {"hour": hour, "store": store, "namespace": place["namespace"], "tier": place["tier"]}
                        figures = {"saved": draw() * 3600, "lost": draw() * 60, "money": draw() * 9 - 1}
                        amounts = {"bytes": int(draw() * 2**36), "transferred": int(draw() * 2**36)}
                        yield {**key, "seconds": 3600.0, **figures, **amounts, "holdout": None}

    def _stages(self, starts: list[datetime]) -> Rows:
        for start in starts:
            for store in self._names:
                for phase in ("prefill", "decode", "mixed"):
                    spent = {"gpu_seconds": self._chance.random() * 15, "tokens": self._chance.random() * 9e4}
                    row = {
                        "store": store,
                        "stage": "all",
                        "phase": phase,
                        "gpu": "",
                        "start": start,
                        "seconds": WINDOW_S,
                    }
                    yield {**row, **spent}

    def _prospects(self) -> Rows:
        costs = {f"{1 << dram}/0/{1 << remote}": 0.01 for dram in range(30, 36) for remote in range(34, 38)}
        look = timedelta(seconds=TierSizeSettings().look_s)
        for number in range(FORTNIGHT // look):
            told = varied(costs, self._chance)
            row = {"namespace": "ab" * 16, "start": self._now - number * look, "seconds": look.total_seconds()}
            yield {**row, "requests": 100, "costs": told}

    def _stores(self) -> Rows:
        now = self._now
        for name in self._names:
            known = {"name": name, "url": f"http://{name}:7410", "boot_id": "b", "version": "0.1.0"}
            times = {
                "first_seen": now - YEAR,
                "last_seen": now,
                "expected_at": now,
                "summed_until": now - HOUR,
                "folded_until": now - FORTNIGHT,
            }
            yield {
                **known,
                **times,
                "status": SAMPLE["status"],
                "tuning": SAMPLE["tuning"],
                "expected": SAMPLE["tuning"],
            }

    def _moments(self, begin: datetime) -> Iterator[tuple[int, datetime, str]]:
        """A decision of each store a day."""
        number = 0
        for day in range((self._now - begin).days):
            for store in self._names:
                number += 1
                yield number, begin + day * DAY, store

    def _decisions(self, begin: datetime) -> Rows:
        for number, at, store in self._moments(begin):
            off = bool(number % 2)
            what = {
                "tuner": TUNERS[number % 6],
                "store": store,
                "tier": "remote",
                "namespace": "",
                "target": f"{store} remote",
            }
            change = {"field": "tiers.remote.fetch", "from": "on" if off else "off", "to": "off" if off else "on"}
            evidence = {
                "windows": [
                    varied({"fetch_s": 1.5, "recompute_s": 2.5, "requests": 20}, self._chance) for _ in range(20)
                ]
            }
            times = dict.fromkeys(("created_at", "updated_at", "approved_at", "applied_at"), at)
            row = {
                "key": f"{number:032x}",
                **what,
                **change,
                "models": ["llama"],
                "mode": "auto",
                "state": State.KEPT,
                "approved_by": "policy",
            }
            yield {
                **row,
                "reason": "because it pays " * 10,
                "evidence": evidence,
                **times,
                "expected_version": 1,
                "applied_version": 2,
            }

    def _verdicts(self, begin: datetime) -> Rows:
        for number, at, _ in self._moments(begin):
            yield {
                "decision": number,
                "at": at,
                "verdict": "kept",
                "reason": "better by much",
                "evidence": {"gain": 1.0},
            }

    def _answers(self) -> Rows:
        for store in self._names:
            for tuner in TUNERS:
                place = {"tuner": tuner, "store": store, "tier": "remote", "namespace": ""}
                yield {**place, "at": self._now, "change": False, "reason": "fetching pays: 20 requests saved 9 s"}

    def _incidents(self, begin: datetime) -> Rows:
        for _, at, store in self._moments(begin):
            over = {"opened_at": at, "last_seen": at, "closed_at": at + HOUR}
            yield {"kind": "store_unreachable", "store": store, "message": "connection refused", **over}

    def _audit(self, begin: datetime) -> Rows:
        for _, at, store in self._moments(begin):
            yield {
                "at": at,
                "who": "local",
                "source": "127.0.0.1",
                "what": "bypass",
                "detail": {"on": True, "store": store},
            }
