"""Chains of block ids for tests: small ones for hypothesis, large ones like the traffic of chats."""

import random

import numpy as np
from hypothesis import strategies as st

from tiertune_connector.whatif.known import KnownKeys
from tiertune_connector.whatif.sampler import mix
from tiertune_connector.whatif.simulated import SimulatedPool


@st.composite
def grown(draw, depth=8, most=60):
    """Prompts as paths in a tree: a number names a block and its whole prefix."""
    paths = draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=depth), max_size=most))
    names: dict[tuple[int, ...], int] = {}
    return [[names.setdefault(tuple(path[: end + 1]), len(names)) for end in range(len(path))] for path in paths]


@st.composite
def sessions(draw, longest=50, most=40):
    """Prompts of a few sessions, some of which share their heads, cut at any length: many times that of a tiny pool."""
    requests = draw(st.lists(st.tuples(st.integers(0, 5), st.integers(1, longest)), max_size=most))
    return [[100 * (who if place > 10 else who // 3) + place for place in range(length)] for who, length in requests]


def generated(requests, seed, systems=8, live=400):
    """Sessions that begin with a system prompt, grow by some blocks a turn, pause for others, and end."""
    lots = random.Random(seed)
    unused = iter(range(10**9))
    heads = [[next(unused) for _ in range(lots.randint(1, 8))] for _ in range(systems)]
    sessions, chains = [], []
    for _ in range(requests):
        if len(sessions) < live or lots.random() < 0.15:
            head = heads[min(systems - 1, int(lots.expovariate(0.7)))]
            sessions.append(list(head))
        place = max(0, len(sessions) - 1 - int(lots.expovariate(1 / 60)))
        session = sessions[place]
        session.extend(next(unused) for _ in range(lots.randint(2, 18)))
        chains.append(list(session))
        if len(session) > 60 or len(sessions) > 2 * live:
            del sessions[place]
    return chains


def requests(chains, seed=0, together=1):
    """Some chains at a time with the hashes of their keys, and with those alone of keys that came before."""
    known, chains = KnownKeys(), list(chains)
    for start in range(0, len(chains), together):
        some = chains[start : start + together]
        hashed = mix(np.array([key for chain in some for key in chain], dtype=np.uint64), seed)
        yield some, hashed, hashed[known.before(hashed)]


def hits_of(chains, capacity, algorithm="lru"):
    """Keys within the cached prefixes of a pool that is simulated whole."""
    pool, hits = SimulatedPool(capacity, algorithm), 0
    for chain in chains:
        hits += pool.prefix(chain)
        pool.write_through(chain)
    return hits
