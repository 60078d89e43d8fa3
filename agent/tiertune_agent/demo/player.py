"""An engine without a GPU: real keys, real bytes, the real client and gate; only the prefill is a sleep.

A chunk's bytes are derived from its key, so that every loaded chunk is compared bit for bit.
"""

import hashlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from tiertune_connector.client.store_client import Loaded, StoreClient
from tiertune_connector.cost import GateDecision, PrefillCost, deadline_s, decide
from tiertune_connector.ending import until_told
from tiertune_connector.keys import Namespace
from tiertune_connector.protocol.messages import LookupReply, Report, StepReport, TierReport
from tiertune_connector.protocol.reporting import gained_s, prefill_line, tier_reports
from tiertune_connector.units import Clock

if TYPE_CHECKING:
    from tiertune_agent.replay.traces import Trace

Bytes = npt.NDArray[np.uint8]

MAX_CHUNKS = 64
"""Longer prompts are cut: any trace then fits the demo's small tiers."""
REQUESTS = "requests.npz"
"""File that ``save_requests`` wrote, in the players' folder."""
PATIENCE_S = 30.0
"""A player ends if its store lives, but does not answer within this time."""
UNKNOWN_DEADLINE_S = 0.5
LEAST_DEADLINE_S = 0.1


class Job(msgspec.Struct, frozen=True):
    """A player's argument, as JSON; its files are in the folder that it is started in."""

    name: str
    """Of the player, and with an ending of its files: its tally, and the journal, which gets a line for each request
    served: Unix time of its start, its id.
    """
    index: int
    players: int
    socket: str
    chunk_tokens: int
    chunk_bytes: int
    requests_per_s: float
    """Of all players together."""
    prefill_step_s: float
    """Fixed seconds of a prefill, whatever its length."""
    prefill_token_s: float


@dataclass(frozen=True)
class Prompt:
    request: str
    keys: list[bytes]
    tokens: int
    due_s: float
    """Arrival, seconds after the start: one follows the other evenly, whatever pauses the trace has."""


class Tally:
    """What one player counted, shared through a file: the player adds, the demo reads."""

    CHUNKS = ("verified", "rejected", "wrong")
    """Read and right; refused by the client's own check; accepted by it, but with wrong bytes."""
    GATE = ("fetch", "recompute", "won", "lost", "late", "failed")
    """Requests for which chunks were found, by decision; those that fetched also by outcome, once for all tiers."""
    FIELDS = ("requests", *CHUNKS, *GATE)

    def __init__(self, path: Path) -> None:
        self._counts = np.memmap(path, np.uint64, "r+" if path.exists() else "w+", shape=(len(self.FIELDS),))

    def add(self, field: str) -> None:
        self._counts[self.FIELDS.index(field)] += np.uint64(1)

    def read(self) -> dict[str, int]:
        return dict(zip(self.FIELDS, self._counts.tolist(), strict=True))


def chunk_keys(chain: Sequence[int], salt: str) -> list[bytes]:
    """A 32-byte key per block, hashed over it and all blocks before it, as engines hash prompts."""
    keys, parent = [], salt.encode()
    for block in chain:
        parent = hashlib.sha256(parent + int(block).to_bytes(8, "little")).digest()
        keys.append(parent)
    return keys


def payload(key: bytes, nbytes: int) -> Bytes:
    """The bytes of a key's chunk."""
    generator = np.random.Generator(np.random.SFC64(np.frombuffer(key, np.uint32).tolist()))
    return np.frombuffer(generator.bytes(nbytes), np.uint8)


def save_requests(trace: "Trace", path: Path) -> None:
    """Write what players replay of a trace."""
    np.savez(path, offsets=trace.offsets, ids=trace.ids, tokens=trace.input_len)


