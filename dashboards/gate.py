"""The dashboard "Gate": what it decides, whether its predictions hold, what it wins and loses, from which length on."""

from grafana_foundation_sdk.builders.dashboard import Dashboard

from dashboards.board import Rows, board
from dashboards.fleet import JUDGED, WON
from dashboards.panels import AnyPanel, bars, lines, stacked
from dashboards.queries import Query, counted, difference, mean, quantile, rate, ratio, select

NAME = "gate"
FETCH, RECOMPUTE = 'kind="fetch"', 'kind="recompute"'
PLACE = "store, tier"


def dashboard() -> Dashboard:
    rows: Rows = [
        ("What it decides", _deciding()),
        ("Predicted against actual", _predicting()),
        ("Won and lost", _winning()),
        ("From which length on", _lengths()),
        ("What it believes of fetches", _believing()),
    ]
    return board(NAME, "gate", "Fetch or recompute: is the gate right, and what does it win?", rows)


def break_even() -> str:
    """Tokens from which on fetching beats recomputing; no value if it does at no length.

    A fetch of n tokens takes t0 + n * bytes of a token / bandwidth, recomputing them n * seconds of a token. A token's
    seconds are the mean prediction per request, divided by the tokens of the mean request.
    """
    tokens = f"({rate('gate_candidate_tokens_total', by=PLACE)} > 0)"
    request_s, requests = mean("gate_predicted_seconds", RECOMPUTE, by=PLACE), "gate_candidate_requests_total"
    token_s = f"{request_s} * {rate(requests, by=PLACE)} / {tokens}"
    token_bytes = f"{rate('gate_candidate_bytes_total', by=PLACE)} / {tokens}"
    bandwidth = f"avg by ({PLACE}) ({select('fetch_estimate_bytes_per_second')})"
    start_s = f"avg by ({PLACE}) ({select('fetch_estimate_t0_seconds')})"
    return f"{start_s} / (({token_s} - {token_bytes} / {bandwidth}) > 0)"


def _deciding() -> list[AnyPanel]:
    fetched = rate("gate_requests_total", 'decision="fetch"', by="tier")
    return [
        stacked(
            "Decisions",
            "reqps",
            "Requests that found chunks in the tier, by what the gate decided and why.",
            Query(rate("gate_requests_total", by="tier, decision, reason"), "{{tier}}: {{decision}} ({{reason}})"),
        ),
        lines(
            "Share fetched",
            "percentunit",
            "Of the requests that found chunks in the tier.",
            Query(ratio(fetched, rate("gate_requests_total", by="tier")), "{{tier}}"),
        ),
    ]


def _predicting() -> list[AnyPanel]:
    predicted = "gate_predicted_seconds"
    return [
        lines(
            "Means per request",
            "s",
            "Predictions are of all decisions, actual seconds of those fetched: with the gate at work the two need not "
            "meet, but a fetch that actually takes longer than recomputing is a wrong decision.",
            Query(mean(predicted, FETCH, by="tier"), "{{tier}}: fetch, predicted"),
            Query(mean("gate_actual_seconds", FETCH, by="tier"), "{{tier}}: fetch, actual"),
            Query(mean(predicted, RECOMPUTE, by="tier"), "{{tier}}: recompute, predicted"),
        ),
        lines(
            "99th percentiles",
            "s",
            "The same at the slow end.",
            Query(quantile(0.99, predicted, FETCH, by="tier"), "{{tier}}: fetch, predicted"),
            Query(quantile(0.99, "gate_actual_seconds", FETCH, by="tier"), "{{tier}}: fetch, actual"),
            Query(quantile(0.99, predicted, RECOMPUTE, by="tier"), "{{tier}}: recompute, predicted"),
        ),
    ]


def _winning() -> list[AnyPanel]:
    judged = rate("gate_outcomes_total", JUDGED, by="tier")
    lost = counted(rate("lost_seconds_total", by="tier"), rate("saved_seconds_total", by="tier"))
    return [
        lines(
            "Outcomes",
            "reqps",
            "Won and lost are fetches that took less or more time than recomputing was predicted to take; skipped ones "
            "were recomputed.",
            Query(rate("gate_outcomes_total", by="tier, outcome"), "{{tier}}: {{outcome}}"),
            span=8,
        ),
        lines(
            "Share won",
            "percentunit",
            "Of the fetches that ended, those that failed or came too late included.",
            Query(ratio(rate("gate_outcomes_total", WON, by="tier"), judged), "{{tier}}"),
            span=8,
        ),
        lines(
            "Seconds saved and lost",
            "short",
            "Per second of time. Lost is drawn below zero.",
            Query(rate("saved_seconds_total", by="tier"), "{{tier}}: saved"),
            Query(f"-({lost})", "{{tier}}: lost"),
            span=8,
        ),
    ]


def _lengths() -> list[AnyPanel]:
    by = "tier, tokens"
    seconds = "gate_length_seconds_total"
    saved, lost = rate(seconds, 'result="saved"', by=by), rate(seconds, 'result="lost"', by=by)
    each = f"({difference(saved, lost)}) / ({rate('gate_length_requests_total', by=by)} > 0)"
    return [
        lines(
            "Break-even length",
            "short",
            "Tokens from which on a fetch beats recomputing, by the present estimates and what requests lately found. "
            "No value: no length does, or nobody found anything.",
            Query(break_even(), "{{store}} {{tier}}"),
        ),
        bars(
            "Seconds won per fetch, by its length",
            "s",
            "Mean over all the time shown, of the fetches of at least so many tokens (and fewer than the next class). "
            "Below 0 such fetches lose, and a floor (min_fetch_tokens) is due.",
            Query(each, "{{tier}}, from {{tokens}} tokens"),
        ),
    ]


def _believing() -> list[AnyPanel]:
    def believed(title: str, unit: str, description: str, metric: str) -> AnyPanel:
        return lines(
            title, unit, description, Query(f"avg by ({PLACE}) ({select(metric)})", "{{store}} {{tier}}"), span=8
        )

    return [
        believed(
            "Estimated bandwidth",
            "Bps",
            "Learned from fetches and, where there are none, probes.",
            "fetch_estimate_bytes_per_second",
        ),
        believed("Before the first byte", "s", "The estimate's fixed part.", "fetch_estimate_t0_seconds"),
        believed("Queue", "s", "Estimated seconds of transfers under way.", "fetch_estimate_queue_seconds"),
        believed("Age of the newest observation", "s", "Old estimates are probed.", "fetch_estimate_age_seconds"),
        believed(
            "Doubt",
            "short",
            "Standard error of the logarithm of predicted seconds: 0.1 is about ten per cent.",
            "fetch_estimate_doubt",
        ),
        lines(
            "Probes",
            "ops",
            "Small background fetches per second, by outcome.",
            Query(rate("probes_total", by="tier, outcome"), "{{tier}}: {{outcome}}"),
            span=8,
        ),
    ]
