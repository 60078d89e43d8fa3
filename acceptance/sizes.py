"""The agent splits one budget between the hosts' DRAM and the remote, and follows traffic that shifts."""

import time
from dataclasses import dataclass
from statistics import fmean

from acceptance.fleet import Fleet, NotShownError, expect, fleet
from acceptance.gates import WITHIN_S
from acceptance.regret import PROBE_S, Fetch, Recorded, Regret, Standing, recorded, regret
from acceptance.traffic import Phase, shifting
from tiertune_agent.demo.result import total
from tiertune_agent.demo.world import HOSTS, Setup
from tiertune_agent.records import CHANGED
from tiertune_agent.replay.engine import OVERHEAD_S

CHUNK_BYTES = 60 << 10
"""With its header it fits into what Redis allocates for 64 KiB."""
BUDGET_BYTES = 800 * CHUNK_BYTES
LINK_BYTES_PER_S = 48.0 * 2**20
"""Of each host's link to the remote: a chunk from there costs more than from DRAM, and less than computing it."""
PREFILL_CHUNK_S = 0.014
FEW, MANY = 12, 60
"""Documents of the first and of the second phase: one host's DRAM holds FEW; MANY exceed even the whole budget."""
MOST_REGRET = 0.08
"""Bound for one cell; that for the mean over cells is 3 % (docs/tuning-results.md)."""
DEAR = 0.15
"""If keeping the split would take more than this over the best after the turn, the sizes must have improved."""
PERIOD_S = 4.0
REQUESTS_PER_S = 12.0


@dataclass(frozen=True)
class Size:
    """Lengths of a run's phases."""

    few_s: float
    many_s: float


SHORT, FULL = Size(few_s=40, many_s=96), Size(few_s=96, many_s=144)
"""Following the turn costs the same however long the second phase is: the regret was 5.5 to 8.0 % with 40 s (six runs),
4.7 and 8.1 % with 56 s (two)."""
POLICY = """\
version: 1
mode: observe
guard: {{changes_per_hour: 100000, min_requests: 20, soak: 2s}}
remote: {{manage: true}}
budgets: {{total: {budget}}}
tuners:
  tier_size: {{mode: auto, period: {period_s}s, hold_off: 0s, min_gain: 0.01}}
"""


def prove(*, short: bool) -> str:
    """In full the phases are longer, and sizes must have followed the traffic by the end."""
    size = SHORT if short else FULL
    setup = Setup(
        window_s=1,
        chunk_bytes=CHUNK_BYTES,
        requests_per_s=REQUESTS_PER_S,
        dram_bytes=BUDGET_BYTES // 4,
        remote_bytes=BUDGET_BYTES // 2,
        prefill_step_s=OVERHEAD_S,
        prefill_chunk_s=PREFILL_CHUNK_S,
        policy=POLICY.format(budget=BUDGET_BYTES, period_s=PERIOD_S),
    )
    few, many = (int(seconds * REQUESTS_PER_S) for seconds in (size.few_s, size.many_s))
    trace = shifting([Phase(few, FEW), Phase(many, MANY)], REQUESTS_PER_S, seed=1)
    with fleet(setup, trace, plays=False) as made:
        made.world.limit(LINK_BYTES_PER_S)
        made.world.play(trace)
        stood, fetches = _watched(made, few + many)
        changes = [one for one in made.agent.decisions("tier_size") if one["state"] in CHANGED]
        made.world.stop("player")
        journals = [made.world.folder / f"player-{index}.journal" for index in range(setup.players)]
        traffic = recorded(trace, journals)
        verified = made.unharmed()
    found = regret(traffic, setup, stood, fetches=fetches, period_s=PERIOD_S)
    return judged(found, traffic, stood, len(changes), verified, must_follow=not short)


def _watched(made: Fleet, requests: int) -> tuple[list[Standing], list[Fetch]]:
    """All sizes in force until this many requests were served, and what a fetch cost meanwhile."""
    stood: list[Standing] = []
    fetches: list[Fetch] = []

    def over() -> bool:
        now = _standing(made)
        if now and not (stood and (now.dram, now.remote) == (stood[-1].dram, stood[-1].remote)):
            stood.append(now)
        if not fetches or time.time() - fetches[-1].at >= PROBE_S:
            fetches.extend(_fetch(made))
        return made.world.counted()["requests"] >= requests

    made.world.until(over, f"engines serve {requests} requests", requests / 4 + WITHIN_S)
    expect(fetches, "no store tells what a fetch from the remote takes")
    return stood, fetches


def _standing(made: Fleet) -> Standing | None:
    """None while the Redis does not tell how much it may hold."""
    dram = [int(made.tuning(host)["tiers"]["dram"]["capacity_bytes"]) for host in HOSTS]
    remote = made.store(HOSTS[0], "status")["tiers"]["remote"]["capacity_bytes"]
    return None if remote is None else Standing(time.time(), dram, int(remote))


def _fetch(made: Fleet) -> list[Fetch]:
    """What a fetch costs now, as the stores measured it, the mean of both; none while one does not know."""
    told = made.metrics()
    first = [total([one], "fetch_estimate_t0_seconds", tier="remote") for one in told]
    rate = [total([one], "fetch_estimate_bytes_per_second", tier="remote") for one in told]
    if not all(rate):
        return []
    return [Fetch(time.time(), fmean(first), fmean(CHUNK_BYTES / each for each in rate))]


def judged(
    found: Regret, traffic: Recorded, stood: list[Standing], changes: int, verified: int, *, must_follow: bool
) -> str:
    """The evidence; NotShownError if the claim does not hold."""
    turned = [each for each in stood if each.at <= traffic.trace.t[traffic.turn]][-1]
    first, then, last = (each.remote / BUDGET_BYTES for each in (stood[0], turned, stood[-1]))
    best, stay = found.by_share[found.best], found.to_stay(then)
    told = (
        f"in {changes} decisions the remote's share of {BUDGET_BYTES / 2**20:.0f} MiB went from {first:.0%} to "
        f"{then:.0%} while few documents were asked about ({FEW}), and to {last:.0%} after they had become many "
        f"({MANY}; to stay would have taken {stay:.0%} more than the best), in {len(traffic.hosts)} requests: a regret "
        f"of {found.share:+.1%} (at most {MOST_REGRET:.0%}) against the best split that stands still, {found.best:.0%} "
        f"({1000 * found.ttft_s:.1f} against {1000 * best:.1f} ms to the first token, replayed on the {found.requests} "
        "recorded requests after three periods)"
    )
    follows = not must_follow or stay <= DEAR or found.to_stay(last) < stay
    if not (changes and follows and found.share <= MOST_REGRET):  # NaN compares false, and proves nothing
        raise NotShownError(told)
    return f"{told}; all {verified} chunks that were read were right"
