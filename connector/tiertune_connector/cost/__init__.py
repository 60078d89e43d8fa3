"""What a fetch and a recompute cost, measured as requests pass, and the choice between them. Pure."""

from tiertune_connector.cost.backlog import Backlog
from tiertune_connector.cost.fetch import FetchCost, FetchEstimate, Predicted
from tiertune_connector.cost.gate import (
    ALONE,
    Candidate,
    GateDecision,
    GateSettings,
    Others,
    Reason,
    deadline_s,
    decide,
    gain_s,
    waited_s,
)
from tiertune_connector.cost.prefill import TOKENS_ONLY, ModelShape, PrefillCost

__all__ = [
    "ALONE",
    "TOKENS_ONLY",
    "Backlog",
    "Candidate",
    "FetchCost",
    "FetchEstimate",
    "GateDecision",
    "GateSettings",
    "ModelShape",
    "Others",
    "Predicted",
    "PrefillCost",
    "Reason",
    "deadline_s",
    "decide",
    "gain_s",
    "waited_s",
]