def prompts(path: Path, job: Job) -> Iterator[Prompt]:
    """This player's share: every ``job.players``-th request, so that a session goes from engine to engine.

    Prompts are cut to ``MAX_CHUNKS``, and have keys of full chunks only. The trace is repeated with new keys when it
    ends, so one of fewer requests than players feeds them all, too.
    """
    with np.load(path) as saved:
        offsets, ids, tokens = (saved[name] for name in ("offsets", "ids", "tokens"))
    for number in count(job.index, job.players):
        turn, row = divmod(number, len(tokens))
        length = min(int(tokens[row]), MAX_CHUNKS * job.chunk_tokens)
        chain = ids[offsets[row] : offsets[row + 1]][: length // job.chunk_tokens]
        yield Prompt(f"{turn}-{row}", chunk_keys(chain.tolist(), f"round {turn}"), length, number / job.requests_per_s)


class Player:
    """Serves one prompt after another. ``clock`` gives monotonic seconds, ``sleep`` stands for the GPU's work."""

    def __init__(
        self,
        client: StoreClient,
        job: Job,
        tally: Tally,
        *,
        clock: Clock,
        sleep: Callable[[float], object],
    ) -> None:
        self._client = client
        self._job = job
        self._tally = tally
        self._clock = clock
        self._sleep = sleep
        self._cost = PrefillCost()
        client.prefill = partial(prefill_line, self._cost)

    def warm_up(self) -> None:
        """Prefill for no request, as engines do at their start: then costs are known, for long prompts too."""
        for chunks in (1, MAX_CHUNKS // 2, MAX_CHUNKS):
            self._prefill(0, chunks * self._job.chunk_tokens)

    def serve(self, prompt: Prompt) -> None:
        reply = self._client.lookup(prompt.request, prompt.keys, prompt_tokens=prompt.tokens).result(PATIENCE_S)
        decision = self._decide(prompt, reply)
        have = self._fetch(prompt, decision, reply)
        self._prefill(have * self._job.chunk_tokens, prompt.tokens)
        self._store(prompt, have)
        self._tally.add("requests")

    def _decide(self, prompt: Prompt, reply: LookupReply) -> GateDecision:
        return decide(
            reply.tiers,
            computed_tokens=0,
            prompt_tokens=prompt.tokens,
            chunk_tokens=self._job.chunk_tokens,
            chunk_bytes=self._job.chunk_bytes,
            fetch=reply.costs,
            prefill=self._cost.each_s,
            settings=reply.gate,
            most=reply.reach(0),
        )

    def _fetch(self, prompt: Prompt, decision: GateDecision, reply: LookupReply) -> int:
        """Fetch; returns how many leading chunks came and are right."""
        if not decision.fetches:
            if decision.candidates:
                self._tally.add("recompute")
            self._client.tell(Report(tier_reports(decision, chunk_tokens=self._job.chunk_tokens)))
            return 0
        started = self._clock()
        keys = prompt.keys[: decision.cut]
        limit_s = deadline_s(decision, reply.gate, unknown_s=UNKNOWN_DEADLINE_S, floor_s=LEAST_DEADLINE_S)
        loaded = self._client.load(keys, deadline_s=limit_s).result(limit_s + PATIENCE_S)
        chunks = self._read(loaded)
        actual_s = self._clock() - started
        self._client.release(loaded)
        have = self._verify(keys, chunks)
        failure = "" if have == decision.cut else "late" if "late" in loaded.outcomes else "failed"
        reports = tier_reports(
            decision,
            chunk_tokens=self._job.chunk_tokens,
            actual_s=actual_s,
            seconds=loaded.seconds,
            failure=failure,
            used=decision.cut_to(have, range(decision.cut), reply.tiers),
        )
        self._client.tell(Report(reports))
        self._count(reports, failure)
        self._client.report_steps([StepReport("all", "kv_wait", actual_s, 0)])
        return have

    def _count(self, reports: Sequence[TierReport], failure: str) -> None:
        """Count one fetch, from however many tiers: it won if they gained more than they lost."""
        self._tally.add("fetch")
        gains = [gained_s(report) for report in reports if report.actual_s is not None]
        known = [gain for gain in gains if gain is not None]
        if failure or len(known) == len(gains):
            self._tally.add(failure or ("won" if sum(known) > 0 else "lost"))

    def _read(self, loaded: Loaded) -> list[Bytes]:
        """The chunks of a load, up to the first that the client's check refuses."""
        chunks = []
        for slot in loaded.slots:
            out = np.empty(self._job.chunk_bytes, np.uint8)
            if not self._client.read(slot, out):
                self._tally.add("rejected")
                break
            chunks.append(out)
        return chunks

    def _verify(self, keys: Sequence[bytes], chunks: Sequence[Bytes]) -> int:
        """How many leading chunks have the bytes of their keys."""
        for position, (key, chunk) in enumerate(zip(keys, chunks, strict=False)):
            if not np.array_equal(chunk, payload(key, self._job.chunk_bytes)):
                self._tally.add("wrong")
                return position
            self._tally.add("verified")
        return len(chunks)

    def _prefill(self, start: int, end: int) -> None:
        start = min(start, end - 1)  # the last token is always computed: it gives the first one of the answer
        began = self._clock()
        self._sleep(self._job.prefill_step_s + self._job.prefill_token_s * (end - start))
        seconds = self._clock() - began
        self._cost.observe_step([(start, end)], seconds)
        self._client.report_steps([StepReport("all", "prefill", seconds, end - start)])

    def _store(self, prompt: Prompt, have: int) -> None:
        """Offer what was computed."""
        reserved = self._client.reserve(prompt.keys[have:], request=prompt.request).result(PATIENCE_S)
        slots = [slot for slot in reserved.slots if slot is not None]
        written = [slot for slot in slots if self._client.write(slot, payload(slot.key, self._job.chunk_bytes))]
        self._client.commit(written).result(PATIENCE_S)


def main() -> None:
    """The one argument is a job."""
    job = msgspec.json.decode(sys.argv[1], type=Job)
    namespace = Namespace(model="demo", chunk_tokens=job.chunk_tokens, hash_algorithm="sha256")
    client = StoreClient(
        job.socket, namespace, chunk_bytes=job.chunk_bytes, chunk_tokens=job.chunk_tokens, engine=job.name
    )
    clock = time.monotonic
    with until_told() as ended, Path(f"{job.name}.journal").open("a") as journal:
        client.connect()
        tally = Tally(Path(f"{job.name}.tally"))
        player = Player(client, job, tally, clock=clock, sleep=ended.wait)
        player.warm_up()
        started = clock()
        for prompt in prompts(Path(REQUESTS), job):
            if ended.wait(started + prompt.due_s - clock()):
                break
            print(time.time(), prompt.request, file=journal)
            player.serve(prompt)
        client.close()


if __name__ == "__main__":
    main()
