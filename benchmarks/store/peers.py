"""Beside LMCache: prompts of eight chunks, from an engine's blocks into each store and back, in turns.

Theirs is LMCache's server in multi-process mode and its own client (`engine_driven`: the client copies), in an
environment of its own; ours is a store process and its client. Both begin and end in blocks of 16 tokens: LMCache's
client gathers them into shared memory, ours into a row first, as the adapter does, and copies from there with a
checksum. Each copy is followed by numpy's copy of as many bytes.
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Protocol

import numpy as np
import redis

from benchmarks.store.lmcache_server import BOUND, VENV, LMCache, lmcache
from benchmarks.store.remote import redis_server
from benchmarks.store.rounds import WARM
from benchmarks.store.slower import NotMeasuredError
from benchmarks.store.world import CHUNK_TOKENS, DEADLINE_S, START_S, keys, rows, serving, touched, wait_until
from tiertune_agent.demo.ports import free_port
from tiertune_connector.chunk import Bytes
from tiertune_connector.client.store_client import ArrivedPart, StoreClient

CHUNKS = 8
PLANES, BLOCKS, BLOCK_TOKENS, BLOCK_BYTES = 2 * 32, 300, 16, 16 * 8 * 128 * 2
"""Keys and values of 32 layers, each of 300 blocks of 16 tokens, with 8 heads of 128 bfloat16."""
SHAPE = f"(2,{BLOCKS},{BLOCK_TOKENS},8,128):bfloat16:32"
"""The same in LMCache's notation."""
NBYTES = PLANES * CHUNK_TOKENS // BLOCK_TOKENS * BLOCK_BYTES
DRAM_GIB = 1
"""DRAM of each side: four prompts."""
IN_REDIS = 6
"""Prompts loaded in turns: the one asked for next has left DRAM."""
LOOKUPS = 25
"""Lookups for each round of copies."""
MISSING = 1_000_000
"""A prompt that nobody stored."""
Seconds = dict[str, dict[str, list[float]]]
"""Seconds by figure, then by whose they are."""


class Side(Protocol):
    """Methods return the seconds of the operation alone; RuntimeError if it did not do what was asked."""

    def lookup(self, prompt: int, hits: int) -> float: ...
    def store(self, prompt: int) -> float: ...
    def retrieve(self, prompt: int) -> float: ...
    def load(self, prompt: int) -> float:
        """Lookup and retrieve of a prompt that is not in DRAM."""
        ...


class Ours:
    def __init__(self, client: StoreClient) -> None:
        self._client = client
        self._blocks = touched(PLANES * BLOCKS * BLOCK_BYTES).reshape(PLANES, BLOCKS, BLOCK_BYTES)
        self._staged = rows(CHUNKS, NBYTES)

    def lookup(self, prompt: int, hits: int) -> float:
        chain = _keys(prompt)
        start = perf_counter()
        found = self._client.lookup("bench", chain, prompt_tokens=CHUNKS * CHUNK_TOKENS).result().tiers
        took_s = perf_counter() - start
        _expect(len(found), hits)
        return took_s

    def store(self, prompt: int) -> float:
        self.lookup(prompt, 0)
        chain = _keys(prompt)
        start = perf_counter()
        slots = [slot for slot in self._client.reserve(chain).result().slots if slot is not None]
        for slot, row, ids in zip(slots, self._staged, _ids(prompt), strict=False):
            np.take(self._blocks, ids, axis=1, out=_paged(row), mode="clip")  # in its usual mode it copies twice
            self._client.write(slot, row)
        kept = self._client.commit(slots).result()
        took_s = perf_counter() - start
        _expect(sum(kept), CHUNKS)
        return took_s

    def retrieve(self, prompt: int) -> float:
        self.lookup(prompt, CHUNKS)
        return self._retrieve(prompt)

    def load(self, prompt: int) -> float:
        return self.lookup(prompt, CHUNKS) + self._retrieve(prompt)

    def _retrieve(self, prompt: int) -> float:
        chain, good = _keys(prompt), 0
        start = perf_counter()
        loaded = self._client.load(chain, deadline_s=DEADLINE_S, arriving=self._copy_parts).result()
        for slot, row, ids in zip(loaded.slots, self._staged, _ids(prompt), strict=False):
            good += self._client.read(slot, row)
            self._blocks[:, ids] = _paged(row)
        self._client.release(loaded)
        took_s = perf_counter() - start
        _expect(good, CHUNKS)
        return took_s

    def _copy_parts(self, parts: Sequence[ArrivedPart]) -> None:
        for part in parts:
            self._client.read_part(part, self._staged[part.position])


