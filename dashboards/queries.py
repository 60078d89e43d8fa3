"""PromQL of the dashboards, from a few words: names without prefix, ratios and differences that survive absent series.

A counter appears with its first event. Hence ``or``: no event of one kind is zero beside events of the other kind, but
where neither was reported the answer stays empty. Unknown is not zero.
"""

from dataclasses import dataclass

PREFIX = "tiertune_"
STORE = 'store=~"$store"'
POOL = 'namespace=~"$namespace"'


@dataclass(frozen=True)
class Query:
    """One line of a panel; ``legend`` in Grafana's ``{{label}}`` form."""

    expr: str
    legend: str = ""


def select(metric: str, *matchers: str) -> str:
    """A metric of the chosen stores; ``matchers`` narrow it further."""
    return f"{PREFIX}{metric}{{{', '.join((STORE, *matchers))}}}"


def total(vector: str, by: str = "") -> str:
    return f"sum by ({by}) ({vector})" if by else f"sum({vector})"


def rate(metric: str, *matchers: str, by: str = "") -> str:
    """Sum of a counter's rates, per second."""
    return total(f"rate({select(metric, *matchers)}[$__rate_interval])", by)


def ratio(part: str, whole: str) -> str:
    """Share of the whole: 0 without any part, empty (not NaN) without any whole. Both have the same labels."""
    return f"({part} or {whole} * 0) / ({whole} > 0)"


def difference(left: str, right: str) -> str:
    """Left less right, either of which may not have appeared yet. Both have the same labels."""
    return f"({left} or {right} * 0) - ({right} or {left} * 0)"


def mean(histogram: str, *matchers: str, by: str) -> str:
    """Mean of what a histogram observed, per group; empty where it observed nothing."""
    seconds, count = (rate(f"{histogram}_{part}", *matchers, by=by) for part in ("sum", "count"))
    return f"{seconds} / ({count} > 0)"


def quantile(share: float, histogram: str, *matchers: str, by: str) -> str:
    return f"histogram_quantile({share:g}, {rate(f'{histogram}_bucket', *matchers, by=f'{by}, le')})"
