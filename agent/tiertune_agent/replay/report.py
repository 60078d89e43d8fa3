"""``tiertune replay --html``: the runs of one or more cells as one self-contained page."""

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment

from tiertune_agent.fields import Json, shown
from tiertune_agent.replay.scenario import MODELS, Scenario
from tiertune_agent.web import charts, over_time, templating, text
from tiertune_agent.web.charts import Bars, Chart, Piece
from tiertune_connector.tuning import TIERS
from tiertune_connector.units import format_duration

HIT_IN = ("gpu", *TIERS)
TOLD = {
    "always": "fetches every hit",
    "never": "fetches nothing from remote",
    "best_static": "the better of always and never, in hindsight",
    "rule": "the gate, by costs as they are measured",
    "rule_oracle": "the gate, knowing the true bandwidth",
    "rule_blind": "the gate without looking at queues",
    "baseline": "fetches every hit; LRU; DRAM and remote half each",
    "best_split": "the best constant split in hindsight, with the gate",
    "tuned": "the whole agent in the loop, from baseline on",
}
"""What each run does."""
HERE = Path(__file__).parent
SHOWN_DECISIONS = 100
BYTES = "capacity_bytes"


class Run(NamedTuple):
    """One bar of every chart."""

    name: str
    figures: Json
    gain: float | None
    """Share of the reference's mean TTFT that is saved; None: this is the reference."""

    @property
    def hit_share(self) -> float:
        return float(sum(self.figures["hit_tokens"].values()) / self.figures["prompt_tokens"])

    @property
    def parts(self) -> dict[str, tuple[float, str]]:
        """By where tokens came from: their share in per cent, and the same in words."""
        run = self.figures
        tokens = {tier: run["hit_tokens"].get(tier, 0) for tier in HIT_IN} | {"recomputed": run["recomputed_tokens"]}
        shares = {name: 100 * count / run["prompt_tokens"] for name, count in tokens.items() if count > 0}
        return {
            name: (share, f"{name}: {text.count(tokens[name])} tokens, {share:.1f} %") for name, share in shares.items()
        }


