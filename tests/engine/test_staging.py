"""Staging on the scheduler's side, against a real store: loads that are cut off, resets, room that is too small."""

from concurrent.futures import Future

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_offload.base import OffloadKey
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from engine.scheduler import tokens, wait_until
from tiertune_connector.client.store_client import Loaded
from tiertune_connector.protocol.messages import Report


@pytest.fixture
def long(engines):
    """A prompt of twelve chunks and a part of one, which the store has from an engine that computed them."""
    prompt = tokens(64 * 12 + 10, seed=1)
    engines().computes("a", prompt)
    return prompt


@pytest.fixture
def small(engines):
    """An engine whose staging has room for eight chunks."""
    return engines(staging="2MiB")


@pytest.fixture
def begun(engine):
    """The worker is told to copy a prompt to staging: its job, and what makes the copy, whenever it is."""
    return engine.begin_store(engine.request("b", tokens(300, seed=1)))


def fails(engine, chunks):
    """Its loads bring none of so many chunks."""
    failed = Future()
    failed.set_result(Loaded([], ["error"] * chunks, {}, 0, 1))
    engine.tier._client.load = lambda *_, **__: failed


def test_a_request_that_ends_before_its_load_begins_leaves_nothing(engine, prompt):
    """Its slots in staging are given back."""
    asked = engine.request("b", prompt)
    wait_until(engine.ask("b").reply.done)
    assert engine.connector.get_num_new_matched_tokens(asked, 0) == (None, False)
    engine.tier.on_request_finished(engine.context(asked))
    engine.settle()
    assert engine.staged(asked) == [[False] * 4]
    assert engine.manager.primary_tier._num_write_pending_chunks == 0


def test_a_request_that_is_aborted_in_mid_load_leaves_nothing(engine, prompt):
    """The load comes to its end by itself, and its slots in staging are free again."""
    asked = engine.request("b", prompt)
    engine.begin_load(asked)
    engine.done(asked)
    engine.settle()
    assert engine.knows_nothing()
    assert engine.manager.primary_tier._num_write_pending_chunks == 0


def test_what_came_is_as_new_as_its_arrival(engine, prompt):
    """A load may be slow: what others put into staging meanwhile leaves before what the request is about to take."""
    asked = engine.request("b", prompt)
    engine.begin_load(asked)
    context, primary = engine.context(asked), engine.manager.primary_tier
    meanwhile = [OffloadKey(bytes([n]) * 36) for n in range(4)]
    primary.prepare_store(meanwhile, context)
    primary.complete_store(meanwhile, context)
    engine.settle()
    leaving = [key for key, _ in primary._policy.evict(4, set())]
    assert set(leaving) == set(meanwhile)
    assert engine.staged(asked) == [[True] * 4]


def test_a_reset_in_mid_load_ends_it(engine, prompt, monkeypatch):
    """With a store that never answers: the prompt is recomputed, and a late answer changes nothing."""
    monkeypatch.setattr("tiertune_connector.vllm.tier.DRAIN_S", 0.01)
    answer = Future()
    engine.tier._client.load = lambda *_, **__: answer
    asked = engine.request("b", prompt)
    engine.begin_load(asked)
    engine.connector.reset_cache()
    answer.set_result(Loaded([], ["error"] * 4, {}, 0, 1))
    assert engine.matched(asked) == 0
    engine.done(asked)
    assert engine.knows_nothing()


