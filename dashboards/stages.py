"""The dashboard "Stages": where GPU seconds go, what a request costs, how long it waits, what power is drawn."""

from grafana_foundation_sdk.builders.dashboard import Dashboard

from dashboards.board import Rows, board
from dashboards.panels import AnyPanel, bars, lines, number, stacked
from dashboards.queries import Query, counted, rate, ratio, select, share, total
from dashboards.recording import FIRST

NAME = "stages"
STEP, WAIT, WORK = "stage, phase", 'phase="kv_wait"', 'phase!="kv_wait"'
GPU = "gpu, stage"
SECONDS = "stage_gpu_seconds_total"


def dashboard() -> Dashboard:
    rows: Rows = [
        ("GPU seconds", _seconds()),
        ("What a request costs", _requests()),
        ("GPUs", _devices()),
    ]
    return board(NAME, "stages", "Where engines spend their seconds, by stage and phase. On CPU: wall seconds.", rows)


def requests_telling(*matchers: str) -> str:
    """Requests per second at stores that tell of such seconds: an observed source tells of its waiting at most.

    Where decode looks them up once more, each counts once: of a pool's as many as are the first stage's part of its
    prompt tokens. Where no prompt is at its first stage, all are decode's.
    """
    requests, first, prompts = (
        rate(*asked, by="store, namespace")
        for asked in (("requests_total",), ("prompt_tokens_total", FIRST), ("prompt_tokens_total",))
    )
    telling = f"and on (store) rate({select(SECONDS, *matchers)}[$__rate_interval])"
    once = total(f"{requests} * {first} / ({prompts} > 0) {telling}")
    return f"({once} > 0 or {total(f'{requests} {telling}')})"


def per_request(by: str) -> str:
    """Seconds of the mean request, of those of which they are known."""
    work, wait = rate(SECONDS, WORK, by=by), rate(SECONDS, WAIT, by=by)
    return f"{share(work, requests_telling(WORK), by='')} or {share(wait, requests_telling(), by='')}"


def _seconds() -> list[AnyPanel]:
    return [
        stacked(
            "GPU seconds by stage and phase",
            "short",
            "Seconds of work per second of time, of all engines. Waiting for chunks is no work and not in here.",
            Query(rate(SECONDS, WORK, by=STEP), "{{stage}}: {{phase}}"),
        ),
        lines(
            "Tokens",
            "short",
            "Tokens per second of each stage and phase.",
            Query(rate("stage_tokens_total", WORK, by=STEP), "{{stage}}: {{phase}}"),
            span=6,
        ),
        lines(
            "Seconds per 1000 tokens",
            "s",
            "What a token costs. It rises with the length of prompts, and where GPUs do other things.",
            Query(
                f"1000 * {rate(SECONDS, WORK, by=STEP)} / ({rate('stage_tokens_total', WORK, by=STEP)} > 0)",
                "{{stage}}: {{phase}}",
            ),
            span=6,
        ),
    ]


def _requests() -> list[AnyPanel]:
    work, wait = rate(SECONDS, WORK), rate(SECONDS, WAIT)
    return [
        number(
            "Seconds of work per request",
            "s",
            "GPU seconds of the mean request, where engines tell them.",
            Query(f"{work} / ({requests_telling(WORK)} > 0)"),
            span=6,
        ),
        number(
            "KV wait per request",
            "s",
            "Seconds that the mean request waited for its chunks, where engines tell them.",
            Query(f"({counted(wait, work)}) / ({requests_telling()} > 0)"),
            span=6,
        ),
        number(
            "KV wait against work",
            "percentunit",
            "Seconds waited for chunks by seconds of work. Waiting blocks its request, not the GPU.",
            Query(ratio(_seconds_beside_work(WAIT), work)),
            span=6,
        ),
        number("Requests", "reqps", "Requests that looked up, per second.", Query(rate("requests_total")), span=6),
        lines(
            "Seconds per request",
            "s",
            "Of the mean request, by stage and phase, where engines tell them. kv_wait: how long it waited for its "
            "chunks.",
            Query(per_request(STEP), "{{stage}}: {{phase}}"),
        ),
        bars(
            "Share of a request",
            "percentunit",
            "How the seconds of the mean request divide among stages and phases over all the time shown, its waiting "
            "included.",
            Query(share(_seconds_beside_work(by=STEP), _seconds_beside_work(), by=""), "{{stage}}: {{phase}}"),
        ),
    ]


def _seconds_beside_work(*matchers: str, by: str = "") -> str:
    """Of the stores that told of work, too: an observed engine reports its waiting alone, which is not all it does."""
    every, work = (f"rate({select(SECONDS, *only)}[$__rate_interval])" for only in (matchers, (WORK,)))
    return total(f"{every} and on (store) {work}", by)


def _devices() -> list[AnyPanel]:
    watts, tokens = rate("gpu_energy_joules_total", by="stage"), rate("stage_tokens_total", WORK, by="stage")
    return [
        lines(
            "Utilisation",
            "percentunit",
            "Share of time in which a kernel ran: not how well it filled the GPU.",
            Query(f"avg by ({GPU}) ({select('gpu_utilization_ratio')})", "{{stage}} {{gpu}}"),
            span=6,
        ),
        stacked(
            "Memory",
            "bytes",
            "Used and free memory.",
            Query(total(select("gpu_memory_bytes"), f"{GPU}, state"), "{{stage}} {{gpu}}: {{state}}"),
            span=6,
        ),
        stacked(
            "Power",
            "watt",
            "Power drawn now.",
            Query(total(select("gpu_power_watts"), GPU), "{{stage}} {{gpu}}"),
            span=6,
        ),
        lines(
            "Energy per 1000 tokens",
            "joule",
            "What the GPUs of a stage use, by the tokens that it works on.",
            Query(f"1000 * {watts} / ({tokens} > 0)", "{{stage}}"),
            span=6,
        ),
    ]
