"""One run of the demo, from its first process to its last."""

import json
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Protocol

import httpx
from rich.console import Console
from rich.live import Live

from tiertune_agent.demo import result, screen
from tiertune_agent.demo.result import Figures
from tiertune_agent.demo.screen import Scene
from tiertune_agent.demo.world import DemoError, EndedError, World, free_port, taken, world
from tiertune_agent.replay.traces import Trace, TraceError, builtin_trace, load_trace

LEAST_SECONDS = 60
TRACE = "lmcache_agents"
SLOW_BYTES_PER_S = float(1 << 20)
"""Per host: a chunk of 64 KiB takes 62 ms instead of about one."""
LOOK_EVERY_S = 0.5
TELL_EVERY_S = 5.0


def run(seconds: int, trace: Path | None, port: int, json_path: Path | None) -> int:
    """As ``run_demo``."""
    try:
        loaded = load_trace(trace) if trace else builtin_trace(TRACE)
    except TraceError as error:
        return _refuse(str(error))
    if seconds < LEAST_SECONDS:
        return _refuse(f"--seconds {seconds}: a run needs at least {LEAST_SECONDS} s, for changes take windows")
    port = port or free_port()
    if why := taken(port):
        return _refuse(f"--port {port}: {why}; give another, 0 takes a free one")
    if json_path and not json_path.parent.is_dir():
        return _refuse(f"--json {json_path}: there is no folder {json_path.parent}")
    with _signals() as ended:
        return _run(loaded, seconds, port, json_path, ended)


def _run(trace: Trace, seconds: int, port: int, json_path: Path | None, ended: threading.Event) -> int:
    console = Console()
    figures = Figures()
    missing: list[str] = []
    try:
        with world(ended, port) as made:
            slowed = (seconds / 3, 2 * seconds / 3)
            scene = Scene(trace.name, made.remote, made.page, seconds, slowed, SLOW_BYTES_PER_S)
            console.print("starting a remote, two hosts, four engines, the agent ...")
            made.start(trace)
            watch = Watch(made, time.monotonic(), datetime.now(UTC))
            told: Teller = LiveTeller(console, scene) if console.is_terminal else PlainTeller(console, scene)
            with told:
                _play(made, watch, scene, told, ended)
            made.stop("player")
            figures = watch.look()
            console.print("ending ...")
    except EndedError:
        ended.set()
    except DemoError as error:
        missing = [str(error)]
    missing = missing or ([] if ended.is_set() else result.shortfall(figures, slowed))
    ...
