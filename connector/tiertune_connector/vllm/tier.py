"""TierTune's store as vLLM's one secondary tier."""

# mypy: allow-subclassing-any, no-warn-return-any
# Where mypy runs, vLLM is not installed.

import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingMetricMetadata,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.base import JobResult, ParentManager, SecondaryTierManager, TransferJob

from tiertune_connector.cost import Backlog, PrefillCost
from tiertune_connector.keys import Namespace
from tiertune_connector.profile.steps import IN_FLIGHT, Steps
from tiertune_connector.protocol.messages import Side
from tiertune_connector.protocol.reporting import prefill_line
from tiertune_connector.tracing import Tracing, open_tracing
from tiertune_connector.vllm import metrics
from tiertune_connector.vllm.choosing import Choosing
from tiertune_connector.vllm.facts import Facts, Prompt
from tiertune_connector.vllm.gate import EngineGate
from tiertune_connector.vllm.joining import join
from tiertune_connector.vllm.lookups import Ask, Lookups
from tiertune_connector.vllm.settings import EngineSettings
from tiertune_connector.vllm.telemetry import Telemetry
from tiertune_connector.vllm.transfers import Job, Transfers

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
    from vllm.v1.request import Request

    from tiertune_connector.vllm.compat import Staging

DRAIN_S = 2.0
"""Most that a drain waits for the store, because it runs on the scheduler thread."""


