"""vLLM's own scheduler and TierTune's connector on both of its sides; only the model is played.

What it "computes" follows from the tokens before: of attention 8 bytes for each token, of a recurrent layer 8 bytes for
its state. Before each step it holds all that the step needs against that, in blocks that vLLM says have it, so that
whatever a load brings is looked at byte by byte. Copies between blocks and staging are put off as long as vLLM allows.
"""

import time

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, resolve_kv_cache_block_sizes
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from engine.conftest import PATIENCE_S
from tiertune_connector.vllm.connector import TierTuneConnector

MASK = (1 << 64) - 1
VOCABULARY = 4000
STALE = 0x55


class Late:
    """The worker's copies, each done only when it is waited for, or by chance."""

    def __init__(self, worker, random):
        self._worker, self._random, self._pending = worker, random, []

    def submit_store(self, job, source, target):
        self._pending.append((job, self._worker.submit_store, source, target))
        return True

    def submit_load(self, job, source, target, expedited=False):
        self._pending.append((job, self._worker.submit_load, source, target))
        return True

    def wait(self, jobs):
        self._do([each for each in self._pending if each[0] in jobs])

    def get_finished(self):
        self._do([each for each in self._pending if self._random.random() < 0.4])
        return self._worker.get_finished()

    def shutdown(self):
        self._pending.clear()
        self._worker.shutdown()

    def _do(self, some):
        for each in some:
            self._pending.remove(each)
            job, copy, source, target = each
            assert copy(job, source, target)


