"""The demo's output: a live view in a terminal, plain lines elsewhere."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from tiertune_agent.demo.result import Figures, applied
from tiertune_agent.fields import Json, shown
from tiertune_agent.records import State
from tiertune_connector.units import format_size

NEWEST = 5
"""Decisions shown in the live view."""


@dataclass(frozen=True)
class Scene:
    """What stays the same during a run."""

    trace: str
    remote: str
    page: str
    seconds: int
    slowed: tuple[float, float]
    """When the remote is slowed, seconds after the start."""
    slow_bytes_per_s: float

    def slow(self, now_s: float) -> bool:
        return self.slowed[0] <= now_s < self.slowed[1]

    def weather(self, now_s: float) -> str:
        """The remote's speed at a moment, in words."""
        start, end = (clock(at) for at in self.slowed)
        if self.slow(now_s):
            return f"THE REMOTE IS SLOWED to {format_size(self.slow_bytes_per_s)}/s per host, from {start} to {end}"
        if now_s < self.slowed[0]:
            return f"the remote is fast; it will be slowed at {start}"
        return f"the remote is fast again, since {end}"


Tell = Callable[[Figures], None]
"""Shows the figures of a look."""


@contextmanager
def teller(console: Console, scene: Scene) -> Iterator[Tell]:
    """Shows figures on the console until the context ends."""
    if not console.is_terminal:
        yield _lines(partial(console.print, markup=False, soft_wrap=True), scene)
        return
    with Live(console=console, auto_refresh=False) as view:
        yield lambda figures: view.update(live(scene, figures), refresh=True)


def _lines(say: Callable[[str], None], scene: Scene) -> Tell:
    """Says a line for each decision and each change of the remote's speed."""
    weather, decisions = "", 0
    say(f"trace {scene.trace}, page {scene.page}")

    def tell(figures: Figures) -> None:
        nonlocal weather, decisions
        if weather != scene.weather(figures.seconds):
            weather = scene.weather(figures.seconds)
            say(f"{clock(figures.seconds)}  {weather}")
        for decision in figures.decisions[decisions:]:
            if decision["state"] == State.APPROVED:  # its outcome is not known yet
                break
            say(f"{clock(decision['at_s'])}  {decided(decision)}: {decision['reason']}")
            decisions += 1

    return tell


def clock(seconds: float) -> str:
    minutes, rest = divmod(max(0, int(seconds)), 60)
    return f"{minutes}:{rest:02d}"


def live(scene: Scene, figures: Figures) -> RenderableType:
    """The whole view, for a terminal 80 columns wide or more."""
    return Group(
        Rule(f"TierTune demo  {clock(figures.seconds)} of {clock(scene.seconds)}", align="left"),
        Text(f"trace {scene.trace} · remote: {scene.remote} · page {scene.page}", style="dim"),
        Text(
            f" {scene.weather(figures.seconds)} ", style="bold white on red" if scene.slow(figures.seconds) else "green"
        ),
        _tiers(figures),
        _fetching(figures),
        Text(counted(figures), style="bold red" if figures.counted.get("wrong") else ""),
        Rule("decisions, newest first", align="left"),
        *_decisions(figures.decisions),
    )


def counted(figures: Figures) -> str:
    """Requests, seconds and chunks, in one line."""
    requests, chunks, wrong = (figures.counted.get(name, 0) for name in ("requests", "verified", "wrong"))
    saved, lost = figures.total("saved_s"), figures.total("lost_s")
    return f"{requests} requests · saved {saved:.1f} s of prefill, lost {lost:.1f} s · {chunks} chunks, {wrong} wrong"


def decided(decision: Json) -> str:
    """Who decided what."""
    before, after = (shown(decision["field"], decision[side]) for side in ("from", "to"))
    pool = f" {decision['pool'][:8]}" if decision["pool"] else ""
    how = "" if applied(decision) else f" ({decision['state']})"
    return f"{decision['store']}{pool}: {decision['tuner']} {before} → {after}{how}"


def ending(figures: Figures) -> list[str]:
    """The closing lines."""
    gate = figures.gate
    gates = f"{gate['won']} won, {gate['lost']} lost, {gate['late'] + gate['failed']} came too late or not at all"
    return [
        f"{figures.seconds:.0f} s: {counted(figures)}",
        f"the gates fetched {gate['fetch']} times ({gates}) and recomputed {gate['recompute']} times",
    ]


def _tiers(figures: Figures) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("tier", no_wrap=True)
    for name in ("hit tokens", "share", "held of", "allowed", "fetched", "recomputed", "saved"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, tier in figures.tiers.items():
        table.add_row(
            name,
            f"{tier['hit_tokens']:,.0f}",
            _share(tier["hit_tokens"], figures.prompt_tokens),
            format_size(tier["resident_bytes"]),
            format_size(tier["capacity_bytes"]),
            f"{tier['fetched']:,.0f}",
            f"{tier['recomputed']:,.0f}",
            f"{tier['saved_s']:.1f} s",
        )
    return table


def _fetching(figures: Figures) -> Text:
    text = Text("fetch from remote:")
    for store, on in figures.fetching.items():
        text.append(f"  {store} ")
        text.append(" ON " if on else " OFF ", style="black on green" if on else "black on yellow")
    return text


def _decisions(decisions: Iterable[Json]) -> Iterator[RenderableType]:
    newest = list(decisions)[-NEWEST:][::-1]
    if not newest:
        yield Text("none yet: the agent looks every two seconds", style="dim")
    for decision in newest:
        told = f"{clock(decision['at_s'])}  {decided(decision)}"
        yield Text(told, style="bold" if applied(decision) else "")
        yield Padding(Text(decision["reason"], style="dim"), (0, 0, 0, 6))


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "-"