class TierTuneTier(SecondaryTierManager):
    """Answers as the gate decided, and moves chunks on other threads. Runs on the scheduler thread.

    No method waits for the store, except at the start, in drains and at the end, and for a millisecond if the engine
    has nothing else to do.
    """

    def __init__(
        self,
        offloading_spec: "OffloadingSpec",
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: "BackpressureDetector | None" = None,
        *,
        settings: EngineSettings,
        facts: Facts,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self._settings, self._groups = settings, facts.groups
        self._tokens_by_group = {group.index: group.chunk_tokens for group in facts.groups}
        namespace, chunk_bytes = facts.namespace, self.block_size_bytes
        chunk_tokens, fetched_bytes = namespace.chunk_tokens, chunk_bytes * facts.whole_groups
        self._client = join(settings, namespace, chunk_bytes=chunk_bytes, engine=offloading_spec.config.engine_id)
        prefill = PrefillCost(facts.shape, step_tokens=facts.step_tokens, decode_tokens=facts.decode_tokens)
        self._client.prefill = partial(prefill_line, prefill)
        self.backlog = Backlog(prefill)
        self._ranks = offloading_spec.config.parallel.world_size
        self._copies = self._ranks if offloading_spec.config.replicated_layout else 1
        """Copies of a chunk that all ranks together make: one, in parts, or one each if all have the same KV."""
        self._gate = gate = EngineGate(prefill, facts, settings, chunk_bytes=fetched_bytes)
        steps = Steps(
            stage=settings.stage,
            clock=time.monotonic,
            observe=prefill.observe_step,
            decode_tokens=facts.decode_tokens,
            ranks=self._ranks,
        )
        tracing = _tracing(settings, namespace, fetched_bytes)
        self.telemetry = Telemetry(self._client, steps=steps, tracing=tracing, chunk_tokens=chunk_tokens)
        self._choosing = Choosing(
            self._client, gate, self.backlog, self.telemetry, chunk_tokens=chunk_tokens, needs=facts.needs
        )
        self._lookups = Lookups(
            self._client,
            choose=self._choosing.choose,
            clock=time.monotonic,
            chunk_tokens=chunk_tokens,
            deadline_s=settings.lookup_deadline,
        )
        self._transfers = Transfers(self._client, np.asarray(primary_kv_view).view(np.uint8))
        self._prompts: dict[str, Prompt] = {}
        self._prefilling: set[str] = set()
        """Requests without a first token: for others, a step brings nothing new."""
        self._loading: dict[str, Job] = {}
        """By request: the load whose end vLLM has not been told."""
        self._suffixes: dict[int, bytes] = {}
        """By job: what the store's keys have behind vLLM's."""
        self._contexts: dict[str, ReqContext] = {}
        self._absent: list[Ask] = []
        """Requests whose lookup is answered: staging may have what the store lacks."""
        self.promoted: list[tuple[str, Sequence[OffloadKey]]] = []
        """Requests, with the keys that came from the store since the connector last took this for vLLM's events."""
        self._held_by = -1
        """A step's number: nothing is loaded until the output of a later step has come."""
        self._advancing: deque[tuple[int, dict[str, int]]] = deque(maxlen=IN_FLIGHT)
        """Steps without an output yet, by number: the prompts that each computes, and up to which token."""

    # -- for the connector

    def expect(self, request: str, prompt: Prompt) -> None:
        """A request has come: ask the store for all of its chunks."""
        self._prompts[request] = prompt
        self._prefilling.add(request)
        self.backlog.arrived(request, prompt.tokens)
        self.telemetry.arrived(request, prompt.headers, prompt.tokens, len(prompt.keys[0]))
        if prompt.reads and self._contexts[request].load_tier_filter.allows(self.medium, self.locality):
            chain, *others = ([bytes(key) + prompt.suffix for key in keys] for keys in prompt.keys)
            sides = [
                Side(keys, group.chunk_tokens, group.window_chunks or 0)
                for group, keys in zip(self._groups[1:], others, strict=True)
                if keys
            ]
            backlog_s = self.backlog.seconds(request)
            self._lookups.expect(request, prompt.tokens, chain, sides, prompt.tenant, backlog_s=backlog_s)

    def bind(self, staging: "Staging") -> None:
        """Call before the first request; ``staging`` is vLLM's primary tier."""
        self._staging = staging

    def must_wait(self, request: str, computed_tokens: int) -> bool:
        """Whether asking for the request's chunks would bring nothing new yet. Constant time, except for the decision.

        If the engine has no other request, it waits for the store's reply, once and no longer than vLLM would sleep.
        """
        load = self._loading.get(request)
        if load is not None and not load.over:
            return True
        prompt, context = self._prompts.get(request), self._contexts.get(request)
        if prompt is None or context is None:
            return False

        def staged(key: bytes) -> bool:
            return self._staging.holds(OffloadKey(key.removesuffix(prompt.suffix)), context)

        alone = len(self._prompts) == 1
        return not self._lookups.settled(request, computed_tokens, staged, alone=alone)

    def goes_on(self, request: "Request") -> bool:
        """Whether the request has been given more input since it came (`resumable`)."""
        prompt = self._prompts.get(request.request_id)
        return prompt is not None and request.num_prompt_tokens > prompt.tokens

    def answered(self, request: str, tokens: int) -> None:
        """The scheduler has been told that it need not compute the first ``tokens`` of the request."""
        if (ask := self._lookups.get(request)) is not None:
            self.telemetry.settled(ask, tokens)
            self._choosing.ended(ask)

    def given(self, scheduled: Iterable[tuple[str, int, int]]) -> int:
        """The engine has a step to do: (request, first token, end token) of each request in it. Returns its number."""
        spans, prompts = [], {}
        for request, first, end in scheduled:
            spans.append((first, end))
            if request in self._prefilling:
                prompts[request] = end
        number = self.telemetry.steps.given(spans)
        if prompts:
            self._advancing.append((number, prompts))
        return number

    def output(self) -> None:
        """The output of the oldest step given has come; with asynchronous scheduling the next is given before that."""
        steps = self.telemetry.steps
        steps.output()
        while self._advancing and self._advancing[0][0] <= steps.ended:
            for request, end in self._advancing.popleft()[1].items():
                self._computed(request, end)

    def hold(self) -> None:
        """Staging's rows get new owners while the worker may still copy for the old ones: fill none of them yet.

        With the next step the worker ends those copies (vLLM's ``jobs_to_flush``). 0.33 holds promotions by itself.
        """
        self._held_by = self.telemetry.steps.last

    def part(self) -> None:
        """Present requests read and write no more: they may be computed with both old weights and new ones."""
        for request, prompt in self._prompts.items():
            self._prompts[request] = replace(prompt, writes=False)
            self._lookups.forget(request)

    def measured(self, seconds: Mapping[int, Sequence[float]], gpus: Sequence[str]) -> None:
        """Device seconds of steps, by their numbers; each rank names its ``gpus`` once, maybe in different steps."""
        self.telemetry.steps.measured(seconds)
        if gpus:
            self._client.gpus = list(dict.fromkeys([*self._client.gpus, *gpus]))

    def copied(self, nbytes: int, seconds: float) -> None:
        """The worker copied ``nbytes`` from staging to its devices in ``seconds``, both summed over the ranks."""
        self._gate.copied(nbytes // self._copies, seconds / self._ranks)

    # -- vLLM's tier

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._contexts[req_context.req_id] = req_context
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        prompt = self._prompts.get(req_context.req_id)
        if prompt is None or self.telemetry.steps.ended <= self._held_by:
            return LookupResult.MISS
        fetched = self._lookups.offers(req_context.req_id, bytes(key) + prompt.suffix)
        return LookupResult.HIT if fetched else LookupResult.MISS

    def submit_load(self, job_metadata: TransferJob) -> None:
        request = job_metadata.req_context.req_id
        ask, prompt = self._lookups.get(request), self._prompts.get(request)
        # The request ended in this very step, or its adapter is not any more what the chunks were computed with.
        if ask is None or prompt is None or not prompt.stands():
            self._transfers.skip(job_metadata.job_id, request, [bytes(key) for key in job_metadata.keys])
            return
        keys = self._named(job_metadata.job_id, job_metadata.keys, prompt.suffix)
        chunks = job_metadata.chunk_ids.tolist()
        self._loading[request] = self._transfers.load(job_metadata.job_id, request, keys, chunks, deadline_s=ask.load_s)

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Offers the store the whole chunks in the prompt's order; vLLM names them as a set.

        For a recurrent model vLLM may also name the partial chunk at a prompt's end: that is looked up in staging only.
        """
        request = job_metadata.req_context.req_id
        prompt = self._prompts.get(request)
        if prompt is None or not (prompt.writes and prompt.stands()):
            self._transfers.skip(job_metadata.job_id, request)
            return
        position = job_metadata.req_context.get_offload_key_position
        named = zip(job_metadata.keys, job_metadata.chunk_ids.tolist(), strict=True)
        rows = sorted(
            (place, name, chunk)
            for name, chunk in named
            if not (place := position(name) or 0) % self._tokens_by_group[get_offload_group_idx(name)]
        )
        if not rows:
            self._transfers.skip(job_metadata.job_id, request)
            return
        self._transfers.store(
            job_metadata.job_id,
            request,
            self._named(job_metadata.job_id, (name for _, name, _ in rows), prompt.suffix),
            [chunk for _, _, chunk in rows],
            deadline_s=self._settings.store_deadline,
            tenant=prompt.tenant,
        )

    def get_finished_jobs(self) -> Iterable[JobResult]:
        return [self._result(job) for job in self._transfers.take()]

    def serve_external_requests(self, parent: ParentManager) -> None:
        """Cascade again what staging has and the store said it lacks: it was restarted or flushed, or evicted it."""
        absent, self._absent = self._absent, []
        for ask in absent:
            context, prompt = self._contexts.get(ask.request), self._prompts.get(ask.request)
            if context is None or prompt is None or not prompt.writes:
                continue
            known = ask.reply.result().tiers
            if len(known) == len(ask.chain):  # the store also has what a cut there needs of other groups
                continue
            keys = [
                key
                for key in (*prompt.keys[0][len(known) :], *(key for side in prompt.keys[1:] for key in side))
                if self._staging.holds(key, context)
            ]
            if keys:
                self.submit_store(parent.create_store_job(keys, context))

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        for request in context.preempted_req_ids:
            self._lookups.preempted(request)
        for ask in self._lookups.answered():
            self.telemetry.answered(ask)
            if not ask.reply.result().reason:
                self._absent.append(ask)
                self._choosing.prefetch(ask, self._staging.room())

    def on_request_finished(self, req_context: ReqContext) -> None:
        """The request gets no more jobs."""
        request = req_context.req_id
        self._contexts.pop(request, None)
        self._prompts.pop(request, None)
        self._prefilling.discard(request)
        for _, prompts in self._advancing:  # steps in flight do not count for a later request of its name
            prompts.pop(request, None)
        self.backlog.left(request)
        ask = self._lookups.forget(request)
        if ask is not None and request not in self._loading:  # else its load still goes on
            self._choosing.ended(ask)
        self.telemetry.finished(request, ask)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Nothing to do: lookups name the whole prompt, and so touch what the engine has itself."""

    def drain_jobs(self) -> None:
        self._transfers.drain(DRAIN_S)

    def shutdown(self) -> None:
        self._transfers.close(DRAIN_S)
        self.telemetry.close()
        self._client.close()

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:  # noqa: ARG003
        return metrics.definitions()

    def get_stats(self) -> OffloadingConnectorStats | None:
        return metrics.connector_stats(self.telemetry.changes())

    # -- within

    def _computed(self, request: str, end: int) -> None:
        if request not in self._prefilling:  # it has ended, or was given its first decode before this output
            return
        self.backlog.computed(request, end)
        if end >= self._prompts[request].tokens:
            self._prefilling.discard(request)
            if (ask := self._lookups.get(request)) is not None:
                self.telemetry.first_token(ask)

    def _named(self, job: int, names: Iterable[OffloadKey], suffix: bytes) -> list[bytes]:
        """The store's keys of a job's chunks."""
        self._suffixes[job] = suffix
        return [bytes(name) + suffix for name in names]

    def _result(self, job: Job) -> JobResult:
        suffix = self._suffixes.pop(job.id, b"")
        done = [OffloadKey(key.removesuffix(suffix)) for key in job.done]
        if job.loads:
            self._loaded(job, done)
        else:
            self.telemetry.stored(job)
        return JobResult(
            job.id,
            success=job.succeeded,
            successful_keys=None if job.succeeded else done,
            transfer_time=job.seconds,
            transfer_bytes=len(done) * self.block_size_bytes,
        )

    def _loaded(self, job: Job, came: list[OffloadKey]) -> None:
        own = self._loading.get(job.request) is job  # else that of another request of its name
        if own:
            del self._loading[job.request]
        if not job.succeeded:
            self.backlog.computed(job.request, 0)
        ask = self._lookups.get(job.request)
        if ask is not None:
            self.telemetry.loaded(ask, job)
            if own:
                self._choosing.ended(ask)
        self.promoted.append((job.request, came))


def _tracing(settings: EngineSettings, namespace: Namespace, chunk_bytes: int) -> Tracing:
    return open_tracing(
        settings.otlp_endpoint,
        chunk_tokens=namespace.chunk_tokens,
        chunk_bytes=chunk_bytes,
        model=namespace.model,
        attributes={"tiertune.stage": settings.stage, "tiertune.namespace": namespace.digest},
    )
