"""What the scheduler's side tells the gate and counts: steps, loads, copies, waits, tokens saved."""

import time
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1 import offloading_connector
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.outputs import KVConnectorOutput

from engine.scheduler import far_from_a_small_dram, gated, tokens, told, wait_until, waits
from tiertune_connector.cost import FetchEstimate
from tiertune_connector.profile.steps import IN_FLIGHT
from tiertune_connector.protocol.messages import LookupReply
from tiertune_connector.vllm.gate import FADE
from tiertune_connector.vllm.step_timing import StepMetadata


def test_a_load_that_is_over_sooner_than_predicted_is_ahead_of_nobody(engine, prompt, store, remote):
    """A slow link was foretold, and the chunks came at once: the gate believes no more that it is busy."""
    wait_until(lambda: len(remote._chunks) >= 4)
    store.store.dram.flush(None, None)
    gate = engine.tier.gate
    engine.took(1000, 10_000.0)
    slow = FetchEstimate(0.0, 5.0, 1e9)
    store.store.lanes["remote"].transit.estimate = lambda *_: slow
    assert engine.finds("b", prompt) == 256
    now = time.monotonic()
    assert gate.loads.behind({"remote": slow, "dram": slow}, now, now) == {"remote": slow, "dram": slow}


def test_the_gate_knows_who_else_is_on_the_engine(engine, prompt):
    """Requests whose prompts are not computed yet, before and behind; one that is decoding is none."""
    engine.request("b", tokens(300, seed=1))
    asked = engine.request("c", prompt)
    engine.request("d", tokens(300, seed=2))
    assert engine.matched(asked) == 256
    assert [each.prefills for each in engine.ask("c").decision.candidates] == [2]
    engine.tier.given([("b", 0, 300)])
    assert engine.tier.gate.backlog.others("c") == 2
    engine.tier.telemetry.steps.output()
    assert engine.tier.gate.backlog.others("c") == 1


@pytest.mark.parametrize(("staging", "had"), [("32MiB", 0), ("256KiB", 64)], ids=["lost", "no room"])
def test_what_does_not_come_after_all_is_ahead_of_others(engines, store, staging, had):
    """All of a prompt was found, to its last token; but the store has lost it by now, or staging has one row for it."""
    engines().computes("a", tokens(256))
    engine = engines(staging=staging)
    engine.took(1000, 1000.0)
    asked = engine.request("b", tokens(256))
    engine.request("c", tokens(300, seed=3))
    wait_until(engine.ask("b").reply.done)
    if not had:
        store.store.flushes.drop()
    assert engine.matched(asked) == had
    assert engine.ask("b").decision.cut == 4
    gate = engine.tier.gate
    assert gate.backlog.seconds("c") == pytest.approx(gate.prefill.seconds(had, 256))


def test_what_a_step_computes_is_done_when_its_output_comes(engine, monkeypatch):
    """With asynchronous scheduling the next step is given before that: a request waits for both until then.

    Its first token is there with the output of the step that computed the prompt's end, not with the next step given.
    """
    engine.took(1000, 1.0)
    told = []
    monkeypatch.setattr(engine.tier.telemetry, "first_token", lambda ask: told.append(ask.request))
    engine.request("a", tokens(300, seed=1))
    engine.request("b", tokens(300, seed=2))
    backlog_s = engine.tier.gate.backlog.seconds
    whole_s = backlog_s("b")
    assert whole_s > 0
    engine.tier.given([("a", 0, 200)])
    engine.tier.given([("a", 200, 300)])
    engine.tier.given([])
    assert backlog_s("b") == whole_s
    engine.tier.telemetry.steps.output()
    assert 0 < backlog_s("b") < whole_s
    assert told == []
    engine.tier.given([("a", 300, 301), ("b", 0, 300)])
    engine.tier.telemetry.steps.output()
    assert (backlog_s("b"), told) == (0.0, ["a"])
    engine.tier.telemetry.steps.output()
    engine.tier.telemetry.steps.output()
    assert told == ["a", "b"]
    assert engine.tier.gate.backlog.others("") == 0


