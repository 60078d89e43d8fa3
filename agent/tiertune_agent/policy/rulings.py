"""The rules of one policy by target; what many targets have in common is laid over once."""

from tiertune_agent.policy.document import Policy, Rule
from tiertune_agent.records import Target


class Rulings:
    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._laid: dict[tuple[int, ...], Rule] = {}
        """By the numbers of the overrides that fit."""

    def for_target(self, target: Target) -> Rule:
        """As the policy says it, which takes its time to lay overrides over."""
        fitting = tuple(number for number, each in enumerate(self._policy.overrides) if each.match.fits(target))
        if fitting not in self._laid:
            self._laid[fitting] = self._policy.for_target(target)
        return self._laid[fitting]
