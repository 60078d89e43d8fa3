"""TierTune's store as vLLM's one secondary tier."""

# mypy: allow-subclassing-any, no-warn-return-any
# Where mypy runs, vLLM is not installed.

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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

from tiertune_connector.cost import PrefillCost
from tiertune_connector.profile.steps import Steps
from tiertune_connector.protocol.messages import Side
from tiertune_connector.protocol.reporting import prefill_line
from tiertune_connector.tracing import RequestTrace, open_tracing
from tiertune_connector.vllm import compat, metrics
from tiertune_connector.vllm.facts import UNKNOWN, Facts, Prompt
from tiertune_connector.vllm.gate import EngineGate
from tiertune_connector.vllm.joining import join
from tiertune_connector.vllm.lookups import Ask, Lookups
from tiertune_connector.vllm.settings import EngineSettings
from tiertune_connector.vllm.telemetry import Telemetry
from tiertune_connector.vllm.transfers import Job, Transfers

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector

DRAIN_S = 2.0
"""Most that a drain waits for the store, because it runs on the scheduler thread."""


@dataclass(slots=True, eq=False)
class _Known:
    """What is known of a request."""

    context: ReqContext
    prompt: Prompt = UNKNOWN
    ask: Ask | None = None
    """None: it is not looked up, or not any more."""
    load: Job | None = None
    """The load whose end vLLM has not been told."""
    trace: RequestTrace | None = None
    prefilling: bool = True
    """It has no first token yet: for others, a step brings nothing new."""


_ENDED = _Known(None, prefilling=False)
"""Of a request that has ended, or that nobody has told of."""


