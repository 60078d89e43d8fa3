"""The scheduler's side against a real store, with vLLM's own managers and no engine: what is asked, fetched, stored."""

import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.kv_offload.base import LookupResult, ScheduleEndContext
from vllm.v1.request import Request

from e2e.vllm_model import HEADS, KV_HEADS, LAYERS, WIDTH
from engine.conftest import BLOCK, cache_of, full_attention
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
            "remote": {"url": f"file://{home}/remote", "probe_every": 3600},
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

    def request(self, name, tokens, **fields):
        """A request comes."""
        request = Request(name, tokens, SamplingParams(max_tokens=1), None, block_hasher=self._hasher, **fields)
        self.connector.on_new_request(request)
        return request

    def keys(self, request):
        """By group."""
        return [list(state.offload_keys) for state in self.scheduler._req_status[request.request_id].group_states]

    def context(self, request):
        return self.scheduler._req_status[request.request_id].req_context

    def step(self):
        """The end of a step."""
        self.manager.on_schedule_end(ScheduleEndContext(new_req_ids=[], preempted_req_ids=()))

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

    def make(*, layers=None, **extra):
        settings = {
            "socket": str(store.server.path), "staging": "32MiB", "chunk_tokens": CHUNK, "store_dram": 0,
            "lookup_deadline": "20s", "load_deadline": "20s", "load_deadline_floor": "20s", "store_deadline": "20s",
        }  # fmt: skip
        config = configured(extra=settings | extra, engine_id=f"tt-test-{len(made)}")
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
    store.store.flush()
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
    second.tier._gate._prefill.observe_step([(0, 1000)] * 1, 1.0)
    for _ in range(5):
        second.tier._gate._prefill.observe_step([(0, 1000)], 1.0)
    lane = store.store.lanes["remote"]
    lane.estimate = lambda: FetchEstimate(0.0, 1e-4, 1e9)
    waiting = second.request("b", prompt)
    wait_until(lambda: (second.step(), len(pool.pool) == 4)[1])
    wait_until(lambda: (second.step(), pool.pool.pinned == 0)[1])
    assert second.matched(waiting)[0] == 256


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
