"""How far a prompt is fetched, with what the engine knows of the requests before it."""

from concurrent.futures import Future
from time import monotonic
from unittest.mock import Mock

import pytest

from tiertune_connector.client.store_client import Loaded
from tiertune_connector.cost import TOKENS_ONLY, FetchEstimate, PrefillCost
from tiertune_connector.keys import Namespace
from tiertune_connector.protocol.messages import LookupReply
from tiertune_connector.vllm.facts import Facts, Group
from tiertune_connector.vllm.gate import EngineGate
from tiertune_connector.vllm.lookups import Ask
from tiertune_connector.vllm.settings import EngineSettings

CHUNK, CHUNK_BYTES = 64, 1 << 20
PROMPT = 10 * CHUNK
TOKEN_S, DRAM_S, REMOTE_S = 1.0, 2.0, 10.0
"""Of a token to compute, and of a chunk to fetch: so long that the time that a test takes is nothing."""
COSTS = {
    "dram": FetchEstimate(0.0, 0.0, CHUNK_BYTES / DRAM_S),
    "remote": FetchEstimate(0.0, 0.0, CHUNK_BYTES / REMOTE_S),
}
SLOW = {"remote": FetchEstimate(0.0, 0.0, 1.0)}
FAR = ["remote"] * 10
PARTS = ["dram"] * 3 + ["remote"] * 7


class Client:
    """Loads when a test says so."""

    def __init__(self):
        self.loads = []

    def load(self, keys, *, deadline_s):
        self.loads.append((keys, Future()))
        return self.loads[-1][1]

    def come(self, chunks):
        """So many of what the last load is to bring."""
        self.loads[-1][1].set_result(Loaded([None] * chunks, [], {}, 1, 1))

    def release(self, _loaded): ...


@pytest.fixture
def client():
    return Client()


def chooses(client, *groups):
    """A gate of an engine whose layers form these groups."""
    facts = Facts(Namespace(model="llama", chunk_tokens=CHUNK), TOKENS_ONLY, groups, step_tokens=0)
    settings = EngineSettings(socket="/run/tiertune/store.sock")
    return EngineGate(client, PrefillCost(seconds_per_flop=TOKEN_S), facts, settings, chunk_bytes=CHUNK_BYTES)


WHOLE = Group(0, CHUNK, None)


@pytest.fixture
def gate(client):
    return chooses(client, WHOLE)


@pytest.fixture
def backlog(gate):
    return gate.backlog


def arrives(backlog, request, tiers, costs=COSTS, room=None):
    backlog.arrived(request, PROMPT)
    reply = Future()
    reply.set_result(LookupReply(1, list(tiers), costs, {}, room=room))
    return Ask(request, PROMPT, [bytes([place]) for place in range(10)], [], reply, monotonic(), Mock())


def prefetched(gate, backlog, tiers, request="a", **more):
    """One that arrives, and of which all that has room is prefetched."""
    waiting = arrives(backlog, request, tiers, **more)
    gate.prefetch(waiting, room=100)
    return waiting


NONE = {"dram": 0, "remote": 0}


def queues(gate):
    """Seconds that a fetch waits now, by tier, to a second."""
    now = monotonic()
    return {tier: round(cost.queue_s) for tier, cost in gate.loads.behind(COSTS, now, now).items()}


@pytest.mark.parametrize("tiers", [(), FAR])
def test_nobody_waits_for_what_a_request_has_itself(gate, backlog, tiers):
    """On the device or in staging, and whatever else is found: of ten chunks it has eight, and two are computed."""
    first = arrives(backlog, "a", tiers, SLOW)
    arrives(backlog, "b", ())
    assert backlog.seconds("b") == pytest.approx(PROMPT * TOKEN_S)
    assert not gate.choose(first, 8).fetches
    assert backlog.seconds("b") == pytest.approx(2 * CHUNK * TOKEN_S)


def test_what_is_fetched_is_ahead_of_others_and_what_is_not_is_not(gate, backlog):
    """Loads that the store did not know of when it told its costs."""
    assert not gate.choose(arrives(backlog, "a", FAR, SLOW), 0).fetches
    assert queues(gate) == NONE
    assert gate.choose(arrives(backlog, "b", PARTS), 0).cut == 10
    assert queues(gate) == {"dram": 3 * DRAM_S, "remote": 7 * REMOTE_S}


def test_what_dram_has_no_room_for_is_computed(gate, backlog, client):
    """Neither is it predicted to come, nor do others believe so; what the engine has itself needs no room."""
    first = arrives(backlog, "a", FAR, room=(8, 6))
    arrives(backlog, "b", ())
    gate.prefetch(first, room=100)
    assert [len(keys) for keys, _ in client.loads] == [6]
    decision = gate.choose(first, 0)
    assert (decision.cut, decision.fetch_s) == (6, 6 * REMOTE_S)
    assert backlog.seconds("b") == pytest.approx(4 * CHUNK * TOKEN_S)
    assert gate.choose(arrives(backlog, "c", PARTS, room=(8, 6)), 0).cut == 8
    assert gate.choose(arrives(backlog, "d", PARTS, room=(8, 6)), 2).cut == 9
    assert gate.choose(arrives(backlog, "e", PARTS, room=(8, 6)), 4).cut == 10


