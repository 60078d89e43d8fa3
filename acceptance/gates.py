"""The agent stops fetching from a throttled remote, and starts it again when the link is fast again."""

from acceptance.fleet import SLOW_BYTES_PER_S, Fleet, fleet
from acceptance.traffic import everyday
from tiertune_agent.demo.world import Setup

POLICY = """\
version: 1
mode: observe
guard: {changes_per_hour: 1000, min_requests: 4, soak: 5s}
tuners:
  remote_fetch: {mode: auto, period: 1s, disable_after: 2, enable_after: 2}
"""
SETUP = Setup(players=2, window_s=1, requests_per_s=8.0, dram_bytes=8 << 20, policy=POLICY)
WITHIN_S = 60.0


def prove(*, short: bool) -> str:
    """One turn; in full three, to rule out chance."""
    turns = 1 if short else 3
    with fleet(SETUP, everyday()) as made:
        made.world.until(lambda: made.hits("remote") > 0, "engines find chunks in the remote", WITHIN_S)
        times = [_turn(made) for _ in range(turns)]
        verified = made.unharmed()
        reason = next(one["reason"] for one in made.agent.decisions("remote_fetch") if one["to"] == "off")
    off, on = (max(column) for column in zip(*times, strict=True))
    return (
        f"both hosts stopped fetching within {off:.1f} s of their link being throttled to "
        f"{SLOW_BYTES_PER_S / 2**20:g} MiB/s ({reason}) and fetched again within {on:.1f} s of its end, "
        f"{turns} of {turns} times; all {verified} chunks that were read were right"
    )


def _turn(made: Fleet) -> tuple[float, float]:
    """Seconds until all hosts are off, and until all are on again. First, fetching stays on for longer than a soak."""
    until = made.world.until
    made.serving(60)
    made.world.limit(SLOW_BYTES_PER_S)
    off_s = until(lambda: not any(made.fetching()), "fetching is switched off while the remote is slow", WITHIN_S)
    made.world.limit(0.0)
    on_s = until(lambda: all(made.fetching()), "fetching is switched on when the remote is fast", WITHIN_S)
    hits = made.counted("gate_fetched_tokens_total", tier="remote")
    until(lambda: made.counted("gate_fetched_tokens_total", tier="remote") > hits, "chunks are fetched again", WITHIN_S)
    return off_s, on_s
