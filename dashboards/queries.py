"""PromQL of the dashboards, from a few words: names without prefix, ratios and differences that survive absent series.

A counter appears with its first event. Hence ``or``: a kind without events is zero beside events of the other kind, but
if neither was reported the answer stays empty. Unknown is not zero.
"""

from dataclasses import dataclass

from tiertune_connector.catalogue import PREFIX

STORE = 'store=~"$store"'
AGENT_STORE = 'store=~"$store|fleet"'
"""What concerns the whole fleet, such as a managed remote, concerns each chosen store."""
POOL = 'namespace=~"$namespace"'
HOUR_S = 3600


@dataclass(frozen=True)
class Query:
    """One line of a panel; ``legend`` in Grafana's ``{{label}}`` form."""

    expr: str
    legend: str = ""


def select(metric: str, *matchers: str) -> str:
    """A metric of the chosen stores; ``matchers`` narrow it further."""
    return f"{PREFIX}{metric}{{{', '.join((STORE, *matchers))}}}"


def of_agent(metric: str, *matchers: str) -> str:
    """A metric of the agent that has no store."""
    return f"{PREFIX}{metric}{{{', '.join(matchers)}}}" if matchers else f"{PREFIX}{metric}"


def total(vector: str, by: str = "") -> str:
    return f"sum by ({by}) ({vector})" if by else f"sum({vector})"


def rated(vector: str, by: str = "") -> str:
    """Sum of a selected counter's rates, per second."""
    return total(f"rate({vector}[$__rate_interval])", by)


def rate(metric: str, *matchers: str, by: str = "") -> str:
    """As ``rated``, of the chosen stores."""
    return rated(select(metric, *matchers), by)


def ratio(part: str, whole: str) -> str:
    """Share of the whole: 0 without any part, empty (not NaN) without any whole. Both have the same labels."""
    return f"({part} or {whole} * 0) / ({whole} > 0)"


def portion(part: str, whole: str) -> str:
    """``ratio``, at most 1: a part counted later than the whole, or in a later scrape, may briefly exceed it."""
    return f"clamp_max({ratio(part, whole)}, 1)"


def share(part: str, whole: str, by: str) -> str:
    """Each part's share of the whole, which has the labels ``by`` alone; empty without any whole."""
    return f"{part} / on ({by}) group_left () ({whole} > 0)"


def difference(left: str, right: str) -> str:
    """Left less right, either of which may not have appeared yet. Both have the same labels."""
    return f"({left} or {right} * 0) - ({right} or {left} * 0)"


def counted(part: str, beside: str) -> str:
    """What was counted; 0 if only ``beside`` was. Both have the same labels."""
    return f"{part} or {beside} * 0"


def mean(histogram: str, *matchers: str, by: str) -> str:
    """Mean of what a histogram observed, per group; empty where it observed nothing."""
    seconds, count = (rate(f"{histogram}_{part}", *matchers, by=by) for part in ("sum", "count"))
    return f"{seconds} / ({count} > 0)"


def quantile(share: float, histogram: str, *matchers: str, by: str = "") -> str:
    """A quantile; empty where nothing was observed, as it would be NaN."""
    return quantile_of(share, select(f"{histogram}_bucket", *matchers), select(f"{histogram}_count", *matchers), by)


def quantile_of(share: float, buckets: str, count: str, by: str = "") -> str:
    """The same of a histogram's selected series."""
    quantile = f"histogram_quantile({share:g}, {rated(buckets, f'{by}, le' if by else 'le')})"
    return f"{quantile} and ({rated(count, by)} > 0)"


def numbered(metric: str, label: str, words: tuple[str, ...], by: str) -> str:
    """Of a gauge that is 1 for one word of a label: the word's place among ``words``, from 1 on."""
    selected = [select(metric, f'{label}="{word}"') for word in words]
    chosen = (f"({vector} == 1) * {place}" for place, vector in enumerate(selected, 1))
    return f"max by ({by}) ({' or '.join(chosen)})"
