"""One run of the demo, from its first process to its last."""

import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import httpx
from rich.console import Console

from tiertune_agent.collector.adapters.exposition import Exposition
from tiertune_agent.demo import result
from tiertune_agent.demo.ports import free_port
from tiertune_agent.demo.result import Figures
from tiertune_agent.demo.screen import Scene, Tell, ending, teller
from tiertune_agent.demo.world import DEMO, HOSTS, DemoError, EndedError, World, world
from tiertune_agent.network import http_client, json_of, read_whole
from tiertune_agent.replay.traces import Trace, builtin_trace, open_trace
from tiertune_agent.terminal import options
from tiertune_connector.ending import Ending, until_told

TRACE = "lmcache_agents"
SLOW_BYTES_PER_S = float(3 << 20)
"""Per host and direction: a chunk takes 21 ms instead of about one."""
LOOK_EVERY_S = 1.0
ABOUT = """Engines fetch cached chunks of a prompt where that beats recomputing them.
Every two seconds the agent asks: does the remote pay? It switches fetching."""
ASK_TIMEOUT_S = 3.0


def run(seconds: int, trace: Path | None, port: int, json_path: Path | None) -> int:
    """The exit status: 0 shown or ended early by the user, 1 not shown. InputError, TraceError for unusable input.

    ``trace`` None takes a shipped one, ``port`` 0 a free one for the page; ``json_path`` gets the result.
    """
    loaded = open_trace(str(trace)) if trace else builtin_trace(TRACE)
    port = port or free_port()
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError as error:
        raise options.InputError(f"--port {port}: {error.strerror}: give another one, 0 takes a free one") from None
    with until_told() as ended:
        return Run(loaded, seconds, ended).through(port, json_path)


class Run:
    """``ended`` is set when the user ends the demo."""

    def __init__(self, trace: Trace, seconds: int, ended: Ending) -> None:
        self._trace = trace
        self._seconds = seconds
        self._slowed = (seconds / 3, 2 * seconds / 3)
        self._ended = ended
        self._console = Console(highlight=False, emoji=False)
        self._figures = Figures()

    def through(self, port: int, json_path: Path | None) -> int:
        """The exit status. Whatever happens, every process and file of the run is gone afterwards."""
        try:
            with world(self._ended, port) as made:
                self._play(made)
            missing = [] if self._ended.is_set() else result.shortfall(self._figures, self._slowed)
        except EndedError:
            missing = []
        except DemoError as error:
            missing = [str(error)]
        return self._conclude(missing + result.damage(self._figures), json_path)

    def _conclude(self, missing: Sequence[str], json_path: Path | None) -> int:
        told = ending(self._figures) if self._figures.seconds else []
        if not missing and not self._ended.is_set():
            told.append("SHOWN: fetching from the remote went off while that was slow, and on again after it")
        for words in [*told, *(f"NOT SHOWN: {what}" for what in missing)]:
            self._console.print(words, markup=False, soft_wrap=True)
        if self._figures.seconds:
            options.result(self._figures.document(), json_path)
        return 1 if missing else 0

    def _play(self, made: World) -> None:
        scene = Scene(self._trace.name, made.page, self._seconds, self._slowed, SLOW_BYTES_PER_S)
        self._console.print(ABOUT, style="dim")
        what = f"{len(HOSTS)} hosts, {DEMO.players} engines, a remote ({made.remote}), the agent"
        self._console.print(f"starting {what} ...")
        made.serve(self._trace)
        made.play(self._trace)
        with http_client(timeout=ASK_TIMEOUT_S) as http:
            watch = Watch(made, http)
            with teller(self._console, scene) as tell:
                self._follow(made, watch, tell)
            self._console.print("ending all of them ...")
            made.stop("player")  # before the last look, so that it counts all that they did
            self._figures = watch.look(self._figures)

    def _follow(self, made: World, watch: "Watch", tell: Tell) -> None:
        start, end = self._slowed
        while not self._ended.is_set() and watch.seconds < self._seconds:
            made.limit(SLOW_BYTES_PER_S if start <= watch.seconds < end else 0.0)
            made.check()
            self._figures = watch.look(self._figures)
            tell(self._figures)
            changes = [at - watch.seconds for at in (start, end, self._seconds) if at > watch.seconds]
            self._ended.wait(min([LOOK_EVERY_S, *changes]))


class Watch:
    """Reads figures from the stores, the agent and the players; the run starts when it is made."""

    def __init__(self, made: World, http: httpx.Client) -> None:
        self._made = made
        self._http = http
        self._started = time.monotonic()
        self._started_at = datetime.now(UTC)

    @property
    def seconds(self) -> float:
        """Since the start of the run."""
        return time.monotonic() - self._started

    def look(self, last: Figures) -> Figures:
        """The figures now; those of the ``last`` look if somebody does not answer in time."""
        try:
            last = self._ask()
        except httpx.HTTPError:
            self._made.check()
        return replace(last, seconds=self.seconds, counted=self._made.counted())

    def _ask(self) -> Figures:
        page = self._made.page
        metrics = [f"{page}metrics", *(f"{url}/metrics" for url in self._made.stores.values())]
        told = [Exposition(read_whole(self._http, url).text) for url in metrics]
        decided = json_of(read_whole(self._http, f"{page}api/v1/decisions?limit=1000"))["decisions"]
        return Figures(
            tiers=result.tiers(told),
            decisions=result.decisions(decided, self._started_at),
            windows=int(result.total(told, "agent_loop_seconds_count")),
        )
