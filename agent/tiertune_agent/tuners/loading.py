"""Does loading pay at an engine that keeps its own connector? Compares waiting for chunks with computing them."""

from math import hypot

from tiertune_agent.fields import Json
from tiertune_agent.records import OBSERVED, Target, Windows, total
from tiertune_agent.tuners.advice import ADVICE, Advice
from tiertune_agent.tuners.base import Answer, Current, NoChange, Proposal
from tiertune_agent.tuners.evidence import ENOUGH_WINDOWS, ERRORS, Ratio, Summand, ratio

WAIT_S, LOADED = "observed_wait_seconds_total", "observed_loaded_tokens_total"
PREFILL_S, COMPUTED = "observed_prefill_seconds_total", "observed_prefill_tokens_total"
REQUESTS = "requests_total"


class Loading(Advice):
    """Compares seconds of requests: waiting for loaded tokens against the prefill of computed ones.

    Loaded tokens are the first of their prompts, which are the cheapest to compute: if loading loses against the mean
    computed token, it loses all the more against computing the loaded ones.
    """

    name = "loading"
    scope = "store"

    def targets(self, store: str, status: Json) -> list[Target]:
        """The first tier beyond the GPU of an observed source; our own stores have a gate instead."""
        tiers = [tier for tier in status.get("tiers") or {} if tier != "gpu"]
        models = tuple(status.get("models") or ())
        return [Target(store, tiers[0], models=models)] if status.get(OBSERVED) and tiers else []

    def evaluate(self, history: Windows, current: Current) -> Answer:  # noqa: ARG002 (windows are enough)
        whole = [window for window in history if not window.tier and window.observed]
        wait, compute = _per_token(whole, WAIT_S, LOADED), _per_token(whole, PREFILL_S, COMPUTED)
        if wait is None or compute is None:
            return NoChange("not enough data: it is not told what loading and computing take, or too little happened")
        requests = int(total(whole, REQUESTS))
        gain, error = compute.value - wait.value, hypot(wait.error, compute.error)
        evidence = {
            **wait.document("loaded_token_s"),
            **compute.document("computed_token_s"),
            "requests": requests,
        }
        told = (
            f"requests waited {1e6 * wait.value:,.0f} ms for 1000 loaded tokens, and {1e6 * compute.value:,.0f} ms for "
            f"1000 computed ones (standard error of the difference {1e6 * error:,.0f} ms)"
        )
        if -gain > ERRORS * error and -gain >= self.settings.min_gain * compute.value:
            return Proposal(f"{ADVICE}loading", "load", "recompute", told, evidence, requests)
        return NoChange(f"{'loading pays' if gain > ERRORS * error else 'loading stays'}: {told}", evidence)


def _per_token(windows: Windows, seconds: str, tokens: str) -> Ratio | None:
    """Seconds per token; None if unknown, or if too few windows had any."""
    told = [
        Summand(spent, count)
        for window in windows
        if (spent := window.known(seconds)) is not None and (count := window.known(tokens)) is not None
        if spent or count
    ]
    found = ratio(told)
    return found if found.windows >= ENOUGH_WINDOWS else None
