"""The scheduler's side against a real store, with vLLM's own managers and no engine: what is asked, fetched, stored."""

import tempfile
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.config import MultiModalConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import TransferJobStatus
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.kv_offload.base import LookupResult, ScheduleEndContext
from vllm.v1.request import Request

from e2e.vllm_model import HEADS, KV_HEADS, LAYERS, WIDTH
from engine.conftest import BLOCK, cache_of, full_attention
from tiertune_connector.client.store_client import Loaded
from tiertune_connector.cost import FetchEstimate
from tiertune_connector.serve.main import StoreProcess
from tiertune_connector.settings import StoreSettings
from tiertune_connector.tiers.memory import MemoryTier
from tiertune_connector.vllm.connector import TierTuneConnector

CHUNK = 64
PATIENCE_S = 20.0
SLIDING = 128


@pytest.fixture
def home():
    """Short enough for a unix socket."""
    with tempfile.TemporaryDirectory(prefix="tt-") as folder:
        yield Path(folder)


@pytest.fixture
def remote():
    return MemoryTier()


@pytest.fixture
def store(home, remote):
    settings = StoreSettings.model_validate(
        {
            "name": "host-a",
            "socket": home / "s.sock",
            "state_dir": home / "state",
            "http": {"port": 0},
            "dram": {"capacity": "64MiB", "segment": "16MiB"},
            "remote": {"url": f"file://{home}/remote", "timeout": PATIENCE_S, "probe_every": 3600},
        }
    )
    process = StoreProcess(settings, wrap_remote=lambda _: remote)
    process.start()
    yield process
    process.stop()


