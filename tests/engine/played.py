"""vLLM's own scheduler and TierTune's connector on both of its sides; only the model is played, by every rank."""

import time
from collections import deque
from dataclasses import dataclass, field
from queue import Queue
from types import SimpleNamespace

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, resolve_kv_cache_block_sizes
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.fault_tolerance import EngineCoreSentinel
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from engine.conftest import PATIENCE_S
from engine.rank import VOCABULARY, Rank
from tiertune_connector.vllm.connector import TierTuneConnector

EMBEDDINGS = 400
"""Room for those of images, and what a step may make of them."""


@dataclass
class Step:
    """That is scheduled, and not over."""

    output: SchedulerOutput
    results: list[ModelRunnerOutput | None]
    """Of the ranks that are done with it."""
    drafts: dict[str, list[int]] = field(default_factory=dict)


def alone(config, role, cache, _pages):
    """TierTune's connector as the only one: what vLLM talks to, and TierTune's in it."""
    made = TierTuneConnector(config, role, cache)
    return made, made


class Played:
    """One engine; ``step`` it until nobody waits."""

    def __init__(self, config, cache, seed=0, make=alone):
        self.random = np.random.default_rng(seed)
        config.cache_config.num_gpu_blocks = cache.num_blocks
        block, unit = resolve_kv_cache_block_sizes(cache, config)
        hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(unit, hash_function)
        size = config.parallel_config.world_size
        self.ranks = [Rank(config, cache, number, self.random, make) for number in range(size)]
        self._aggregator = KVOutputAggregator(size)
        self._ahead = config.scheduler_config.async_scheduling
        self._drafted = config.num_speculative_tokens or 0
        self._queue: deque[Step] = deque()
        self._depth = config.max_concurrent_batches
        structured = StructuredOutputManager(config)
        made = AsyncScheduler if self._ahead else Scheduler
        self.scheduler = made(config, cache, structured, block_size=block, hash_block_size=unit)
        self.scheduler.max_num_encoder_input_tokens = EMBEDDINGS
        self.scheduler.encoder_cache_manager = EncoderCacheManager(EMBEDDINGS)
        parts = getattr(self.scheduler.connector, "sub_connectors", [self.scheduler.connector])
        (self.connector,) = (each for each in parts if isinstance(each, TierTuneConnector))
        self.tier = self.connector.tier
        self.answers: dict[str, list[int]] = {}
        self.loaded = 0
        """Blocks that came from staging."""
        self.rejected = 0
        """Drafts that were not right."""

    def exchanges(self, method):
        """Somebody has the workers exchange their weights, between two steps."""
        executor = SimpleNamespace(collective_rpc=lambda *_: None)
        EngineCore.collective_rpc(
            SimpleNamespace(vllm_config=self.scheduler.vllm_config, model_executor=executor), method
        )

    def fault(self):
        """A peer fails in the next step, of which nobody gets the output; then vLLM goes on."""
        output, results = self.scheduler.schedule(), []
        for rank in self.ranks:
            rank.faulty = True
            results.append(rank.execute(output, None))
            rank.faulty = False
        core = SimpleNamespace(scheduler=self.scheduler, vllm_config=self.scheduler.vllm_config, model_executor=None)
        core.batch_queue, core.output_queue, core.engine_index = self._queue, Queue(), 0
        core._send_abort_outputs = list
        EngineCoreSentinel(core, core.vllm_config.parallel_config).on_fault(RuntimeError("a peer"))
        if hasattr(EngineCoreSentinel, "_drain_batch_queue"):  # 0.33 loses nothing that is for its connector
            told = self._aggregator.aggregate(results).kv_connector_output
            nothing = SchedulerOutput.make_empty()
            self.scheduler.update_from_output(nothing, ModelRunnerOutput.with_kv_conn_output_only(told))

    def add(self, name, tokens, *, most=8, transfer=None, **fields):
        """``transfer``: the request's `kv_transfer_params`."""
        extra = {"kv_transfer_params": transfer} if transfer else None
        sampling = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True, extra_args=extra)
        sampling.update_from_generation_config({}, None)
        request = Request(name, list(tokens), sampling, None, block_hasher=self._hasher, **fields)
        self.answers[name] = []
        self.scheduler.add_request(request)
        return request

    def abort(self, name):
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def run(self):
        """Until all requests have ended and nothing is under way."""
        until = time.monotonic() + PATIENCE_S
        while self.scheduler.has_requests() or self._queue:
            assert time.monotonic() < until, f"stuck: {self.scheduler.requests}"
            self.step()

    @property
    def loading(self):
        """Whether a request waits that has blocks: what it needs is being copied to the device, or has been."""
        runs = RequestStatus.RUNNING
        return any(each.status is not runs and each.num_computed_tokens for each in self.scheduler.requests.values())

    def knows_nothing(self):
        """Whether no request left a trace, nor a row of staging that is kept for one."""
        tier, staging = self.tier, self.tier._staging
        left = (tier._requests, tier._transfers._jobs, len(tier.gate.backlog))
        used = staging._num_allocated_chunks - len(staging._free_list)
        return not any(left) and staging._num_evictable_cache_chunks == used

    def step(self):
        """As vLLM's engine core: of steps that are scheduled ahead the first one ends when there are enough of them."""
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            self._queue.append(Step(output, [None] * len(self.ranks)))
            for told in getattr(output.kv_connector_metadata, "metadata", [output.kv_connector_metadata]):
                self.loaded += sum(len(job.dst_spec.block_ids) for job in getattr(told, "load_jobs", {}).values())
            for number in range(len(self.ranks)):
                if self.random.random() < 0.5:
                    self._execute(number)
            if len(self._queue) < self._depth:
                return
        if self._queue:
            self._end()

    def drain(self):
        """No step is left that is not over."""
        while self._queue:
            self._end()

    def close(self):
        self.scheduler.shutdown()
        for rank in self.ranks:
            rank.worker.shutdown()

    def _execute(self, number):
        """The first step that a rank has not done yet: each has its own pace."""
        step = next((step for step in self._queue if step.results[number] is None), None)
        if step is not None:

            def drafts(name, text, place, count):
                return step.drafts.setdefault(name, self._draft(text, place, count))

            step.results[number] = self.ranks[number].execute(step.output, drafts)

    def _end(self):
        step = self._queue[0]
        for number in self.random.permutation(len(self.ranks)):
            while step.results[number] is None:
                self._execute(number)
        self._queue.popleft()
        result = self._aggregator.aggregate(step.results)
        for some in self.scheduler.update_from_output(step.output, result).values():
            for each in some.outputs:
                self.answers[each.request_id] += each.new_token_ids
        said = {name: tokens for name, tokens in zip(result.req_ids, result.sampled_token_ids, strict=True) if tokens}
        for name, drafts in step.output.scheduled_spec_decode_tokens.items():
            self.rejected += 1 + len(drafts) - len(said.get(name, drafts))
        if self._drafted and not self._ahead:
            self._tell_drafts(said)
        if not step.output.num_scheduled_tokens:
            time.sleep(0.0005)

    def _tell_drafts(self, names):
        told = {}
        for name, request in self.scheduler.requests.items():
            if name in names and request.status is RequestStatus.RUNNING:
                count = self.random.integers(self._drafted + 1)
                told[name] = self._draft(self.ranks[0].texts[name], request.num_tokens, count)
        self.scheduler.update_draft_token_ids(DraftTokenIds(list(told), list(told.values())))

    def _draft(self, text, place, count):
        """Some are right."""
        right = text.said(place, int(count))
        return [token if self.random.random() < 0.6 else (token + 1) % VOCABULARY for token in right]
