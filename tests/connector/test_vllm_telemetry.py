"""What an engine tells of a request of a holdout: its seconds to the first token, or to its end, once."""

from concurrent.futures import Future

import pytest

from tiertune_connector.cost import Candidate, Decision, Reason
from tiertune_connector.profile.steps import Steps
from tiertune_connector.protocol.messages import LookupReply
from tiertune_connector.vllm import telemetry
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

    def first_token(self, request, tokens, seconds, group):
        self.first_tokens.append((request, tokens, seconds, group))


class Silent:
    """Tracing that is off."""

    def finished(self, _request): ...


@pytest.fixture
def client():
    return Client()


@pytest.fixture
def told(client, monkeypatch):
    monkeypatch.setattr(telemetry, "monotonic", lambda: 107.5)
    steps = Steps(stage="all", clock=lambda: 0.0, observe=lambda *_: None, decode_tokens=1, ranks=1)
    made = telemetry.Telemetry(client, steps=steps, tracing=Silent(), chunk_tokens=CHUNK)
    yield made
    made._reporter.close()


def ask(*, group="fetched", tier="remote", decided=True):
    reply = Future()
    reply.set_result(LookupReply(1, [tier] * 4, {}, {}, group=group))
    candidate = Candidate(tier, 4, 0, Reason.OFF, 0.1, 0.2)
    decision = Decision(0, tier, Reason.OFF, 0.1, 0.2, (candidate,)) if decided else None
    return Ask("r", PROMPT, [], [], reply, 100.0, decision=decision, reported=True)


@pytest.mark.parametrize("group", ["held", "fetched"])
def test_the_first_step_behind_the_prompt_tells(told, client, group):
    """Prefill in two steps, then decoding: one message, with its group and the tokens found in the remote."""
    request = ask(group=group)
    for first in (0, 64):
        told.computes(request, first)
    assert client.first_tokens == []
    for first in (100, 101):
        told.computes(request, first)
    told.finished("r", request)
    assert client.first_tokens == [("r", 64, 7.5, group)]


@pytest.mark.parametrize("steps", [[], [0], [0, 64]], ids=["nothing computed", "aborted in its prompt", "one token"])
def test_a_request_without_a_further_step_tells_when_it_ends(told, client, steps):
    """It had one token to make, or it failed: its group must not lose it."""
    request = ask()
    for first in steps:
        told.computes(request, first)
    assert client.first_tokens == []
    told.finished("r", request)
    assert client.first_tokens == [("r", 64, 7.5, "fetched")]


@pytest.mark.parametrize("other", [{"group": ""}, {"tier": "dram"}, {"decided": False}])
def test_only_requests_of_a_holdout_with_remote_chunks_tell(told, client, other):
    """Without a holdout, or without candidates in the remote, there is nothing to measure."""
    told.computes(ask(**other), 100)
    assert client.first_tokens == []
