"""Reports to a store: a gate's decisions and what came of them, what a prefill costs."""

from collections.abc import Mapping

from msgspec.structs import replace

from tiertune_connector.cost import Candidate, GateDecision, PrefillCost, gain_s, waited_s
from tiertune_connector.protocol.messages import PrefillLine, TierReport

DRAM = "dram"


def prefill_line(cost: PrefillCost) -> PrefillLine | None:
    """A prefill's cost as reported to the store; None: unknown."""
    line, shape = cost.line, cost.shape
    if line is None:
        return None
    return PrefillLine(cost.added_s, line[1], shape.params, shape.layers, shape.width, cost.step_tokens)


def tier_reports(
    decision: GateDecision,
    *,
    chunk_tokens: int,
    actual_s: float | None = None,
    seconds: Mapping[str, float] | None = None,
    failure: str = "",
    used: GateDecision | None = None,
    shared: bool = False,
) -> list[TierReport]:
    """One report for each tier that offered chunks.

    ``actual_s`` is how long the request waited for all that was fetched, None if nothing was; ``seconds`` is each
    slower tier's part, from the load's reply. A load may have begun before the request waited: its seconds count no
    further than that wait. The rest is the copy of what was not copied meanwhile, charged to DRAM, or to the last tier
    fetched from if DRAM gave nothing. ``failure`` is ``late`` or ``failed`` if not all of the fetch came, and
    ``unknown`` if nobody can tell what it was worth. ``used`` is what is left of the decision if the engine computed
    some of it anyway; without it a failed fetch came to nothing. Of a tier whose chunks came, and were of use in part,
    the predictions are that part's; if none was of use it has failed. ``shared``: other loads, or
    other groups' chunks, came meanwhile.
    """
    kept = used or (decision.cut_to(0, (), ()) if failure else decision)
    fetched = [candidate.tier for candidate in decision.candidates if candidate.fetched]
    took: dict[str, float] = {}
    if fetched and actual_s is not None:
        took = {tier: min((seconds or {}).get(tier, 0.0), actual_s) for tier in fetched}
        took[DRAM if DRAM in took else fetched[-1]] += actual_s - max(took.values())
        # What DRAM had at the lookup may have left for another tier since.
        shared = shared or any(waited_s for tier, waited_s in (seconds or {}).items() if tier not in took)
    reports = []
    for chosen, left in zip(decision.candidates, kept.candidates, strict=True):
        told, failed = chosen, failure
        if actual_s is not None and not failure:
            in_vain = chosen.fetched and not left.fetched
            told, failed = (replace(chosen, chunks=left.chunks), "failed") if in_vain else (left, "")
        actual = took.get(told.tier)
        report = TierReport(
            told.tier,
            told.chunks,
            told.chunks * chunk_tokens,
            chosen.fetched * chunk_tokens,
            told.reason.value,
            told.fetch_s,
            told.recompute_s,
            actual,
            _outcome(told, actual, failed),
            max(0.0, told.backlog_s),
            told.prefills,
            (chosen.fetched - left.fetched) * chunk_tokens,
            shared and actual is not None,
        )
        reports.append(report)
    return reports


def gained_s(report: TierReport) -> float | None:
    """Seconds of prefill that a fetch saved, negative if it lost, as in ``gain_s``; None if unknown."""
    if report.actual_s is None or report.outcome == "unknown":
        return None
    if report.outcome not in ("late", "failed"):
        return gain_s(report.fetch_s, report.recompute_s, report.actual_s, report.backlog_s, report.prefills)
    came = max(0, report.fetched_tokens - report.vain_tokens)  # the rest is recomputed anyway
    whole_s = gain_s(report.fetch_s, report.recompute_s, 0.0, report.backlog_s) if report.recompute_s else 0.0
    came_s = whole_s * came / report.fetched_tokens if came else 0.0
    return came_s - waited_s(report.actual_s, report.backlog_s, report.prefills)


def recomputed(report: TierReport) -> int:
    """Tokens that the tier had but the engine computed anyway."""
    return report.tokens - report.fetched_tokens + report.vain_tokens


def _outcome(candidate: Candidate, took: float | None, failure: str) -> str:
    if took is None:
        return "skipped"
    if failure:
        return failure
    if candidate.recompute_s is None:
        return "unknown"  # the engine cannot tell yet what recomputing would have cost
    gain = gain_s(candidate.fetch_s, candidate.recompute_s, took, candidate.backlog_s, candidate.prefills)
    return "won" if gain > 0 else "lost"
