"""TierTune's store as vLLM's one secondary tier."""

# mypy: allow-subclassing-any, no-warn-return-any
# Where mypy runs, vLLM is not installed.

import logging
import time
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

import numpy as np
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from tiertune_connector.cost import Decision, ModelShape, PrefillCost
from tiertune_connector.keys import Namespace
from tiertune_connector.serve.client import StoreClient
from tiertune_connector.serve.protocol import LookupReply
from tiertune_connector.vllm.gate import EngineGate
from tiertune_connector.vllm.lookups import Answer, Ask, Lookups
from tiertune_connector.vllm.settings import EngineSettings
from tiertune_connector.vllm.steps import Steps
from tiertune_connector.vllm.transfers import Job, Transfers

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector

logger = logging.getLogger(f"vllm.{__name__}")
RESULTS = {Answer.HIT: LookupResult.HIT, Answer.MISS: LookupResult.MISS, Answer.RETRY: LookupResult.RETRY}
DRAIN_S = 2.0
"""A drain runs on the scheduler thread: it waits no longer for the store."""
REPORT_EVERY_S = 1.0


class TierTuneTier(SecondaryTierManager):
    """Answers from the gate, moves chunks off-thread. Runs on the scheduler thread; no method waits for the store."""

    def __init__(
        self,
        offloading_spec: "OffloadingSpec",
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: "BackpressureDetector | None" = None,
        *,
        settings: EngineSettings,
        namespace: Namespace,
        shape: ModelShape,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        chunk_tokens, chunk_bytes = namespace.chunk_tokens, self.block_size_bytes
        self._settings = settings
        self._client = StoreClient(
            settings.socket,
            namespace,
            chunk_bytes=chunk_bytes,
            chunk_tokens=chunk_tokens,
            engine=offloading_spec.config.engine_id,
            stage=settings.stage,
        )
        prefill = PrefillCost(shape)
        self.steps = Steps(prefill, stage=settings.stage, clock=time.monotonic)
        self._gate = EngineGate(
            prefill,
            chunk_tokens=chunk_tokens,
            chunk_bytes=chunk_bytes,
            load_deadline_s=settings.load_deadline,
            floor_s=settings.load_deadline_floor,
        )
        self._lookups = Lookups(
            self._client,
            choose=self._choose,
            clock=time.monotonic,
            chunk_tokens=chunk_tokens,
            deadline_s=settings.lookup_deadline,
        )
        self._transfers = Transfers(self._client, np.asarray(primary_kv_view).view(np.uint8))
        self._loading: set[str] = set()
        self._reported = time.monotonic()
        if not self._client.connect(timeout_s=settings.connect_timeout):
            logger.warning("TierTune: no store at %s; prompts are recomputed until there is one", settings.socket)

    def expect(self, request: str, prompt_tokens: int) -> None:
        """A request has come."""
        self._lookups.expect(request, prompt_tokens)

    def waiting(self, request: str) -> bool:
        """Whether asking for the request's chunks can tell nothing new yet; takes constant time."""
        return request in self._loading or self._lookups.waiting(request)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        end_token = req_context.get_offload_key_position(key) or 0
        return RESULTS[self._lookups.answer(req_context.req_id, bytes(key), end_token)]

    def submit_load(self, job_metadata: TransferJob) -> None:
        request = job_metadata.req_context.req_id
        ask = self._lookups.get(request)
        deadline_s = self._gate.deadline_s(ask.decision, ask.gate) if ask else self._settings.load_deadline
        self._loading.add(request)
        self._transfers.load(
            job_metadata.job_id,
            request,
            [bytes(key) for key in job_metadata.keys],
            job_metadata.chunk_ids.tolist(),
            deadline_s=deadline_s,
        )

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Tells the store the chunks in the prompt's order; vLLM names them as a set."""
        position = job_metadata.req_context.get_offload_key_position
        rows = sorted(
            zip(job_metadata.keys, job_metadata.chunk_ids.tolist(), strict=True), key=lambda row: position(row[0]) or 0
        )
        self._transfers.store(
            job_metadata.job_id,
            job_metadata.req_context.req_id,
            [bytes(key) for key, _ in rows],
            [chunk for _, chunk in rows],
            deadline_s=self._settings.store_deadline,
        )

    def get_finished_jobs(self) -> Iterable[JobResult]:
        return [self._result(job) for job in self._transfers.take()]

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:  # noqa: ARG002
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._lookups.forget(req_context.req_id)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:  # noqa: ARG002
        self._lookups.send()
        now = time.monotonic()
        if now - self._reported >= REPORT_EVERY_S:
            self._reported = now
            self._client.report_steps(self.steps.take())

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:  # noqa: ARG002
        self._client.touch([bytes(key) for key in keys])

    def drain_jobs(self) -> None:
        self._transfers.drain(DRAIN_S)

    def shutdown(self) -> None:
        self._transfers.close(DRAIN_S)
        self._client.close()

    def _choose(self, ask: Ask, reply: LookupReply) -> Decision:
        decision = self._gate.choose(ask, reply)
        if decision.candidates and not decision.fetches:
            self._client.report(ask.request, self._gate.report(decision))
        return decision

    def _result(self, job: Job) -> JobResult:
        if job.loads:
            self._loaded(job)
        return JobResult(
            job.id,
            success=job.succeeded,
            successful_keys=None if job.succeeded else [OffloadKey(key) for key in job.done],
            transfer_time=job.seconds,
            transfer_bytes=len(job.done) * self.block_size_bytes,
        )

    def _loaded(self, job: Job) -> None:
        self._loading.discard(job.request)
        ask = self._lookups.get(job.request)
        if ask is not None and ask.decision is not None:
            self._client.report(ask.request, self._gate.report(ask.decision, job))
        if not job.succeeded:
            self._lookups.failed(job.request, set(job.keys).difference(job.done))
