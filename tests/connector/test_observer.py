"""What a store learns from lookups: samples for the fleet, and totals that they are a part of."""

import threading
import weakref

import pytest

from connector.stores import CHUNK_BYTES, CHUNK_TOKENS, NAMESPACE, amid, at_once, chain, counted, eventually, in_turns
from tiertune_connector.counters import Counters
from tiertune_connector.keys import Namespace
from tiertune_connector.protocol.messages import PrefillLine, Side
from tiertune_connector.sampling.observer import LookupRecord, Observer, Room, Samples, Sampling, StaleError
from tiertune_connector.sessions.session import Session
from tiertune_connector.whatif.sampler import Pick

ALL = Sampling(rate=1.0, version=1)
DIGEST = NAMESPACE.digest


@pytest.fixture
def session():
    return Session("c", "engine-0", "all", NAMESPACE, CHUNK_BYTES, CHUNK_TOKENS)


def requests(observer):
    """Those of the namespace that were studied."""
    return observer.read(0)[0]["namespaces"][DIGEST]["requests"]


def observer_of(session, sampling=ALL, **more):
    observer = Observer(lambda _: None, lambda: 1700.5, **more)
    observer.attach(session)
    observer.adopt(sampling)
    return observer


# -- the ring


def asked(number, length=4):
    return LookupRecord(number, 0.0, length, 64, "e", DIGEST, b"")


def filled(room, requests, each=3):
    ring = Samples(room)
    for number in range(requests):
        request = asked(number)
        ring.add(request, [Pick(position, key, False) for position, key in enumerate(chain(f"r{number}", each))])
    return ring


def test_the_ring_drops_its_oldest_and_counts_them():
    """Ten samples of room, thirty samples: numbers 20 to 29 are left, and 20 were dropped."""
    ring = filled(10, 10)
    assert (ring.next, ring.dropped) == (30, 20)
    assert [sample["seq"] for sample in ring.page(0)] == list(range(20, 30))


def test_reading_goes_on_where_it_ended():
    """From a number on; beyond the end there is nothing."""
    ring = filled(100, 10)
    assert [sample["seq"] for sample in ring.page(27)] == [27, 28, 29]
    assert ring.page(30) == ring.page(1000) == []


def test_a_page_never_parts_a_request():
    """The limit is passed to the end of the request that it falls in."""
    ring = filled(100, 10, each=4)
    pages, since = [], 0
    while page := ring.page(since, 6):
        pages.append([sample["req"] for sample in page])
        since = page[-1]["seq"] + 1
    assert pages == [[0] * 4 + [1] * 4, [2] * 4 + [3] * 4, [4] * 4 + [5] * 4, [6] * 4 + [7] * 4, [8] * 4 + [9] * 4]


def test_a_ring_that_was_cleared_counts_what_it_held_as_dropped():
    """Numbers go on."""
    ring = filled(100, 2)
    ring.clear()
    assert (ring.next, ring.dropped, ring.page(0)) == (6, 6, [])


# -- the observer


def test_a_sample_tells_its_chunk_and_its_request(session):
    """Its place, the length of its prompt, who asked; of the tenant the digest, of the request only a number."""
    observer, keys = observer_of(session), chain("k", 3)
    observer.seen(session, keys, 50, b"\xab" * 16)
    header, samples = observer.read(0)
    assert samples[2] == {
        "seq": 2, "t": 1700.5, "req": 1, "key": keys[2].hex(), "pos": 2, "chain_len": 3, "prompt_tokens": 50,
        "engine": "engine-0", "namespace": DIGEST, "tenant": "ab" * 16, "hot": False,
    }  # fmt: skip
    assert (header["next"], header["rate"], header["hash_seed"], header["hot_version"]) == (3, 1.0, 0, 1)
    assert (header["dropped"], header["behind"], header["skipped"]) == (0, 0, 0)


def test_requests_without_a_sampled_chunk_count_too(session):
    """Totals are of all lookups."""
    observer = observer_of(session, Sampling(rate=1e-9, version=1, hot=(chain("k", 1)[0],)))
    observer.seen(session, chain("k", 4), 70)
    for index in range(9):
        observer.seen(session, chain(f"other{index}", 10), 160)
    header, samples = observer.read(0)
    assert [(sample["pos"], sample["hot"]) for sample in samples] == [(0, True)]
    told = header["namespaces"][DIGEST]
    assert (told["requests"], told["chunks"]) == (10, 94)


def test_namespaces_that_are_studied_together_are_told_apart(session):
    """Requests of two that come in turns: each has its own totals, and its samples its own keys."""
    other = Session("d", "engine-1", "all", Namespace("other", chunk_tokens=CHUNK_TOKENS), CHUNK_BYTES, CHUNK_TOKENS)
    observer = observer_of(session)
    observer.attach(other)
    for index in range(6):
        observer.seen((session, other)[index % 2], chain(f"r{index % 2}", 3 + index % 2), 64)
    header, samples = observer.read(0)
    for which, each in enumerate((session, other)):
        told = header["namespaces"][each.digest]
        assert (told["requests"], told["chunks"]) == (3, 3 * (3 + which))
        mine = {(sample["key"], sample["engine"]) for sample in samples if sample["namespace"] == each.digest}
        assert mine == {(key.hex(), each.engine) for key in chain(f"r{which}", 3 + which)}


