"""Stores without a process: what the agent sees of them over HTTP, on a clock that a test moves."""

import json
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import httpx
from sqlalchemy import func, select

from tiertune_agent.fields import replaced
from tiertune_agent.history.models import AnswerRow, HourRow, ProspectRow, StageWindowRow, WindowRow
from tiertune_agent.records import Histogram, Rates, Snapshot, Window
from tiertune_connector.documents import FieldError
from tiertune_connector.tuning import parse_tuning
from tiertune_connector.whatif.chain import Shape

START = datetime(2025, 3, 5, 12, 0, tzinfo=UTC)


def after(**span):
    """So long after the start; ``span`` is what `timedelta` takes."""
    return START + timedelta(**span)


DIGEST = "ab" * 16

MB = 1e6

SLOW, FAST = 1e8, 1e9
"""Bytes per second: the 100 MB of a fake store's requests take 1 s or 0.1 s, recomputing them takes 0.5 s."""


class Clock:
    """A time that moves only when told."""

    def __init__(self, at=START):
        self.at = at

    def now(self):
        return self.at

    def seconds(self):
        return self.at.timestamp()

    def advance(self, seconds):
        self.at += timedelta(seconds=seconds)


class FakeStore:
    """A store's HTTP interface with its rules for tuning; requests weigh 100 MB and take 0.5 s to recompute."""

    def __init__(self, clock, name="host-a", bandwidth=1e9):
        self.clock, self.name, self.bandwidth = clock, name, bandwidth
        self.boot_id, self.up, self.bypass = "boot-1", True, False
        self.tuning = {
            "version": 1,
            "bypass": False,
            "tiers": {
                "dram": {"capacity_bytes": 1 << 30},
                "disk": {"capacity_bytes": 0, "write": "evict"},
                "remote": {
                    "fetch": "on",
                    "write": "commit",
                    "min_fetch_tokens": 0,
                    "margin": 1.1,
                    "deadline_factor": 1.5,
                    "holdout": 0.0,
                },
            },
            "pools": {},
            "defaults": {"eviction": "lru"},
        }
        self.counters = {}
        self.keys = {}
        self.puts = []
        self.lose_answers = False
        self.before_put = lambda: None
        self.health = {"dram": "ok", "remote": "ok", "disk": "absent"}
        self.held = {}
        self.uptime_s = None

    def count(self, name, amount, **labels):
        """Count on one series."""
        key = (name, tuple(labels.items()))
        self.counters[key] = self.counters.get(key, 0.0) + amount

    def counts(self, amounts, **labels):
        """Count on several series of these labels, by their names."""
        for name, amount in amounts.items():
            self.count(name, amount, **labels)

    def restart(self):
        self.boot_id, self.counters = f"boot-{int(self.boot_id[5:]) + 1}", {}

    @contextmanager
    def deaf(self):
        """No change reaches it meanwhile; it is read as ever."""

        def refuse():
            raise httpx.ConnectError("connection refused")

        self.before_put = refuse
        yield
        self.before_put = lambda: None

    def traffic(self, requests=10):
        """A window's requests: what the gate would count at the present bandwidth."""
        pool = {"namespace": DIGEST, "model": "llama"}
        self.count("prompt_tokens_total", 1000.0 * requests, stage="all", **pool)
        self.count("stage_gpu_seconds_total", 0.5 * requests, stage="all", phase="prefill")
        self.count("stage_tokens_total", 1000.0 * requests, stage="all", phase="prefill")
        if self.tuning["tiers"]["remote"]["fetch"] == "off":
            return
        fetch_s = 100 * MB / self.bandwidth
        remote = {"tier": "remote"}
        self.count("gate_candidate_requests_total", requests, **remote)
        self.count("gate_candidate_bytes_total", 100 * MB * requests, **remote)
        self.count("gate_candidate_seconds_total", fetch_s * requests, **remote, kind="fetch")
        self.count("gate_candidate_seconds_total", 0.5 * requests, **remote, kind="recompute")
        if fetch_s * 1.1 < 0.5:
            self.count("saved_seconds_total", (0.5 - fetch_s) * requests, **remote)
            self.count("tier_lookup_tokens_total", 500.0, **remote, result="hit", origin="other_host", **pool)

    def simulate(self, algorithm, hit, size=1 << 30):
        """A window's ghosts of this algorithm and size: of 1000 tokens, so many hit."""
        labels = {"algorithm": algorithm, "capacity_bytes": str(size), "namespace": DIGEST, "model": "llama"}
        self.count("whatif_tokens_total", hit, **labels, result="hit")
        self.count("whatif_tokens_total", 1000 - hit, **labels, result="miss")

    def larger_pays(self):
        """A window's ghosts by which a pool of four times the size would hit more."""
        for hit, size in ((300, 1 << 30), (400, 4 << 30)):
            self.simulate("lru", hit, size)

    def answers(self, what, status, **response):
        """From now on so to ``put_tuning`` or the like; ``response`` is what `httpx.Response` takes."""
        setattr(self, what, lambda _request: httpx.Response(status, **response))

    def by_hand(self, field, value):
        """Somebody sets it."""
        self.tuning = {**replaced(self.tuning, field, value), "version": self.tuning["version"] + 1}

    def tells(self, what, change):
        """From now on its answer to ``get_status`` or the like is what ``change`` makes of the document."""
        told = getattr(self, what)
        setattr(self, what, lambda request: httpx.Response(200, text=json.dumps(change(told(request).json()))))

    def handle(self, request):
        if not self.up:
            raise httpx.ConnectError("connection refused", request=request)
        route = getattr(self, f"{request.method.lower()}_{request.url.path.removeprefix('/v1/')}")
        return route(request)

    def get_counters(self, _request):
        gauges = {
            ("fetch_estimate_t0_seconds", (("tier", "remote"),)): 0.001,
            ("fetch_estimate_bytes_per_second", (("tier", "remote"),)): self.bandwidth,
            ("fetch_estimate_age_seconds", (("tier", "remote"),)): 0.5,
        }
        metrics = {}
        for (name, labels), value in {**self.counters, **gauges}.items():
            table = metrics.setdefault(name, {"labels": [label for label, _ in labels], "rows": []})
            table["rows"].append([*(text for _, text in labels), value])
        document = {"store": self.name, "boot_id": self.boot_id, "seq": 1, "time_s": self.clock.now().timestamp()}
        return httpx.Response(200, json={**document, "since": None, "metrics": metrics})

    def get_status(self, _request):
        tiers = {
            tier: {"health": health, "reason": "told so", **self.held.get(tier, {})}
            for tier, health in self.health.items()
        }
        pool = {"model": "llama", "chunk_bytes": 1 << 20, "dram": {"effective": {"capacity_bytes": 1 << 30}}}
        return httpx.Response(
            200,
            json={"store": self.name, "version": "0.1", "tiers": tiers, "pools": {DIGEST: pool}, "bypass": self.bypass}
            | {"uptime_s": self.uptime_s, "boot_id": self.boot_id, "tuning_version": self.tuning["version"]},
        )

    def get_tuning(self, _request):
        return httpx.Response(200, json=self.tuning, headers={"ETag": f'"{self.tuning["version"]}"'})

    def put_tuning(self, request):
        self.before_put()
        document, expected = json.loads(request.content), int(request.headers["If-Match"].strip('"'))
        key = request.headers["Idempotency-Key"]
        self.puts.append(key)
        if key in self.keys and self.keys[key] != document:
            return httpx.Response(409, json={"message": "the key was used for another change"})
        if key not in self.keys:
            if expected != self.tuning["version"]:
                return httpx.Response(412, json={"message": f"the tuning is at version {self.tuning['version']}"})
            try:
                parse_tuning(document)
            except FieldError as error:
                return httpx.Response(422, json={"field": error.field, "message": error.message})
            self.keys[key] = document
            self.tuning = {**document, "version": expected + 1}
        if self.lose_answers:
            raise httpx.ReadTimeout("no answer", request=request)
        return self.get_tuning(request)

    def get_samples(self, _request):
        return httpx.Response(404)

    def post_bypass(self, request):
        self.bypass = json.loads(request.content)["on"]
        self.tuning = {**self.tuning, "bypass": self.bypass, "version": self.tuning["version"] + 1}
        return httpx.Response(200, json={"bypass": self.bypass})

    def post_flush(self, _request):
        return httpx.Response(200, json={"dram": 7, "remote": 3})


