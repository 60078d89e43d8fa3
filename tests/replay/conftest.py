"""The shipped traces, loaded once."""

import pytest

from tiertune_agent.replay.traces import builtin_trace


@pytest.fixture(scope="session")
def small():
    return builtin_trace("lmcache_agents")


@pytest.fixture(scope="session")
def shifting():
    return builtin_trace("shift_mix_slice")