def test_a_page_says_how_much_is_behind_it(session):
    """A reader knows whether to ask again."""
    observer = observer_of(session)
    for index in range(10):
        observer.seen(session, chain(f"r{index}", 5), 80)
    header, samples = observer.read(0, limit=12)
    assert (len(samples), header["next"], header["behind"]) == (15, 15, 35)
    header, samples = observer.read(header["next"], limit=100)
    assert (len(samples), header["next"], header["behind"]) == (35, 50, 0)


def test_what_comes_often_is_told(session):
    """Candidates for the fleet's hot set, with how often they were counted."""
    observer = observer_of(session)
    for index in range(2000):
        observer.seen(session, [*chain("system prompt", 1), *chain(f"r{index}", 5)], 96)
    often = observer.read(0)[0]["namespaces"][DIGEST]["hot_candidates"]
    assert next(iter(often)) == chain("system prompt", 1)[0].hex()
    assert 150 < next(iter(often.values())) < 350, "one request of eight is counted"


def test_only_a_newer_way_to_sample_is_adopted(session):
    """The same again is no error, so that an answer that was lost can be asked for again."""
    observer = observer_of(session)
    newer = Sampling(seed=0, rate=1.0, hot=(b"x",), version=5)
    observer.adopt(newer)
    observer.adopt(newer)
    for stale in (ALL, Sampling(version=5), Sampling(version=4)):
        with pytest.raises(StaleError, match="at version 5"):
            observer.adopt(stale)
    assert observer.sampling == newer


def test_samples_of_another_rate_do_not_mix(session):
    """What was sampled before is dropped with a new rate or seed, and stays with a new hot set."""
    observer = observer_of(session)
    observer.seen(session, chain("k", 5), 80)
    observer.adopt(Sampling(rate=1.0, version=2, hot=(b"x",)))
    assert len(observer.read(0)[1]) == 5
    observer.adopt(Sampling(rate=0.5, version=3, hot=(b"x",)))
    header, samples = observer.read(0)
    assert (samples, header["dropped"], header["next"]) == ([], 5, 5)


def test_lookups_that_find_no_room_to_wait_are_counted(session):
    """Memory is bounded even if nobody studies them."""
    observer = observer_of(session, most_waiting=25)
    for index in range(4):
        observer.seen(session, chain(f"r{index}", 10), 160)
    header, samples = observer.read(0)
    assert (header["skipped"], {sample["req"] for sample in samples}) == (2, {1, 2})
    observer.seen(session, chain("after", 10), 160)
    assert observer.read(0)[0]["next"] == 30


def test_a_lookup_does_not_wait_for_what_is_studied(session):
    """While one request is being studied, for however long, another can be left there."""
    entered, leave = threading.Event(), threading.Event()

    def room(_: str) -> None:
        entered.set()
        assert leave.wait(10)

    observer = Observer(room, lambda: 0.0)
    observer.attach(session)
    observer.seen(session, chain("a", 3), 48)
    student = threading.Thread(target=observer.settle)
    student.start()
    assert entered.wait(10)
    observer.seen(session, chain("b", 3), 48)
    assert student.is_alive()
    leave.set()
    student.join(10)
    assert requests(observer) == 2


def test_while_a_study_rests_others_are_answered(session):
    """However much waits to be studied: who asks studies it at once."""
    observer = observer_of(session)
    resting, leave = threading.Event(), threading.Event()

    def rest() -> None:
        resting.set()
        assert leave.wait(10)

    for number in range(4):
        observer.seen(session, chain(f"{number}", 600), 9600)
    student = threading.Thread(target=observer.settle, args=(rest,))
    student.start()
    assert resting.wait(10)
    assert requests(observer) == 4
    assert student.is_alive()
    leave.set()
    student.join(10)
    assert requests(observer) == 4


def test_a_study_ends_though_lookups_never_do(session):
    """Who asks for counters gets them, however fast prompts come."""
    observer = observer_of(session)
    observer.seen(session, chain("first", 4), 64)
    observer.settle(lambda: observer.seen(session, chain("next", 600), 64))
    assert requests(observer) == 2


def test_nothing_is_lost_between_threads(session):
    """Eight threads look up while one studies and one reads: every chunk is sampled once, numbers have no gap."""
    observer, got = observer_of(session), []

    def look(thread):
        for index in range(200):
            observer.seen(session, chain(f"{thread}/{index}", 3), 48)

    def read(_):
        got.extend(observer.read(len(got), limit=50)[1])

    with amid(in_turns(read, lambda _: observer.settle()), 2):
        at_once(look, 8)
        eventually(lambda: not observer.read(len(got))[1])
    assert [sample["seq"] for sample in got] == list(range(8 * 200 * 3))
    assert len({sample["key"] for sample in got}) == 8 * 200 * 3
    assert sorted({sample["req"] for sample in got}) == list(range(1, 1601))


