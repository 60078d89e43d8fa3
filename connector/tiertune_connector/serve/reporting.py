"""From a gate's decision and what came of it to the report that the store counts."""

from collections.abc import Mapping

from tiertune_connector.cost import Candidate, Decision
from tiertune_connector.cost import outcome as judge
from tiertune_connector.serve.protocol import TierReport


def tier_reports(
    decision: Decision,
    *,
    chunk_tokens: int,
    actual_s: float | None = None,
    seconds: Mapping[str, float] | None = None,
    failure: str = "",
) -> list[TierReport]:
    """One report for each tier that offered chunks.

    ``actual_s`` is how long the engine waited for all that it fetched, None if it fetched nothing; ``seconds`` is the
    part of each slower tier, as the load told. ``failure`` is ``late`` or ``failed`` if the fetch came to nothing.
    """
    slower = max((seconds or {}).values(), default=0.0)
    reports = []
    for candidate in decision.candidates:
        took = None
        if candidate.fetched and actual_s is not None:
            took = (seconds or {}).get(candidate.tier, max(0.0, actual_s - slower))
        reports.append(
            TierReport(
                candidate.tier,
                candidate.chunks,
                candidate.chunks * chunk_tokens,
                candidate.fetched * chunk_tokens,
                candidate.reason.value,
                candidate.fetch_s,
                candidate.recompute_s,
                took,
                _outcome(candidate, took, failure),
            )
        )
    return reports


def _outcome(candidate: Candidate, took: float | None, failure: str) -> str:
    if took is None:
        return "skipped"
    if failure or candidate.recompute_s is not None:
        return failure or judge(candidate, took).kind
    return "unknown"  # the engine cannot tell yet what recomputing would have cost
