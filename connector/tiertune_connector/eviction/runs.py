"""Runs of new keys, such as prompts longer than a pool bring: most of them enter and leave without a trace.

All that they do then is to push others out. Done at once, that is a part of the work, and exactly the same.
"""

from collections import OrderedDict
from collections.abc import Mapping
from itertools import islice
from typing import Protocol

from tiertune_connector.eviction.base import Eviction, Key


class Passable(Eviction, Protocol):
    """An algorithm whose new keys enter a queue and, while it is this queue's turn, push its first ones out."""

    def use(self, keys: list[Key]) -> None:
        """``touch`` all of these, one after another."""

    def passing(self, keys: list[Key], start: int) -> list[Key]:
        """The first of ``keys[start:]``, none resident, that do no more than this in a full pool; maybe none."""

    def let_pass(self, run: list[Key]) -> tuple[list[Key], list[Key]]:
        """They enter, one after another; returns as ``push`` does."""


def enter(eviction: Passable, keys: list[Key]) -> tuple[list[Key], list[Key]]:
    """``keys``, none of them resident or twice, enter a full pool one after another, while nothing is pinned.

    Returns those that were inserted, and those that left; a key that entered and left within its run is in neither.
    """
    inserted: list[Key] = []
    left: list[Key] = []
    start = 0
    while start < len(keys):
        run = eviction.passing(keys, start)
        if run:
            gone, passed = eviction.let_pass(run)
            left += gone
            inserted += run[len(passed) :]
            start += len(run)
        else:
            key = keys[start]
            eviction.admit(key)
            victim = eviction.evict(())
            assert victim is not None  # the pool is full
            eviction.insert(key)
            left.append(victim)
            inserted.append(key)
            start += 1
    return inserted, left


def before(keys: list[Key], known: Mapping[Key, object]) -> int:
    """How many keys come before the first one that is known."""
    if known.keys().isdisjoint(keys):  # the quickest way to ask for many, and most often so
        return len(keys)
    return keys.index(next(filter(known.__contains__, keys)))


def push(queue: OrderedDict[Key, None], keys: list[Key], most: int) -> tuple[list[Key], list[Key]]:
    """New keys enter a queue of at most so many, one after another, and its first ones leave for them.

    Returns those that were in the queue and left, and those of ``keys`` that came and left: the first ones.
    """
    leaving = max(0, len(queue) + len(keys) - most)
    gone = list(islice(queue, leaving))
    passed = leaving - len(gone)
    if len(gone) == len(queue):
        queue.clear()
    else:
        for key in gone:  # quicker than `popitem`, as is the loop below than `update`
            del queue[key]
    for key in keys[passed:]:
        queue[key] = None
    return gone, keys[:passed]
