"""The scheduler's side of an engine, with vLLM's own managers: the test is scheduler and worker."""

import time
from collections import Counter

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import TransferJobStatus
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_offload.base import LookupResult, ScheduleEndContext
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from engine.conftest import BLOCK, PATIENCE_S
from tiertune_connector.cost import FetchEstimate
from tiertune_connector.vllm.connector import TierTuneConnector
from tiertune_connector.vllm.stats import CONNECTED


class Engine:
    """A connector of that side."""

    def __init__(self, config, cache):
        self.connector = TierTuneConnector(config, KVConnectorRole.SCHEDULER, cache)
        self.scheduler = self.connector.connector_scheduler
        self.manager = self.scheduler.manager
        self.tier = self.connector.tier
        self.rows = np.asarray(self.manager.primary_tier.get_kv_memoryview()).view(np.uint8)
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self._counts = Counter()

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

    def ask(self, name):
        return self.tier._requests[name].ask

    def step(self, *preempted):
        """The end of a step."""
        self.manager.on_schedule_end(ScheduleEndContext(new_req_ids=[], preempted_req_ids=preempted))

    def matched(self, request, computed=0, *, room=True):
        """Steps until the scheduler has its answer: tokens that come from outside. ``put_off`` counts those before.

        If there is ``room``, it begins with the request.
        """
        until, self.put_off = time.monotonic() + PATIENCE_S, 0
        while time.monotonic() < until:
            tokens, _ = self.connector.get_num_new_matched_tokens(request, computed)
            self.step()
            if tokens is not None:
                if room:
                    self.tier.begun(request.request_id, computed + tokens)
                return tokens
            self.put_off += 1
            time.sleep(0.001)
        raise AssertionError("no answer")

    def finds(self, name, tokens, **fields):
        """Tokens from outside for a request that comes."""
        return self.matched(self.request(name, tokens, **fields))

    def computes(self, name, tokens, **fields):
        """A request comes, of which the worker computes the whole prompt."""
        self.compute(self.request(name, tokens, **fields))

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

    def end(self, request, status, *, computed):
        """A request that has all of its blocks ends, of which so many tokens are ``computed``; tokens then stored."""
        for state in self.scheduler._req_status[request.request_id].group_states:
            state.block_ids = list(range(1, 2 + request.num_tokens // BLOCK))
        request.num_computed_tokens, request.status = computed, status
        self.connector.request_finished_all_groups(request, ())
        output = SchedulerOutput.make_empty()
        output.finished_req_ids = {request.request_id}
        jobs = self.connector.build_connector_meta(output).store_jobs.values()
        return sum(len(job.src_spec.block_ids) for job in jobs) * BLOCK

    def output(self, *jobs):
        """Of the oldest step given, in which the worker has ended ``jobs``."""
        if jobs:
            told = OffloadingWorkerMetadata(completed_jobs=dict.fromkeys(jobs, 1))
            self.connector.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=told))
        self.connector.get_kv_connector_stats()

    def counted(self):
        """What the engine has counted of requests and chunks since it began."""
        self._counts.update(self.tier.telemetry.changes())
        return {key: count for key, count in self._counts.items() if key != CONNECTED}

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

    def begin_load(self, *requests):
        """The store has answered, and the loads that were decided for are under way."""
        for request in requests:
            wait_until(self.ask(request.request_id).reply.done)
            assert self.connector.get_num_new_matched_tokens(request, 0) == (None, False)
        self.step()

    def knows_nothing(self):
        """Whether no request left a trace."""
        tier = self.tier
        return not any((tier._requests, tier._transfers._jobs, len(tier.gate.backlog)))

    def took(self, tokens, seconds):
        """It believes that prefills of so many tokens take so long."""
        for _ in range(6):
            self.tier.gate.prefill.observe_step([(0, tokens)], seconds)

    def done(self, request):
        self.manager.on_request_finished(self.context(request))

    def close(self):
        del self.rows
        self.connector.shutdown()


def payload(key, size):
    return np.frombuffer(np.random.default_rng(list(key)).bytes(size), np.uint8)


def tokens(count, *, seed=0):
    return np.random.default_rng(seed).integers(10, 4000, count).tolist()


def wait_until(true):
    until = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < until
        time.sleep(0.002)


def far_from_a_small_dram(first, second, store, remote):
    """A prompt of ten chunks that only the remote has, and a DRAM for eight; ``second`` fetches whatever comes."""
    prompt = tokens(64 * 10 + 20)
    first.computes("a", prompt)
    wait_until(lambda: len(remote._chunks) >= 10 * len(first.tier._groups))
    (pool,) = store.store.dram.pools.values()
    store.store.dram.flush(None, None)
    store.store.dram.retune(8 * pool.stride, {})
    wait_until(lambda: pool.pool.capacity == 8)
    second.took(1000, 10_000.0)
    store.store.lanes["remote"].transit.estimate = lambda *_: FetchEstimate(0.0, 0.001, 1e9)
    return prompt


def told(store, name):
    """What the store counted."""
    return sum(row[-1] for row in store.counters.snapshot()[1].get(name, {"rows": []})["rows"])


def waits(engine, monkeypatch):
    """Tokens of each request that waited for its chunks, as they come."""
    counts = []
    monkeypatch.setattr(engine.tier.telemetry.steps, "kv_wait", lambda _seconds, count: counts.append(count))
    return counts


def gated(engine):
    """What the engine counted of gates and loads, and how often or how much."""
    names = {"engine_gate_requests_total", "engine_loads_total", "engine_fetched_tokens_total"}
    counts = engine.counted().items()
    return {(name.removeprefix("engine_"), labels): count for (name, labels), count in counts if name in names}
