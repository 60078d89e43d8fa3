"""What an engine tells of a timed request: its seconds to the first token, once."""

from concurrent.futures import Future

import pytest

from tiertune_connector.cost import Candidate, Decision, ModelShape, PrefillCost, Reason
from tiertune_connector.profile.steps import Steps
from tiertune_connector.serve.protocol import LookupReply
from tiertune_connector.vllm import telemetry
from tiertune_connector.vllm.gate import EngineGate
from tiertune_connector.vllm.lookups import Ask

CHUNK = 16
PROMPT = 100


class Client:
    """Keeps what it is told."""

    connected = True

    def __init__(self):
        self.first_tokens = []

    def report(self, request, tiers): ...

    def report_steps(self, steps):
        return True

    def first_token(self, request, tokens, seconds):
        self.first_tokens.append((request, tokens, seconds))


class Silent:
    """Tracing that is off."""

    def finished(self, _request): ...


@pytest.fixture
def client():
    return Client()


@pytest.fixture
def told(client, monkeypatch):
    monkeypatch.setattr(telemetry, "monotonic", lambda: 107.5)
    prefill = PrefillCost(ModelShape(8e9, 32, 4096, 131072))
    gate = EngineGate(prefill, chunk_tokens=CHUNK, chunk_bytes=1 << 20, load_deadline_s=1.0, floor_s=0.1)
    steps = Steps(stage="all", clock=lambda: 0.0, observe=lambda *_: None, decode_tokens=1, ranks=1)
    made = telemetry.Telemetry(client, steps=steps, gate=gate, tracing=Silent(), chunk_tokens=CHUNK)
    yield made
    made._reporter.close()


def ask(*, timed=True, tier="remote", decided=True):
    reply = Future()
    reply.set_result(LookupReply(1, [tier] * 4, {}, {}, timed=timed))
    candidate = Candidate(tier, 4, 0, Reason.OFF, 0.1, 0.2)
    decision = Decision(0, tier, Reason.OFF, 0.1, 0.2, (candidate,)) if decided else None
    return Ask("r", PROMPT, [], [], reply, 100.0, decision=decision, reported=True)


def test_the_first_step_behind_the_prompt_tells(told, client):
    """Prefill in two steps, then decoding: one message, with the tokens found in the remote."""
    request = ask()
    for first, end in ((0, 64), (64, 100)):
        told.computes(request, first, end)
    assert client.first_tokens == []
    for first in (100, 101):
        told.computes(request, first, first + 1)
    told.finished("r", request)
    assert client.first_tokens == [("r", 64, 7.5)]


def test_a_request_of_one_token_tells_when_it_ends(told, client):
    """Nothing is computed behind the prompt: the end of the request is its first token."""
    request = ask()
    told.computes(request, 0, 100)
    told.finished("r", request)
    assert client.first_tokens == [("r", 64, 7.5)]


def test_an_aborted_request_tells_nothing(told, client):
    """Without its whole prompt computed it had no first token."""
    request = ask()
    told.computes(request, 0, 64)
    told.finished("r", request)
    assert client.first_tokens == []


@pytest.mark.parametrize("other", [{"timed": False}, {"tier": "dram"}, {"decided": False}])
def test_only_timed_requests_with_remote_chunks_tell(told, client, other):
    """Without a holdout, or without candidates in the remote, there is nothing to measure."""
    told.computes(ask(**other), 100, 101)
    assert client.first_tokens == []