def test_a_step_of_a_request_that_ended_tells_nothing_of_another_of_its_name(engine, monkeypatch):
    """An aborted request's step may be in flight when one of the same name comes: that has computed nothing."""
    told = []
    aborted = engine.request("a", tokens(300, seed=1))
    engine.tier.given([("a", 0, 300)])
    engine.done(aborted)
    monkeypatch.setattr(engine.tier.telemetry, "first_token", lambda ask: told.append(ask.request))
    del engine.scheduler._req_status["a"]
    engine.request("a", tokens(300, seed=2))
    engine.tier.telemetry.steps.output()
    assert engine.tier.gate.backlog.others("") == 1
    assert told == []


def test_a_reply_to_a_request_that_ended_tells_nothing_of_another_of_its_name(engine, monkeypatch):
    """The store may be slow: what it found is the other prompt's."""
    told = []
    monkeypatch.setattr(engine.tier._client, "lookup", lambda *_, **__: Future())
    monkeypatch.setattr(engine.tier.telemetry, "answered", told.append)
    aborted = engine.request("a", tokens(300, seed=1))
    asked = engine.ask("a")
    engine.done(aborted)
    engine.step()
    del engine.scheduler._req_status["a"]
    engine.request("a", tokens(300, seed=2))
    asked.reply.set_result(LookupReply(1, ["dram"] * 4, {}, {}))
    engine.step()
    assert told == []
    engine.ask("a").reply.set_result(LookupReply(1, [], {}, {}))
    engine.step()
    assert told == [engine.ask("a")]


def test_a_load_of_a_request_that_ended_ends_none_of_another_of_its_name(engine, monkeypatch):
    """An aborted request's chunks may come, or fail to, when one of the same name loads its own: that still waits."""
    ended = []
    monkeypatch.setattr(engine.tier.telemetry, "loaded", lambda ask, _: ended.append(ask.request))
    monkeypatch.setattr(engine.tier.gate.backlog, "computed", lambda request, _: ended.append(request))
    monkeypatch.setattr(engine.tier.gate, "ended", lambda ask: ended.append(ask.request))
    old, own = (SimpleNamespace(request="a", succeeded=success) for success in (False, True))
    engine.request("a", tokens(300))
    engine.tier._requests["a"].load = own
    engine.tier._loaded(old, [])
    assert ended == []
    engine.tier._loaded(own, [])
    assert ended == ["a", "a"]


def test_what_a_request_that_ended_still_loads_is_ahead_of_others(engine, monkeypatch):
    """It comes all the same, and lapses when it was predicted to be over."""
    ended = []
    monkeypatch.setattr(engine.tier.gate, "ended", lambda ask: ended.append(ask.request))
    for request in ("a", "b"):
        aborted = engine.request(request, tokens(300))
        if request == "a":
            engine.tier._requests["a"].load = SimpleNamespace(request="a", over=False)
        engine.done(aborted)
    assert ended == ["b"]


def test_steps_whose_output_never_comes_are_not_kept(engine):
    """As many as the profile keeps: an engine that told of none would fill its memory."""
    engine.request("a", tokens(300, seed=1))
    for place in range(IN_FLIGHT + 3):
        engine.tier.given([("a", place, place + 1)])
    assert len(engine.tier.telemetry.steps._steps) == IN_FLIGHT


def test_devices_that_ranks_tell_one_by_one_are_all_known(engine):
    """In a step each where one is behind; once each."""
    for gpus in (("GPU-a", "GPU-b"), (), ("GPU-c",), ("GPU-a",)):
        engine.tier.measured({}, gpus)
    assert engine.tier._client.gpus == ["GPU-a", "GPU-b", "GPU-c"]


def test_the_gate_hears_what_the_copy_to_the_devices_takes(engine):
    """Of both kinds of metadata; ranks copy at the same time, each its part."""
    for metadata, nbytes, seconds in ((OffloadingWorkerMetadata(), 100, 2.0), (StepMetadata(), 300, 4.0)):
        metadata.transfer_stats.load.record(nbytes, seconds)
        metadata.transfer_stats.store.record(7, 7.0)
        engine.connector.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=metadata))
    assert engine.tier.gate._copied == (FADE * 100 + 300, FADE * 2.0 + 4.0)