class Played:
    """One engine; ``step`` it until nobody waits."""

    def __init__(self, config, cache, seed=0):
        self.random = np.random.default_rng(seed)
        config.cache_config.num_gpu_blocks = cache.num_blocks
        block, unit = resolve_kv_cache_block_sizes(cache, config)
        hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(unit, hash_function)
        self.worker = TierTuneConnector(config, KVConnectorRole.WORKER, cache)
        self._specs = [group.kv_cache_spec for group in cache.kv_cache_groups]
        self._pages = self._make_worker(cache)
        structured = StructuredOutputManager(config)
        self.scheduler = Scheduler(config, cache, structured, block_size=block, hash_block_size=unit)
        self.tier = self.scheduler.connector.tier
        self._tables: dict[str, tuple[list[int], ...]] = {}
        self._texts: dict[str, np.ndarray] = {}
        self.answers: dict[str, list[int]] = {}
        self.loaded = 0
        """Blocks that came from staging."""

    def _make_worker(self, cache):
        (page,) = {spec.page_size_bytes for spec in self._specs}
        (tensor,) = {tensor.size for tensor in cache.kv_cache_tensors}
        pages = torch.full((tensor // page, page), STALE, dtype=torch.int8)
        blocks = CanonicalKVCaches(
            [CanonicalKVCacheTensor(pages, page)], [[CanonicalKVCacheRef(0, page)] for _ in self._specs]
        )
        side: OffloadingConnectorWorker = self.worker.connector_worker
        side._init_worker(blocks)
        side.worker = Late(side.worker, self.random)
        return pages.numpy().view(np.uint64)

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
        while self.scheduler.has_requests():
            assert time.monotonic() < until, f"stuck: {self.scheduler.requests}"
            self.step()

    @property
    def loading(self):
        """Whether a request waits for what is copied to the device."""
        waits = RequestStatus.WAITING_FOR_REMOTE_KVS
        return any(request.status is waits for request in self.scheduler.requests.values())

    def knows_nothing(self):
        """Whether no request left a trace, nor a row of staging that is kept for one."""
        tier, staging = self.tier, self.tier._staging._primary
        left = (tier._prompts, tier._contexts, tier._lookups._asks, tier._names, tier._loading, len(tier.backlog))
        used = staging._num_allocated_chunks - len(staging._free_list)
        return not any(left) and staging._num_evictable_cache_chunks == used

    def step(self):
        """Loads begin before the forward pass or after it, as they do on a device."""
        output = self.scheduler.schedule()
        metadata = output.kv_connector_metadata
        self.loaded += sum(len(job.dst_spec.block_ids) for job in metadata.load_jobs.values())
        self.worker.bind_connector_metadata(metadata)
        self.worker.handle_preemptions(metadata)
        early = self.random.random() < 0.5
        if early:
            self.worker.start_load_kv(None)
        tokens = self._forward(output)
        if not early:
            self.worker.start_load_kv(None)
        self.worker.wait_for_save()
        _, received = self.worker.get_finished(output.finished_req_ids)
        told = KVConnectorOutput(
            finished_recving=received, kv_connector_worker_meta=self.worker.build_connector_worker_meta()
        )
        self.worker.clear_connector_metadata()
        names = list(output.num_scheduled_tokens)
        computed = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[tokens[name] for name in names],
            kv_connector_output=told,
        )
        self.scheduler.update_from_output(output, computed)
        if not names:
            time.sleep(0.0005)

    def close(self):
        self.scheduler.shutdown()
        self.worker.shutdown()

    # -- the model

    def _forward(self, output):
        for block in output.new_block_ids_to_zero or ():
            self._pages[block] = 0
        for copy in output.kv_cache_block_copies or ():
            self._pages[copy.dst_block_id] = self._pages[copy.src_block_id]
        spans = self._spans(output)
        for name, first in spans.items():
            self._check_states(name, first)
        tokens = {name: self._compute(name, first, output.num_scheduled_tokens[name]) for name, first in spans.items()}
        for name, first in spans.items():  # now: a request may have blocks that another one fills in the same step
            self._check_tokens(name, first)
        return tokens

    def _spans(self, output):
        """The first token that each request computes in the step; their tables of blocks are followed."""
        for name in output.finished_req_ids:
            self._tables.pop(name, None)
            self._texts.pop(name, None)
        spans = {}
        for new in output.scheduled_new_reqs:
            self._tables[new.req_id] = tuple(list(ids) for ids in new.block_ids)
            spans[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for name, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if name in cached.resumed_req_ids:
                self._tables[name] = tuple(list(ids) for ids in blocks)
            elif blocks is not None:
                for table, more in zip(self._tables[name], blocks, strict=True):
                    table.extend(more)
            spans[name] = computed
        return spans

    def _text(self, name):
        """Of each prefix of a request's tokens a number; the first is of none."""
        request = self.scheduler.requests[name]
        known = self._texts.get(name)
        if known is None or len(known) != request.num_tokens + 1:
            known = self._texts[name] = prefixes(request.all_token_ids)
        return known

    def _check_states(self, name, first):
        text = self._text(name)
        for group, (spec, table) in enumerate(zip(self._specs, self._tables[name], strict=True)):
            if isinstance(spec, MambaSpec) and first:
                block = table[(first - 1) // spec.block_size]
                assert self._pages[block, 0] == text[first] ^ tag(group), f"{name}: state after {first} tokens"

    def _check_tokens(self, name, first):
        text = self._text(name)
        for group, (spec, table) in enumerate(zip(self._specs, self._tables[name], strict=True)):
            if isinstance(spec, MambaSpec):
                continue
            start = max(0, first - spec.sliding_window + 1) if isinstance(spec, SlidingWindowSpec) else 0
            places = np.arange(start, first)
            blocks, words = self._where(spec, table, places)
            right = self._pages[blocks, words] == text[places + 1] ^ tag(group)
            assert right.all(), f"{name}: group {group}, tokens {places[~right].tolist()} of {first}"

    def _where(self, spec, table, places):
        blocks = np.asarray(table, dtype=np.int64)[places // spec.block_size]
        assert (blocks > 0).all(), f"no block for some of {places.tolist()}"
        return blocks, places % spec.block_size * (self._pages.shape[1] // spec.block_size)

    def _compute(self, name, first, count):
        request, text, end = self.scheduler.requests[name], self._text(name), first + count
        for group, (spec, table) in enumerate(zip(self._specs, self._tables[name], strict=True)):
            if isinstance(spec, MambaSpec):
                self._pages[table[(end - 1) // spec.block_size], 0] = text[end] ^ tag(group)
                continue
            places = np.arange(first, end)
            blocks, words = self._where(spec, table, places)
            self._pages[blocks, words] = text[places + 1] ^ tag(group)
        if end < request.num_tokens:
            return []
        token = int(text[end] % VOCABULARY)
        self.answers[name].append(token)
        return [token]


def following(state, token):
    """The number of a prefix with one token more."""
    state = (state * 6364136223846793005 + token * 1442695040888963407 + 1) & MASK
    return state ^ state >> 29


def prefixes(tokens):
    """Of every prefix its number, that of none first."""
    told = [0]
    for token in tokens:
        told.append(following(told[-1], int(token)))
    return np.asarray(told, dtype=np.uint64)


def answer(prompt, most):
    """What the model says."""
    state, said = int(prefixes(prompt)[-1]), []
    for _ in range(most):
        said.append(state % VOCABULARY)
        state = following(state, said[-1])
    return said


def tag(group):
    """What tells the bytes of a group from those of another."""
    return np.uint64((group + 1) * 0x9E3779B97F4A7C15 & MASK)
