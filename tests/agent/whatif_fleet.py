"""Stores as the agent sees them, requests of a fleet, and what they cost exactly."""

import json
from collections import OrderedDict
from datetime import timedelta

import httpx
import numpy as np

from agent.fakes import START, snapshot, window
from tiertune_agent.collector.samples import SampleReader
from tiertune_agent.collector.sampling import Handout
from tiertune_agent.whatif.fleet import FleetWhatif
from tiertune_connector.keys import Namespace
from tiertune_connector.sampling.observer import Observer, Sampling, StaleError
from tiertune_connector.sessions.session import Session
from tiertune_connector.whatif.chain import Shape

CHUNK_TOKENS, CHUNK_BYTES = 16, 1000
TOKEN_S, FETCH = 0.001, {"dram": (0.0, 1e-7), "remote": (0.004, 1e-6)}
NAMESPACE = Namespace(model="llama", chunk_tokens=CHUNK_TOKENS)
DIGEST = NAMESPACE.digest
PREFILL = {"overhead_s": 0.01, "seconds_per_flop": TOKEN_S, "params": 0.5, "layers": 0, "width": 0, "step_tokens": 0}


NOW = Shape(40 * CHUNK_BYTES, 0, 80 * CHUNK_BYTES)
"""What hosts have if nothing else is said."""


class Host:
    """A store as the agent sees it: the real observer behind a pretended HTTP; ``clock`` gives seconds."""

    def __init__(self, name, clock, *, dram=40, remote=80, skew_s=0.0, namespace=NAMESPACE):
        self.name, self.url, self.clock, self.skew_s = name, f"http://{name}", clock, skew_s
        self.namespace = namespace
        self.dram, self.remote = dram * CHUNK_BYTES, remote * CHUNK_BYTES
        self.prefill, self.up = PREFILL, True
        self.remote_told = None  # as it is
        self.gate = {"margin": 1.0}
        self.boot()

    def boot(self):
        self.boot_id, self.began_s = f"{self.name}-{id(self)}-{self.clock()}", self.clock()
        self.observer = Observer(lambda _: None, lambda: self.clock() + self.skew_s)
        self.session = Session("c", "e", "all", self.namespace, CHUNK_BYTES, CHUNK_TOKENS)
        self.observer.attach(self.session)
        self.puts = []

    def look(self, keys):
        self.observer.seen(self.session, keys, len(keys) * CHUNK_TOKENS)

    def samples(self, since):
        if not self.up:
            raise httpx.ConnectError("refused")
        header, lines = self.observer.read(since)
        return "\n".join(json.dumps(line) for line in [{"boot_id": self.boot_id, **header}, *lines])

    def put_sampling(self, document):
        self.puts.append(document)
        hot = tuple(bytes.fromhex(key) for key in document["hot"])
        try:
            self.observer.adopt(Sampling(document["seed"], document["rate"], hot, document["version"]))
        except StaleError:
            return httpx.Response(412)
        return httpx.Response(200)

    def snapshot(self, at):
        pool = {"chunk_tokens": CHUNK_TOKENS, "chunk_bytes": CHUNK_BYTES, "prefill": self.prefill,
                "chunks_each": self.observer.terms(self.namespace.digest)["chunks_each"],
                "dram": {"effective": {"capacity_bytes": self.dram, "eviction": "lru"}}}  # fmt: skip
        remote = {"health": "ok", "capacity_bytes": self.remote} if self.remote else {"health": "absent"}
        gauges = [
            window(tier, {"fetch_estimate_t0_seconds": first_s, "fetch_estimate_bytes_per_second": 1 / byte_s}, at)
            for tier, (first_s, byte_s) in FETCH.items()
        ]
        return snapshot(
            *gauges, store=self.name, url=self.url, boot_id=self.boot_id, at=at,
            status={"pools": {self.namespace.digest: pool}, "tiers": {"remote": self.remote_told or remote},
                    "uptime_s": self.clock() - self.began_s},
            tuning={"tiers": {"dram": {"capacity_bytes": self.dram}, "remote": self.gate}},
        )  # fmt: skip


