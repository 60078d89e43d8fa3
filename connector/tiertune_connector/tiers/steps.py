"""Long work with a store's lock held, in steps, so that no request waits for more than one of them."""

import threading
from collections.abc import Iterator
from time import sleep

BREATH_S = 5e-4
"""Pause between steps: without it, others would hardly get the lock."""


def in_steps(lock: threading.RLock, count: int, at_once: int, *, last_first: bool = False) -> Iterator[slice]:
    """Slices of ``count`` items, at most ``at_once`` each; the caller deals with each while the lock is held."""
    starts = range(0, count, at_once)
    for number, start in enumerate(reversed(starts) if last_first else starts):
        if number:
            sleep(BREATH_S)
        with lock:
            yield slice(start, start + at_once)