class TestResetWhileTheWorkerCopies:
    """vLLM gives all rows of staging out anew, and the worker goes on with what it was told before."""

    @pytest.mark.parametrize("resets", [1, 2])
    def test_no_row_is_filled_that_the_worker_may_still_write(self, engine, prompt, begun, resets):
        """Until it has done the step in which it ends that: what it wrote last would be another prompt's hit.

        A second reset finds no job under way any more; the worker still has to end those of the first.
        """
        job, copied = begun
        engine.connector.reset_cache()
        asked = engine.request("c", prompt)
        assert engine.matched(asked) == 0
        assert engine.give() == {job}
        for _ in range(1, resets):
            engine.connector.reset_cache()
        assert engine.finds("d", prompt) == 0
        copied()
        engine.output(job)
        assert engine.finds("e", prompt) == 256
        assert engine.staged(asked) == [[True] * 4]

    def test_steps_that_were_given_before_it_release_nothing(self, engine, prompt, begun):
        """Their outputs come later, where steps are given ahead."""
        engine.give()
        engine.connector.reset_cache()
        engine.output()
        assert engine.finds("c", prompt) == 0
        engine.give()
        engine.output(begun[0])
        assert engine.finds("d", prompt) == 256

    def test_where_the_worker_has_nothing_to_copy_nothing_is_held(self, engine, prompt):
        """An idle engine is warm from the store at once."""
        engine.connector.reset_cache()
        assert engine.finds("c", prompt) == 256


def test_a_preempted_request_is_fetched_again(engine, prompt):
    """What staging has lost meanwhile comes a engine time."""
    asked = engine.request("b", prompt)
    assert engine.matched(asked) == 256
    engine.manager.primary_tier.reset_cache()
    assert engine.matched(asked) == 0
    engine.step("b")
    assert engine.matched(asked) == 256
    assert engine.staged(asked) == [[True] * 4]


def test_a_prompt_longer_than_staging_gets_what_fits(small, long):
    """Its own chunks do not push each other out of staging for ever, each fetched again and again."""
    assert small.finds("b", long) == 64 * 8


def test_what_staging_has_no_room_for_is_not_told_as_fetched(small, long, prompt):
    """Eight chunks of twelve came, so that two thirds are saved; for those of the next prompt there is no row."""
    small.took(778, 1.0)
    asked = small.request("c", long)
    assert small.matched(asked) == 8 * 64
    decision, told = small.ask("c").decision, small.counted()
    assert decision.cut == 12
    assert told["engine_fetched_tokens_total", ("dram",)] == 8 * 64
    assert told["engine_saved_seconds_total", ("dram",)] < decision.recompute_s * 8 / 12
    small.manager.prepare_load(small.keys(asked)[0][:8], small.context(asked))
    last = small.request("d", prompt)
    assert small.matched(last) == 0
    small.done(last)
    after = small.counted()
    assert {key for key in after if after[key] != told.get(key)} == {
        ("engine_lookup_tokens_total", ("dram", "hit")),
        ("engine_gate_requests_total", ("dram", "fetch", "cheaper")),
    }


def test_a_part_of_a_chunk_on_the_device_is_no_chunk_that_was_fetched(engines, prompt):
    """Of four chunks the device has one and a half, and staging has no room: none of the three came."""
    small = engines(staging="256KiB")
    other = small.request("c", tokens(64, seed=1))
    small.manager.prepare_store(small.keys(other)[0], small.context(other))
    asked = small.request("b", prompt)
    told = []
    small.tier._client.tell = lambda message: told.extend(message.tiers if isinstance(message, Report) else ())
    assert small.matched(asked, computed=96) == 0
    small.done(asked)
    assert [(report.fetched_tokens, report.vain_tokens) for report in told] == [(3 * 64, 3 * 64)]


def test_a_load_that_fails_is_told_with_what_it_was_to_bring(small, long):
    """Staging had room for eight chunks of twelve, of which the store brings none."""
    fails(small, chunks=8)
    assert small.finds("b", long) == 0
    told = small.counted()
    assert told["engine_loads_total", ("dram", "failed")] == 1
    assert told["engine_fetched_tokens_total", ("dram",)] == 8 * 64


@pytest.mark.parametrize(("comes", "matched"), [(True, (256, True)), (False, (0, False))])
def test_a_load_that_is_over_puts_its_request_off_no_more(engine, prompt, comes, matched):
    """vLLM hears of it when the request is asked for, and not only at the end of that step, which may be a long one."""
    if not comes:
        fails(engine, chunks=4)
    asked = engine.request("b", prompt)
    engine.begin_load(asked)
    wait_until(lambda: all(job.over for job in engine.tier._transfers._jobs.values()))
    assert engine.connector.get_num_new_matched_tokens(asked, 0) == matched


