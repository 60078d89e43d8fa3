"""Looking for a prompt's chunks in a directory: how far they reach, and how many answers are waited for in turn."""

import threading
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.stores import PATIENCE_S, A, chain, no_more_threads
from tiertune_connector.tiers import directory, looking
from tiertune_connector.tiers.base import Outcome
from tiertune_connector.tiers.directory import DirectoryTier
from tiertune_connector.tiers.looking import Lookers

FIRST, AT_ONCE = looking._PIECE, looking._AT_ONCE
QUICK, SLOW = float("inf"), -1.0
"""Every answer is taken for quick, or for slow."""


@pytest.fixture(scope="module")
def lookers():
    made = Lookers()
    yield made
    made.shutdown()


def in_turn(found):
    for position, one in enumerate(found):
        if isinstance(one, OSError):
            return one
        if not one:
            return position
    return len(found)


ANSWERS = st.integers(0, 150).flatmap(
    lambda count: st.dictionaries(st.integers(0, 150), st.sampled_from([0, OSError()]), max_size=4).map(
        lambda others: [others.get(position, 1) for position in range(count)]
    )
)


@given(ANSWERS, st.sampled_from([QUICK, SLOW]))
def test_chunks_asked_for_at_once_reach_as_far_as_those_asked_for_in_turn(lookers, answers, slow):
    """Up to the first that is missing; one that cannot be looked at counts only before that."""

    def there(key):
        answer = answers[int(key)]
        if isinstance(answer, OSError):
            raise answer
        return answer

    with patch.object(looking, "_SLOW_S", slow):
        try:
            told = lookers.leading(there, [b"%d" % position for position in range(len(answers))])
        except OSError as error:
            told = error
    assert told == in_turn(answers)


def test_where_answers_are_slow_a_long_prompt_waits_for_few(tmp_path, monkeypatch):
    """Over a network 256 chunks took 80 ms, longer than an engine waits: the first few in turn, the rest at once."""
    monkeypatch.setattr(looking, "_SLOW_S", SLOW)
    together, each = threading.Barrier(AT_ONCE), 3
    waits, look = [], directory._mode

    def looked(path):
        if path == tmp_path:
            return look(path)
        if len(waits) < FIRST or together.wait(PATIENCE_S) == 0:
            waits.append(path)
        return 1

    monkeypatch.setattr(directory, "_mode", looked)
    keys = chain("k", FIRST + each * AT_ONCE)
    tier = DirectoryTier(tmp_path, writer="host-a")
    assert tier.present(A, keys) == (Outcome.OK, len(keys))
    assert len(waits) == FIRST + each
    tier.close()


def test_where_no_more_threads_can_be_had_all_are_asked_in_turn(monkeypatch):
    """The tier is well: the process, or its user, has too many."""
    monkeypatch.setattr(looking, "_SLOW_S", SLOW)
    alone, asked = Lookers(), set()
    with monkeypatch.context() as patched:
        no_more_threads(patched)
        keys = [b"%d" % number for number in range(100)]
        assert alone.leading(lambda key: asked.add(threading.current_thread()) or key != b"70", keys) == 70
    assert len(asked - {threading.current_thread()}) == 1
    alone.shutdown()


def test_where_answers_are_quick_no_thread_is_asked(lookers, monkeypatch):
    """A local disk's would be told later, and cost more of the processor."""
    monkeypatch.setattr(looking, "_SLOW_S", QUICK)
    asked = []
    keys = chain("k", 300)
    assert lookers.leading(lambda _: asked.append(threading.current_thread()) or True, keys) == len(keys)
    assert asked == [threading.current_thread()] * len(keys)
