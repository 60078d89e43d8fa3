"""The gate as an engine uses it."""

from concurrent.futures import Future
from unittest.mock import Mock

import pytest

from tiertune_connector.cost import TOKENS_ONLY, FetchEstimate, GateSettings, PrefillCost, Reason, decide
from tiertune_connector.keys import Namespace
from tiertune_connector.protocol.messages import LookupReply
from tiertune_connector.vllm.facts import Facts, Group
from tiertune_connector.vllm.gate import EngineGate, OwnLoads
from tiertune_connector.vllm.lookups import Ask
from tiertune_connector.vllm.settings import EngineSettings

TOKENS, BYTES = 64, 1 << 20
SETTINGS = EngineSettings(socket="/run/tiertune/store.sock", load_deadline=1.0, load_deadline_floor=0.1)
FAR = ["remote"] * 4
SLOW, FAST = FetchEstimate(0.0, 0.0, 1 << 20), FetchEstimate(0.0, 0.0, 100 << 20)


def engine(groups=1, ahead=0):
    """One that prefills a token in a millisecond, and whose layers form so many groups, all with full attention."""
    same = [Group(index, TOKENS, None) for index in range(groups)]
    facts = Facts(Namespace(model="llama", chunk_tokens=TOKENS), TOKENS_ONLY, same, step_tokens=0, ahead=ahead)
    prefill = PrefillCost(seconds_per_flop=1e-3)
    return EngineGate(Mock(), prefill, facts, SETTINGS, chunk_bytes=groups * BYTES)


@pytest.fixture
def gate():
    return engine()


@pytest.fixture
def loads():
    return OwnLoads()


def behind(loads, now, tier="remote"):
    """What a fetch costs now behind those that were begun, of a tier that is idle but for them."""
    return loads.behind({tier: FAST}, now, now)[tier]


def ask(tiers, remote, settings=None):
    """A request of 300 tokens that the store has answered."""
    reply = Future()
    reply.set_result(LookupReply(1, tiers, {"dram": FAST} | ({"remote": remote} if remote else {}), settings or {}))
    return Ask("a", 300, [bytes([place]) for place in range(4)], [], reply, 0.0, Mock())


def choose(gate, tiers, remote, *, own=0, backlog_s=0.0, prefills=0):
    gate.backlog = Mock(**{"seconds.return_value": backlog_s, "others.return_value": prefills})
    gate.loads = Mock(**{"behind.side_effect": lambda costs, *_: costs})
    return gate.decide(ask(tiers, remote), own)


def test_a_slow_remote_is_recomputed_and_a_fast_one_fetched(gate):
    """A chunk of 1 MiB takes 64 ms to compute: 1 s from a remote of 1 MiB/s loses, 10 ms wins."""
    assert choose(gate, FAR, SLOW).cut == 0
    assert choose(gate, FAR, FAST).cut == 4


def test_what_the_device_takes_for_its_copy_counts(gate):
    """A fetch of 10 ms a chunk wins against 64 ms of computing until the copy to the device takes 60."""
    gate.copied(4 * BYTES, 4 * 0.05)
    assert choose(gate, FAR, FAST).cut == 4
    gate.copied(400 * BYTES, 400 * 0.06)
    assert choose(gate, FAR, FAST).cut == 0
    for _ in range(100):
        gate.copied(4 * BYTES, 4 * 0.05)
    assert choose(gate, FAR, FAST).cut == 4


@pytest.mark.parametrize(
    ("ahead", "step_s", "cut"), [(0, 0.0, 4), (0, 0.13, 4), (0, 0.16, 0), (1, 0.08, 4), (1, 0.09, 0), (3, 0.05, 0)]
)
def test_a_fetch_beside_decodes_must_pay_for_the_steps_that_it_loses(ahead, step_s, cut):
    """It saves 54 ms a chunk; what it has fetched is there after two steps of theirs, one of them in part.

    That it is there the scheduler hears as many steps later as are scheduled ahead.
    """
    gate = engine(ahead=ahead)
    gate.decode_s = lambda: step_s
    assert choose(gate, FAR, FAST).cut == cut


def test_each_group_of_a_models_layers_has_chunks_to_be_handled():
    """Where handling is all that a fetch takes, four groups' chunks take four times as long as one's."""
    handled = FetchEstimate(0.0, 0.02, 1e15)
    for groups, told in ((1, (4, 0.08)), (4, (0, 0.32))):
        decision = choose(engine(groups), FAR, handled)
        assert (decision.cut, decision.fetch_s) == (told[0], pytest.approx(told[1]))


def test_one_slow_copy_is_not_the_last(gate):
    """Where nothing is fetched nothing is copied, and nobody would tell that copies are fast."""
    gate.copied(BYTES, 0.6)
    cuts = [choose(gate, FAR, FAST).cut for _ in range(300)]
    assert cuts == sorted(cuts)
    assert set(cuts[:200]) == {0}
    assert cuts[-1] == 4
    gate.copied(100 * BYTES, 100 * 0.06)
    assert choose(gate, FAR, FAST).cut == 0


def test_what_is_not_fetched_for_other_reasons_says_nothing_of_copies(gate):
    """From a remote that is slow even without them, or switched off: what they take is as known as before."""
    gate.copied(BYTES, 0.06)
    for _ in range(300):
        assert choose(gate, FAR, SLOW).cut == 0
        assert gate.decide(ask(FAR, FAST, {"remote": GateSettings(fetch_on=False)}), 0).cut == 0
    assert choose(gate, FAR, FAST).cut == 0


