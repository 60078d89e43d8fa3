"""The demo's output: a line for whatever changes; a terminal shows the figures of the moment below them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console

from tiertune_agent.demo.result import Figures, applied
from tiertune_agent.fields import Json, change
from tiertune_agent.records import State
from tiertune_connector.units import format_size


@dataclass(frozen=True)
class Scene:
    """What stays the same during a run."""

    trace: str
    page: str
    seconds: int
    slowed: tuple[float, float]
    """When the remote is slowed, seconds after the start."""
    slow_bytes_per_s: float

    def weather(self, now_s: float) -> str:
        """The remote's speed at a moment, in words."""
        start, end = self.slowed
        if now_s < start:
            return f"the remote is fast; it will be slowed at {clock(start)}"
        if now_s >= end:
            return f"the remote is fast again, since {clock(end)}"
        speed = f"{format_size(self.slow_bytes_per_s)}/s per host"
        return f"THE REMOTE IS SLOWED to {speed}, from {clock(start)} to {clock(end)}"


Tell = Callable[[Figures], None]
"""Shows the figures of a look."""


@contextmanager
def teller(console: Console, scene: Scene) -> Iterator[Tell]:
    """Says on the console, until the context ends, each decision and each change of the remote's speed."""
    weather, decisions = "", 0

    def say(words: str) -> None:
        console.print(words, markup=False, soft_wrap=True)

    def tell(figures: Figures) -> None:
        nonlocal weather, decisions
        now = clock(figures.seconds)
        if weather != scene.weather(figures.seconds):
            weather = scene.weather(figures.seconds)
            say(f"{now}  {weather}")
        for decision in figures.decisions[decisions:]:
            if decision["state"] == State.APPROVED:  # its outcome is not known yet
                break
            say(f"{clock(decision['at_s'])}  {decided(decision)}: {decision['reason']}")
            decisions += 1
        moment.update(f"{now} of {clock(scene.seconds)}  {counted(figures)}")

    say(f"trace {scene.trace}, page {scene.page}")
    with console.status("") as moment:  # seen in a terminal only
        yield tell


def clock(seconds: float) -> str:
    minutes, rest = divmod(max(0, int(seconds)), 60)
    return f"{minutes}:{rest:02d}"


def counted(figures: Figures) -> str:
    """Requests, seconds and chunks, in one line."""
    requests, chunks, wrong = (figures.counted.get(name, 0) for name in ("requests", "verified", "wrong"))
    saved, lost = figures.total("saved_s"), figures.total("lost_s")
    return f"{requests} requests · saved {saved:.1f} s of prefill, lost {lost:.1f} s · {chunks} chunks, {wrong} wrong"


def decided(decision: Json) -> str:
    """Who decided what."""
    told = change(decision["field"], decision["from"], decision["to"])
    pool = f" {decision['pool'][:8]}" if decision["pool"] else ""
    how = "" if applied(decision) else f" ({decision['state']})"
    return f"{decision['store']}{pool}: {decision['tuner']} {told}{how}"


def ending(figures: Figures) -> list[str]:
    """The closing lines."""
    gate = figures.gate
    gates = f"{gate['won']} won, {gate['lost']} lost, {gate['late'] + gate['failed']} came too late or not at all"
    return [
        f"{figures.seconds:.0f} s: {counted(figures)}",
        f"the gates fetched {gate['fetch']} times ({gates}) and recomputed {gate['recompute']} times",
    ]
