"""Eviction algorithms over a few keys: exactly what a pool with them does, but for whole runs of keys at once.

Chains come again as they came before, so their keys form runs. A letter stands for a key's state, and a chain is looked
up as a word of letters: a run is a stretch of letters whose keys are treated alike. Queues are lists, because a run
moves in a list at once; each move shifts all that follows, so this pays while keys are few.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from operator import itemgetter
from string import ascii_uppercase, digits
from typing import ClassVar

from tiertune_connector.eviction import ARC, S3FIFO, Key
from tiertune_connector.eviction.s3fifo import MOST_USES, PROMOTED_ABOVE, SMALL_SHARE

MOST_KEYS = 128
"""Caches with a capacity below this are followed in this way."""
_MOST_NUMBERS = 8192
"""Numbers given out before keys that no cache knows any more lose theirs."""
_NEW, _GHOST, _FREQUENT_GHOST = "-", "g", "h"
_RECENT, _FREQUENT = "r", "f"
_SMALL, _MAIN = digits[: MOST_USES + 1], ascii_uppercase[: MOST_USES + 1]
"""Letters of resident keys in S3-FIFO's queues, by uses."""
_USED = str.maketrans(_SMALL[:-1] + _MAIN[:-1], _SMALL[1:] + _MAIN[1:])
_LESS_USED = dict(zip(_MAIN[1:], _MAIN, strict=False))
_PASSING = _SMALL[: PROMOTED_ABOVE + 1]
"""Letters of keys in the small queue that leave the cache when it is their turn."""

Run = list[int]
"""Keys, as numbers, one after another."""
Kinds = list[str]
"""By a key's number: its letter."""


class Numbers:
    """Small numbers that stand for keys in some caches, so that a key's letter is found in a list."""

    def __init__(self) -> None:
        self._numbers: defaultdict[Key, int] = defaultdict(count().__next__)
        self._sweep_at = _MOST_NUMBERS

    def __len__(self) -> int:
        """All numbers are below this."""
        return len(self._numbers)

    def of(self, keys: Iterable[Key]) -> Run:
        """The numbers of keys, new or not."""
        return list(map(self._numbers.__getitem__, keys))

    def sweep(self, caches: Sequence["Tiny"]) -> None:
        """If there are many: renumber the keys that any cache knows, and forget the rest."""
        if len(self) < self._sweep_at:
            return
        alive = set().union(*(cache.known for cache in caches))
        known = {key: number for key, number in self._numbers.items() if number in alive}
        for cache in caches:
            cache.renumber(list(known.values()))
        self._numbers = defaultdict(count(len(known)).__next__, zip(known, count(), strict=False))
        self._sweep_at = max(_MOST_NUMBERS, 2 * len(known))


class Queue:
    """Keys: first the ghosts, in the order in which they left, then the residents, the next victim first."""

    def __init__(self, kinds: Kinds, resident: str, ghost: str = _NEW) -> None:
        self.keys: Run = []
        self.ghosts = 0
        self._kinds, self._resident, self._ghost = kinds, resident, ghost

    def __len__(self) -> int:
        return len(self.keys) - self.ghosts

    def flow(self, run: Run, leaving: int = 0, most: int = 0) -> None:
        """``run`` enters while ``leaving`` keys leave, maybe its own; the latest ``most`` of all ghosts remain."""
        keys, kinds, known = self.keys, self._kinds, len(self.keys)
        keys += run
        ghosts = self.ghosts + leaving
        if ghosts > most:
            forgotten, ghosts = ghosts - most, most
            for key in keys[: min(known, forgotten)]:
                kinds[key] = _NEW
            del keys[:forgotten]
        self.ghosts = ghosts
        if leaving and ghosts:
            ghost = self._ghost
            for key in keys[max(0, ghosts - leaving) : ghosts]:
                kinds[key] = ghost
        if run:
            resident = self._resident
            for key in keys[max(ghosts, len(keys) - len(run)) :]:
                kinds[key] = resident

    def take(self, run: Run) -> None:
        """``run`` leaves the queue: all residents or all ghosts."""
        keys = self.keys
        start = keys.index(run[0])
        if start < self.ghosts:
            self.ghosts -= len(run)
        if keys[start : start + len(run)] == run:
            del keys[start : start + len(run)]
        else:
            gone = set(run)
            keys[:] = [key for key in keys if key not in gone]


