"""Another connector beside TierTune's in a `MultiConnector`: it keeps blocks of prompts, and fails now and then."""

import zlib
from dataclasses import dataclass, field

import numpy as np
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from tiertune_connector.vllm.connector import TierTuneConnector

KEPT: dict[tuple[bytes, int], np.ndarray] = {}
"""Blocks of all engines, by hash and rank."""


@dataclass
class Told(KVConnectorMetadata):
    loads: list[tuple[str, list[tuple[bytes, int]]]] = field(default_factory=list)
    saves: list[tuple[bytes, int]] = field(default_factory=list)


class Beside(KVConnectorBase_V1, SupportsHMA):
    """`at_once`: it loads in the step that computes with it; `fails`: a share of its loads. Of one group."""

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        transfer, self._rank = vllm_config.kv_transfer_config, vllm_config.parallel_config.rank
        self._at_once = transfer.kv_connector_extra_config["at_once"]
        self._fails = transfer.kv_connector_extra_config["fails"]
        self._random = np.random.default_rng(zlib.crc32(f"{transfer.engine_id} {role} {self._rank}".encode()))
        self._block = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self._requests, self._computed, self._loads = {}, {}, []
        self._pending, self._bad, self._failed = [], set(), False
        self.pages = None

    # -- the scheduler's side

    def on_new_request(self, request):
        self._requests[request.request_id] = request

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        first, count = num_computed_tokens // self._block, 0
        last = (request.num_tokens - self._at_once) // self._block
        while first + count < last and (bytes(request.block_hashes[first + count]), 0) in KEPT:
            count += 1
        self._computed[request.request_id] = first
        return count * self._block, count > 0 and not self._at_once

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        first = self._computed.pop(request.request_id, 0)
        places = range(first, first + num_external_tokens // self._block)
        if places:
            into = [(bytes(request.block_hashes[place]), blocks.blocks[0][place].block_id) for place in places]
            self._loads.append((request.request_id, into))

    def build_connector_meta(self, scheduler_output):
        told, self._loads = Told(self._loads), []
        for name, count in scheduler_output.num_scheduled_tokens.items():
            request = self._requests[name]
            table = scheduler_output.kv_connector_block_state.resolve_block_ids(name)[0]
            end = min(request.num_computed_tokens + count, request.num_prompt_tokens) // self._block
            told.saves += [(bytes(request.block_hashes[place]), table[place]) for place in range(end)]
        return told

    def request_finished(self, request, block_ids):
        self._requests.pop(request.request_id)
        return False, None

    def request_finished_all_groups(self, request, block_ids):
        return self.request_finished(request, block_ids)

    # -- the worker's

    def start_load_kv(self, forward_context, **kwargs):
        self._pending += self._get_connector_metadata().loads
        self._failed = False
        if self._at_once:
            self._load(1.0)

    def wait_for_layer_load(self, layer_name): ...

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs): ...

    def wait_for_save(self):
        for key, block in self._get_connector_metadata().saves:
            if not self._failed and self._random.random() < 0.05:  # else it had all, and nothing came from TierTune
                KEPT.setdefault((key, self._rank), self.pages[block].copy())

    def get_finished(self, finished_req_ids):
        return None, self._load(0.3)

    def get_block_ids_with_load_errors(self):
        bad, self._bad = self._bad, set()
        return bad

    def _load(self, share):
        done = [each for each in self._pending if self._random.random() < share]
        for each in done:
            self._pending.remove(each)
            _, blocks = each
            come = self._random.integers(len(blocks)) if self._random.random() < self._fails else len(blocks)
            for place, (key, block) in enumerate(blocks):
                self.pages[block] = KEPT[key, self._rank] if place < come else 0
            self._bad |= {block for _, block in blocks[come:]}
            self._failed |= come < len(blocks)
        return {name for name, _ in done}


def transfer(of_tiertune, **settings):
    """vLLM's configuration of both, TierTune first."""
    other = {"kv_connector": "Beside", "kv_connector_module_path": "engine.beside", "kv_role": "kv_both"}
    first = {name: getattr(of_tiertune, name) for name in ("kv_connector", "kv_role", "kv_connector_extra_config")}
    return KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        engine_id=of_tiertune.engine_id,
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"connectors": [first, other | {"kv_connector_extra_config": settings}]},
    )


def both(config, role, cache, pages):
    """What vLLM talks to, and TierTune's in it."""
    made = MultiConnector(config, role, cache)
    ours, other = made.sub_connectors
    assert isinstance(ours, TierTuneConnector)
    other.pages = pages
    return made, ours
