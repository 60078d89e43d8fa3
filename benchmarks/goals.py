"""What a figure must reach and what it aims at, and how figures are printed beside that."""

from collections.abc import Iterable
from dataclasses import dataclass
from operator import ge, le, lt
from typing import Literal

_REACHES = {"at least": ge, "at most": le, "below": lt}


@dataclass(frozen=True)
class Goal:
    side: Literal["at least", "at most", "below"]
    must: float
    """What must be reached."""
    aim: float | None = None
    """What is hoped for."""

    def reached(self, value: float) -> bool:
        return bool(_REACHES[self.side](value, self.must))

    def __str__(self) -> str:
        return f"{self.side} {self.must:g}" + (f", aim {self.aim:g}" if self.aim is not None else "")


Judged = tuple[str, float, Goal | None]
"""A figure's name, value and goal; without a goal it is only shown."""


def short(judged: Judged) -> bool:
    _, value, goal = judged
    return goal is not None and not goal.reached(value)


def table(figures: Iterable[Judged]) -> str:
    """A table of figures, those that are short of their goal first."""
    lines = [f"{'figure':<30} {'measured':>10}  goal"]
    for each in sorted(figures, key=short, reverse=True):
        name, value, goal = each
        end = f"  {goal}  {'short' if short(each) else 'reached'}" if goal else ""
        lines.append(f"{name:<30} {value:>10.4g}{end}")
    return "\n".join(lines)
