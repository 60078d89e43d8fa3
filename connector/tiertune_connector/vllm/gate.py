"""The gate as an engine uses it: its own prefill cost against the store's fetch costs. Imports no vLLM."""

from collections.abc import Mapping

from tiertune_connector.cost import Candidate, Decision, GateSettings, PrefillCost, decide, outcome
from tiertune_connector.serve.protocol import LookupReply, TierReport
from tiertune_connector.vllm.lookups import Ask
from tiertune_connector.vllm.transfers import Job


class EngineGate:
    """Decides one request, says how long its load may take, and what became of it."""

    def __init__(
        self, prefill: PrefillCost, *, chunk_tokens: int, chunk_bytes: int, load_deadline_s: float, floor_s: float
    ) -> None:
        """A load of unknown cost may take ``load_deadline_s``; none gets less than ``floor_s``."""
        self._prefill = prefill
        self._chunk_tokens = chunk_tokens
        self._chunk_bytes = chunk_bytes
        self._load_deadline_s = load_deadline_s
        self._floor_s = floor_s

    def choose(self, ask: Ask, reply: LookupReply) -> Decision:
        """Chunks before the first missing one count as computed: they are on the device or in staging."""
        return decide(
            [""] * ask.first_chunk + reply.tiers,
            computed_tokens=ask.first_chunk * self._chunk_tokens,
            prompt_tokens=ask.prompt_tokens,
            chunk_tokens=self._chunk_tokens,
            chunk_bytes=self._chunk_bytes,
            fetch=reply.costs,
            prefill=self._prefill.seconds,
            settings=reply.gate,
        )

    def deadline_s(self, decision: Decision | None, settings: Mapping[str, GateSettings]) -> float:
        """Seconds that the load may take."""
        if decision is None or decision.fetch_s is None:
            return self._load_deadline_s
        tuned = [settings.get(candidate.tier, GateSettings()) for candidate in decision.candidates if candidate.fetched]
        factor = max((settings.deadline_factor for settings in tuned), default=1.0)
        return max(self._floor_s, factor * decision.fetch_s)

    def report(self, decision: Decision, job: Job | None = None) -> list[TierReport]:
        """What was decided for every tier that offered chunks; with ``job``, also what became of them."""
        return [self._tier(candidate, decision, job) for candidate in decision.candidates]

    def _tier(self, candidate: Candidate, decision: Decision, job: Job | None) -> TierReport:
        actual_s = _actual_s(candidate, decision, job) if job and candidate.fetched else None
        return TierReport(
            tier=candidate.tier,
            chunks=candidate.chunks,
            tokens=candidate.chunks * self._chunk_tokens,
            fetched_tokens=candidate.fetched * self._chunk_tokens,
            reason=candidate.reason,
            fetch_s=candidate.fetch_s,
            recompute_s=candidate.recompute_s,
            actual_s=actual_s,
            outcome=_outcome(candidate, job, actual_s),
        )


def _actual_s(candidate: Candidate, decision: Decision, job: Job) -> float:
    """A slower tier's own seconds; the copy into staging is DRAM's, or the last tier's where DRAM gave nothing."""
    slower = job.reply.seconds if job.reply else {}
    copy_s = max(0.0, job.seconds - max(slower.values(), default=0.0))
    fetched = [other.tier for other in decision.candidates if other.fetched]
    bears_copy = "dram" if "dram" in fetched else fetched[-1]
    return slower.get(candidate.tier, 0.0) + (copy_s if candidate.tier == bears_copy else 0.0)


def _outcome(candidate: Candidate, job: Job | None, actual_s: float | None) -> str:
    if job is None or actual_s is None:
        return "skipped"
    if job.succeeded:
        return outcome(candidate, actual_s).kind
    return "late" if job.late or (job.reply is not None and "late" in job.reply.outcomes) else "failed"
