"""How the demo is told: live in a terminal, in plain lines elsewhere."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from tiertune_agent.demo.result import Decision, Figures
from tiertune_connector.units import format_size

NEWEST = 4
"""Decisions shown in the live view."""
TELL_EVERY_S = 5.0


@dataclass(frozen=True)
class Scene:
    """What stays the same, and where the run stands."""

    trace: str
    remote: str
    page: str
    seconds: int
    slowed: tuple[float, float]
    """When the remote is slowed, seconds after the start."""
    slow_bytes_per_s: float

    def weather(self, now_s: float) -> tuple[str, str]:
        """How the remote is at a moment, in a sentence, with its style."""
        start, end = self.slowed
        if now_s < start:
            return f"The remote is as fast as it is. It will be slowed at {clock(start)}.", "green"
        if now_s < end:
            rate = format_size(self.slow_bytes_per_s)
            return (
                f"THE REMOTE IS SLOWED to {rate}/s per host, from {clock(start)} to {clock(end)}.",
                "bold white on red",
            )
        return f"The remote is as fast as before again, since {clock(end)}.", "green"


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class Teller(Protocol):
    def tell(self, figures: Figures) -> None:
        """Called every time that the demo has looked."""


@contextmanager
def teller(console: Console, scene: Scene) -> Iterator[Teller]:
    """Tells on the console until the end of the context."""
    if not console.is_terminal:
        yield Lines(console, scene)
        return
    with Live(console=console, auto_refresh=False) as view:
        yield View(view, scene)


class View:
    def __init__(self, view: Live, scene: Scene) -> None:
        self._live = view
        self._scene = scene

    def tell(self, figures: Figures) -> None:
        self._live.update(live(self._scene, figures), refresh=True)


class Lines:
    """One every few seconds, one for each decision and each change of the remote."""

    def __init__(self, console: Console, scene: Scene) -> None:
        self._console = console
        self._scene = scene
        self._weather = ""
        self._decisions = 0
        self._next_s = 0.0
        self._say(f"{scene.trace} on page {scene.page} and here:")

    def tell(self, figures: Figures) -> None:
        words, _ = self._scene.weather(figures.seconds)
        if words != self._weather:
            self._weather = words
            self._say(f"{clock(figures.seconds)}  {words}")
        for decision in figures.decisions[self._decisions :]:
            self._say(decided(decision))
        self._decisions = len(figures.decisions)
        if figures.seconds >= self._next_s:
            self._next_s = figures.seconds + TELL_EVERY_S
            self._say(line(self._scene, figures))

    def _say(self, words: str) -> None:
        self._console.print(words, markup=False, soft_wrap=True)


def live(scene: Scene, figures: Figures) -> RenderableType:
    """The whole view, for a terminal 80 columns wide or more."""
    title = f"TierTune demo  {clock(figures.seconds)} of {clock(scene.seconds)}"
    about = f"2 hosts, 4 engines, {scene.trace} · remote: {scene.remote} · page: {scene.page}"
    words, style = scene.weather(figures.seconds)
    return Group(
        Rule(title, align="left"),
        Text(about, style="dim"),
        Text(f" {words} ", style=style),
        _tiers(figures),
        _fetching(figures),
        Text.from_markup(_counted(figures)),
        Rule("decisions", align="left"),
        *_decisions(figures.decisions),
    )


def line(scene: Scene, figures: Figures) -> str:
    """One line of progress."""
    shares = ", ".join(
        f"{name} {_share(tier.hit_tokens, figures.prompt_tokens)}" for name, tier in figures.tiers.items()
    )
    fetch = ", ".join(f"{store} {'on' if on else 'off'}" for store, on in figures.fetching.items())
    slow = "remote SLOWED, " if scene.slowed[0] <= figures.seconds < scene.slowed[1] else ""
    return (
        f"{clock(figures.seconds)}  {slow}{figures.counted.get('requests', 0)} requests, prompt tokens hit: {shares}; "
        f"remote fetch: {fetch}; saved {figures.total('saved_s'):.1f} s, lost {figures.total('lost_s'):.1f} s"
    )


def decided(decision: Decision) -> str:
    """One decision in one line."""
    pool = f" {decision.pool[:8]}" if decision.pool else ""
    verb = "recommends" if decision.state == "proposed" else "turns"
    what = f"{decision.tuner} {verb} {decision.before} to {decision.after} on {decision.store}{pool}"
    return f"{clock(max(0.0, decision.at_s))}  {what}: {decision.reason}"


def ending(figures: Figures, missing: Iterable[str]) -> list[str]:
    """The last words."""
    counted = {"requests": 0, "verified": 0, "wrong": 0} | dict(figures.counted)
    gate = {name: int(figures.total(name)) for name in ("fetch", "recompute", "won", "lost", "late", "failed")}
    amiss = gate["late"] + gate["failed"]
    requests = f"{counted['requests']} requests in {figures.seconds:.0f} s"
    chunks = f"{counted['verified']} chunks came from tiers, each compared bit for bit: {counted['wrong']} wrong"
    gates = f"the gates fetched {gate['fetch']} times ({gate['won']} won, {gate['lost']} lost, {amiss} came too late)"
    seconds = f"{figures.total('saved_s'):.1f} s of prefill saved, {figures.total('lost_s'):.1f} s lost"
    told = [f"{requests}; {chunks}", f"{gates} and recomputed {gate['recompute']} times; {seconds}"]
    return told + [f"NOT SHOWN: {what}" for what in missing]


def _tiers(figures: Figures) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 3, 0, 0))
    for name in (
        "tier",
        "hit tokens",
        "of prompts",
        "holds",
        "of",
        "evicted",
        "fetched",
        "recomputed",
        "saved",
        "lost",
    ):
        table.add_column(name, justify="left" if name == "tier" else "right", no_wrap=True)
    for name, tier in figures.tiers.items():
        table.add_row(
            name,
            f"{tier.hit_tokens:,.0f}",
            _share(tier.hit_tokens, figures.prompt_tokens),
            format_size(tier.resident_bytes),
            format_size(tier.capacity_bytes),
            f"{tier.evictions:,.0f}",
            f"{tier.fetch:,.0f}",
            f"{tier.recompute:,.0f}",
            f"{tier.saved_s:.1f} s",
            f"{tier.lost_s:.1f} s",
        )
    return table


def _fetching(figures: Figures) -> Text:
    text = Text("fetch from remote:")
    for store, on in figures.fetching.items():
        text.append(f"  {store} ")
        text.append(" ON " if on else " OFF ", style="black on green" if on else "black on yellow")
    return text


def _counted(figures: Figures) -> str:
    counted = figures.counted
    wrong = counted.get("wrong", 0)
    style = "bold red" if wrong else "dim"
    return (
        f"{counted.get('requests', 0)} requests, [bold]{figures.total('saved_s'):.1f} s[/] of prefill saved, "
        f"{figures.total('lost_s'):.1f} s lost  "
        f"[{style}]{counted.get('verified', 0)} chunks read and compared bit for bit, {wrong} wrong[/]"
    )


def _decisions(decisions: Iterable[Decision]) -> list[RenderableType]:
    newest = list(decisions)[-NEWEST:][::-1]
    if not newest:
        return [Text("none yet: the agent looks every two seconds", style="dim")]
    return [Text.from_markup(escape(decided(decision))) for decision in newest]


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "-"
