"""What tuners answer, told apart: a test that expects the one is shown the other."""

from tiertune_agent.tuners.base import NoChange, Proposal


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
