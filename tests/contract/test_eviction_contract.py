"""Every registered eviction algorithm, alone and inside a pool."""

from collections.abc import Collection
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from contract.published import Algorithm1, Figure4
from extending.slru import SLRU
from tiertune_connector.eviction import ALGORITHMS, CANDIDATES
from tiertune_connector.pool import Pool
from tiertune_connector.whatif.simulated import SimulatedPool

inherited = settings(suppress_health_check=[HealthCheck.differing_executors])  # one contract, several classes
KEYS = [bytes([number]) for number in range(24)]
key = st.sampled_from(KEYS)
few = st.sampled_from(KEYS[:8])
"""Of a pool of six: so that most of what is asked for is there, pinned, or leaving."""


def chains(depth=6):
    """Prompts as paths in a tree of blocks: a key names its whole prefix, as real chunk keys do."""
    path = st.lists(st.integers(0, 2), min_size=1, max_size=depth)
    return st.lists(path.map(lambda steps: [bytes(steps[: end + 1]) for end in range(len(steps))]), max_size=60)


def ghosts(eviction):
    """How many keys an algorithm, or the one that takes over from it, remembers beyond its residents."""
    eviction = getattr(eviction, "successor", eviction)
    kept = (each for each in vars(eviction).values() if isinstance(each, Collection))
    return len({key for each in kept for key in each} - {*eviction})


class Pins(dict):
    """Counts how often it is asked."""

    asked = 0

    def __contains__(self, key):
        self.asked += 1
        return super().__contains__(key)


class EvictionContract:
    """Subclass with ``algorithm``; the pool drives it as the store does, a plain model says what must hold."""

    algorithm: str

    def test_it_is_registered_under_its_name(self):
        """The name in a tuning document is the name that the algorithm tells."""
        assert ALGORITHMS[self.algorithm](4).name == self.algorithm

    def test_against_the_model(self):
        """Under any sequence of calls: capacity and pins are kept, victims are told once, ghosts are bounded."""

        class Machine(PoolMachine):
            algorithm = self.algorithm

        test = Machine.TestCase()
        test.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
        test.runTest()

    @inherited
    @given(order=st.lists(key, unique=True, max_size=12), cuts=st.sets(st.integers(0, 12)))
    def test_adopting_in_pieces_is_adopting_at_once(self, order, cuts):
        """Taking over from another algorithm, in steps or in one go, drops nothing, and keeps the order of victims."""
        eviction = ALGORITHMS[self.algorithm](12)
        for start, end in pairwise([0, *sorted(cuts), len(order)]):
            eviction.adopt(order[start:end])
        assert list(eviction) == order
        assert [eviction.evict(()) for _ in order] == order

    @inherited
    @given(order=st.lists(key, unique=True, min_size=1, max_size=12))
    def test_nothing_changes_when_all_is_pinned(self, order):
        """A refused eviction leaves order and ghosts as they were."""
        eviction = ALGORITHMS[self.algorithm](12)
        for entry in order:
            eviction.admit(entry)
            eviction.insert(entry)
        before = list(eviction), ghosts(eviction)
        assert eviction.evict(set(order)) is None
        assert (list(eviction), ghosts(eviction)) == before

    @inherited
    @given(entry=key)
    def test_a_removed_key_is_forgotten(self, entry):
        """What left for another reason than room leaves no ghost."""
        eviction = ALGORITHMS[self.algorithm](4)
        eviction.admit(entry)
        eviction.insert(entry)
        eviction.remove(entry)
        assert (len(eviction), ghosts(eviction), eviction.evict(())) == (0, 0, None)

    @inherited
    @given(accesses=st.lists(key, max_size=60), room=st.integers(0, 8))
    def test_a_smaller_capacity_bounds_what_is_remembered(self, accesses, room):
        """However it was used, after a shrink at most so many are kept, and at most twice as many remembered."""
        pool = SimulatedPool(8, self.algorithm)
        for entry in accesses:
            pool.write_through([entry])
        pool.resize(room)
        assert len(pool) <= room
        assert ghosts(pool._eviction) <= 2 * room

    def test_a_long_prompt_is_reserved_without_looking_at_all_of_it_each_time(self):
        """Many chunks are being written: the next one looks at some of them for a victim, under the store's lock."""
        pool = SimulatedPool(2_000, self.algorithm)
        for _ in range(3):
            pool.write_through(range(2_000))
        pool._pins = Pins()
        assert all(pool.reserve(key) for key in range(10_000, 11_900))
        assert pool._pins.asked < 200 * 1_900