class Tiny(ABC):
    """One algorithm over keys that are numbers."""

    residents: ClassVar[str]
    """Letters of resident keys."""
    alike: ClassVar[Mapping[str, str]]
    """By letter: all letters whose keys are treated like its own."""

    def __init__(self, capacity: int) -> None:
        self.hits = 0
        """Keys within the longest cached prefix of their request, before the request touched the cache."""
        self._capacity = self._room = capacity
        self._kinds: Kinds = []
        self._queues: list[Queue] = []
        self._moved = ""  # letters that keys may have lost since the request was looked up

    @property
    def known(self) -> set[int]:
        """Keys that are resident or remembered."""
        return {key for queue in self._queues for key in queue.keys}

    def extend(self, numbers: int) -> None:
        """From now on all keys are below ``numbers``."""
        self._kinds += _NEW * (numbers - len(self._kinds))

    def renumber(self, keys: Sequence[int]) -> None:
        """A key's number is its place in ``keys`` from now on; others, which no cache knows, have none."""
        places = dict(zip(keys, count(), strict=False))
        self._kinds[:] = [self._kinds[key] for key in keys]
        for queue in self._queues:
            queue.keys[:] = [places[key] for key in queue.keys]

    def request(self, keys: Run, look: Callable[[Kinds], Iterable[str]]) -> None:
        """The keys of one request, tail first, none twice; ``look`` picks their letters from a list."""
        if not self._capacity:
            return
        kinds, self._moved = "".join(look(self._kinds)), ""
        self.hits += len(keys) - len(kinds.rstrip(self.residents))
        while keys:
            kind = kinds[0]
            if kind in self._moved:
                kinds, self._moved = self._look(keys), ""
                continue
            run = len(kinds) - len(kinds.lstrip(self.alike[kind]))
            if kind in self.residents:
                self._use(keys[:run], kinds[:run])
            else:
                run = self._enter(keys[:run], kind)
            keys, kinds = keys[run:], kinds[run:]

    def resize(self, capacity: int) -> None:
        """Change the capacity, and evict what does not fit."""
        self._room += capacity - self._capacity
        self._capacity = capacity
        self._adapt()
        while self._room < 0:
            self._evict()
            self._room += 1

    def _look(self, keys: Run) -> str:
        return "".join(itemgetter(*keys)(self._kinds))

    @abstractmethod
    def _use(self, run: Run, kinds: str) -> None:
        """Residents that are treated alike are used, one after another."""

    @abstractmethod
    def _enter(self, run: Run, kind: str) -> int:
        """The first keys of ``run``, of one kind, none resident, enter one after another; returns how many."""

    @abstractmethod
    def _evict(self) -> None:
        """One resident leaves."""

    @abstractmethod
    def _adapt(self) -> None:
        """The capacity has changed; all residents stay for now."""


class TinyARC(Tiny):
    """``eviction.ARC``: both queues with their ghosts."""

    residents = _RECENT + _FREQUENT
    alike: ClassVar = {kind: kind for kind in (_NEW, _RECENT, _FREQUENT, _GHOST, _FREQUENT_GHOST)}

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._target = 0.0
        self._recent = Queue(self._kinds, _RECENT, _GHOST)
        self._frequent = Queue(self._kinds, _FREQUENT, _FREQUENT_GHOST)
        self._queues = [self._recent, self._frequent]
        self._incoming = _NEW

    def _use(self, run: Run, kinds: str) -> None:
        if kinds[0] == _FREQUENT:
            self._frequent.take(run)
            self._frequent.keys += run
        else:
            self._recent.take(run)
            self._frequent.flow(run, 0, self._frequent.ghosts)

    def _enter(self, run: Run, kind: str) -> int:
        self._incoming = kind
        room = min(self._room, len(run))
        self._room -= room
        if kind == _NEW:
            self._insert(run, room)
        else:
            self._return(run, kind, room)
        return len(run)

    def _insert(self, run: Run, room: int) -> None:
        """New keys enter; as long as recent keys are no more than their target, frequent ones leave for them."""
        pushing = len(run) - room
        below = int(self._target) + 1 - len(self._recent) - room
        frequent = max(0, min(pushing, below, len(self._frequent)))
        self._moved = _RECENT + _GHOST + _FREQUENT_GHOST + (_FREQUENT if frequent else "")
        self._flow(run, [], pushing - frequent, frequent)

    def _return(self, run: Run, kind: str, room: int) -> None:
        """Ghosts of one kind become frequent. Counts decide who leaves for each; the first ``room`` push none out."""
        target, most = self._target, float(self._capacity)
        recent, recent_ghosts = len(self._recent), self._recent.ghosts
        frequent, frequent_ghosts = len(self._frequent), self._frequent.ghosts
        leaving = 0
        for place in range(len(run)):
            if kind == _GHOST:
                step = frequent_ghosts / recent_ghosts if frequent_ghosts > recent_ghosts else 1.0
                target = min(most, target + step)
                recent_ghosts -= 1
            else:
                step = recent_ghosts / frequent_ghosts if recent_ghosts > frequent_ghosts else 1.0
                target = target - step if target > step else 0.0
                frequent_ghosts -= 1
            if place < room:
                continue
            if recent > target or (0 < recent == target and kind != _GHOST) or not frequent + place:
                recent -= 1
                recent_ghosts += 1
                leaving += 1
            else:
                frequent_ghosts += 1
        self._target = target
        self._moved += self.residents
        (self._recent if kind == _GHOST else self._frequent).take(run)
        self._flow([], run, leaving, len(run) - room - leaving)

    def _flow(self, new: Run, back: Run, recent: int, frequent: int) -> None:
        """``new`` and ``back`` enter, ``recent`` and ``frequent`` leave; recent keys with ghosts fit the capacity."""
        once, often, capacity = self._recent, self._frequent, self._capacity
        once.flow(new, recent, max(0, capacity - len(once) - len(new) + recent))
        often.flow(back, frequent, max(0, 2 * capacity - len(once.keys) - len(often) - len(back) + frequent))

    def _evict(self) -> None:
        held, target = len(self._recent), self._target
        recent = held > target or (0 < held == target and self._incoming == _FREQUENT_GHOST) or not len(self._frequent)
        self._flow([], [], recent, not recent)

    def _adapt(self) -> None:
        self._target = min(self._target, float(self._capacity))
        self._flow([], [], 0, 0)


