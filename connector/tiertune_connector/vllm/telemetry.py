"""What an engine reports of its requests: to the store, on vLLM's own metrics, in spans. Imports no vLLM.

Runs on the scheduler thread.
"""

from dataclasses import dataclass
from time import monotonic

from tiertune_connector.client.store_client import StoreClient
from tiertune_connector.cost import GateDecision
from tiertune_connector.cost.gate import REMOTE
from tiertune_connector.profile.reports import Reporter
from tiertune_connector.profile.steps import Steps
from tiertune_connector.protocol.messages import FirstToken, Report
from tiertune_connector.protocol.reporting import tier_reports
from tiertune_connector.tracing import RequestTrace, Tracing
from tiertune_connector.vllm.lookups import Ask
from tiertune_connector.vllm.stats import EngineStats, Key
from tiertune_connector.vllm.transfers import Job


@dataclass(eq=False)
class Telemetry:
    """Makes one report per request, whoever gets it."""

    client: StoreClient
    steps: Steps
    tracing: Tracing
    chunk_tokens: int

    def __post_init__(self) -> None:
        self._stats = EngineStats(self.chunk_tokens)
        self._reporter = Reporter(self.steps.totals, self.client)

    def answered(self, ask: Ask) -> None:
        """The store has answered, at the latest during the step that ends now."""
        self._stats.looked_up(ask.reply.result().tiers, len(ask.chain))

    def settled(self, ask: Ask) -> None:
        """The scheduler has its answer: it waits no more. If the gate fetches nothing, that is reported at once."""
        if ask.decision is not None:
            if not ask.decision.fetches:
                self._report(ask, ask.decision)
        elif ask.wanted_at is not None:
            self._stats.looked_up((), 0, late=True)
            ask.trace.late, ask.trace.looked_up_at = True, monotonic()
        self._waited(ask, 0)

    def begun(self, ask: Ask, tokens: int) -> None:
        """The scheduler has room for the request, and takes the prompt's first ``tokens`` as computed."""
        had = (tokens + 1) // self.chunk_tokens  # a prompt's last token is computed even if it is there
        if ask.had is None:  # later it may have what it computed before it was preempted
            ask.had = had
        load, ask.load = ask.load, None
        if load is not None:
            self._report_load(ask, load, had)

    def loaded(self, ask: Ask, job: Job) -> None:
        """The request's load is over; if it succeeded, it is reported when the waiting scheduler takes what came."""
        if not job.succeeded:
            self._report_load(ask, job)
        elif ask.wanted_at is not None:
            ask.load = job
        self._waited(ask, len(set(job.done).intersection(ask.chain)))

    def stored(self, job: Job) -> None:
        """Chunks that vLLM finished were offered to the store."""
        for result in job.results:
            self._stats.stored(result)

    def finished(self, ask: Ask | None, trace: RequestTrace | None) -> None:
        """The request has ended; ``ask`` if the store was asked."""
        if ask is not None:
            if ask.load is not None:
                self._report_load(ask, ask.load, ask.had)
            if ask.decision is not None:  # what was chosen and not begun, or came by others' loads
                every, tiers = range(len(ask.chain)), ask.reply.result().tiers
                used = None if ask.had is None else ask.decision.cut_to(ask.had, every, tiers)
                self._report(ask, ask.decision, used=used)
            self.first_token(ask)  # even if it ended without a token, it counts in its group
        self.tracing.ended(trace)

    def first_token(self, ask: Ask) -> None:
        """The output of the step that computed the prompt's end has come, or the request has ended without one.

        Report once how long a request of a holdout took, if it found chunks in the remote tier.
        A request that ended without a first token waited at least so long. If left out, such requests would be missing
        from one group alone: a fetch can fail, and what is not fetched cannot.
        """
        if ask.timed:
            return
        ask.timed = True
        if ask.decision is None or not (group := ask.reply.result().group):
            return
        tokens = sum(each.chunks for each in ask.decision.candidates if each.tier == REMOTE) * self.chunk_tokens
        if tokens:
            self.client.tell(FirstToken(tokens, monotonic() - ask.sent_at, group))

    def changes(self) -> dict[Key, float]:
        """What vLLM's metrics have not been given yet."""
        return self._stats.take(connected=self.client.connected)

    def close(self) -> None:
        """Send what is left, within seconds."""
        self._reporter.close()
        self.tracing.close()

    def _report(
        self, ask: Ask, decision: GateDecision, job: Job | None = None, used: GateDecision | None = None
    ) -> None:
        """Report once what was decided, and what came of it; ``job`` is the load, if there was one.

        ``used`` is the part of the decision that was of use, if not all of it was.
        """
        if ask.trace.reports or not decision.candidates:
            return
        ask.trace.reports = reports = tier_reports(
            decision,
            chunk_tokens=self.chunk_tokens,
            actual_s=job.seconds if job else None,
            seconds=job.reply.seconds if job and job.reply else None,
            failure=_failure(ask, job) if job else "",
            used=used,
            shared=job is not None and (job.shared or not set(job.keys) <= set(ask.chain)),
        )
        self.client.tell(Report(reports))
        self._stats.gated(reports)
        if job is not None:
            ask.trace.loaded_at = job.started + job.seconds

    def _report_load(self, ask: Ask, job: Job, had: int | None = None) -> None:
        """Report what ``job`` loaded of the prompt's first ``had`` chunks, if anything.

        None: the load failed, or the request has ended before any were taken, and computes nothing again. The rest of
        these chunks came by others' loads. vLLM takes fewer chunks than came if staging had no room for the rest, of
        whatever group, or has lost it.
        """
        if ask.decision is None:
            return
        keys, done, tiers = set(job.keys), set(job.done), ask.reply.result().tiers
        loaded = [place for place, key in enumerate(ask.chain) if key in keys]
        end = loaded[-1] + 1 if loaded else 0
        if had is not None:
            came = had
        elif job.succeeded:
            end = came = ask.decision.cut
        elif done.issuperset(keys.difference(ask.chain)):
            came = next((place for place in loaded if ask.chain[place] not in done), end)
        else:
            came = 0
        asked, used = (ask.decision.cut_to(until, set(loaded), tiers) for until in (end, came))
        if asked.fetches:
            self._report(ask, asked, job, used)

    def _waited(self, ask: Ask, chunks: int) -> None:
        """Count once how long the scheduler wanted the request and could not have it."""
        if ask.wanted_at is not None:
            self.steps.kv_wait(monotonic() - ask.wanted_at, chunks * self.chunk_tokens)
            ask.wanted_at = None


def _failure(ask: Ask, job: Job) -> str:
    """``late``, ``failed`` or empty; ``unknown`` if the request has ended before the scheduler took what came."""
    if job.succeeded:
        return "unknown" if ask.had is None else ""
    return "late" if job.late or (job.reply is not None and "late" in job.reply.outcomes) else "failed"