class Theirs:
    def __init__(self, server: LMCache) -> None:
        self._server = server

    def lookup(self, prompt: int, hits: int) -> float:
        return float(self._ask("lookup", prompt, hits)["seconds"])

    def store(self, prompt: int) -> float:
        """Store into an empty L1: it evicts late, in the background.

        The wait until lookups find the prompt is not timed.
        """
        self._server.clear()
        took_s = float(self._ask("store", prompt)["seconds"])
        wait_until(lambda: self._server.ask("lookup", prompt)["hits"] == CHUNKS, "lookups find it")
        return took_s

    def retrieve(self, prompt: int) -> float:
        return float(self._ask("retrieve", prompt)["seconds"])

    def load(self, prompt: int) -> float:
        """Load from L2, which LMCache's lookup does."""
        self._server.clear()
        told = self._ask("retrieve", prompt)
        return float(told["lookup_s"] + told["seconds"])

    def check(self, prompt: int) -> None:
        """RuntimeError unless what it retrieves is what it was given."""
        self._ask("check", prompt)

    def _ask(self, what: str, prompt: int, hits: int = CHUNKS) -> dict[str, Any]:
        told = self._server.ask(what, prompt)
        _expect(told["hits"], hits)
        return told


def measure(folder: Path, rounds: int) -> dict[str, Any]:
    """NotMeasuredError where LMCache or Redis is not installed."""
    if not (VENV / ".tiertune-setup").exists():
        raise NotMeasuredError("LMCache is not installed: make setup-lmcache makes .venv-lmcache")
    if shutil.which("redis-server") is None:
        raise NotMeasuredError("redis-server is not installed (Debian package redis-server)")
    homes = [folder / name for name in ("memory", "remote")]
    for home in homes:
        home.mkdir()
    return {"peers": {"lmcache": figures(memory(homes[0], rounds) | remote(homes[1], rounds))}}


def memory(folder: Path, rounds: int) -> Seconds:
    with serving(folder, dram=DRAM_GIB << 30) as store, lmcache(folder, CHUNKS, SHAPE, gib=DRAM_GIB) as server:
        client, theirs = store.client(NBYTES), Theirs(server)
        sides: dict[str, Side] = {"ours": Ours(client), "theirs": theirs}
        took = turns(
            sides,
            {"store_8x32m": lambda side, n: side.store(n), "retrieve_8x32m": lambda side, n: side.retrieve(n)},
            rounds,
            beside=copying(),
        )
        last = WARM + rounds - 1
        theirs.check(last)
        took |= turns(
            sides,
            {
                "lookup_hit_8": lambda side, _: side.lookup(last, CHUNKS),
                "lookup_miss_8": lambda side, _: side.lookup(MISSING, 0),
            },
            rounds * LOOKUPS,
        )
        client.close()
    return took


def remote(folder: Path, rounds: int) -> Seconds:
    """Prompts that only Redis has; both sides reach it by TCP on the loopback, each with a database of its own."""
    with ExitStack() as stack:
        port = free_port()
        stack.enter_context(redis_server(folder, port, BOUND))
        redises = [stack.enter_context(redis.Redis(port=port, db=number)) for number in (0, 1)]
        section = {"url": f"redis://127.0.0.1:{port}/1", "timeout": START_S}
        store = stack.enter_context(serving(folder, dram=DRAM_GIB << 30, remote=section))
        adapter = json.dumps({"type": "resp", "host": "127.0.0.1", "port": port})
        server = stack.enter_context(lmcache(folder, CHUNKS, SHAPE, "--l2-adapter", adapter, gib=DRAM_GIB))
        client, theirs = store.client(NBYTES), Theirs(server)
        sides: dict[str, Side] = {"ours": Ours(client), "theirs": theirs}
        for prompt in range(IN_REDIS):
            for side, there in zip(sides.values(), reversed(redises), strict=True):
                side.store(prompt)
                _wait_held(there, (prompt + 1) * CHUNKS)
            store.wait_written()
        took = turns(
            sides,
            {"redis_load_8x32m": lambda side, n: sent(redises[0], lambda: side.load(n % IN_REDIS))},
            rounds,
            beside=copying(),
        )
        server.clear()
        theirs.check(0)
        client.close()
    return took


