"""One engine behind a slow link, event by event: prefills in turn, loads that share the link, a gate that believes.

Every prompt's chunks lie in the remote, all but its last few tokens. A request that waits for its load keeps its turn
but stops nobody. Prefills differ by chance from what is predicted.
"""

import heapq
from collections import deque
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from tiertune_connector.cost import ALONE, GateSettings, Others, PrefillCost, deadline_s, decide, gain_s, waited_s
from tiertune_connector.slower.transit import FETCHED_AT_ONCE
from tiertune_connector.tiers.base import Outcome

CHUNK_TOKENS = 64
CHUNK_BYTES = 64 * 36_864
SETTINGS = {"remote": GateSettings()}


class Pipe:
    """Chunks over a link: the first FETCHED_AT_ONCE of the queue share it evenly."""

    def __init__(self, bytes_per_s, after):
        self.bytes_per_s, self._after = bytes_per_s, after
        self._waiting, self._moving, self._now, self._version = deque(), [], 0.0, count()
        self._current = -1

    def ask(self, nbytes, now, done):
        self._advance(now)
        self._waiting.append([nbytes, done])
        self._start(now)

    def _advance(self, now):
        if self._moving:
            share = (now - self._now) * self.bytes_per_s / len(self._moving)
            for chunk in self._moving:
                chunk[0] -= share
        self._now = now

    def _start(self, now):
        while self._waiting and len(self._moving) < FETCHED_AT_ONCE:
            self._moving.append(self._waiting.popleft())
        self._current = version = next(self._version)
        if self._moving:
            least = max(0.0, min(chunk[0] for chunk in self._moving))
            self._after(now + least * len(self._moving) / self.bytes_per_s, lambda at: self._end(at, version))

    def _end(self, now, version):
        if version != self._current:
            return
        self._advance(now)
        ended = [chunk for chunk in self._moving if chunk[0] <= 1e-3]
        self._moving = [chunk for chunk in self._moving if chunk[0] > 1e-3]
        for _, done in ended:
            done(now)
        self._start(now)


@dataclass
class Run:
    """What became of a simulated stream of requests."""

    ttft_s: list[float] = field(default_factory=list)
    saved_s: float = 0.0
    lost_s: float = 0.0
    fetches: int = 0
    late: int = 0


class Host:
    """The engine, the link, and between them a `Way`."""

    def __init__(self, way, *, bytes_per_s, gate=True, alone=False, seed=0, noise=0.25, tokens_per_s=4000.0):
        """``gate``: it may fetch; ``alone``: it takes every request to be the only one."""
        self._way, self._gate, self._alone, self._noise = way, gate, alone, noise
        self._prefill = PrefillCost(seconds_per_flop=1 / tokens_per_s, overhead_s=0.02)
        self._rng = np.random.default_rng(seed)
        self._events, self._order, self._arrivals = [], count(), count()
        self.pipe = Pipe(bytes_per_s, self._at)
        self._turns: dict[int, list] = {}  # by arrival: predicted seconds of the prefill, whether it can start
        self._busy = False
        self.run = Run()

    def play(self, arrivals):
        """Let requests of so many tokens arrive at these times; probes every 5 s before and between."""
        for at in np.arange(-30.0, arrivals[-1][0], 5.0):
            self._at(at, lambda now: self._ask(CHUNK_BYTES // 9, now, lambda _: None))
        for at, tokens in arrivals:
            self._at(at, lambda now, tokens=tokens: self._arrive(tokens, now))
        while self._events:
            at, _, act = heapq.heappop(self._events)
            act(at)
        return self.run

    def _at(self, at, act):
        heapq.heappush(self._events, (at, next(self._order), act))

    def _ask(self, nbytes, now, done):
        def ended(at):
            self._way.at(at).ended(nbytes, Outcome.OK)
            done(at)

        predicted_s = self._way.at(now).asked(nbytes)
        self.pipe.ask(nbytes, now, ended)
        return predicted_s

    def _arrive(self, tokens, now):
        turn = next(self._arrivals)
        backlog_s = sum(predicted_s for predicted_s, _, _ in self._turns.values())
        estimate = self._way.at(now).estimate()
        others = Others(len(self._turns) + self._busy, estimate.transfers)
        decision = decide(
            ["remote"] * (tokens // CHUNK_TOKENS if self._gate else 0),
            computed_tokens=0,
            prompt_tokens=tokens + 8,
            chunk_tokens=CHUNK_TOKENS,
            chunk_bytes=CHUNK_BYTES,
            fetch={"remote": estimate},
            prefill=self._prefill.each_s,
            settings=SETTINGS,
            backlog_s=backlog_s,
            others=ALONE if self._alone else others,
        )
        self._turns[turn] = [self._rest_s(tokens, decision.cut), not decision.fetches, now]
        if decision.fetches:
            self._load(decision, tokens, turn, now)
        self._compute(now)

    def _load(self, decision, tokens, turn, now):
        (candidate,) = decision.candidates
        self.run.fetches += 1
        self._way.transit.awaited(1)
        left, over, predicted_s = decision.cut, False, None

        def ended(at):
            nonlocal left, over
            left -= 1
            if not left and not over:
                over = True
                self._way.transit.awaited(-1)
                self._way.transit.loaded(predicted_s, at - now)
                gained_s = gain_s(
                    candidate.fetch_s, candidate.recompute_s, at - now, candidate.backlog_s, candidate.prefills
                )
                self.run.saved_s += max(0.0, gained_s)
                self.run.lost_s += max(0.0, -gained_s)
                self._turns[turn][1] = True
                self._compute(at)

        def late(at):
            nonlocal over
            if not over:
                over = True
                self._way.transit.awaited(-1)
                self.run.late += 1
                self.run.lost_s += waited_s(at - now, candidate.backlog_s, candidate.prefills)
                self._way.at(at).given_up(predicted_s, at - now)
                self._turns[turn][:2] = [self._rest_s(tokens, 0), True]
                self._compute(at)

        self._at(now + deadline_s(decision, SETTINGS, unknown_s=1.0, floor_s=0.1), late)
        for _ in range(decision.cut):
            predicted_s = self._ask(CHUNK_BYTES, now, ended)

    def _rest_s(self, tokens, cut):
        return self._prefill.seconds(cut * CHUNK_TOKENS, tokens + 8)

    def _compute(self, now):
        """Begin the earliest prefill that can start, if none runs."""
        turn = next((turn for turn, (_, ready, _) in self._turns.items() if ready), None)
        if self._busy or turn is None:
            return
        predicted_s, _, arrived = self._turns.pop(turn)
        self._busy = True

        def done(at):
            self._busy = False
            self.run.ttft_s.append(at - arrived)
            self._compute(at)

        self._at(now + predicted_s * self._rng.lognormal(0.0, self._noise), done)


def stream(requests, per_s, seed=0):
    """Poisson arrivals of prompts of 128 to 1500 tokens."""
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1 / per_s, requests))
    return [(float(at), int(tokens)) for at, tokens in zip(times, rng.integers(128, 1500, requests), strict=True)]
