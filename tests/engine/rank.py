"""One rank of a played engine: its worker's side of the connector, its blocks, and its share of what the model knows.

What it "computes" follows from the tokens before: of attention 8 bytes for each token, of a recurrent layer 8 bytes for
its state. Before each step it holds all that the step needs against that, in blocks that vLLM says have it, so that
whatever a load brings is looked at byte by byte. Copies between blocks and staging are made at once, or put off as long
as vLLM allows.
"""

import copy
import pickle
import zlib

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

MASK = (1 << 64) - 1
VOCABULARY = 4000
STALE = 0x55


class Late:
    """The worker's copies, each done only when it is waited for, or by chance."""

    def __init__(self, worker, random):
        self._worker, self._random, self._pending = worker, random, []

    def submit_store(self, job, source, target):
        return self._submit(job, self._worker.submit_store, source, target)

    def submit_load(self, job, source, target, expedited=False):
        return self._submit(job, self._worker.submit_load, source, target)

    def wait(self, jobs):
        self._do([each for each in self._pending if each[0] in jobs])

    def get_finished(self):
        self._do([each for each in self._pending if self._random.random() < 0.4])
        return self._worker.get_finished()

    def shutdown(self):
        self._pending.clear()
        self._worker.shutdown()

    def _submit(self, *copied):
        self._pending.append(copied)
        if self._random.random() < 0.2:
            self._do([copied])
        return True

    def _do(self, some):
        for each in some:
            self._pending.remove(each)
            job, copied, source, target = each
            assert copied(job, source, target)


class Text:
    """A prompt and what the model says to it; every prefix has a number."""

    def __init__(self, prompt):
        self._tokens, self._numbers = [], [0]
        for token in prompt:
            self._append(int(token))

    def numbers(self, count):
        """Of the prefixes of up to ``count`` tokens, that of none first."""
        while len(self._numbers) <= count:
            self._append(self._numbers[-1] % VOCABULARY)
        return np.asarray(self._numbers[: count + 1], dtype=np.uint64)

    def said(self, place, count):
        """``count`` tokens from a place on."""
        self.numbers(place + count)
        return self._tokens[place : place + count]

    def _append(self, token):
        self._tokens.append(token)
        self._numbers.append(following(self._numbers[-1], token))