def test_failures_of_a_study_are_counted_and_it_goes_on(session):
    """The thread does not end; what was asked after the failure is studied."""
    counters, stopping, failed = Counters(), threading.Event(), threading.Event()

    def room(_: str) -> None:
        if not failed.is_set():
            failed.set()
            raise OSError("for once")

    observer = Observer(room, lambda: 0.0)
    observer.attach(session)
    thread = threading.Thread(target=observer.run, args=(stopping, counters))
    observer.seen(session, chain("a", 3), 48)
    thread.start()
    try:
        eventually(lambda: counted(counters, "internal_errors_total"))
        assert thread.is_alive()
    finally:
        stopping.set()
        thread.join()
    observer.seen(session, chain("b", 3), 48)
    assert requests(observer) == 2
    assert counted(counters, "internal_errors_total") == {("observe",): 1.0}


@pytest.mark.parametrize(("lookups", "shortest_s", "longest_s"), [(2, 0.019, 0.02), (63, 2e-3, 0.02)])
def test_who_studies_rests_the_shorter_the_more_waits(session, lookups, shortest_s, longest_s):
    """Between its batches: requests have the interpreter nearly always, and no lookup is skipped in a flood."""
    observer = Observer(lambda _: None, lambda: 0.0, most_waiting=64 * 600)
    observer.attach(session)
    for number in range(lookups):
        observer.seen(session, chain(str(number), 600), 48)
    rests = []

    class Stopping:
        def wait(self, seconds):
            rests.append(seconds)
            return len(rests) > 1 + lookups

    observer.run(Stopping(), Counters())
    first, *between = rests[: 1 + lookups]
    assert between == sorted(between)
    assert between[0] == pytest.approx(shortest_s, abs=1e-3)
    assert between[-1] == pytest.approx(longest_s)
    assert first > longest_s
    assert observer.read(0)[0]["skipped"] == 0


def test_terms_are_what_engines_told_last(session):
    """Tokens of a chunk, and the line of its prefill."""
    observer = observer_of(session)
    assert observer.terms(DIGEST) == {"chunk_tokens": CHUNK_TOKENS, "chunks_each": 1.0, "prefill": None}
    observer.prefill(session, PrefillLine(0.01, 1e-15, 8e9, 32, 4096, 8192))
    observer.prefill(session, None)
    assert observer.terms(DIGEST)["prefill"] == {
        "overhead_s": 0.01, "seconds_per_flop": 1e-15, "params": 8e9, "layers": 32, "width": 4096, "step_tokens": 8192,
    }  # fmt: skip
    assert observer.terms("unknown") == {"chunk_tokens": 0, "chunks_each": 1.0, "prefill": None}


def test_samples_do_not_hold_whole_prompts(session):
    """A sample of a long prompt keeps its own key and the prompt's length; the other keys are let go."""

    class Keys(list):
        """A list that can be watched."""

    observer = observer_of(session)
    keys = Keys(chain("long", 50))
    watched = weakref.ref(keys)
    observer.seen(session, keys, 800)
    del keys
    _, samples = observer.read(0)
    assert {sample["chain_len"] for sample in samples} == {50}
    assert watched() is None


def test_ghosts_leave_room_for_the_chunks_of_other_groups_of_layers(session):
    """A pool of 100 chunks holds 50 of a chain beside as many of another group; both are the same bytes."""
    observer = Observer(lambda _: Room(100, 10), lambda: 0.0)
    observer.attach(session)
    keys = chain("k", 60)
    observer.beside(session, [Side(chain("other", 60), CHUNK_TOKENS, 0)])
    observer.beside(session, [])
    for _ in range(2):
        observer.seen(session, keys, 60 * CHUNK_TOKENS)
    hits = {labels[:3]: count for _, labels, count in observer.rows() if labels[1] == "1000"}
    assert hits["lru", "1000", "hit"] == 50 * CHUNK_TOKENS
    assert hits["lru", "1000", "miss"] == 70 * CHUNK_TOKENS


def test_a_group_with_a_window_leaves_ghosts_their_room(session):
    """Engines keep only its last chunks of a prompt, though they name all of them in a lookup."""
    observer = observer_of(session)
    windowed, whole = Side(chain("w", 60), CHUNK_TOKENS, 4), Side(chain("other", 60), CHUNK_TOKENS * 2, 0)
    observer.beside(session, [windowed])
    assert observer.terms(DIGEST)["chunks_each"] == 1.0
    observer.beside(session, [windowed, whole])
    assert observer.terms(DIGEST)["chunks_each"] == 1.5
