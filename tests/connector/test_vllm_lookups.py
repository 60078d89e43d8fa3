"""Lookups: asked once, decided once, bounded in time."""

from concurrent.futures import Future
from typing import Any

import pytest

from tiertune_connector.cost import GateDecision
from tiertune_connector.cost.gate import Candidate, Reason
from tiertune_connector.protocol.messages import LookupReply, Side, brief
from tiertune_connector.tracing import RequestTrace
from tiertune_connector.vllm.lookups import PATIENCE_S, Lookups

CHUNK = 64
LOAD_S = 2.0
KEYS = [bytes([n]) * 36 for n in range(4)]
TRACE = "a", None, 266, 4, 0.0, 0


class Reply(Future[LookupReply]):
    """Received by who asks for its result, where it is at hand: as a client's."""

    def __init__(self):
        super().__init__()
        self.at_hand: LookupReply | None = None
        self.arrives: Any = None
        """A clock, if it is at hand only as late as it is waited for."""
        self.waited: list[float | None] = []

    def result(self, timeout=None):
        if not self.done():
            self.waited.append(round(timeout, 6))
            if self.arrives is not None:
                self.arrives.now += timeout
            if self.at_hand is None:
                raise TimeoutError
            self.set_result(self.at_hand)
        return super().result(timeout)


class FakeClient:
    def __init__(self):
        self.connected = True
        self.asked: list[dict] = []
        self.replies: list[Reply] = []
        self.owned: list[tuple[str, int, int]] = []

    def lookup(self, request, keys, *, prompt_tokens, tenant, sides, defer, deadline_s):
        asked = {"request": request, "keys": keys, "tokens": prompt_tokens, "tenant": tenant, "deadline": deadline_s}
        self.asked.append({**asked, "sides": sides, "defer": defer})
        self.replies.append(Reply())
        return self.replies[-1]

    def tell(self, own):
        self.owned.append((own.request, own.gpu_chunks, own.staging_chunks))


class Gate:
    """Fetches all that was found, and remembers what it was asked."""

    def __init__(self):
        self.asked: list[int] = []

    def __call__(self, ask, own_chunks):
        self.asked.append(own_chunks)
        cut, ask.load_s = max(own_chunks, len(ask.reply.result().tiers)), LOAD_S
        candidate = Candidate("dram", cut - own_chunks, cut - own_chunks, Reason.CHEAPER, None, None)
        return GateDecision(cut, "dram", Reason.CHEAPER, None, None, (candidate,))


@pytest.fixture
def client():
    return FakeClient()


@pytest.fixture
def gate():
    return Gate()


@pytest.fixture
def lookups(client, clock, gate):
    return Lookups(client, choose=gate, clock=clock, chunk_tokens=CHUNK, deadline_s=0.1)


def reply(*tiers):
    return LookupReply(1, list(tiers), {}, {})


def nothing_staged(_key):
    return False


def expect(lookups, request="a", sides=()):
    return lookups.expect(request, len(KEYS) * CHUNK + 10, KEYS, list(sides), b"t" * 16, trace=RequestTrace(*TRACE))


def fetched(lookups, ask):
    return [lookups.offers(ask, key) for key in KEYS]


def found(lookups, client, chunks):
    """So many leading chunks of the first request are in DRAM."""
    ask = expect(lookups)
    client.replies[0].set_result(reply(*["dram"] * chunks))
    lookups.settled(ask, 0, nothing_staged)
    return ask


def test_the_whole_prompt_is_asked_for_when_the_request_comes(lookups, client):
    """One lookup with all keys, sides and the tenant, before the scheduler wants the request; never a second one.

    The store is to answer while there is time left for its answer to arrive.
    """
    side = Side(KEYS[:2], 128, 1)
    ask = expect(lookups, sides=[side])
    for _ in range(3):
        assert not lookups.settled(ask, 0, nothing_staged)
    (asked,) = client.asked
    assert 0.05 < asked.pop("deadline") < 0.1
    assert asked == {
        "request": "a", "keys": KEYS, "tokens": 266, "tenant": b"t" * 16, "sides": [side], "defer": True,
    }  # fmt: skip