class Fleet:
    """Hosts, and a service that reads them."""

    def __init__(self, hosts=2, **options):
        self.now_s = START.timestamp()
        self.hosts = [Host(f"host-{index}", self.clock, **options) for index in range(hosts)]
        self.restart()

    def restart(self):
        """Another agent reads the same hosts."""
        by_url = {host.url: host for host in self.hosts}
        self.reader, self.handout = SampleReader(by_url.get, self.clock), Handout(by_url.get)
        self.service = FleetWhatif(self.reader, self.handout, self.clock)

    def clock(self):
        return self.now_s

    def play(self, requests):
        """One request after another, each a host and keys, 10 ms apart."""
        for host, keys in requests:
            self.now_s += 0.01
            self.hosts[host].look(keys)

    def round(self, seconds=15.0, every_s=0.0):
        self.now_s += seconds
        at = START + timedelta(seconds=self.now_s - START.timestamp())
        up = [host.snapshot(at) for host in self.hosts if host.up]
        return self.service.round(up, at, every_s=every_s)

    def told(self, requests):
        """What is told after these."""
        self.play(requests)
        return self.round()

    def counts(self, requests=()):
        """How many of them each prospect is of."""
        return [prospect.requests for prospect in self.told(requests)]


def begun(count, **options):
    """A fleet after its first round, and so many requests for it."""
    fleet = Fleet(**options)
    fleet.round()
    return fleet, list(conversations(count, hosts=len(fleet.hosts)))


def chain(*blocks):
    return [str(block).rjust(8, "0").encode() * 2 for block in blocks]


def conversations(count, *, hosts=2, people=12, seed=0):
    """Each request continues somebody's conversation, or begins it anew; all share their first three chunks."""
    rng = np.random.default_rng(seed)
    turns = [0] * people
    lives = list(range(people))
    for index in range(count):
        who = int(rng.zipf(1.5)) % people
        turns[who] += 1
        if turns[who] > 8:
            turns[who], lives[who] = 1, people + index
        own = [f"{lives[who]}-{turn}" for turn in range(turns[who])]
        yield int(rng.integers(hosts)), chain("s0", "s1", "s2", *own)


class Lru:
    def __init__(self, capacity):
        self.capacity, self.held = capacity, OrderedDict()

    def write(self, keys):
        for key in reversed(keys):
            self.held.pop(key, None)
            while self.capacity and len(self.held) >= self.capacity:
                self.held.popitem(last=False)
            if self.capacity:
                self.held[key] = None


def exact_cost(requests, shape, hosts):
    """Mean seconds of a request, by a simulation that follows every chunk.

    Three quarters of the DRAM have room for what comes from the remote; what does not find room is recomputed.
    """
    each_s = CHUNK_TOKENS * TOKEN_S - FETCH["dram"][1] * CHUNK_BYTES
    drams, remote = [Lru(shape.dram // CHUNK_BYTES) for _ in range(hosts)], Lru(shape.remote // CHUNK_BYTES)
    seconds = 0.0
    for host, keys in requests:
        tiers = []
        for key in keys:
            if key not in drams[host].held and key not in remote.held:
                break
            tiers.append("dram" if key in drams[host].held else "remote")
        saved_s = tiers.count("dram") * each_s
        if "remote" in tiers:
            first, fetched = tiers.index("remote"), tiers.count("remote")
            far_s = FETCH["remote"][1] * CHUNK_BYTES + FETCH["remote"][0] / (len(tiers) - first)
            near_s = first * each_s
            saved_s += fetched * (CHUNK_TOKENS * TOKEN_S - far_s)
            saved_s = near_s + min(1.0, 0.75 * shape.dram / CHUNK_BYTES / fetched) * (saved_s - near_s)
        seconds += len(keys) * CHUNK_TOKENS * TOKEN_S - saved_s
        drams[host].write(keys)
        remote.write(keys)
    return seconds / len(requests)


def exact_rest(first, rest, shape, hosts=2):
    """Mean seconds of the rest, after the first ones were there."""
    every = [*first, *rest]
    return (exact_cost(every, shape, hosts) * len(every) - exact_cost(first, shape, hosts) * len(first)) / len(rest)


def many(count, *, people, seed=0):
    """Requests of a fleet too large to follow every chunk of."""
    return conversations(count, people=people, seed=seed)