def test_requests_that_wait_for_one_load_wait_for_one_deadline(engines, prompt):
    """When it fails the others do not try one after another, each waiting for all before it."""
    second = engines(load_deadline="200ms", load_deadline_floor="200ms")
    begun, load = [], second.tier._transfers.load
    second.tier._transfers.load = lambda job: begun.append(job.request) or load(job)
    second.tier._client.load = lambda *_, **__: Future()
    requests = [second.request(f"b{n}", prompt) for n in range(4)]
    for request in requests:
        wait_until(second.ask(request.request_id).reply.done)
    waiting = list(requests)

    def all_answered():
        waiting[:] = [one for one in waiting if second.connector.get_num_new_matched_tokens(one, 0)[0] is None]
        second.step()
        return not waiting

    wait_until(all_answered)
    assert begun == ["b0"]


def test_blocks_that_another_connector_loads_into_are_copied_before(engine):
    """Beside it behind a `MultiConnector`: what a request that has ended left in them is on its way to staging yet."""
    job, _ = engine.begin_store(engine.request("a", tokens(300)))
    engine.scheduler._block_id_to_pending_jobs[7] = {job}
    given = KVCacheBlocks(([KVCacheBlock(7)],))
    engine.connector.update_state_after_alloc(engine.request("b", tokens(64, seed=1)), given, 0)
    assert engine.give() == {job}


@pytest.mark.parametrize(("failed", "stored"), [(3, False), (99, True)], ids=["of its blocks", "of others"])
def test_what_was_computed_on_blocks_that_another_connector_did_not_fill_is_not_stored(engine, failed, stored):
    """A step's output tells it, when the worker has been told to copy them to staging by then."""
    request = engine.request("a", tokens(300))
    job, copied = engine.begin_store(request)
    status = engine.scheduler._req_status["a"]
    status.transfer_jobs.add(job)
    status.group_states[0].block_ids = list(range(1, 11))
    copied()
    engine.connector.update_connector_output(KVConnectorOutput(invalid_block_ids={failed}))
    done = OffloadingWorkerMetadata({job: 1})
    engine.connector.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=done))
    assert engine.staged(request) == [[stored] * 4]
    assert bool(engine.manager._jobs) is stored, "on its way to the store"
    engine.settle()


def test_a_request_that_has_ended_on_blocks_that_were_not_filled_stores_nothing_more(engine):
    """vLLM corrects how much those have computed that run; it does not look at those that were aborted meanwhile."""
    request = engine.request("a", tokens(300))
    engine.scheduler._req_status["a"].group_states[0].block_ids = list(range(1, 11))
    request.status = RequestStatus.FINISHED_ABORTED
    engine.connector.update_connector_output(KVConnectorOutput(invalid_block_ids={3}))
    assert engine.end(request, RequestStatus.FINISHED_ABORTED, computed=300) == 0


@pytest.mark.parametrize(
    ("status", "computed", "stored"),
    [
        (RequestStatus.FINISHED_STOPPED, 300, 256),
        (RequestStatus.FINISHED_ERROR, 100, 64),
        (RequestStatus.FINISHED_LENGTH_CAPPED, 0, 0),
    ],
    ids=["at its end", "by an error amid its prompt", "by an output of before it was preempted"],
)
def test_no_more_of_a_request_that_has_ended_is_stored_than_it_computed(engine, status, computed, stored):
    """Its other blocks have not been filled, or are another request's by now."""
    assert engine.end(engine.request("a", tokens(300)), status, computed=computed) == stored


def test_who_asks_for_less_to_be_stored_has_less_stored(engine):
    """`max_offload_tokens` of the request counts on, whatever it computed."""
    sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": {"max_offload_tokens": 130}})
    request = engine.request("a", tokens(300), sampling=sampling)
    assert engine.end(request, RequestStatus.FINISHED_STOPPED, computed=300) == 128