def test_what_copies_changed_is_asked_only_where_they_can_matter(gate, monkeypatch):
    """A tier that is switched off is so without them, too: one decision is enough."""
    asked = Mock(wraps=decide)
    monkeypatch.setattr("tiertune_connector.vllm.gate.decide", asked)
    gate.copied(BYTES, 0.06)
    gate.decide(ask(FAR, FAST, {"remote": GateSettings(fetch_on=False)}), 0)
    assert asked.call_count == 1


def test_the_backlog_hides_a_part_of_a_fetch(gate):
    """Behind 2.1 s of work two chunks of a second each come for nothing; a third would not."""
    decision = choose(gate, FAR, SLOW, backlog_s=2.1)
    assert (decision.cut, decision.fetch_s, decision.reason) == (2, 2.0, Reason.CHEAPER)


@pytest.mark.parametrize(("factor", "deadline_s"), [(1.5, 0.1), (3.0, 0.12), (50.0, 2.0)])
def test_the_deadline_is_the_prediction_times_the_tuned_factor(gate, factor, deadline_s):
    """But never less than the floor."""
    asked = ask(FAR, FAST, {"remote": GateSettings(deadline_factor=factor)})
    assert gate.deadline_s(asked, gate.decide(asked, 0)) == pytest.approx(deadline_s)


def test_a_load_of_unknown_cost_has_the_usual_deadline(gate):
    """Local chunks are fetched though nobody knows how long that takes."""
    asked = ask(["disk"] * 2, None)
    decision = gate.decide(asked, 0)
    assert decision.cut == 2
    assert gate.deadline_s(asked, decision) == 1.0


def test_who_is_before_a_request_changes_its_choice(gate):
    """Four chunks, 256 ms to compute and 40 to fetch: not over a link with 20 transfers, unless the engine is full."""
    assert choose(gate, FAR, crowded(20)).cut == 0
    assert choose(gate, FAR, crowded(20), prefills=2).cut == 4
    assert choose(gate, FAR, SLOW, prefills=20).cut == 4
    assert choose(gate, ["dram"] * 4, crowded(20)).cut == 4


def crowded(transfers):
    return FetchEstimate(0.0, 0.0, 100 << 20, transfers=transfers)


def queued(seconds, transfers=0):
    return FetchEstimate(0.0, 0.0, 100 << 20, seconds, transfers=transfers)


def test_a_queue_that_was_told_a_while_ago_has_moved_on(loads):
    """What was on its way half a second ago is shorter by that, and not less than nothing."""
    for told_s, now_s in [(2.0, 1.5), (0.3, 0.0), (0.0, 0.0)]:
        assert loads.behind({"remote": queued(told_s)}, 10.0, 10.5)["remote"].queue_s == pytest.approx(now_s)


def test_transfers_that_were_told_a_while_ago_have_moved_on_with_their_queue(loads):
    """Of four that had a second left, half a second later two are; none stays longer than the queue."""
    told = {"remote": queued(1.0, 4)}
    left = [loads.behind(told, 10.0, now)["remote"].transfers for now in (10.0, 10.5, 10.9, 11.0, 20.0)]
    assert left == [4, 2, 1, 0, 0]


def test_loads_that_the_store_did_not_know_of_are_ahead(gate, loads):
    """After a fetch of 4 s was decided, the next from the same tier waits for what is left of it."""
    decision = choose(gate, FAR, SLOW, backlog_s=10.0)
    assert decision.fetch_s == 4.0
    loads.began("remote", decision.fetch_s, 20.0)
    costs = {"dram": FAST, "remote": queued(0.5)}
    assert loads.behind(costs, 19.9, 21.0) == {"dram": FAST, "remote": queued(3.0, 1)}
    loads.began("remote", decision.fetch_s, 21.0)
    assert loads.behind(costs, 21.0, 21.0)["remote"] == queued(4.0, 2)
    assert loads.behind(costs, 24.5, 24.5)["remote"] == queued(0.5, 1)
    assert loads.behind(costs, 30.0, 30.0) == costs


def test_a_load_that_ends_early_holds_up_nobody(loads):
    """Others had brought its chunks, the link got faster, or it failed: those behind it come so much sooner."""
    first, second = loads.began("remote", 10.0, 0.0), loads.began("remote", 15.0, 0.0)
    third = loads.began("remote", 18.0, 0.0)
    loads.ended(first, 2.0)
    assert behind(loads, 2.0) == queued(8.0, 2)
    loads.ended(third, 3.0)  # before the one ahead of it: its own part falls away
    assert behind(loads, 3.0) == queued(4.0, 1)
    loads.ended(second, 4.0)
    loads.ended(second, 4.0)
    assert behind(loads, 4.0) == FAST
    assert loads.began("remote", 1.0, 4.0).ends_at == 5.0


def test_a_load_that_was_foretold_without_those_ahead_keeps_its_own_time(loads):
    """The rest of a prefetch: it stays when what was ahead of it is over, and those behind it stay behind it."""
    first, _, _ = loads.began("dram", 10.0, 0.0), loads.began("dram", 3.0, 0.0), loads.began("dram", 12.0, 0.0)
    loads.ended(first, 0.5)
    assert behind(loads, 0.5, "dram") == queued(4.5, 2)
    assert behind(loads, 2.5, "dram") == queued(2.5, 2)


def test_a_load_that_ended_late_moves_nothing(loads):
    """When it was to have ended it was forgotten; what is behind it, the store tells."""
    late = loads.began("remote", 1.0, 0.0)
    loads.began("remote", 4.0, 0.0)
    loads.ended(late, 2.0)
    assert behind(loads, 2.0) == queued(2.0, 1)
