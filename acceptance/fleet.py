"""A demo's world as claims use it: ask its stores and engines, retune a store, wait for a condition."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import httpx

from tiertune_agent.collector.adapters.exposition import Exposition
from tiertune_agent.demo.ports import free_port
from tiertune_agent.demo.result import total
from tiertune_agent.demo.world import END_S, HOSTS, Child, Setup, World, world
from tiertune_agent.replay.traces import Trace
from tiertune_connector.ending import Ending

SLOW_BYTES_PER_S = 1.5 * 2**20
"""Of the throttled link: fetching a chunk takes about 40 ms, recomputing it 5 ms."""
ASK_TIMEOUT_S = 10.0
Json = Any


class NotShownError(Exception):
    """A claim did not hold; the message says what was expected and what was found."""


def expect(holds: object, otherwise: str) -> None:
    """NotShownError unless it holds."""
    if not holds:
        raise NotShownError(otherwise)


def command(*words: str) -> None:
    """Run ``tiertune`` with these arguments; NotShownError if it fails."""
    call = [sys.executable, "-c", "from tiertune_agent.cli import main; main()", *words]
    done = subprocess.run(call, check=False, capture_output=True, text=True, timeout=60)
    expect(done.returncode == 0, f"tiertune {words[0]} failed: {done.stderr}")


class AgentApi:
    """The HTTP API of the agent; ``page`` is the URL of its page."""

    def __init__(self, page: str, http: httpx.Client) -> None:
        self._api = f"{page}api/v1"
        self._http = http

    def get(self, path: str) -> Json:
        return self._http.get(f"{self._api}/{path}").raise_for_status().json()

    def post(self, path: str) -> None:
        """Send a command."""
        self._http.post(f"{self._api}/{path}").raise_for_status()

    def decisions(self, tuner: str) -> list[Json]:
        """One tuner's decisions, oldest first."""
        told = self.get("decisions?limit=1000")["decisions"]
        return sorted((one for one in told if one["tuner"] == tuner), key=lambda one: int(one["id"]))

    def incidents(self, kind: str, host: str) -> list[str]:
        """Messages of open incidents."""
        told = [one for one in self.get("incidents")["incidents"] if one["closed_at"] is None]
        return [one["message"] for one in told if (one["kind"], one["store"]) == (kind, host)]


class Fleet:
    """Asks the processes of a world."""

    def __init__(self, made: World, http: httpx.Client) -> None:
        self.world = made
        self.agent = AgentApi(made.page, http)
        self._http = http

    def store(self, host: str, path: str) -> Json:
        return self._http.get(f"{self.world.stores[host]}/v1/{path}").raise_for_status().json()

    def tuning(self, host: str) -> Json:
        return self.store(host, "tuning")

    def retune(self, host: str, change: Callable[[Json], None]) -> None:
        """Change a tuning by hand, past the agent; again if the agent changed it in between."""

        def put() -> bool:
            tuning = self.tuning(host)
            change(tuning)
            headers = {"If-Match": str(tuning["version"]), "Idempotency-Key": f"hand-{time.monotonic_ns()}"}
            answer = self._http.put(f"{self.world.stores[host]}/v1/tuning", json=tuning, headers=headers)
            if answer.status_code == httpx.codes.PRECONDITION_FAILED:
                return False
            answer.raise_for_status()
            return True

        self.world.until(put, f"{host} takes a tuning by hand", 10)

    def fetching(self) -> list[bool]:
        """Whether each host may fetch from the remote."""
        return [self.tuning(host)["tiers"]["remote"]["fetch"] == "on" for host in HOSTS]

    def metrics(self, *hosts: str) -> list[Exposition]:
        """What the stores of these hosts export; none: of all."""
        urls = (f"{self.world.stores[host]}/metrics" for host in hosts or HOSTS)
        return [Exposition(self._http.get(url).raise_for_status().text) for url in urls]

    def counted(self, metric: str, *hosts: str, **labels: str) -> float:
        """A counter's sum over these hosts; none: all."""
        return total(self.metrics(*hosts), metric, **labels)

    def hits(self, tier: str, *hosts: str) -> float:
        """Tokens that were found in the tier."""
        return self.counted("tier_lookup_tokens_total", *hosts, tier=tier, result="hit")

    def serving(self, requests: int) -> None:
        """Wait for this many more requests to be served."""
        goal = self.world.counted()["requests"] + requests
        self.world.until(lambda: self.world.counted()["requests"] >= goal, f"engines serve {requests} requests", 60)

    def kill(self, name: str) -> None:
        """SIGKILL to a process, as the kernel does when memory is short."""
        self._child(name).process.kill()
        self.lost(name)

    def lost(self, name: str, within_s: float = END_S) -> None:
        """Wait for the end of a process that is killed; the world no longer looks for it."""
        gone = self._child(name)
        with suppress(subprocess.TimeoutExpired):
            gone.process.wait(within_s)
        expect(gone.process.poll() is not None, f"{name} still runs after {within_s:g} s")
        self.world.children.remove(gone)

    def _child(self, name: str) -> Child:
        return next(child for child in self.world.children if child.name == name)

    def unharmed(self) -> int:
        """How many chunks were read and found right; NotShownError if one was wrong, or none was read."""
        counted = self.world.counted()
        expect(not counted["wrong"], f"{counted['wrong']} chunks with wrong bytes were taken for right")
        expect(counted["verified"], "no engine compared a chunk with what it must be")
        return counted["verified"]


@contextmanager
def fleet(setup: Setup, trace: Trace, *, plays: bool = True, files: Mapping[str, str] | None = None) -> Iterator[Fleet]:
    """A running fleet, which is gone afterwards. ``plays`` False: the players wait for ``world.play``.

    ``files``, texts by name, are written into the world's folder before anything starts.
    """
    with (
        world(Ending(), free_port(), setup) as made,
        httpx.Client(timeout=ASK_TIMEOUT_S, trust_env=False) as http,
    ):
        for name, text in (files or {}).items():
            (made.folder / name).write_text(text)
        made.serve(trace)
        if plays:
            made.play(trace)
        yield Fleet(made, http)