class TinyS3FIFO(Tiny):
    """``eviction.S3FIFO``. A resident's letter stands for its queue and its uses."""

    residents = _SMALL + _MAIN
    alike: ClassVar = {_NEW: _NEW, _GHOST: _GHOST, **dict.fromkeys(_SMALL, _SMALL), **dict.fromkeys(_MAIN, _MAIN)}

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._small, self._main = Queue(self._kinds, _SMALL[0], _GHOST), Queue(self._kinds, _MAIN[0])
        self._queues = [self._small, self._main]
        self._adapt()

    def _use(self, run: Run, kinds: str) -> None:
        used = kinds.translate(_USED)
        if used != kinds:
            kinds_of = self._kinds
            for key, kind in zip(run, used, strict=True):
                kinds_of[key] = kind

    def _enter(self, run: Run, kind: str) -> int:
        if self._room:
            room = min(self._room, len(run))
            self._room -= room
            return self._insert(run[:room], kind)
        passing = self._passing(len(run))
        if not passing:
            most = len(run) if kind == _GHOST else min(len(run), self._small_capacity - len(self._small))
            return self._insert(run[: self._leave_main(most)], kind)
        self._moved += _SMALL + _GHOST
        if kind == _NEW:
            self._small.flow(run[:passing], passing, self._most_ghosts)
            return passing
        self._small.flow([], 1, self._most_ghosts)
        return self._insert(run[:1], self._kinds[run[0]])  # the ghost itself may have been forgotten

    def _insert(self, run: Run, kind: str) -> int:
        if kind == _NEW:
            self._small.flow(run, 0, self._most_ghosts)
        else:
            self._small.take(run)
            self._main.flow(run)
        return len(run)

    def _passing(self, most: int) -> int:
        """How many keys, at most ``most``, leave the small queue for as many new ones; 0 at the main queue's turn."""
        small, main = self._small, self._main
        while len(small) >= self._small_capacity or not main.keys:
            kinds = self._look(small.keys[small.ghosts : small.ghosts + most])
            passing = len(kinds) - len(kinds.lstrip(_PASSING))
            if passing:
                return most if passing == len(small) else passing
            main.flow([small.keys.pop(small.ghosts)])
            self._moved += _SMALL
        return 0

    def _leave_main(self, most: int) -> int:
        """At most ``most`` leave main, once used keys before them went to its end with a use less; returns how many."""
        main, kinds, unused, staying = self._main.keys, self._kinds, _MAIN[0], 0
        while (kind := kinds[key := main[staying]]) != unused:
            kinds[key] = _LESS_USED[kind]
            staying = (staying + 1) % len(main)
        main += main[:staying]
        del main[:staying]
        first = self._look(main[:most])
        leaving = len(first) - len(first.lstrip(unused))
        self._main.flow([], leaving)
        self._moved += _MAIN
        return leaving

    def _evict(self) -> None:
        if self._passing(1):
            self._small.flow([], 1, self._most_ghosts)
        else:
            self._leave_main(1)

    def _adapt(self) -> None:
        self._small_capacity = max(1, int(SMALL_SHARE * self._capacity))
        self._most_ghosts = max(0, self._capacity - self._small_capacity)
        self._small.flow([], 0, self._most_ghosts)


TINY: dict[str, type[Tiny]] = {ARC.name: TinyARC, S3FIFO.name: TinyS3FIFO}
"""By the name of the algorithm."""