def hybrid():
    """Layers of the tiny model, the last half of them with a sliding window."""
    window = SlidingWindowSpec(
        block_size=BLOCK,
        num_kv_heads=KV_HEADS,
        head_size=WIDTH // HEADS,
        dtype=torch.float32,
        sliding_window=SLIDING,
    )
    return {f"model.layers.{n}.attn": full_attention() if n < LAYERS // 2 else window for n in range(LAYERS)}


class Engine:
    """A connector on the scheduler's side; the test is scheduler and worker."""

    def __init__(self, config, cache):
        self.connector = TierTuneConnector(config, KVConnectorRole.SCHEDULER, cache)
        self.scheduler = self.connector.connector_scheduler
        self.manager = self.scheduler.manager
        self.tier = self.connector.tier
        self.rows = np.asarray(self.manager.primary_tier.get_kv_memoryview()).view(np.uint8)
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)

    def request(self, name, tokens, *, sampling=None, **fields):
        """A request comes."""
        sampling = sampling or SamplingParams(max_tokens=1)
        request = Request(name, tokens, sampling, None, block_hasher=self._hasher, **fields)
        self.connector.on_new_request(request)
        return request

    def keys(self, request):
        """By group."""
        return [list(state.offload_keys) for state in self.scheduler._req_status[request.request_id].group_states]

    def context(self, request):
        return self.scheduler._req_status[request.request_id].req_context

    def step(self, *preempted):
        """The end of a step."""
        self.manager.on_schedule_end(ScheduleEndContext(new_req_ids=[], preempted_req_ids=preempted))

    def matched(self, request, computed=0):
        """Steps until the scheduler has its answer: tokens that come from outside; and how often it was put off."""
        until, put_off = time.monotonic() + PATIENCE_S, 0
        while time.monotonic() < until:
            tokens, _ = self.connector.get_num_new_matched_tokens(request, computed)
            self.step()
            if tokens is not None:
                return tokens, put_off
            put_off += 1
            time.sleep(0.001)
        raise AssertionError("no answer")

    def compute(self, request, *, only=lambda _group, _index: True):
        """The worker computes the whole prompt: bytes that follow from the keys go through staging to the store."""
        context = self.context(request)
        keys = [
            key for group, of_group in enumerate(self.keys(request)) for n, key in enumerate(of_group) if only(group, n)
        ]
        prepared = self.manager.prepare_store(keys, context)
        for key, chunk in zip(prepared.keys_to_store, prepared.store_spec.chunk_ids.tolist(), strict=True):
            self.rows[chunk] = payload(key, self.rows.shape[1])
        self.manager.complete_store(prepared.keys_to_store, context)
        self.settle()

    def begin_store(self, request):
        """The worker is told to copy the whole prompt to staging: its job, and what makes the copy, whenever it is."""
        prepared = self.manager.prepare_store(self.keys(request)[0], self.context(request))
        job = self.scheduler._generate_job_id()
        self.scheduler._jobs[job] = TransferJobStatus(
            req_id=request.request_id, pending_count=1, keys=set(prepared.keys_to_store), is_store=True
        )

        def copied():
            for key, chunk in zip(prepared.keys_to_store, prepared.store_spec.chunk_ids.tolist(), strict=True):
                self.rows[chunk] = payload(key, self.rows.shape[1])

        return job, copied

    def give(self):
        """A step in which nothing is computed: the jobs that the worker has to end with it."""
        return self.connector.build_connector_meta(SchedulerOutput.make_empty()).jobs_to_flush

    def output(self):
        """Of the oldest step given."""
        self.connector.get_kv_connector_stats()

    def settle(self):
        """No job is left."""
        until = time.monotonic() + PATIENCE_S
        self.step()
        while self.manager._jobs and time.monotonic() < until:
            self.step()
            time.sleep(0.001)
        assert not self.manager._jobs

    def staged(self, request):
        """Per group and chunk, whether staging has exactly the chunk's bytes."""
        context, policy = self.context(request), self.manager.primary_tier._policy
        return [
            [
                self.manager.primary_tier.lookup(key, context) is LookupResult.HIT
                and np.array_equal(self.rows[policy.get(key).chunk_id], payload(key, self.rows.shape[1]))
                for key in keys
            ]
            for keys in self.keys(request)
        ]

    def begin_load(self, request):
        """The store has answered, and the load that was decided for is under way."""
        wait_until(self.tier._lookups.get(request.request_id).reply.done)
        assert self.connector.get_num_new_matched_tokens(request, 0) == (None, False)
        self.step()

    def knows_nothing(self):
        """Whether no request left a trace."""
        tier = self.tier
        return not any(
            (tier._prompts, tier._contexts, tier._lookups._asks, tier._names, tier._loading, len(tier.backlog))
        )

    def done(self, request):
        self.manager.on_request_finished(self.context(request))

    def close(self):
        del self.rows
        self.connector.shutdown()


def payload(key, size):
    return np.frombuffer(np.random.default_rng(list(key)).bytes(size), np.uint8)


@pytest.fixture
def engines(configured, store):
    """Makes engines on the store; all end with the test."""
    made = []

    def make(*, layers=None, engine_id=None, arguments=None, multimodal=None, **extra):
        settings = {
            "socket": str(store.server.path), "staging": "32MiB", "chunk_tokens": CHUNK, "store_dram": 0,
            "connect_timeout": "20s", "lookup_deadline": "20s", "load_deadline": "20s", "load_deadline_floor": "20s",
            "store_deadline": "20s",
        }  # fmt: skip
        config = configured(extra=settings | extra, engine_id=engine_id or f"tt-test-{len(made)}", **(arguments or {}))
        config.model_config.multimodal_config = multimodal
        made.append(Engine(config, cache_of(config, layers() if layers else None)))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def tokens(count, *, seed=0):
    return np.random.default_rng(seed).integers(10, 4000, count).tolist()


def test_another_engine_gets_exactly_what_the_first_one_computed(engines):
    """All whole chunks come, byte for byte; the scheduler is put off until they are there, and never waits."""
    first, second = engines(), engines()
    prompt = tokens(300)
    first.compute(first.request("a", prompt))
    asked = second.request("b", prompt)
    matched, put_off = second.matched(asked)
    assert matched == 256
    assert put_off > 0
    assert second.staged(asked) == [[True] * 4]