def turns(
    sides: Mapping[str, Side],
    each: Mapping[str, Callable[[Side, int], float]],
    rounds: int,
    *,
    beside: Callable[[], float] | None = None,
) -> Seconds:
    """All figures of one side, then of the other; they take turns to begin. ``beside`` comes after each figure."""
    took: Seconds = {figure: {name: [] for name in (*sides, *(("memcpy",) if beside else ()))} for figure in each}
    for number in range(WARM + rounds):
        for name in list(sides)[:: 1 if number % 2 else -1]:
            for figure, once in each.items():
                seconds = {name: once(sides[name], number)} | ({"memcpy": beside()} if beside else {})
                if number >= WARM:
                    for whose, one in seconds.items():
                        took[figure][whose].append(one)
    return took


def figures(took: Seconds) -> dict[str, Any]:
    """Medians as `bench.json` has them: GB/s of copies, microseconds of lookups."""
    told: dict[str, Any] = {}
    for figure, by in took.items():
        lookup = figure.startswith("lookup")
        values = {whose: median(s) * 1e6 if lookup else CHUNKS * NBYTES / median(s) / 1e9 for whose, s in by.items()}
        told[figure] = {**values, "unit": "us" if lookup else "GB/s", "samples": len(by["ours"])}
    return told


def table(told: Mapping[str, Any]) -> list[str]:
    """Lines for what `figures` returned, those where LMCache is ahead first; none if there is nothing."""
    if not told:
        return []
    lines = [f"{'beside LMCache':<18} {'unit':<5} {'ours':>9} {'LMCache':>9} {'memcpy':>8} {'speed':>7}"]
    for name, row in sorted(told.items(), key=lambda item: faster(item[1])):
        times, plain = faster(row), f"{row['memcpy']:.2f}" if "memcpy" in row else "-"
        ahead = "ours is ahead" if times > 1 else "LMCACHE IS AHEAD"
        values = f"{row['ours']:>9.2f} {row['theirs']:>9.2f} {plain:>8} {times:>6.2f}x"
        lines.append(f"{name:<18} {row['unit']:<5} {values}  {ahead}")
    return lines


def faster(row: Mapping[str, Any]) -> float:
    """Our speed over theirs."""
    over = float(row["ours"] / row["theirs"])
    return 1 / over if row["unit"] == "us" else over


def copying() -> Callable[[], float]:
    """A copy of as many bytes as a prompt has, between two touched buffers; it returns its seconds."""
    row, out = rows(2, CHUNKS * NBYTES)

    def once() -> float:
        start = perf_counter()
        np.copyto(out, row)
        return perf_counter() - start

    return once


def sent(server: "redis.Redis", once: Callable[[], float]) -> float:
    """Seconds that ``once`` returns; RuntimeError unless Redis has sent a prompt meanwhile."""
    before = _sent_bytes(server)
    took_s = once()
    if (moved := _sent_bytes(server) - before) < CHUNKS * NBYTES:
        raise RuntimeError(f"a prompt was to come from Redis, which sent {moved} bytes")
    return took_s


def _wait_held(server: "redis.Redis", chunks: int) -> None:
    wait_until(lambda: int(server.dbsize()) >= chunks, f"Redis has {chunks} chunks")


def _sent_bytes(server: "redis.Redis") -> int:
    return int(server.info("stats")["total_net_output_bytes"])


def _keys(prompt: int) -> list[bytes]:
    return keys(f"prompt {prompt}", CHUNKS)


def _ids(prompt: int) -> list["np.typing.NDArray[np.intp]"]:
    """Blocks of each chunk: those that LMCache's client takes for this prompt."""
    count = CHUNKS * CHUNK_TOKENS // BLOCK_TOKENS
    first = prompt * count % (BLOCKS - count)
    return list(np.arange(first, first + count).reshape(CHUNKS, -1))


def _paged(row: Bytes) -> "np.typing.NDArray[np.uint8]":
    return row.reshape(PLANES, -1, BLOCK_BYTES)


def _expect(found: int, wanted: int) -> None:
    if found != wanted:
        raise RuntimeError(f"{wanted} chunks were to be found, stored or loaded, not {found}")
