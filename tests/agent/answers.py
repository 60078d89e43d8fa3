"""What tuners answer, told apart: a test that expects the one is shown the other. And trials of such answers."""

from collections.abc import Sequence

from tiertune_agent.tuners.base import NoChange, Proposal
from tiertune_agent.verdicts.verdict import Pair, Trial


def proposal(answer: Proposal | NoChange) -> Proposal:
    """The answer, which wishes a change."""
    assert isinstance(answer, Proposal), answer
    return answer


def no_change(answer: Proposal | NoChange, *said: str) -> NoChange:
    """The answer, which wishes none and says these words."""
    assert isinstance(answer, NoChange), answer
    for words in said:
        assert words in answer.reason, answer
    return answer


def trial_of(pairs: Sequence[tuple[float, float]], of: str = "cost", weights: Sequence[float] = ()) -> Trial:
    """A trial of these windows, which count alike unless they have weights."""
    each = weights or [1.0] * len(pairs)
    return Trial([Pair(old, new, weight) for (old, new), weight in zip(pairs, each, strict=True)], of)