def test_a_prompt_that_nobody_has_is_computed(engines):
    """The answer is no tokens, and stays so however often vLLM asks."""
    engine = engines()
    request = engine.request("a", tokens(300))
    assert [engine.matched(request)[0] for _ in range(3)] == [0, 0, 0]


def test_what_is_on_the_device_is_not_fetched(engines):
    """With two chunks computed by the time the scheduler asks, the other two are fetched."""
    first, second = engines(), engines()
    first.compute(first.request("a", tokens(300)))
    asked = second.request("b", tokens(300))
    assert second.matched(asked, computed=128)[0] == 128
    assert second.staged(asked) == [[False, False, True, True]]


def test_a_store_that_was_flushed_gets_again_what_staging_has(engines, store):
    """The next request with the prompt learns what the store lacks, and cascades it; another engine then hits."""
    first, second = engines(), engines()
    prompt = tokens(300)
    first.compute(first.request("a", prompt))
    store.store.flushes.drop()
    again = first.request("b", prompt)
    assert first.matched(again, computed=256)[0] == 0
    first.settle()
    assert second.matched(second.request("c", prompt))[0] == 256


def test_a_waiting_requests_remote_chunks_are_brought_near(engines, store, remote):
    """Before the scheduler wants the request its chunks are in DRAM; nothing of them stays pinned."""
    first = engines()
    prompt = tokens(300)
    first.compute(first.request("a", prompt))
    wait_until(lambda: len(remote._chunks) >= 4)
    pool = next(iter(store.store.dram.pools.values()))
    store.store.dram.flush(None, None)
    second = engines()
    second.tier._choosing._gate._prefill.observe_step([(0, 1000)] * 1, 1.0)
    for _ in range(5):
        second.tier._choosing._gate._prefill.observe_step([(0, 1000)], 1.0)
    lane = store.store.lanes["remote"]
    lane.transit.estimate = lambda: FetchEstimate(0.0, 1e-4, 1e9)
    waiting = second.request("b", prompt)
    wait_until(lambda: (second.step(), len(pool.pool) == 4)[1])
    wait_until(lambda: (second.step(), pool.pool.pinned == 0)[1])
    assert second.matched(waiting)[0] == 256


def test_the_gate_knows_who_else_is_on_the_engine(engines):
    """Requests whose prompts are not computed yet, before and behind; one that is decoding is none."""
    first, second = engines(), engines()
    prompt = tokens(300)
    first.compute(first.request("a", prompt))
    second.request("b", tokens(300, seed=1))
    asked = second.request("c", prompt)
    second.request("d", tokens(300, seed=2))
    assert second.matched(asked)[0] == 256
    assert [each.prefills for each in second.tier._lookups.get("c").decision.candidates] == [2]
    second.tier.given([("b", 0, 300)])
    assert second.tier.backlog.others("c") == 1


def test_unsalted_requests_neither_read_nor_write_where_salt_is_required(engines, store):
    """A salted one does both; another salt does not see it."""
    first, second = engines(isolation="require_salt"), engines(isolation="require_salt")
    prompt = tokens(300)
    first.compute(first.request("a", prompt))
    assert held(store) == 0
    first.compute(first.request("b", prompt, cache_salt="alice"))
    assert held(store) == 4
    assert second.matched(second.request("c", prompt))[0] == 0
    assert second.matched(second.request("d", prompt, cache_salt="bob"))[0] == 0
    assert second.matched(second.request("e", prompt, cache_salt="alice"))[0] == 256


def test_an_adapter_of_the_same_name_with_other_weights_never_hits(engines, home):
    """vLLM's keys have its name and path alone; the store's have its contents too."""
    first, second = engines(), engines()
    prompt = tokens(300)
    helper = adapter(home / "helper", 1)
    first.compute(first.request("a", prompt, lora_request=helper))
    assert second.matched(second.request("b", prompt))[0] == 0
    assert second.matched(second.request("c", prompt, lora_request=helper))[0] == 256
    other = adapter(home / "helper", 2)
    third = engines()
    assert third.matched(third.request("d", prompt, lora_request=other))[0] == 0