class TierTuneTier(SecondaryTierManager):
    """Answers as the gate decided, and moves chunks on other threads. Runs on the scheduler thread.

    No method waits for the store longer than a millisecond, except at the start, in drains and at the end. vLLM's
    touches are not heeded: lookups name the whole prompt, and so touch what the engine has itself.
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
        self._ranks = offloading_spec.config.parallel.world_size
        self._copies = self._ranks if offloading_spec.config.replicated_layout else 1
        """Copies of a chunk that all ranks together make: one, in parts, or one each if all have the same KV."""
        steps = Steps(
            stage=settings.stage,
            clock=time.monotonic,
            observe=prefill.observe_step,
            decode_tokens=facts.decode_tokens,
            ranks=self._ranks,
        )
        tracing = open_tracing(
            settings.otlp_endpoint,
            chunk_bytes=fetched_bytes,
            model=namespace.model,
            attributes={"tiertune.stage": settings.stage, "tiertune.namespace": namespace.digest},
        )
        self.telemetry = Telemetry(self._client, steps=steps, tracing=tracing, chunk_tokens=chunk_tokens)
        self.gate = EngineGate(self._client, prefill, facts, settings, fetched_bytes, decode_s=lambda: steps.decode_s)
        self._lookups = Lookups(
            self._client,
            choose=self.gate.choose,
            clock=time.monotonic,
            chunk_tokens=chunk_tokens,
            deadline_s=settings.lookup_deadline,
        )
        self._transfers = Transfers(self._client, np.asarray(primary_kv_view).view(np.uint8))
        self._requests: dict[str, _Known] = {}
        self.promoted: list[tuple[str, Sequence[OffloadKey]]] = []
        """Requests, with the keys that came from the store since the connector last took this for vLLM's events."""
        self._held_by = -1
        """A step's number: nothing is loaded until the output of a later step has come."""

    # -- for the connector

    def expect(self, request: str, prompt: Prompt) -> None:
        """A request has come: ask the store for all of its chunks."""
        known = self._requests[request]
        known.prompt = prompt
        self.gate.backlog.arrived(request, prompt.tokens)
        # vLLM takes nothing behind the last whole chunk of any group, and finds the chain before it looks for that.
        whole = min(group.chunk_tokens * len(keys) for group, keys in zip(self._groups, prompt.keys, strict=True))
        chunks = -(-whole // self._groups[0].chunk_tokens)
        known.trace = self.telemetry.tracing.arrived(request, prompt.headers, prompt.tokens, chunks)
        if prompt.reads and known.context.load_tier_filter.allows(self.medium, self.locality):
            chain, *others = ([bytes(key) + prompt.suffix for key in keys] for keys in prompt.keys)
            sides = [
                Side(keys, group.chunk_tokens, group.window_chunks or 0)
                for group, keys in zip(self._groups[1:], others, strict=True)
            ]
            chain, backlog_s = chain[:chunks], self.gate.backlog.seconds(request)
            known.ask = self._lookups.expect(
                request, prompt.tokens, chain, sides, prompt.tenant, trace=known.trace, backlog_s=backlog_s
            )

    def bind(self, staging: "CPUOffloadingManager") -> None:
        """Call before the first request; ``staging`` is vLLM's primary tier.

        0.33 has a lock against a thread that polls tiers between steps; this tier asks for no such thread, so there is
        none.
        """
        self._staging = staging

    def must_wait(self, request: str, computed_tokens: int) -> bool:
        """Whether asking for its chunks would bring nothing new yet; constant time, a short wait and the decision."""
        known = self._known(request)
        if known.load is not None and not known.load.over:
            return True

        def staged(key: bytes) -> bool:
            return self._staged(OffloadKey(key.removesuffix(known.prompt.suffix)), known.context)

        return known.ask is not None and not self._lookups.settled(known.ask, computed_tokens, staged)

    def answered(self, request: str, tokens: int) -> None:
        """The scheduler has been told that it need not compute the first ``tokens`` of the request."""
        known = self._known(request)
        self.gate.backlog.computed(request, min(tokens, known.prompt.tokens - 1))
        if known.ask is not None:
            self.telemetry.settled(known.ask)
            self.gate.ended(known.ask)

    def begun(self, request: str, tokens: int) -> None:
        """The scheduler has given the request blocks, of which the first ``tokens`` come from elsewhere, or have come.

        They may be fewer than it was told: while there was no room, staging may have lost some. And a connector beside
        this one may bring them.
        """
        ask = self._known(request).ask
        if ask is not None:
            self.telemetry.begun(ask, tokens)

    def given(self, scheduled: Iterable[tuple[str, int, int]]) -> int:
        """The engine has a step to do: (request, first token, end token) of each request in it. Returns its number."""
        told = list(scheduled)
        prompts = [(known, end) for request, _, end in told if (known := self._known(request)).prefilling]
        return self.telemetry.steps.given([(first, end) for _, first, end in told], partial(self._computed, prompts))

    def hold(self) -> None:
        """Staging's rows get new owners while the worker may still copy for the old ones: fill none of them yet.

        With the next step the worker ends those copies (vLLM's ``jobs_to_flush``). 0.33 holds promotions by itself.
        """
        self._held_by = self.telemetry.steps.last

    def part(self) -> None:
        """Present requests read and write no more: they may be computed with both old weights and new ones."""
        for known in self._requests.values():
            known.prompt, known.ask = replace(known.prompt, writes=False), None

    def measured(self, seconds: Mapping[int, Sequence[float]], gpus: Sequence[str]) -> None:
        """Device seconds of steps, by their numbers; each rank names its ``gpus`` once, maybe in different steps."""
        self.telemetry.steps.measured(seconds)
        if gpus:
            self._client.gpus = list(dict.fromkeys([*self._client.gpus, *gpus]))

    def copied(self, nbytes: int, seconds: float) -> None:
        """The worker copied ``nbytes`` from staging to its devices in ``seconds``, both summed over the ranks."""
        self.gate.copied(nbytes // self._copies, seconds / self._ranks)

    # -- vLLM's tier

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._requests[req_context.req_id] = _Known(req_context)
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        known = self._known(req_context.req_id)
        if known.ask is None or self.telemetry.steps.ended <= self._held_by:
            return LookupResult.MISS
        fetched = self._lookups.offers(known.ask, bytes(key) + known.prompt.suffix)
        return LookupResult.HIT if fetched else LookupResult.MISS

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Fetches the chunks, unless the request ended in this very step, or its adapter has other contents by now."""
        request = job_metadata.req_context.req_id
        known = self._known(request)
        ask = known.ask if known.prompt.stands() else None
        suffix = known.prompt.suffix if ask else b""  # else telemetry would take it for a fetch that failed
        job = Job(
            job_metadata.job_id,
            request,
            [bytes(key) + suffix for key in job_metadata.keys],
            job_metadata.chunk_ids.tolist(),
            loads=True,
            deadline_s=ask.load_s if ask else 0.0,
            suffix=suffix,
        )
        if known is not _ENDED:
            known.load = job
        (self._transfers.load if ask else self._transfers.skip)(job)

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Offers the store the whole chunks in the prompt's order; vLLM names them as a set.

        For a recurrent model vLLM may also name the partial chunk at a prompt's end: that is looked up in staging only.
        """
        request, position = job_metadata.req_context.req_id, job_metadata.req_context.get_offload_key_position
        prompt = self._known(request).prompt
        named = zip(job_metadata.keys, job_metadata.chunk_ids.tolist(), strict=True)
        rows = sorted(
            (place, name, chunk)
            for name, chunk in (named if prompt.writes and prompt.stands() else ())
            if not (place := position(name) or 0) % self._tokens_by_group[get_offload_group_idx(name)]
        )
        job = Job(
            job_metadata.job_id,
            request,
            [bytes(name) + prompt.suffix for _, name, _ in rows],
            [chunk for _, _, chunk in rows],
            loads=False,
            deadline_s=self._settings.store_deadline,
            suffix=prompt.suffix,
            tenant=prompt.tenant,
        )
        (self._transfers.store if rows else self._transfers.skip)(job)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        return [self._result(job) for job in self._transfers.take()]

    def serve_external_requests(self, parent: ParentManager) -> None:
        """Take the store's answers, at the end of a step.

        What staging has and the store says it lacks is cascaded again: it was restarted or flushed, or evicted it.
        """
        for ask in self._lookups.answered():
            known, reply = self._known(ask.request), ask.reply.result()
            if known.ask is not ask:
                continue
            self.telemetry.answered(ask)
            if reply.reason:
                continue
            self.gate.prefetch(ask, compat.room(self._staging))
            there, (chain, *sides) = len(reply.tiers), known.prompt.keys
            if not known.prompt.writes or there == len(ask.chain):  # it also has what a cut there needs of other groups
                continue
            keys = [
                key
                for key in (*chain[there:], *(key for side in sides for key in side))
                if self._staged(key, known.context)
            ]
            if keys:
                self.submit_store(parent.create_store_job(keys, known.context))

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        for request in context.preempted_req_ids:
            preempted = self._known(request).ask
            if preempted is not None:
                self._lookups.preempted(preempted)

    def on_request_finished(self, req_context: ReqContext) -> None:
        """The request gets no more jobs."""
        request = req_context.req_id
        known = self._requests.pop(request, _ENDED)
        known.prefilling = False  # steps in flight bring nothing new
        self.gate.backlog.left(request)
        if known.ask is not None and (known.load is None or known.load.over):  # else its load still goes on
            self.gate.ended(known.ask)
        self.telemetry.finished(known.ask, known.trace)

    def drain_jobs(self) -> None:
        self._transfers.drain(DRAIN_S)

    def shutdown(self) -> None:
        self._transfers.close(DRAIN_S)
        for known in self._requests.values():
            self.telemetry.tracing.ended(known.trace)
        self.telemetry.close()
        self._client.close()

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:  # noqa: ARG003
        return metrics.definitions()

    def get_stats(self) -> OffloadingConnectorStats | None:
        return metrics.connector_stats(self.telemetry.changes())

    # -- within

    def _known(self, request: str) -> _Known:
        return self._requests.get(request, _ENDED)

    def _staged(self, key: OffloadKey, context: ReqContext) -> bool:
        """Whether staging has a chunk whole."""
        return self._staging.lookup(key, context) is LookupResult.HIT

    def _computed(self, prompts: Iterable[tuple[_Known, int]]) -> None:
        """A step computed these prompts up to a token each."""
        for known, end in prompts:
            if not known.prefilling:  # it has ended, or was given its first decode before this output
                continue
            self.gate.backlog.computed(known.context.req_id, end)
            if end >= known.prompt.tokens:
                known.prefilling = False
                if known.ask is not None:
                    self.telemetry.first_token(known.ask)

    def _result(self, job: Job) -> JobResult:
        done = [OffloadKey(key.removesuffix(job.suffix)) for key in job.done]
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
        known = self._known(job.request)
        if known.load is job:  # else its request has ended, and another one may have its name
            known.load = None
            # As new as their arrival. vLLM takes them to be as old as their load's begin: those of a slow load would be
            # the first to leave, before their request can take them.
            self._staging.touch(came, known.context)
            if known.ask is not None:
                self.telemetry.loaded(known.ask, job)
                self.gate.ended(known.ask)
        self.promoted.append((job.request, came))
