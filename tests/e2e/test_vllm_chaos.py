"""Whatever is done to the tiers, engines answer as without them."""

import signal
from contextlib import contextmanager
from itertools import count

import numpy as np

from e2e.servers import wait_until
from e2e.vllm_engines import Request, differences, of_engines
from e2e.vllm_fixtures import prompts
from e2e.vllm_stores import MIB, Every

pytestmark = of_engines(600)

REQUESTS = 200
CHANGES = 50
BATCH = 6
PERIOD_S = 0.1
CAPACITIES = (0, 2 * MIB, 8 * MIB, 24 * MIB, 128 * MIB)


class Chaos:
    """One change of every kind after another, on both hosts; the Redis hangs a quarter of the time."""

    def __init__(self, fleet, seed):
        self.fleet = fleet
        self.random = np.random.default_rng(seed)
        self.done = dict.fromkeys(("tuned", "flushed", "stopped"), 0)
        self.hangs = False

    def __call__(self, call):
        self.tune(self.fleet.host_a if call % 2 else self.fleet.host_b)
        if call % 8 == 2:
            self.redis(signal.SIGSTOP)
            self.done["stopped"] += 1
        elif call % 8 == 4:
            self.redis(signal.SIGCONT)
        elif call % 16 == 7:
            (self.fleet.host_a if call % 32 == 7 else self.fleet.host_b).flush()
            self.done["flushed"] += 1

    def tune(self, host):
        pick = self.random.choice
        host.tune(
            tiers__dram__capacity_bytes=int(pick(CAPACITIES)),
            tiers__disk__capacity_bytes=int(pick(CAPACITIES)) if host is self.fleet.host_a else 0,
            tiers__disk__write=str(pick(["commit", "evict"])) if host is self.fleet.host_a else "off",
            tiers__remote__fetch=str(pick(["on", "off"])),
            tiers__remote__write=str(pick(["commit", "evict", "off"])),
            defaults__eviction=str(pick(["lru", "arc"])),
        )
        self.done["tuned"] += 1

    def redis(self, number):
        self.fleet.redis.process.send_signal(number)
        self.hangs = number == signal.SIGSTOP


@contextmanager
def restored(fleet, chaos):
    """Afterwards everything is tuned as before, and Redis answers."""
    before = {host: host.http.get("/v1/tuning") for host in (fleet.host_a, fleet.host_b)}
    try:
        yield
    finally:
        chaos.redis(signal.SIGCONT)
        for host, tuning in before.items():
            host.tune(**{name: tuning[name] for name in ("tiers", "pools", "defaults")})
        wait_until(lambda: all(healthy(host) for host in before), "Redis is back in use", 60)


def healthy(host):
    return host.http.get("/v1/status")["tiers"]["remote"]["health"] == "ok"


def test_outputs_stay_right_while_tiers_are_changed_flushed_and_hung(fleet, reference, engine_a, engine_b, engine_c):
    """Every output of 200 requests or more on three engines equals the run without a cache, with 50 changes meanwhile.

    Every 100 ms something changes: as long as it takes, which is longer on a GPU.
    """
    lengths = ((256, 40), (512, 200), (704, 70), (1024, 100), (320, 500))
    pool = [
        prompt
        for seed, (prefix, tail) in enumerate(lengths)
        for prompt in prompts(6, seed=100 + seed, prefix=prefix, tail=tail)
    ]
    fleet.expected(pool)
    random, engines = np.random.default_rng(0), (engine_a, engine_b, engine_c)
    chaos = Chaos(fleet, seed=1)
    wrong, external, asked = [], 0.0, 0
    with restored(fleet, chaos), Every(PERIOD_S, chaos) as ticks:
        for turn in count():
            batches = {engine: [pool[index] for index in random.integers(len(pool), size=BATCH)] for engine in engines}
            for engine, batch in batches.items():
                if turn:
                    engine.reset(staging=bool(random.integers(2)))
                engine.start([Request(prompt) for prompt in batch])
            for engine, batch in batches.items():
                got = engine.finish()
                wrong += differences(got.answers, fleet.expected(batch))
                external += got.external
                asked += len(batch)
            if wrong or ticks.error or (asked >= REQUESTS and ticks.calls >= CHANGES and min(chaos.done.values()) >= 3):
                break
    assert wrong == []
    assert external > 0, "nothing came through the stores: this run proves little"