@pytest.mark.parametrize(("replicated", "nbytes"), [(False, 400), (True, 200)])
def test_ranks_that_have_the_same_kv_copy_each_chunk_once_each(engines, monkeypatch, replicated, nbytes):
    """Two ranks: their bytes are those of all chunks, or of all twice; they copy at the same time anyway."""

    def config(*arguments):
        built = build_offloading_config(*arguments)
        return replace(built, replicated_layout=replicated, parallel=replace(built.parallel, world_size=2))

    monkeypatch.setattr(offloading_connector, "build_offloading_config", config)
    tier = engines().connector.tier
    tier.copied(400, 3.0)
    assert tier.gate._copied == (nbytes, 1.5)


def test_what_another_request_fetches_is_told_once(engines, store, monkeypatch):
    """Two prompts with a common head at a time: the second fetches its own rest alone, and both waited."""
    first, second = engines(), engines()
    prompt = tokens(300)
    longer = prompt[:256] + tokens(150, seed=1)
    first.computes("a", longer)
    waited = waits(second, monkeypatch)
    requests = [second.request("b", prompt), second.request("c", longer), second.request("d", prompt)]
    second.begin_load(*requests)
    assert [second.matched(request) for request in requests] == [256, 384, 256]
    assert sorted(waited) == [0, 128, 256]
    assert gated(second)["fetched_tokens_total", ("dram",)] == 384
    wait_until(lambda: told(store, "gate_fetched_tokens_total") == 384)
    assert told(store, "duplicate_prefill_tokens_total") == 0


def test_what_a_request_may_not_load_is_not_told_as_fetched(engine, prompt):
    """Its client bounds the tokens that are loaded for it."""
    sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": {"max_load_tokens": 128}})
    assert engine.finds("b", prompt, sampling=sampling) == 128
    assert engine.ask("b").decision.cut == 4
    assert gated(engine)["fetched_tokens_total", ("dram",)] == 128


def test_a_prompt_longer_than_dram_is_fetched_as_far_as_dram_has_room(engines, store, remote):
    """Of ten chunks in the remote six come into a DRAM of eight. That was the plan: it is no load that failed."""
    first, second = engines(), engines()
    asked = second.request("b", far_from_a_small_dram(first, second, store, remote))
    assert second.matched(asked) == 64 * 6
    second.done(asked)
    counts = gated(second)
    assert counts["loads_total", ("remote", "won")] == 1
    assert counts["fetched_tokens_total", ("remote",)] == 64 * 6
    assert ("loads_total", ("remote", "failed")) not in counts
    wait_until(lambda: told(store, "duplicate_prefill_tokens_total") == 64 * 4)


@pytest.mark.parametrize("room", [True, False])
def test_what_staging_lost_before_it_was_taken_is_not_told_as_saved(engine, prompt, store, room):
    """It came in time, and in vain: a load that failed, of what is computed again.

    Even if the scheduler had its answer before, but no room for the request.
    """
    asked = engine.request("b", prompt)
    engine.begin_load(asked)
    engine.settle()
    assert room or engine.matched(asked, room=False) == 256
    engine.manager.primary_tier.reset_cache()
    assert engine.matched(asked) == 0
    engine.done(asked)
    assert gated(engine) == {
        ("gate_requests_total", ("dram", "fetch", "unknown_cost")): 1,
        ("loads_total", ("dram", "failed")): 1,
        ("fetched_tokens_total", ("dram",)): 256,
    }
    wait_until(lambda: told(store, "duplicate_prefill_tokens_total") == 256)


def test_what_came_for_a_request_that_ends_while_there_is_no_room_is_not_told_as_failed(engine, prompt, store):
    """Its client gave up: nothing failed, nobody computed anything, and a higher margin would mend nothing."""
    asked = engine.request("b", prompt)
    assert engine.matched(asked, room=False) == 256
    engine.done(asked)
    counts = gated(engine)
    assert counts["loads_total", ("dram", "unknown")] == 1
    assert counts["fetched_tokens_total", ("dram",)] == 256
    wait_until(lambda: told(store, "gate_fetched_tokens_total") == 256)
    assert told(store, "duplicate_prefill_tokens_total") == 0


def test_what_another_connector_brings_is_not_told_as_saved(engine, prompt):
    """In a MultiConnector vLLM takes the tokens of the first that has some; what the others had was for nothing."""
    asked = engine.request("b", prompt)
    assert engine.matched(asked, room=False) == 256
    engine.connector.update_state_after_alloc(asked, KVCacheBlocks(([],)), 0)
    engine.done(asked)
    assert gated(engine)["loads_total", ("dram", "failed")] == 1