@dataclass(frozen=True)
class Played:
    """One trace under one scenario: what was played, and what came out."""

    document: Json
    """As ``--json`` writes it."""
    scenario: Scenario
    span_s: float
    """Seconds from the first request to the last one."""

    @property
    def title(self) -> str:
        return f"{self.document['trace']}, {self.document['scenario']}"

    @property
    def reference(self) -> str:
        """The run that gains are relative to: baseline if it was played, else the first."""
        names = list(self.document["runs"])
        return "baseline" if "baseline" in names else names[0]

    @cached_property
    def runs(self) -> dict[str, Run]:
        """By name, in the order in which they were asked for."""
        documents = self.document["runs"]
        base = documents[self.reference]["ttft_mean_s"]
        return {
            name: Run(name, run, None if name == self.reference else 1 - run["ttft_mean_s"] / base)
            for name, run in documents.items()
        }

    def width(self, run: Run, figure: str) -> float:
        """One of a run's figures in per cent of the longest."""
        return float(100 * run.figures[figure] / max(each.figures[figure] for each in self.runs.values()))

    @property
    def shown(self) -> Run:
        """The run that the headline is about: the agent's if there is one to hold it against, else the fastest."""
        tuned = self.runs.get("tuned") if self.reference != "tuned" else None
        return tuned or min(self.runs.values(), key=lambda run: float(run.figures["ttft_mean_s"]))

    @property
    def headline(self) -> str:
        run = self.shown
        mean = _time(run.figures["ttft_mean_s"])
        if run.gain is None:
            return f"No run is faster than {run.name}: {mean} to the first token on average"
        base = _time(self.document["runs"][self.reference]["ttft_mean_s"])
        return f"With {run.name} the first token comes {_gain(run.gain)} than with {self.reference}: {mean}, not {base}"

    @property
    def kinds(self) -> list[str]:
        """Where any run's tokens came from, the nearest first; what was recomputed is last."""
        told = {name for run in self.runs.values() for name in run.parts}
        return [name for name in (*HIT_IN, "recomputed") if name in told]

    @property
    def hits(self) -> Bars:
        """Where every run's tokens came from, in per cent."""
        pieces, runs = [], self.runs.values()
        for kind in self.kinds:
            widths, tips = zip(*(run.parts.get(kind, (None, "")) for run in runs), strict=True)
            pieces.append(Piece(f"part {kind}", widths, tips=tips))
        return Bars(
            "; ".join(f"{run.name}: {', '.join(told for _, told in run.parts.values())}" for run in runs),
            tuple(f"{run.name}: {100 * run.hit_share:.1f} %" for run in runs),
            tuple(pieces),
            top=100.0,
        )

    @property
    def split(self) -> Chart:
        """The remote share that the agent chose in the run ``tuned``, over time."""
        run = self.document["runs"]["tuned"]
        marks = [(one["at_s"], one["reason"]) for one in run["changes"] if one["field"].endswith(BYTES)]
        return over_time.step_chart([(float(at), float(share)) for at, share in run["split"]], self.span_s, marks)

    @property
    def facts(self) -> list[str]:
        """What was played, in a few words each."""
        scenario = self.scenario
        model = next((name for name, spec in MODELS.items() if spec == scenario.model), "a model of its own")
        sizes = {tier: getattr(scenario.tiers, tier) for tier in TIERS}
        told = [f"{tier} {_size(spec)}" for tier, spec in sizes.items() if spec.share or spec.gib]
        slowed = any(event.link or event.link_factor for event in scenario.events)
        moving = ", moving" if scenario.link.fluctuation or slowed else ""
        return [
            f"{self.document['requests']:,} requests in {text.span(self.span_s)}",
            f"{scenario.engines} engines on {scenario.nodes} hosts, {scenario.routing} routing",
            model,
            f"link of {scenario.link.gbps:g} gigabits{moving}",
            *told,
            f"seed {scenario.seed}",
        ]


def report(cells: Sequence[Played], command: str = "") -> str:
    """The page; it names ``command`` as the way to make it again."""
    names = list(dict.fromkeys(name for cell in cells for name in cell.runs))
    page = _environment().get_template("report.html")
    return page.render(cells=cells, names=names, command=command, many=len(cells) > 1, about=TOLD)


def _size(spec: Any) -> str:  # noqa: ANN401 (a TierSpec or a RemoteSpec)
    return f"{100 * spec.share:.3g} % of the trace's bytes" if spec.share is not None else f"{spec.gib:g} GiB"


def _time(seconds: float) -> str:
    """``537 ms``, ``1.23 s``, ``123 s``."""
    if seconds < 1:
        return f"{1e3 * seconds:.0f} ms" if seconds >= 0.1 else f"{1e3 * seconds:.1f} ms"
    return f"{seconds:,.{2 if seconds < 10 else 1 if seconds < 100 else 0}f} s"


def _gain(gain: float) -> str:
    """``23 % sooner``, ``5 % later``."""
    size = abs(100 * gain)
    digits = 0 if size >= 9.95 else 1
    return "no sooner" if round(size, 1) == 0 else f"{size:.{digits}f} % {'sooner' if gain > 0 else 'later'}"


def _environment() -> Environment:
    made = templating.environment(HERE / "templates", templating.STYLES)
    icon = b64encode((templating.STYLES / "icon.svg").read_bytes()).decode()
    made.filters |= {
        "time": _time,
        "duration": format_duration,
        "gain": _gain,
        "figure": lambda value: f"{value:,.4g}",
        "shown": lambda value, field: shown(field, value),
    }
    made.globals |= {
        "draw": charts.draw,
        "draw_bars": charts.draw_bars,
        "icon": f"data:image/svg+xml;base64,{icon}",
        "version": version("tiertune"),
        "most": SHOWN_DECISIONS,
    }
    return made
