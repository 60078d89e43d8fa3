"""Lookups of a prompt's chunks from other processes, beside a bare echo on the same kind of socket."""

import multiprocessing
import socket
import sys
from collections.abc import Callable, Sequence
from multiprocessing.synchronize import Barrier
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import httpx

from benchmarks.store.rounds import percentile
from benchmarks.store.world import (
    CHUNK_TOKENS,
    MIB,
    START_S,
    Store,
    accepts,
    connected,
    dial,
    keys,
    rows,
    running,
    serving,
    store_chunk,
)
from tiertune_connector.client.store_client import StoreClient

KEYS = 64
CLIENTS = 4
TURNS = 5
CHUNK_BYTES = 64 << 10
ASKED, ANSWERED = 2200, 600
"""Bytes of a lookup of ``KEYS`` keys, and of its answer."""
_ECHO = """
import socket, sys, threading
listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
listener.bind(sys.argv[1]); listener.listen(16)
asked, answer = int(sys.argv[2]), bytes(int(sys.argv[3]))
def serve(sock):
    while len(sock.recv(asked, socket.MSG_WAITALL)) == asked:
        sock.sendall(answer)
while True:
    threading.Thread(target=serve, args=listener.accept()[:1], daemon=True).start()
"""
_together: Barrier
"""Shared by one measurement's processes: each phase begins for all at once."""


def measure(folder: Path, rounds: int) -> dict[str, Any]:
    """The median from one client alone; tails from several, each a process, that ask store and echo in turns."""
    times, path = 100 * rounds, folder / "e.sock"
    echo = [sys.executable, "-c", _ECHO, str(path), str(ASKED), str(ANSWERED)]
    with (
        serving(folder, dram=64 * MIB) as store,
        running(echo, folder / "echo.log", lambda: accepts(path)),
    ):
        client, chain, (data,) = store.client(CHUNK_BYTES), keys("lookup", KEYS), rows(1, CHUNK_BYTES)
        for key in chain:
            store_chunk(client, key, data)
        alone = _times(lookups(client, chain), times)
        client.close()
        ours, bare = _several(store, path, times // TURNS)
    return {
        "lookup": {
            "p50_us": 1e6 * median(alone),
            "p99_us": 1e6 * percentile(ours, 0.99),
            "echo_p99_us": 1e6 * percentile(bare, 0.99),
            "keys": KEYS,
        }
    }


def _several(store: Store, echo: Path, times: int) -> tuple[list[float], list[float]]:
    """Seconds of lookups, and of echoes, of all clients."""
    spawn = multiprocessing.get_context("spawn")
    barrier = spawn.Barrier(CLIENTS)
    with spawn.Pool(CLIENTS, _meet, [barrier]) as pool:
        told = pool.starmap(_one, [(store.socket, str(store.http.base_url), echo, times)] * CLIENTS, chunksize=1)
    return [s for ours, _ in told for s in ours], [s for _, bare in told for s in bare]


def _meet(barrier: Barrier) -> None:
    global _together  # noqa: PLW0603 (a barrier reaches a pool's process only when that starts)
    _together = barrier


def _one(store: Path, url: str, echo: Path, times: int) -> tuple[list[float], list[float]]:
    """One of the processes. No turn begins before the store has studied the previous turn's lookups."""
    client = connected(store, CHUNK_BYTES)
    ours, bare = list[float](), list[float]()
    with dial(echo) as sock, httpx.Client(timeout=START_S, trust_env=False, verify=False) as http:
        phases = [(ours, lookups(client, keys("lookup", KEYS))), (bare, _echoes(sock))]
        for _, once in phases:
            _times(once, times // 10)
        for _ in range(TURNS):
            for taken, once in phases:
                http.get(f"{url}/metrics").raise_for_status()
                _together.wait(START_S)
                taken.extend(_times(once, times))
                _together.wait(START_S)  # else the first to end has the store study while others are timed
    client.close()
    return ours, bare


def lookups(client: StoreClient, chain: Sequence[bytes]) -> Callable[[], None]:
    def once() -> None:
        found = client.lookup("bench", chain, prompt_tokens=KEYS * CHUNK_TOKENS).result().tiers
        if len(found) != KEYS:
            raise RuntimeError(f"{len(found)} of {KEYS} chunks were found")

    return once


def _echoes(sock: socket.socket) -> Callable[[], None]:
    asked = bytes(ASKED)

    def once() -> None:
        sock.sendall(asked)
        if len(sock.recv(ANSWERED, socket.MSG_WAITALL)) != ANSWERED:
            raise RuntimeError("the echo has gone")

    return once


def _times(once: Callable[[], None], times: int) -> list[float]:
    taken = []
    for _ in range(times):
        start = perf_counter()
        once()
        taken.append(perf_counter() - start)
    return taken
