"""Lookups: asked once, decided once, bounded in time."""

from concurrent.futures import Future

import pytest

from tiertune_connector.cost import Decision, FetchEstimate, PrefillCost
from tiertune_connector.serve.protocol import LookupReply
from tiertune_connector.vllm.gate import EngineGate
from tiertune_connector.vllm.lookups import Answer, Ask, Lookups

CHUNK = 64
KEYS = [bytes([n]) * 36 for n in range(4)]


class FakeClient:
    def __init__(self):
        self.connected = True
        self.asked: list[list[bytes]] = []
        self.replies: list[Future[LookupReply]] = []

    def lookup(self, request, keys, *, prompt_tokens):
        self.asked.append(keys)
        self.replies.append(Future())
        return self.replies[-1]


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def reply(*tiers):
    return LookupReply(1, list(tiers), {}, {})


def fetch_all(ask: Ask, answer: LookupReply) -> Decision:
    return Decision(ask.first_chunk + len(answer.tiers), "dram", "cheaper", None, None)


@pytest.fixture
def client():
    return FakeClient()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def lookups(client, clock):
    return Lookups(client, choose=fetch_all, clock=clock, chunk_tokens=CHUNK, deadline_s=0.1)


def ask_all(lookups, request="a", first=0):
    return [lookups.answer(request, key, (n + 1) * CHUNK) for n, key in enumerate(KEYS) if n >= first]


def test_missing_keys_are_collected_over_a_step_and_looked_up_once(lookups, client):
    """However often a request asks while its reply is outstanding, the store is asked once, with all keys in order."""
    assert ask_all(lookups) == [Answer.RETRY] * 4
    assert not client.asked
    lookups.send()
    assert ask_all(lookups) == [Answer.RETRY] * 4
    lookups.send()
    assert client.asked == [KEYS]
    assert lookups.waiting("a")


def test_leading_chunks_hit_and_the_rest_misses(lookups, client):
    """Chunks up to the decision's cut are HIT, those after it MISS, and the answer stays."""
    ask_all(lookups, first=1)
    lookups.send()
    client.replies[0].set_result(reply("dram", "remote"))
    assert not lookups.waiting("a")
    for _ in range(2):
        assert ask_all(lookups, first=1) == [Answer.HIT, Answer.HIT, Answer.MISS]


def test_a_late_reply_is_a_miss_and_stays_one(lookups, client, clock):
    """Once the deadline has passed the prompt is recomputed, even if the reply comes after all."""
    ask_all(lookups)
    lookups.send()
    clock.now += 0.1
    assert not lookups.waiting("a")
    client.replies[0].set_result(reply(*["dram"] * 4))
    assert ask_all(lookups) == [Answer.MISS] * 4
    assert lookups.late == 1


def test_an_absent_store_is_a_miss_at_once(lookups, client):
    """Without a connection no request waits even for one step."""
    client.connected = False
    assert ask_all(lookups) == [Answer.MISS] * 4
    lookups.send()
    assert not client.asked
    assert not lookups.waiting("a")


def test_keys_whose_load_failed_are_not_offered_again(lookups, client):
    """A failed load turns into a miss, else vLLM would promote the same chunk for ever."""
    ask_all(lookups)
    lookups.send()
    client.replies[0].set_result(reply(*["dram"] * 4))
    ask_all(lookups)
    lookups.failed("a", KEYS[2:])
    assert ask_all(lookups) == [Answer.HIT, Answer.HIT, Answer.MISS, Answer.MISS]


def test_a_request_that_ends_before_its_lookup_is_not_looked_up(lookups, client):
    """An aborted request leaves nothing behind."""
    ask_all(lookups)
    lookups.forget("a")
    lookups.send()
    assert not client.asked


def gate(prefill):
    return EngineGate(prefill, chunk_tokens=CHUNK, chunk_bytes=1 << 20, load_deadline_s=1.0, floor_s=0.1)


def test_the_gate_recomputes_what_a_slow_remote_would_take_longer_for():
    """With 1 ms per token and 1 MiB per chunk, a remote of 1 MiB/s loses and one of 100 MiB/s wins."""
    prefill = PrefillCost(seconds_per_flop=1e-3)
    ask = Ask("a", prompt_tokens=300, first_chunk=1)
    for bytes_per_s, cut in ((1 << 20, 1), (100 << 20, 4)):
        costs = {"remote": FetchEstimate(0.0, 0.0, bytes_per_s)}
        decision = gate(prefill).choose(ask, LookupReply(1, ["remote"] * 3, costs, {}))
        assert decision.cut == cut
    assert gate(prefill).deadline_s(decision, {}) == pytest.approx(max(0.1, 1.5 * 0.03))
    assert gate(prefill).deadline_s(None, {}) == 1.0


def test_a_decision_against_fetching_is_reported_as_skipped():
    """What was left to recompute is told with its prediction and without an actual time."""
    prefill = PrefillCost(seconds_per_flop=1e-3)
    own = gate(prefill)
    costs = {"remote": FetchEstimate(0.0, 0.0, 1 << 20)}
    decision = own.choose(Ask("a", prompt_tokens=300), LookupReply(1, ["remote"] * 3, costs, {}))
    (report,) = own.report(decision)
    assert (report.tier, report.chunks, report.fetched_tokens, report.outcome) == ("remote", 3, 0, "skipped")
    assert report.actual_s is None
    assert report.fetch_s == pytest.approx(3.0)
