"""What a fetch and a recompute cost, measured as requests pass, and the choice between them. Pure."""

from tiertune_connector.cost.backlog import Backlog
from tiertune_connector.cost.fetch import FetchCost, FetchEstimate
from tiertune_connector.cost.gate import Candidate, Decision, GateSettings, Outcome, Reason, deadline_s, decide, outcome
from tiertune_connector.cost.prefill import TOKENS_ONLY, ModelShape, PrefillCost

__all__ = [
    "TOKENS_ONLY",
    "Backlog",
    "Candidate",
    "Decision",
    "FetchCost",
    "FetchEstimate",
    "GateSettings",
    "ModelShape",
    "Outcome",
    "PrefillCost",
    "Reason",
    "deadline_s",
    "decide",
    "outcome",
]