def fetch(store):
    return store.tuning["tiers"]["remote"]["fetch"]


def transport(*stores):
    """A network in which each store answers at ``http://its-name:7410``; a name longer than a host may have is cut."""
    by_name = {store.name[:63]: store for store in stores}
    return httpx.MockTransport(lambda request: by_name[request.url.host].handle(request))


def remote_window(index=0, *, seconds=15.0, **figures):
    """A window of the remote tier; ``figures`` are the keys of ``names``, None is left out."""
    names = {
        "requests": "gate_candidate_requests_total",
        "fetch": "gate_candidate_seconds_total{kind=fetch}",
        "recompute": "gate_candidate_seconds_total{kind=recompute}",
        "saved": "saved_seconds_total",
        "lost": "lost_seconds_total",
        "nbytes": "gate_candidate_bytes_total",
        "bandwidth": "fetch_estimate_bytes_per_second",
        "age": "fetch_estimate_age_seconds",
        "t0": "fetch_estimate_t0_seconds",
    }
    values = {names[name]: float(value) for name, value in figures.items() if value is not None}
    return window("remote", values, index, seconds)


def window(tier, values, at=0, seconds=15.0, *, namespace="", model="", store="host-a"):
    """``at``: the time at which it begins, or how many as long ones came before it."""
    start = at if isinstance(at, datetime) else after(seconds=at * seconds)
    return Window(store, namespace, model, tier, start, seconds, values)