def test_chunks_of_other_weights_that_were_in_the_adapters_place_never_leave_the_engine(engines, home):
    """Loaded again with other weights, it finds in staging what the old ones computed; no other engine gets that."""
    first, second = engines(), engines()
    prompt = tokens(300)
    first.compute(first.request("a", prompt, lora_request=adapter(home / "helper", 1)))
    other = adapter(home / "helper", 2)
    other.lora_int_id = 2
    first.matched(first.request("b", prompt, lora_request=other), computed=256)
    first.settle()
    assert second.matched(second.request("c", prompt, lora_request=other))[0] == 0


def test_chunks_of_a_request_that_nobody_knows_are_not_stored(engines, store):
    """In doubt whose they are, they stay where they are; vLLM's job ends all the same."""
    engine = engines()
    request = engine.request("a", tokens(300))
    engine.tier._prompts.clear()
    engine.compute(request)
    assert held(store) == 0


def test_a_request_that_ends_before_its_load_begins_leaves_nothing(engines):
    """Its slots in staging are given back."""
    first, second = engines(), engines()
    prompt = tokens(300)
    first.compute(first.request("a", prompt))
    asked = second.request("b", prompt)
    wait_until(second.tier._lookups.get("b").reply.done)
    assert second.connector.get_num_new_matched_tokens(asked, 0) == (None, False)
    second.tier.on_request_finished(second.context(asked))
    second.settle()
    assert second.staged(asked) == [[False] * 4]
    assert second.manager.primary_tier._num_write_pending_chunks == 0


def test_a_request_that_is_aborted_in_mid_load_leaves_nothing(engines):
    """The load comes to its end by itself, and its slots in staging are free again."""
    first, second = engines(), engines()
    prompt = tokens(300)
    first.compute(first.request("a", prompt))
    asked = second.request("b", prompt)
    second.begin_load(asked)
    second.done(asked)
    second.settle()
    assert second.knows_nothing()
    assert second.manager.primary_tier._num_write_pending_chunks == 0


def test_a_reset_in_mid_load_ends_it(engines, monkeypatch):
    """With a store that never answers: the prompt is recomputed, and a late answer changes nothing."""
    monkeypatch.setattr("tiertune_connector.vllm.tier.DRAIN_S", 0.01)
    first, second = engines(), engines()
    prompt = tokens(300)
    first.compute(first.request("a", prompt))
    answer = Future()
    second.tier._client.load = lambda *_, **__: answer
    asked = second.request("b", prompt)
    second.begin_load(asked)
    second.connector.reset_cache()
    answer.set_result(Loaded([], ["error"] * 4, {}, 0, 1))
    assert second.matched(asked)[0] == 0
    second.done(asked)
    assert second.knows_nothing()


class TestResetWhileTheWorkerCopies:
    """vLLM gives all rows of staging out anew, and the worker goes on with what it was told before."""

    @pytest.fixture
    def prompt(self, engines):
        """The store has it."""
        first = engines()
        first.compute(first.request("a", tokens(300)))
        return tokens(300)

    @pytest.fixture
    def busy(self, engines):
        return engines()

    def test_no_row_is_filled_that_the_worker_may_still_write(self, busy, prompt):
        """Until it has done the step in which it ends that: what it wrote last would be another prompt's hit."""
        job, copied = busy.begin_store(busy.request("b", tokens(300, seed=1)))
        busy.connector.reset_cache()
        asked = busy.request("c", prompt)
        assert busy.matched(asked)[0] == 0
        assert busy.give() == {job}
        assert busy.matched(busy.request("d", prompt))[0] == 0
        copied()
        busy.output()
        assert busy.matched(busy.request("e", prompt))[0] == 256
        assert busy.staged(asked) == [[True] * 4]

    def test_steps_that_were_given_before_it_release_nothing(self, busy, prompt):
        """Their outputs come later, where steps are given ahead."""
        busy.begin_store(busy.request("b", tokens(300, seed=1)))
        busy.give()
        busy.connector.reset_cache()
        busy.output()
        assert busy.matched(busy.request("c", prompt))[0] == 0
        busy.give()
        busy.output()
        assert busy.matched(busy.request("d", prompt))[0] == 256

    def test_a_reset_in_between_does_not_release_it(self, busy, prompt):
        """The second one finds no job under way any more; the worker still has to end those of the first."""
        job, _ = busy.begin_store(busy.request("b", tokens(300, seed=1)))
        busy.connector.reset_cache()
        assert busy.give() == {job}
        busy.connector.reset_cache()
        assert busy.matched(busy.request("c", prompt))[0] == 0
        busy.output()
        assert busy.matched(busy.request("d", prompt))[0] == 256

    def test_where_the_worker_has_nothing_to_copy_nothing_is_held(self, busy, prompt):
        """An idle engine is warm from the store at once."""
        busy.connector.reset_cache()
        assert busy.matched(busy.request("c", prompt))[0] == 256