@pytest.mark.parametrize(("groups", "cuts"), [([WHOLE] * 3, (2, 4)), ([WHOLE, Group(1, CHUNK, 2)], (4, 6))])
def test_other_groups_chunks_need_room_too(client, groups, cuts):
    """Of six chunks that can come, a prompt of three groups has two; one with a window has four, and the window's."""
    gate = chooses(client, *groups)
    backlog = gate.backlog
    waiting = prefetched(gate, backlog, FAR, room=(8, 6))
    assert [len(keys) for keys, _ in client.loads] == [cuts[0]]
    client.come(cuts[0])
    assert gate.choose(waiting, 0).fetch_s == cuts[0] * DRAM_S
    assert gate.choose(arrives(backlog, "b", FAR, room=(8, 6)), 2).cut == cuts[1]
    assert gate.choose(arrives(backlog, "c", FAR, room=(0, 0)), 2).cut == 2
    assert gate.choose(arrives(backlog, "d", ["dram"] * 2, room=(6, 5)), 0).cut == 2


def test_windows_alone_need_no_room_for_what_is_before_them(client):
    """Of a prompt as long as may be only the window comes, if there is room for that."""
    gate = chooses(client, Group(0, CHUNK, 3))
    backlog = gate.backlog
    assert gate.choose(arrives(backlog, "a", FAR, room=(2, 2)), 0).cut == 2
    assert gate.choose(arrives(backlog, "b", FAR, room=(4, 3)), 0).cut == 10


def test_a_prefetch_keeps_no_chunks_of_dram_on_their_way(gate, backlog, client):
    """They lie there. They are copied when the request is chosen, and only these while the others still come."""
    waiting = prefetched(gate, backlog, PARTS)
    assert len(client.loads) == 1
    assert queues(gate) == {"dram": 0, "remote": 7 * REMOTE_S}
    assert gate.choose(waiting, 0).cut == 10
    assert queues(gate) == {"dram": 3 * DRAM_S, "remote": 7 * REMOTE_S}


def test_what_was_chosen_already_is_not_prefetched(gate, backlog, client):
    """Its own load is under way: the same chunks would be fetched for nobody."""
    chosen = arrives(backlog, "a", PARTS)
    chosen.cut_tokens = PROMPT
    gate.prefetch(chosen, room=100)
    assert client.loads == []


def test_staging_has_room_for_all_that_is_prefetched(gate, backlog, client):
    """At the same time, too; and what lies in DRAM has nothing to wait for."""
    for tiers, room, loads in ((["dram"] * 10, 10, 0), (FAR, 9, 0), (FAR, 10, 1), (FAR, 19, 1), (FAR, 20, 2)):
        gate.prefetch(arrives(backlog, f"{tiers[0]} {room}", tiers), room)
        assert len(client.loads) == loads
    client.come(10)
    gate.prefetch(arrives(backlog, "later", FAR), room=20)
    assert len(client.loads) == 3, "what has come is in DRAM and takes no more room"


def test_what_was_prefetched_is_copied_out_of_dram(gate, backlog, client):
    """All of it, whatever tier it came from: the next request waits for that."""
    waiting = prefetched(gate, backlog, PARTS)
    client.come(10)
    assert gate.choose(waiting, 0).cut == 10
    assert queues(gate) == {"dram": 10 * DRAM_S, "remote": 0}


def test_all_that_had_room_was_prefetched(gate, backlog, client):
    """It comes out of DRAM, whatever lies in its tier beyond; with chunks of its own, the engine may have more."""
    for request, own, queued in (("a", 0, {"dram": 6 * DRAM_S, "remote": 0}), ("b", 2, {"dram": 0, "remote": 60})):
        waiting = prefetched(gate, backlog, FAR, request, room=(8, 6))
        client.come(6)
        assert gate.choose(waiting, own).cut == 6 + own
        assert queues(gate) == queued
        gate.ended(waiting)


def test_nobody_is_behind_what_is_over(gate, backlog, client):
    """A load whose end the engine was told, sooner than predicted; a prefetch that came while its request waits."""
    loading, waiting = arrives(backlog, "a", PARTS), arrives(backlog, "b", PARTS)
    gate.choose(loading, 0)
    gate.ended(loading)
    assert queues(gate) == NONE
    gate.prefetch(waiting, room=100)
    client.come(10)
    gate.prefetch(arrives(backlog, "c", ()), room=100)
    assert queues(gate) == NONE


@pytest.mark.parametrize("cut", [None, 0], ids=["gone", "declined"])
def test_a_prefetch_that_nobody_waits_for_is_ahead_until_it_is_over(gate, backlog, client, cut):
    """Nothing stops it at the store: whose reply told of no queue would believe that the link is idle."""
    waiting = prefetched(gate, backlog, PARTS)
    waiting.cut_tokens = cut
    gate.ended(waiting)
    assert queues(gate) == {"dram": 0, "remote": 7 * REMOTE_S}
    client.come(10)
    gate.ended(waiting)
    assert queues(gate) == NONE


def test_what_was_chosen_after_its_prefetch_is_under_way(gate, backlog, client):
    """That the prefetch is over ends nothing of it."""
    waiting = prefetched(gate, backlog, PARTS)
    client.come(5)
    waiting.cut_tokens = gate.choose(waiting, 0).cut * CHUNK
    gate.prefetch(arrives(backlog, "b", ()), room=100)
    assert queues(gate) == {"dram": 3 * DRAM_S, "remote": 7 * REMOTE_S}


def test_what_did_not_come_is_loaded_as_it_would_have_been(gate, backlog, client):
    """A prefetch that was cut off makes no slower tier near."""
    parts, costs = ["dram"] * 3 + ["disk"] * 3 + ["remote"] * 4, COSTS | {"disk": COSTS["remote"]}
    waiting = prefetched(gate, backlog, parts, costs=costs)
    client.come(8)
    assert gate.choose(waiting, 0).cut == 10
    now = monotonic()
    assert [round(cost.queue_s) for cost in gate.loads.behind(COSTS, now, now).values()] == [6 * DRAM_S, 4 * REMOTE_S]