@pytest.mark.parametrize(("backlog_s", "least_s"), [(0.0, 0.05), (0.02, 0.05), (2.0, 1.5)])
def test_who_queues_lets_the_store_take_its_time(lookups, client, backlog_s, least_s):
    """What the remote tells by when the request's turn may come is in time; a backlog that is shorter takes nothing."""
    lookups.expect("a", len(KEYS) * CHUNK + 10, KEYS, [], trace=RequestTrace(*TRACE), backlog_s=backlog_s)
    assert least_s < client.asked[0]["deadline"] < max(0.1, backlog_s)


def test_leading_chunks_are_fetched_and_the_rest_is_not(lookups, client):
    """Chunks before the cut are fetched where they are missing, those after it are not."""
    ask = expect(lookups)
    client.replies[0].set_result(reply("dram", "remote", "remote"))
    assert lookups.settled(ask, CHUNK, nothing_staged)
    assert fetched(lookups, ask) == [True, True, True, False]


def test_only_what_the_store_was_asked_for_is_fetched(lookups, client):
    """Of every group what begins before the cut; keys of chunks that vLLM makes up in between are no hits."""
    side = Side([bytes([10 + n]) * 36 for n in range(2)], 2 * CHUNK, 1)
    ask = expect(lookups, sides=[side])
    client.replies[0].set_result(reply("dram", "dram"))
    assert lookups.settled(ask, 0, nothing_staged)
    assert not lookups.offers(ask, b"\xff" * 36)
    assert [lookups.offers(ask, key) for key in side.keys] == [True, False]
    assert fetched(lookups, ask) == [True, True, False, False]


def test_the_gate_counts_from_what_the_engine_has_itself(lookups, client, gate):
    """Tokens on the device, then chunks in staging behind them; both are told to the store."""
    ask = expect(lookups)
    client.replies[0].set_result(reply(*["dram"] * 4))
    staged = {KEYS[1], KEYS[3]}
    assert lookups.settled(ask, CHUNK + 10, staged.__contains__)
    assert gate.asked == [2]
    assert client.owned == [("a", 1, 1)]


def test_the_store_is_told_the_name_by_which_the_request_was_looked_up(lookups, client):
    """Of a long name, which an engine's caller may choose, the digest that its lookup had."""
    name = "x" * 1000
    ask = expect(lookups, name)
    client.replies[0].set_result(reply("dram"))
    assert lookups.settled(ask, 0, nothing_staged)
    assert client.owned == [(brief(name), 0, 0)]


def test_the_gate_is_asked_once_whatever_comes_later(lookups, client, gate):
    """A request that is preempted and wanted again keeps its answer."""
    ask = expect(lookups)
    client.replies[0].set_result(reply("dram"))
    assert lookups.settled(ask, 0, nothing_staged)
    assert lookups.settled(ask, 3 * CHUNK, nothing_staged)
    assert gate.asked == [0]


def test_a_late_reply_means_recompute_and_that_stays(lookups, client, clock, gate):
    """Once the deadline has passed the prompt is recomputed, even if the reply comes after all."""
    ask = expect(lookups)
    clock.now += 0.1
    assert lookups.settled(ask, 0, nothing_staged)
    client.replies[0].set_result(reply(*["dram"] * 4))
    assert fetched(lookups, ask) == [False] * 4
    assert (ask.decision, gate.asked, client.owned) == (None, [], [])


def test_an_absent_store_is_not_waited_for(lookups, client):
    """Without a connection no request waits even for one step."""
    client.connected = False
    assert expect(lookups) is None
    assert not client.asked


def test_a_prompt_without_a_whole_chunk_is_not_asked_for(lookups, client):
    """Nothing of it could be held anywhere."""
    assert lookups.expect("a", 10, [], [], trace=RequestTrace(*TRACE)) is None
    assert not client.asked


def test_a_chunk_is_offered_once(lookups, client):
    """Whether its load failed or staging had no room, or lost it again: vLLM would try for ever."""
    ask = found(lookups, client, 4)
    assert lookups.offers(ask, KEYS[1])
    assert fetched(lookups, ask) == [True, False, True, True]
    assert lookups.settled(ask, 0, nothing_staged)
    assert fetched(lookups, ask) == [False] * 4