class TestLRU(EvictionContract):
    algorithm = "lru"

    @inherited
    @given(prompts=chains(), room=st.integers(6, 40))
    def test_tail_first_touches_keep_prefixes_closed(self, prompts, room):
        """If a block of a chain is cached, so is all before it, as long as chains fit the cache."""
        pool = SimulatedPool(room, self.algorithm)
        for chain in prompts:
            pool.write_through(chain)
            assert all(entry[:-1] in pool for entry in pool if len(entry) > 1)

    @given(accesses=st.lists(key, max_size=200), room=st.integers(1, 12))
    def test_the_cache_holds_the_most_recently_used(self, accesses, room):
        """Contents are the last distinct keys."""
        pool = SimulatedPool(room, self.algorithm)
        for entry in accesses:
            pool.write_through([entry])
        recent = list(dict.fromkeys(reversed(accesses)))[:room]
        assert list(pool) == recent[::-1]


class TestARC(EvictionContract):
    algorithm = "arc"

    def test_a_scan_does_not_flush_what_is_used_again(self):
        """Keys used twice survive many keys used once, which LRU would not grant."""
        assert left_by_a_scan("arc", 8) == [True] * 4
        assert left_by_a_scan("lru", 8) == [False] * 4

    @given(accesses=st.lists(key, min_size=100, max_size=300), room=st.integers(1, 8))
    @settings(deadline=None)
    def test_it_equals_the_textbook(self, accesses, room):
        """Contents equal a literal transcription of figure 4 of the paper."""
        pool, paper = SimulatedPool(room, self.algorithm), Figure4(room)
        for entry in accesses:
            pool.write_through([entry])
            paper.access(entry)
            assert set(pool) == set(paper.t1) | set(paper.t2)


class TestS3FIFO(EvictionContract):
    algorithm = "s3fifo"

    def test_keys_used_once_never_take_the_main_queue(self):
        """A scan passes through the small queue; what was used twice there stays."""
        assert left_by_a_scan(self.algorithm, 10, uses=3) == [True] * 4

    @given(accesses=st.lists(key, min_size=100, max_size=300), room=st.integers(1, 12))
    @settings(deadline=None)
    def test_it_equals_the_paper(self, accesses, room):
        """Contents equal a literal transcription of the paper's algorithm 1."""
        pool, paper = SimulatedPool(room, self.algorithm), Algorithm1(room)
        for entry in accesses:
            pool.write_through([entry])
            paper.access(entry)
            assert set(pool) == set(paper.small) | set(paper.main)


class TestFIFO(EvictionContract):
    algorithm = "fifo"

    @given(accesses=st.lists(key, max_size=200), room=st.integers(1, 12))
    def test_use_changes_nothing(self, accesses, room):
        """Contents are the last keys that entered, whatever was used since."""
        pool = SimulatedPool(room, self.algorithm)
        queue: list[bytes] = []
        for entry in accesses:
            pool.write_through([entry])
            if entry not in queue:
                queue = [*queue, entry][-room:]
            assert list(pool) == queue


