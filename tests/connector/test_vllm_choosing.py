"""How far a prompt is fetched, with what the engine knows of the requests before it."""

from concurrent.futures import Future

import pytest

from tiertune_connector.cost import Backlog, FetchEstimate, PrefillCost
from tiertune_connector.protocol.messages import LookupReply
from tiertune_connector.vllm.choosing import Choosing
from tiertune_connector.vllm.gate import EngineGate
from tiertune_connector.vllm.lookups import Ask

CHUNK, CHUNK_BYTES = 64, 1 << 20
PROMPT = 10 * CHUNK
TOKEN_S = 1e-3
REMOTE = {"remote": FetchEstimate(t0_s=0.0, per_chunk_s=0.0, bytes_per_s=1.0)}


class Telemetry:
    """Nobody is told."""

    def decided(self, _ask, _decision, _backlog_s): ...


@pytest.fixture
def backlog():
    return Backlog(PrefillCost(seconds_per_flop=TOKEN_S))


@pytest.fixture
def choosing(backlog):
    gate = EngineGate(
        PrefillCost(seconds_per_flop=TOKEN_S),
        chunk_tokens=CHUNK,
        chunk_bytes=CHUNK_BYTES,
        load_deadline_s=1.0,
        floor_s=0.1,
    )
    return Choosing(None, gate, backlog, Telemetry(), chunk_tokens=CHUNK)


def arrives(backlog, request, *tiers):
    backlog.arrived(request, PROMPT)
    reply = Future()
    reply.set_result(LookupReply(1, list(tiers), REMOTE, {}))
    return Ask(request, PROMPT, [], [], reply, 0.0)


@pytest.mark.parametrize("tiers", [(), ["remote"] * 10])
def test_nobody_waits_for_what_a_request_has_itself(choosing, backlog, tiers):
    """On the device or in staging, and fetched or not: of ten chunks it has eight, and two are computed."""
    first = arrives(backlog, "a", *tiers)
    arrives(backlog, "b")
    assert backlog.seconds("b") == pytest.approx(PROMPT * TOKEN_S)
    assert not choosing.choose(first, 8).fetches
    assert backlog.seconds("b") == pytest.approx(2 * CHUNK * TOKEN_S)