def test_devices_that_ranks_tell_one_by_one_are_all_known(engines):
    """In a step each where one is behind; once each."""
    tier = engines().tier
    for gpus in (("GPU-a", "GPU-b"), (), ("GPU-c",), ("GPU-a",)):
        tier.measured({}, gpus)
    assert tier._client.gpus == ["GPU-a", "GPU-b", "GPU-c"]


def test_a_preempted_request_is_fetched_again(engines):
    """What staging has lost meanwhile comes a second time."""
    first, second = engines(), engines()
    prompt = tokens(300)
    first.compute(first.request("a", prompt))
    asked = second.request("b", prompt)
    assert second.matched(asked)[0] == 256
    second.manager.primary_tier.reset_cache()
    assert second.matched(asked)[0] == 0
    second.step("b")
    assert second.matched(asked)[0] == 256
    assert second.staged(asked) == [[True] * 4]


def test_a_prompt_longer_than_staging_gets_what_fits(engines):
    """Its own chunks do not push each other out of staging for ever, each fetched again and again."""
    first = engines()
    prompt = tokens(64 * 12 + 10)
    first.compute(first.request("a", prompt))
    small = engines(staging=str(8 * first.rows.shape[1]))
    assert small.matched(small.request("b", prompt))[0] == 64 * 8


def test_what_staging_has_no_room_for_is_not_told_as_fetched(engines):
    """Eight chunks of twelve came, so that two thirds are saved; for those of the next prompt there is no row."""
    first = engines()
    prompt, other = tokens(64 * 12 + 10), tokens(300, seed=1)
    first.compute(first.request("a", prompt))
    first.compute(first.request("b", other))
    small = engines(staging=str(8 * first.rows.shape[1]))
    for _ in range(5):
        small.tier._choosing._gate._prefill.observe_step([(0, 778)], 1.0)
    asked = small.request("c", prompt)
    assert small.matched(asked)[0] == 8 * 64
    decision, told = small.tier._lookups.get("c").decision, small.tier.telemetry._stats.totals
    assert decision.cut == 12
    assert told["engine_fetched_tokens_total", ("dram",)] == 8 * 64
    assert told["engine_saved_seconds_total", ("dram",)] < decision.recompute_s * 8 / 12
    small.manager.prepare_load(small.keys(asked)[0][:8], small.context(asked))
    before = dict(told)
    last = small.request("d", other)
    assert small.matched(last)[0] == 0
    small.done(last)
    assert {key for key in told if told[key] != before.get(key)} == {
        ("engine_lookup_tokens_total", ("dram", "hit")),
        ("engine_gate_requests_total", ("dram", "fetch", "cheaper")),
    }


def test_requests_that_wait_for_one_load_wait_for_one_deadline(engines):
    """When it fails the others do not try one after another, each waiting for all before it."""
    first = engines()
    prompt = tokens(300)
    first.compute(first.request("a", prompt))
    second = engines(load_deadline="200ms", load_deadline_floor="200ms")
    begun = []
    second.tier._client.load = lambda request, *_, **__: begun.append(request) or Future()
    requests = [second.request(f"b{n}", prompt) for n in range(4)]
    for request in requests:
        wait_until(second.tier._lookups.get(request.request_id).reply.done)
    waiting = list(requests)

    def all_answered():
        waiting[:] = [one for one in waiting if second.connector.get_num_new_matched_tokens(one, 0)[0] is None]
        second.step()
        return not waiting

    wait_until(all_answered)
    assert begun == ["b0"]