class TestSLRU(EvictionContract):
    """The example of docs/extending/eviction.md."""

    algorithm = "slru"
    test_tail_first_touches_keep_prefixes_closed = TestLRU.test_tail_first_touches_keep_prefixes_closed

    @pytest.fixture(autouse=True)
    def registered(self, monkeypatch):
        monkeypatch.setitem(ALGORITHMS, "slru", SLRU)

    def test_a_scan_does_not_flush_what_was_used_again(self):
        """As far as the part for it goes: two keys of ten here; LRU would keep none."""
        assert left_by_a_scan(self.algorithm, 10) == [True, True, False, False]

    @given(prompts=chains(), cuts=st.sets(st.integers(1, 6)))
    @settings(deadline=None, max_examples=30)
    def test_a_chain_in_pieces_is_one_use(self, prompts, cuts):
        """As for every candidate."""
        in_pieces(self.algorithm, prompts, cuts)


def left_by_a_scan(algorithm, room, uses=2):
    """Which of four keys, each used so often, are there after a hundred that are used once."""
    pool = SimulatedPool(room, algorithm)
    for _ in range(uses):
        pool.write_through(KEYS[:4])
    for number in range(100):
        pool.write_through([b"scan%d" % number])
    return [entry in pool for entry in KEYS[:4]]


def written(pool, chain, cuts=()):
    """Store a chain as a request does that knew some of it: used once, then written up to each cut in turn."""
    pool.touch(chain)
    for start, end in zip((0, *cuts), (*cuts, len(chain)), strict=True):
        for entry in reversed(chain[start:end]):
            if entry not in pool:
                pool.reserve(entry)
                pool.commit(entry, 0)
        pool.renew(chain)
    return pool


@pytest.mark.parametrize("algorithm", CANDIDATES)
@given(prompts=chains(), cuts=st.sets(st.integers(1, 6)))
@settings(deadline=None, max_examples=30)
def test_a_chain_in_pieces_is_one_use(algorithm, prompts, cuts):
    """The order is the same, and so are the victims, however chains are cut when they are written."""
    in_pieces(algorithm, prompts, cuts)


def in_pieces(algorithm, prompts, cuts):
    whole, pieces = Pool(400, algorithm), Pool(400, algorithm)
    for chain in prompts:
        written(whole, chain)
        written(pieces, chain, [cut for cut in sorted(cuts) if cut < len(chain)])
    assert list(pieces) == list(whole)
    assert pieces.resize(5) == whole.resize(5)


def test_every_algorithm_has_its_contract():
    """Registering an algorithm without testing it fails here."""
    untested = set(ALGORITHMS) - {contract.algorithm for contract in EvictionContract.__subclasses__()}
    assert not untested, "write a subclass of EvictionContract here for each, as docs/extending/eviction.md shows"


