"""Traffic that shifts: first few documents are asked about often, then so many that no host's DRAM holds them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tiertune_agent.replay.traces import Trace

BLOCK_TOKENS = 64
DOCUMENT = 16
"""Blocks of a document. Every prompt is a document and a question that nobody asked before."""
QUESTION = 2
SKEW = 0.7
"""Exponent of the documents' popularity (Zipf)."""


@dataclass(frozen=True)
class Phase:
    requests: int
    documents: int


def shifting(phases: Sequence[Phase], requests_per_s: float, seed: int) -> Trace:
    """One phase after another, each with documents of its own; arrivals evenly spaced."""
    rng = np.random.default_rng(seed)
    chains: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
    kinds: list[str] = []
    fresh = 0
    for number, phase in enumerate(phases):
        first = fresh + np.arange(phase.documents) * DOCUMENT
        fresh += phase.documents * DOCUMENT
        weights = (np.arange(phase.documents) + 1.0) ** -SKEW
        for document in rng.choice(phase.documents, phase.requests, p=weights / weights.sum()):
            chains.append(np.concatenate([first[document] + np.arange(DOCUMENT), fresh + np.arange(QUESTION)]))
            kinds.append(f"phase {number}")
            fresh += QUESTION
    count, blocks = len(chains), DOCUMENT + QUESTION
    return Trace(
        name="shifting",
        block_tokens=BLOCK_TOKENS,
        t=np.arange(count) / requests_per_s,
        input_len=np.full(count, blocks * BLOCK_TOKENS),
        session=np.arange(count),
        type=kinds,
        offsets=np.arange(count + 1) * blocks,
        ids=np.concatenate(chains),
    )


def everyday() -> Trace:
    """More documents than DRAM holds, and later others: many chunks are found in the remote."""
    return shifting([Phase(400, 24), Phase(400, 48)], 10.0, seed=2)
