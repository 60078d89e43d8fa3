"""A harmful change by hand in the middle of a trace: reported as drift, and changed again by a tuner."""

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.goals import Goal
from benchmarks.tuning.figures import worst
from benchmarks.tuning.jobs import Job, Row, Summary
from benchmarks.tuning.worlds import Grid, scenario, short
from tiertune_agent.policy.document import Policy
from tiertune_agent.replay.simulate import Replay
from tiertune_agent.replay.traces import open_trace
from tiertune_agent.replay.tuned import DRAM_FIELD, EVICTION_FIELD, START, ReplayAgent, conduct

HARMS: dict[str, dict[str, Any]] = {"fifo": {"eviction": "fifo"}, "a tenth of DRAM": {"dram_factor": 0.1}}
FIELDS = {"eviction": EVICTION_FIELD, "dram_factor": DRAM_FIELD}
"""The field that each harms."""
SHOWN = ("reported_after_s", "acted_after_s")
GOALS = {"harm_unreported": Goal("at most", 0)}
"""Each is reported, or acted on, within the soak, except those that harmed nothing, or after which no window ended."""


def jobs(grid: Grid) -> Iterator[Job]:
    for trace in grid.traces:
        for name, by_hand in HARMS.items():
            yield Job(harms, trace, {f"{short(trace)} {name}{grid.under}": (by_hand, grid.policy)})


def harms(name: str, cases: Sequence[tuple[dict[str, Any], Policy | None]]) -> Iterator[Row]:
    trace = open_trace(name)
    end = float(trace.t[-1] - trace.t[0])
    middle = end / 2
    for by_hand, policy in cases:
        event = {"at_s": middle, "for_s": 1.0, "by_hand": by_hand}
        replay = Replay(trace, scenario("8b", dram=0.01, remote=0.01, gbps=100, events=[event]))
        agent, _ = conduct(replay, policy)
        fields = [FIELDS[harm] for harm in by_hand]
        after = [change for change in agent.changes if change.at_s > middle and change.field in fields]
        reported = [incident["at_s"] - middle for incident in agent.incidents if incident["at_s"] > middle]
        yield {
            "trace": trace.name,
            "forced": by_hand,
            "soak_s": replay.scenario.period_s,
            "windows": int(end // agent.stores.window_s - middle // agent.stores.window_s),
            "harmed": "dram_factor" not in by_hand or _dram_bytes(replay, agent, middle) > replay.chunk_bytes,
            "reported_after_s": min(reported, default=None),
            "acted_after_s": min((change.at_s - middle for change in after), default=None),
            "first_change": after[0].document() if after else None,
        }


def summary(rows: Sequence[Row]) -> Summary:
    harmed = [row for row in rows if row["harmed"]]
    seen = [row for row in harmed if row["windows"]]
    return {
        "harm_unreported": sum(map(_late, seen)) if seen else None,
        "harm_too_short": len(harmed) - len(seen) if rows else None,
        "harm_of_nothing": len(rows) - len(harmed) if rows else None,
        "harm_reported_after_s_worst": _slowest(rows),
    }


def _dram_bytes(replay: Replay, agent: ReplayAgent, at_s: float) -> int:
    """A host's DRAM at that time; if that is one chunk at most, the harm cannot take any."""
    sizes = [change.after for change in agent.changes if change.field == DRAM_FIELD and change.at_s <= at_s]
    return int(sizes[-1]) if sizes else replay.split(START).dram * replay.chunk_bytes


def _late(row: Row) -> bool:
    told = [row[name] for name in ("reported_after_s", "acted_after_s") if row[name] is not None]
    return all(after_s > row["soak_s"] for after_s in told)


def _slowest(rows: Sequence[Row]) -> float | None:
    return worst(row["reported_after_s"] for row in rows if row["reported_after_s"] is not None)