def test_prompts_whose_logprobs_are_asked_for_are_not_looked_up(engines, store):
    """They are computed from their first token on, and wait for nothing."""
    engine = engines()
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=1)
    request = engine.request("a", tokens(300), sampling=sampling)
    assert engine.connector.get_num_new_matched_tokens(request, 0) == (0, False)
    engine.compute(request)
    assert held(store) == 4


def test_a_request_that_may_not_load_from_a_tier_is_not_looked_up(engines):
    """It waits for no answer that it could not use."""
    engine = engines()
    sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": {"kv_load_tiers": []}})
    request = engine.request("a", tokens(300), sampling=sampling)
    assert engine.connector.get_num_new_matched_tokens(request, 0) == (0, False)


def test_a_long_engine_id_does_not_keep_an_engine_from_the_store(engines):
    """Its end, which tells the ranks of data parallelism apart, is the label."""
    engine = engines(engine_id="e" * 80 + "_dp1")
    assert engine.tier._client.connected


@pytest.mark.parametrize(("hashed", "shared"), [({}, 256), ({"enable_prefix_caching": False}, 0)])
def test_media_that_vllm_only_numbers_are_not_shared(engines, store, hashed, shared):
    """Without both of its caches vLLM does not hash an image but counts: the first one of every process is alike."""
    first, second = (engines(arguments=hashed, multimodal=MultiModalConfig(mm_processor_cache_gb=0)) for _ in range(2))
    image = MultiModalFeatureSpec(
        data=None, modality="image", identifier="renderer0-mm-1-image-0", mm_position=PlaceholderRange(0, CHUNK)
    )
    prompt = tokens(300)
    first.compute(first.request("a", prompt, mm_features=[image]))
    assert second.matched(second.request("b", prompt, mm_features=[image]))[0] == shared
    text = tokens(300, seed=1)
    first.compute(first.request("c", text))
    assert second.matched(second.request("d", text))[0] == 256


class TestHybrid:
    """Two groups, full attention and a window of two chunks: a cut of tokens that both allow."""

    def test_a_cut_takes_the_chain_and_the_last_chunks_of_the_window(self, engines):
        """No more of the windowed group is fetched than vLLM needs."""
        first, second = engines(layers=hybrid), engines(layers=hybrid)
        prompt = tokens(64 * 6 + 10)
        first.compute(first.request("a", prompt))
        asked = second.request("b", prompt)
        assert second.matched(asked)[0] == 64 * 6
        whole, window = second.staged(asked)
        assert whole == [True] * 6
        assert window[-2:] == [True, True]
        assert not any(window[:3])

    def test_where_the_windows_chunk_is_missing_the_cut_is_shorter(self, engines):
        """The last chunk of the windowed group was not stored: all are cut one chunk before."""
        first, second = engines(layers=hybrid), engines(layers=hybrid)
        prompt = tokens(64 * 6 + 10)
        windowed = 1 - next(group.index for group in first.tier._groups if group.window_chunks is None)
        first.compute(first.request("a", prompt), only=lambda group, n: group != windowed or n < 5)
        assert second.matched(second.request("b", prompt))[0] == 64 * 5


def adapter(folder, fill):
    """A LoRA adapter on disk: its contents follow from ``fill``, its name does not."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text('{"r": 8}')
    header = b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'
    (folder / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes([fill]) * 16)
    return SimpleNamespace(lora_name="helper", name="helper", lora_int_id=1, lora_path=str(folder), path=str(folder))


def held(store):
    return sum(len(pool.pool) for pool in store.store.dram.pools.values())


def wait_until(true):
    until = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < until
        time.sleep(0.002)