class PoolMachine(RuleBasedStateMachine):
    """A pool beside sets that say what must be where."""

    algorithm: str

    def __init__(self):
        super().__init__()
        self.pool = Pool(6, self.algorithm)
        self.resident: dict[bytes, int] = {}
        self.writing: set[bytes] = set()
        self.leaving: dict[bytes, int] = {}
        self.pins: dict[bytes, int] = {}
        self.places = 0
        self.excess = 0  # chunks that a smaller capacity could not drop, because of pins

    def gone(self, evicted):
        for entry, place in evicted:
            assert entry not in self.pins, "a pinned key was evicted"
            assert self.resident.pop(entry) == place

    @rule(entry=few)
    def reserve(self, entry):
        if entry in self.resident or entry in self.writing or entry in self.leaving:
            assert self.pool.reserve(entry) is None
            return
        held = len(self.writing) + len(self.pins)
        evicted = self.pool.reserve(entry)
        assert (evicted is None) == (held >= self.pool.capacity), "refused exactly when no room can be made"
        if evicted is not None:
            self.gone(evicted)
            self.writing.add(entry)
            assert len(self.pool) <= self.pool.capacity

    @initialize(entries=st.lists(few, unique=True, min_size=4, max_size=6))
    def begin(self, entries):
        for entry in entries:
            self.reserve(entry)
            self.finish(entry, whole=True)

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), whole=st.booleans())
    def end(self, data, whole):
        self.finish(data.draw(st.sampled_from(sorted(self.writing))), whole=whole)

    def finish(self, entry, *, whole):
        self.writing.remove(entry)
        if whole:
            self.places += 1
            self.pool.commit(entry, self.places)
            self.resident[entry] = self.places
        else:
            self.pool.abort(entry)

    @rule(entries=st.lists(few, unique=True, max_size=5))
    def renew(self, entries):
        self.pool.renew(entries)

    @rule(entries=st.lists(few, max_size=5))
    def touch(self, entries):
        self.pool.touch(entries)

    @rule(entry=few)
    def pin(self, entry):
        assert self.pool.pin(entry) == self.resident.get(entry)
        if entry in self.resident:
            self.pins[entry] = self.pins.get(entry, 0) + 1

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data):
        entry = data.draw(st.sampled_from(sorted(self.pins)))
        self.pins[entry] -= 1
        if not self.pins[entry]:
            del self.pins[entry]
            assert self.pool.unpin(entry) == self.leaving.pop(entry, None)
        else:
            assert self.pool.unpin(entry) is None

    @rule(entry=few)
    def discard(self, entry):
        place = self.resident.pop(entry, None)
        if place is not None and entry in self.pins:
            self.leaving[entry] = place
            place = None
        assert self.pool.discard(entry) == place

    @precondition(lambda self: self.resident)
    @rule(data=st.data(), readers=st.integers(1, 3))
    def discard_what_is_read(self, data, readers):
        entry = data.draw(st.sampled_from(sorted(self.resident)))
        for _ in range(readers):
            self.pin(entry)
        self.discard(entry)

    @rule(size=st.sampled_from([0, 2, 5, 6, 7]))
    def resize(self, size):
        self.made_room(self.pool.resize(size))
        assert self.pool.capacity == size

    @rule()
    def trim(self):
        self.made_room(self.pool.trim())

    def made_room(self, evicted):
        self.gone(evicted)
        assert not evicted or len(self.pool) >= self.pool.capacity, "nothing leaves that need not"
        assert len(self.pool) <= max(self.pool.capacity, self.pool.pinned)
        self.excess = len(self.pool)

    @rule(algorithm=st.sampled_from(sorted(ALGORITHMS)))
    def switch_and_back(self, algorithm):
        order = list(self.pool)
        self.pool.switch(algorithm)
        assert list(self.pool) == order, "a switch drops nothing and keeps the order"
        assert self.pool.hand_over(1) is False, "it is over at once"
        self.pool.switch(self.algorithm)

    @rule(algorithm=st.sampled_from(sorted(ALGORITHMS)))
    def switch_in_steps(self, algorithm):
        order = list(self.pool)
        self.pool.switch(algorithm, whole=False)
        assert (list(self.pool), self.pool.algorithm) == (order, algorithm)

    @rule(count=st.integers(0, 4))
    def hand_over(self, count):
        self.pool.hand_over(count)

    @invariant()
    def contents_are_as_modelled(self):
        assert set(self.pool) == set(self.resident)
        assert all(self.pool.get(entry) == place for entry, place in self.resident.items())
        assert len(self.pool) == len(self.resident) + len(self.writing) + len(self.leaving)
        assert all(entry not in self.pool and self.pool.busy(entry) for entry in (*self.writing, *self.leaving))

    @invariant()
    def capacity_is_exceeded_by_what_was_pinned_alone(self):
        assert len(self.pool) <= max(self.pool.capacity, self.excess)
        assert self.pool.pinned == len(self.writing) + len(self.pins)

    @invariant()
    def ghosts_are_bounded(self):
        assert ghosts(self.pool._eviction) <= 2 * self.pool.capacity