def by_length(window, requests, **gained):
    """The window, with so many fetches of each class, which gained (or lost) so many seconds; ``t1024=-3.0``."""
    values = dict(window.values)
    for name, seconds in gained.items():
        tokens, result = name.removeprefix("t"), "saved" if seconds > 0 else "lost"
        values[f"gate_length_requests_total{{tokens={tokens}}}"] = requests
        values[f"gate_length_seconds_total{{tokens={tokens},result={result}}}"] = abs(seconds)
    return replace(window, values=values)


def histogram(*counts):
    """A histogram whose buckets hold these counts, from the first one on."""
    return Histogram(sum(counts), 0.0, dict(enumerate(counts)))


def snapshot(*windows, stages=(), at=START, **fields):
    known = {"store": "host-a", "url": "http://host-a:7410", "boot_id": "b", "version": "1", "status": {}, "tuning": {}}
    return Snapshot(**{**known, "at": at, "windows": windows, "stages": stages, **fields})


def gib(dram, remote=0, disk=0):
    """Sizes of a host's tiers and of the remote, told in GiB."""
    return Shape(dram << 30, disk << 30, remote << 30)


def costs(seconds):
    """Of a request, by the DRAM of a host in GiB."""
    return {f"{size << 30}/0/0": cost for size, cost in seconds.items()}


def remember(history, *windows, rates=None, **fields):
    """As told by a store: ``fields`` of its snapshot."""
    history.remember([(snapshot(*windows, **fields), rates or Rates())])


def pruned(history, now, keep):
    """Prune; how many rows went."""

    def rows():
        kinds = AnswerRow, HourRow, ProspectRow, StageWindowRow, WindowRow
        with history._session() as session:
            return sum(session.scalar(select(func.count()).select_from(kind)) for kind in kinds)

    before = rows()
    history.retention.prune(now, keep)
    return before - rows()


def propose(history, tuner, target, wish, *, mode="recommend", at=START):
    """What a tuner wishes is written down."""
    return history.decisions.propose(tuner, target, wish, mode=mode, version=1, policy=1, now=at)


def ledger_rows(history, since):
    """Rows of the ledger, of all hours."""
    return [row for rows in history.ledger.hours(since) for row in rows]


def open_incidents(agent):
    """What is wrong, by kind and store."""
    told = agent.history.journal.incidents()
    return {(one["kind"], one["store"]): one["message"] for one in told if not one["closed_at"]}


def wrong(agent):
    """Kinds of what is wrong; one that is so at several stores is there as often."""
    return [kind for kind, _ in open_incidents(agent)]


def drifted(agent):
    """Whether any drift was ever told."""
    return any(one["kind"] == "tuning_drift" for one in agent.history.journal.incidents())


def urls(*hosts):
    return [f"http://{host}:7410" for host in hosts]