def test_chunks_are_offered_for_a_limited_time(lookups, client, clock):
    """What is not on its way by then is recomputed, however often the scheduler asks: others' loads may be ahead."""
    ask = found(lookups, client, 4)
    clock.now += LOAD_S
    assert lookups.settled(ask, 0, nothing_staged)
    assert fetched(lookups, ask) == [False] * 4


def test_a_preempted_request_may_be_fetched_again(lookups, client, clock):
    """From when the scheduler wants it again, as long as the first time; not before."""
    ask = found(lookups, client, 2)
    assert fetched(lookups, ask) == [True, True, False, False]
    lookups.preempted(ask)
    assert fetched(lookups, ask) == [False] * 4
    clock.now += LOAD_S
    assert lookups.settled(ask, 0, nothing_staged)
    assert fetched(lookups, ask) == [True, True, False, False]


def test_replies_are_told_once(lookups, client):
    """What was answered is taken once."""
    asked = [expect(lookups, request) for request in ("a", "b")]
    for pending in client.replies:
        pending.set_result(reply("dram"))
    assert lookups.answered() == asked
    assert lookups.answered() == []
    expect(lookups, "b")
    assert lookups.answered() == []


@pytest.mark.parametrize("late", [False, True])
def test_a_trace_tells_when_the_reply_came(lookups, client, clock, late):
    """Whenever it is noticed, and when it was decided; but nothing of a reply for which the scheduler did not wait."""
    ask = expect(lookups)
    ask.trace.late = late
    clock.now += 0.5
    client.replies[0].set_result(reply("dram"))
    came = clock.now
    clock.now += 0.5
    assert lookups.answered() == [ask]
    assert (ask.trace.looked_up_at, ask.trace.tiers) == ((0.0, ()) if late else (came, ["dram"]))
    lookups.settled(ask, 0, nothing_staged)
    assert (ask.trace.decided_at, ask.trace.decision) == (clock.now, ask.decision)


def test_a_reply_that_has_come_is_taken(lookups, client, gate):
    """Else the request would be put off a whole step of others."""
    ask = expect(lookups)
    client.replies[0].at_hand = reply("dram")
    assert lookups.settled(ask, 0, nothing_staged)
    assert gate.asked == [0]


def test_a_reply_is_waited_for_briefly_and_once(lookups, client):
    """When the scheduler first asks; later it only looks."""
    ask = expect(lookups)
    assert not lookups.settled(ask, 0, nothing_staged)
    assert not lookups.settled(ask, 0, nothing_staged)
    assert client.replies[0].waited == [PATIENCE_S]


def test_those_that_came_together_are_waited_for_together(lookups, client, clock):
    """A burst does not hold up the steps of others for longer than one request does."""
    asks = [expect(lookups, request) for request in "abc"]
    for pending in client.replies:
        pending.at_hand = reply()
        pending.arrives = clock
    assert all(lookups.settled(ask, 0, nothing_staged) for ask in asks)
    assert [pending.waited for pending in client.replies] == [[PATIENCE_S], [0.0], [0.0]]


def test_a_deadline_shorter_than_patience_holds(client, clock, gate):
    """Nothing is waited for beyond its deadline."""
    lookups = Lookups(client, choose=gate, clock=clock, chunk_tokens=CHUNK, deadline_s=PATIENCE_S / 4)
    lookups.settled(expect(lookups), 0, nothing_staged)
    assert client.replies[0].waited == [PATIENCE_S / 4]


def test_where_waiting_is_in_vain_it_is_seldom(lookups, client):
    """A store that hangs, or asks a slow remote, costs fewer and fewer requests a wait, until a reply is in time."""
    waited = [_first_wait(lookups, client) for _ in range(1 + 1 + 1 + 3 + 1)]
    assert waited == [PATIENCE_S, 0.0, PATIENCE_S, 0.0, 0.0, 0.0, PATIENCE_S]
    assert [_first_wait(lookups, client) for _ in range(7)] == [0.0] * 7
    assert [_first_wait(lookups, client, reply()) for _ in range(3)] == [PATIENCE_S] * 3


def _first_wait(lookups, client, comes=None):
    ask = expect(lookups)
    client.replies[-1].at_hand = comes
    lookups.settled(ask, 0, nothing_staged)
    return client.replies[-1].waited[0]