class Rank:
    """``make`` makes its connector."""

    def __init__(self, config, cache, number, random, make):
        own = copy.copy(config)
        own.parallel_config = copy.copy(config.parallel_config)
        own.parallel_config.rank = number
        self._number, self._random = number, random
        self._specs = [group.kv_cache_spec for group in cache.kv_cache_groups]
        (page,) = {spec.page_size_bytes for spec in self._specs}
        (tensor,) = {tensor.size for tensor in cache.kv_cache_tensors}
        pages = torch.full((tensor // page, page), STALE, dtype=torch.int8)
        self.pages = pages.numpy().view(np.uint64)
        self.worker, ours = make(own, KVConnectorRole.WORKER, cache, self.pages)
        refs = [[CanonicalKVCacheRef(0, page)] for _ in self._specs]
        side = ours.connector_worker
        side.spec.splits = [1] * len(self._specs)
        side._init_worker(CanonicalKVCaches([CanonicalKVCacheTensor(pages, page)], refs))
        side.worker = Late(side.worker, random)
        self._tables: dict[str, tuple[list[int], ...]] = {}
        self.texts: dict[str, Text] = {}
        self._computed: dict[str, int] = {}
        """Tokens, without drafts that were not right: a scheduler that is ahead does not know yet."""
        self._known: dict[str, int] = {}
        """Tokens that are there to be computed."""
        self._states: dict[tuple[str, int], tuple[int, int]] = {}
        """By request and group the block of its table that the state is in, and how many behind it for drafts."""
        self.failed: set[str] = set()
        """Requests that another connector has failed: what they compute in this step is nothing."""
        self.faulty = False
        """Whether all requests fail so."""
        self.encoded = 0
        """Images and the like."""
        self._media: dict[str, list[MultiModalFeatureSpec]] = {}

    def execute(self, output, drafts):
        """Loads begin before the forward pass or after it, as they do on a device.

        ``drafts`` are those of requests of which vLLM leaves them to the worker; all ranks have the same.
        """
        metadata = pickle.loads(pickle.dumps(output.kv_connector_metadata))
        self.worker.bind_connector_metadata(metadata)
        self.worker.handle_preemptions(metadata)
        early = output.has_sync_kv_loads or self._random.random() < 0.5
        if early:
            self.worker.start_load_kv(None)
        bad = self.worker.get_block_ids_with_load_errors()
        tokens = self._forward(output, drafts, bad)
        if not early:
            self.worker.start_load_kv(None)
        self.worker.wait_for_save()
        _, received = self.worker.get_finished(output.finished_req_ids)
        told = KVConnectorOutput(
            finished_recving=received,
            invalid_block_ids=bad | self.worker.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=self.worker.build_connector_worker_meta(),
        )
        self.worker.clear_connector_metadata()
        names = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[tokens[name] for name in names],
            kv_connector_output=told,
        )

    # -- the model

    def _forward(self, output, drafts, bad):
        for block in output.new_block_ids_to_zero or ():
            self.pages[block] = 0
        for each in output.kv_cache_block_copies or ():
            self.pages[each.dst_block_id] = self.pages[each.src_block_id]
        spans = self._spans(output)
        self._encode(output)
        self.failed = {
            name for name, first in spans.items() if self.faulty or not bad.isdisjoint(self._blocks(name, first))
        }
        for name, first in spans.items():
            self._carry_states(name, first, first + output.num_scheduled_tokens[name])
        tokens = {}
        for name, first in spans.items():
            told = output.scheduled_spec_decode_tokens.get(name) or []
            if told and min(told) < 0:
                told = drafts(name, self.texts[name], first + output.num_scheduled_tokens[name] - len(told), len(told))
            tokens[name] = self._compute(name, first, output.num_scheduled_tokens[name], told)
        for name, first in spans.items():  # now: a request may have blocks that another one fills in the same step
            self._check_tokens(name, first)
        return tokens

    def _encode(self, output):
        """Of what came with a request when it was new, even if it did not have to be encoded then."""
        self._media |= {new.req_id: new.mm_features for new in output.scheduled_new_reqs}
        for name, numbers in output.scheduled_encoder_inputs.items():
            assert all(self._media[name][number].data is not None for number in numbers), f"{name}: no image"
            self.encoded += len(numbers)

    def _spans(self, output):
        """The first token that each request computes in the step; their tables of blocks are followed."""
        for name in output.finished_req_ids:
            for of_request in (self._tables, self.texts, self._computed, self._known):
                of_request.pop(name, None)
        begin = {new.req_id for new in output.scheduled_new_reqs} | output.scheduled_cached_reqs.resumed_req_ids
        self._states = {at: state for at, state in self._states.items() if at[0] not in begin and at[0] in self._tables}
        spans = {}
        for new in output.scheduled_new_reqs:
            self._tables[new.req_id] = tuple(list(ids) for ids in new.block_ids)
            self.texts[new.req_id] = Text(read(new.prompt_token_ids, new.mm_features))
            self._known[new.req_id] = len(new.prefill_token_ids or new.prompt_token_ids)
            self._computed[new.req_id] = new.num_computed_tokens
            spans[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for name, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if name in cached.resumed_req_ids:
                self._tables[name] = tuple(list(ids) for ids in blocks)
                self._known[name], self._computed[name] = len(cached.all_token_ids[name]), computed
            elif blocks is not None:
                for table, more in zip(self._tables[name], blocks, strict=True):
                    table.extend(more)
            self._computed[name] = min(self._computed[name], computed)
            spans[name] = self._computed[name]
        return spans

    def _carry_states(self, name, first, end):
        """To the block where the step ends, as vLLM's runner does for recurrent layers (`mamba_utils`)."""
        number = self.texts[name].numbers(first)[first]
        for group, (spec, table) in enumerate(zip(self._specs, self._tables[name], strict=True)):
            if not isinstance(spec, MambaSpec):
                continue
            last, ahead = self._states.get((name, group), ((first - 1) // spec.block_size, 0))
            now = (end - 1) // spec.block_size
            if last not in (-1, now):
                self.pages[table[now]] = self.pages[table[last + ahead]]
                ahead = 0
            if first:
                state = self.pages[table[now + ahead], 0]
                assert state == number ^ self._tag(group), f"{name}: state after {first} tokens"
            self._states[name, group] = now, ahead

    def _keep_states(self, name, group, numbers, drafts, right):
        """One after each draft, in a block of its own, and where a block of tokens ends in its own, if it is right."""
        (now, _), table, size = self._states[name, group], self._tables[name][group], self._specs[group].block_size
        sure = len(numbers) - 1 - drafts
        for count in range(drafts + 1):
            self.pages[table[now + count], 0] = numbers[sure + count] ^ self._tag(group)
        whole = (sure + right) // size
        if whole * size >= sure:
            self.pages[table[whole - 1]] = self.pages[table[now + whole * size - sure]]
        self._states[name, group] = now, 0 if whole - 1 == now else right

    def _check_tokens(self, name, first):
        if name in self.failed:
            return
        text = self.texts[name].numbers(first)
        for group, (spec, table) in enumerate(zip(self._specs, self._tables[name], strict=True)):
            if isinstance(spec, MambaSpec):
                continue
            start = max(0, first - spec.sliding_window + 1) if isinstance(spec, SlidingWindowSpec) else 0
            places = np.arange(start, first)
            blocks, words = self._where(spec, table, places)
            right = self.pages[blocks, words] == text[places + 1] ^ self._tag(group)
            assert right.all(), (
                f"{name}: rank {self._number}, group {group}, tokens {places[~right].tolist()} of {first}"
            )

    def _blocks(self, name, first):
        return self._tables[name][0][: -(-first // self._specs[0].block_size)]

    def _where(self, spec, table, places):
        blocks = np.asarray(table, dtype=np.int64)[places // spec.block_size]
        assert (blocks > 0).all(), f"no block for some of {places.tolist()}"
        return blocks, places % spec.block_size * (self.pages.shape[1] // spec.block_size)

    def _compute(self, name, first, count, drafts):
        """What it says: the right ones of ``drafts``, which are the last tokens of ``count``, and one more."""
        text, sure = self.texts[name], first + count - len(drafts)
        numbers = text.numbers(sure).tolist()
        for token in drafts:
            numbers.append(following(numbers[-1], token))
        numbers = np.asarray(numbers, dtype=np.uint64) ^ np.uint64(STALE if name in self.failed else 0)
        said = [] if sure < self._known[name] or name in self.failed else text.said(sure, 1)
        while said and len(said) <= len(drafts) and drafts[len(said) - 1] == said[-1]:
            said += text.said(sure + len(said), 1)
        right = max(0, len(said) - 1)
        for group, (spec, table) in enumerate(zip(self._specs, self._tables[name], strict=True)):
            if isinstance(spec, MambaSpec):
                self._keep_states(name, group, numbers, len(drafts), right)
                continue
            places = np.arange(first, first + count)
            blocks, words = self._where(spec, table, places)
            self.pages[blocks, words] = numbers[places + 1] ^ self._tag(group)
        self._computed[name] = sure + right
        if said:
            self._known[name] = sure + len(said)
        return said

    def _tag(self, group):
        """What tells the bytes of a group on a rank from all others."""
        return np.uint64((group + 1 + 16 * self._number) * 0x9E3779B97F4A7C15 & MASK)


def following(state, token):
    """The number of a prefix with one token more."""
    state = (state * 6364136223846793005 + token * 1442695040888963407 + 1) & MASK
    return state ^ state >> 29


def read(prompt, media):
    """What the model reads of a prompt: in the places of an image something of that image."""
    tokens = [int(token) for token in prompt]
    for each in media:
        for place in range(each.mm_position.length):
            told = f"{each.identifier} {place}".encode()
            tokens[each.mm_position.offset + place] = VOCABULARY + zlib.crc32(told)
    return tokens


def answer(prompt, most, media=()):
    """What the model says."""
    return Text(read(prompt, media)).said(len(prompt), most)
