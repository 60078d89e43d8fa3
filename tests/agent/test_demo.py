"""The parts of the demo alone: players and their prompts, the link, what it refuses."""

import socket
from concurrent.futures import Future
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.memory_tier import MemoryTier
from tiertune_agent.demo.player import (
    MAX_CHUNKS,
    Job,
    Player,
    Prompt,
    Tally,
    chunk_keys,
    payload,
    prompts,
    save_requests,
)
from tiertune_agent.demo.result import Figures
from tiertune_agent.demo.throttle import ThrottledTier, link_rate
from tiertune_agent.demo.world import DEMO, HOSTS, World
from tiertune_agent.replay.traces import BUILTIN, builtin_trace
from tiertune_connector.chunk import NOBODY
from tiertune_connector.client.store_client import ClientSlot, Loaded, Reserved
from tiertune_connector.cost import FetchEstimate
from tiertune_connector.ending import Ending
from tiertune_connector.protocol.messages import LookupReply, SlotRef
from tiertune_connector.tiers.base import Outcome

CHUNK_BYTES = 4096

CHUNK_TOKENS = 64

NAMESPACE = "0" * 32

CHAINS = st.lists(st.integers(0, 5), max_size=8)


class FakeTime:
    def __init__(self):
        self.now = 0.0

    def clock(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@given(CHAINS, CHAINS)
def test_two_prompts_share_the_keys_of_their_common_prefix_and_no_other(one, other):
    """A key names a block and all before it."""
    common = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    left, right = chunk_keys(one, "s"), chunk_keys(other, "s")
    assert left[:common] == right[:common]
    assert not set(left[common:]) & set(right[common:])
    assert not set(left) & set(chunk_keys(one, "another round"))


def test_the_bytes_of_a_chunk_follow_from_its_key():
    """Two players derive the same bytes from one key, and others from another."""
    one, other = chunk_keys([1, 2], "s")
    assert np.array_equal(payload(one, CHUNK_BYTES), payload(one, CHUNK_BYTES))
    assert np.count_nonzero(payload(one, CHUNK_BYTES) != payload(other, CHUNK_BYTES)) > 0.9 * CHUNK_BYTES


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    trace, path = builtin_trace("lmcache_agents"), tmp_path_factory.mktemp("requests") / "requests.npz"
    save_requests(trace, path)
    return trace, path


def job(index=0, players=4):
    return Job(
        name="engine",
        index=index,
        players=players,
        socket="",
        chunk_tokens=CHUNK_TOKENS,
        chunk_bytes=CHUNK_BYTES,
        requests_per_s=10.0,
        prefill_step_s=0.01,
        prefill_token_s=0.001,
    )


def test_the_players_share_every_request_of_the_trace_and_begin_anew_with_other_prompts(saved):
    """Together they serve each request once a round; what a round caches is no use to the next."""
    trace, path = saved
    shares = [list(islice(prompts(path, job(index)), len(trace))) for index in range(4)]
    first = [prompt for share in shares for prompt in share if prompt.request.startswith("0-")]
    again = [prompt for share in shares for prompt in share if prompt.request.startswith("1-")]
    assert sorted(int(prompt.request[2:]) for prompt in first) == list(range(len(trace)))
    assert not {key for prompt in first for key in prompt.keys} & {key for prompt in again for key in prompt.keys}
    due = sorted(prompt.due_s for share in shares for prompt in share)
    assert due == pytest.approx([number / 10 for number in range(4 * len(trace))])


def test_a_trace_of_fewer_requests_than_players_feeds_them_all(tmp_path):
    """One whose first request is past the end of the trace takes the one that is its turn when it begins anew."""
    path = tmp_path / "requests.npz"
    np.savez(path, offsets=np.array([0, 1, 1]), ids=np.array([7]), tokens=np.array([64, 9]))
    shares = [[prompt.request for prompt in islice(prompts(path, job(index)), 2)] for index in range(4)]
    assert shares == [["0-0", "2-0"], ["0-1", "2-1"], ["1-0", "3-0"], ["1-1", "3-1"]]


def test_prompts_are_cut_and_only_whole_chunks_have_keys(saved):
    """An engine caches full blocks only, and no prompt outgrows the demo's tiers."""
    trace, path = saved
    for prompt in islice(prompts(path, job(players=1)), len(trace)):
        row = int(prompt.request[2:])
        assert len(prompt.keys) == min(len(trace.chains[row]), trace.input_len[row] // CHUNK_TOKENS, MAX_CHUNKS)
        assert len(prompt.keys) * CHUNK_TOKENS <= prompt.tokens <= MAX_CHUNKS * CHUNK_TOKENS


class FakeClient:
    """A store that holds ``held`` leading chunks in DRAM and gives them with the bytes of ``bytes_of``."""

    def __init__(self, held, *, bytes_of=lambda key: payload(key, CHUNK_BYTES), delivers=None):
        self.held, self.bytes_of = held, bytes_of
        self.delivers = held if delivers is None else delivers
        self.reports, self.written, self.released = [], [], 0

        self.tiers, self.costs = ["dram"] * held, {}

    def lookup(self, request, keys, *, prompt_tokens):
        return _done(LookupReply(0, self.tiers, self.costs, {}))

    def load(self, keys, *, deadline_s):
        slots = [ClientSlot(key, SlotRef(1, i, 1, 0), 1) for i, key in enumerate(keys)][: self.delivers]
        late = ["late"] * (len(keys) - len(slots))
        return _done(Loaded(slots, ["hit"] * len(slots) + late, {}, 1, 1))

    def read(self, slot, out):
        out[:] = self.bytes_of(slot.key)
        return True

    def release(self, loaded):
        self.released += 1

    def reserve(self, keys, *, request):
        return _done(Reserved([ClientSlot(key, SlotRef(1, 0, 1, 0), 1) for key in keys], [""] * len(keys)))

    def write(self, slot, data):
        assert np.array_equal(data, payload(slot.key, CHUNK_BYTES))
        self.written.append(slot.key)
        return True

    def commit(self, slots):
        return _done([True] * len(slots))

    def tell(self, report):
        self.reports.extend(report.tiers)

    def report_steps(self, steps):
        pass


def _done(value):
    future = Future()
    future.set_result(value)
    return future


def serve_one(client, tmp_path, *, warm=False):
    """A player serves one prompt of four chunks; what it counted, and how many seconds it prefilled."""
    fake, tally = FakeTime(), Tally(tmp_path / "tally")
    player = Player(client, job(), tally, clock=fake.clock, sleep=fake.sleep)
    if warm:
        player.warm_up()
    player.serve(Prompt("r", chunk_keys([1, 2, 3, 4], "s"), 4 * CHUNK_TOKENS + 10, 0.0))
    return Tally(tmp_path / "tally").read(), fake.now


def test_a_player_fetches_what_is_there_and_stores_the_rest(tmp_path):
    """Two of four chunks come from DRAM, are compared, and save their prefill; the other two are written."""
    client = FakeClient(held=2)
    counts, seconds = serve_one(client, tmp_path)
    assert {name: count for name, count in counts.items() if count} == {"requests": 1, "verified": 2, "fetch": 1}
    assert seconds == pytest.approx(0.01 + 0.001 * (2 * CHUNK_TOKENS + 10))
    assert client.written == chunk_keys([1, 2, 3, 4], "s")[2:]
    assert client.released == 1


def test_a_player_counts_foreign_bytes_as_wrong_and_recomputes_them(tmp_path):
    """A chunk that another key's bytes came with is caught, though the client took it for good."""
    client = FakeClient(held=2, bytes_of=lambda _: payload(b"another key of another prompt...", CHUNK_BYTES))
    counts, seconds = serve_one(client, tmp_path)
    assert (counts["verified"], counts["wrong"]) == (0, 1)
    assert seconds == pytest.approx(0.01 + 0.001 * (4 * CHUNK_TOKENS + 10))
    assert [report.outcome for report in client.reports] == ["failed"]


def test_a_player_recomputes_what_came_too_late_and_says_so(tmp_path):
    """Half a load is used, and reported as late."""
    client = FakeClient(held=4, delivers=1)
    counts, _ = serve_one(client, tmp_path)
    assert (counts["verified"], counts["fetch"], counts["late"]) == (1, 1, 1)
    assert [report.outcome for report in client.reports] == ["late"]
    assert len(client.written) == 3


@pytest.mark.parametrize(("bytes_per_s", "gate"), [(1e12, {"fetch": 1, "won": 1}), (1.0, {"recompute": 1})])
def test_a_request_counts_once_however_many_tiers_have_its_chunks(tmp_path, bytes_per_s, gate):
    """Two tiers report what their gates did with one request, which is one fetch, or none."""
    client = FakeClient(held=2)
    client.tiers, slow = ["remote", "disk"], FetchEstimate(0.0, 0.0, bytes_per_s)
    client.costs = {"remote": slow, "disk": slow}
    counts, _ = serve_one(client, tmp_path, warm=True)
    assert [report.tier for report in client.reports] == ["remote", "disk"]
    told = Figures(counted=counts).document()
    assert told["gate"] == dict.fromkeys(Tally.GATE, 0) | gate
    assert told["requests"] == 1


# -- throttle


def throttled(rate):
    fake = FakeTime()
    tier = ThrottledTier(MemoryTier(), lambda: rate, clock=fake.clock, sleep=fake.sleep)
    assert tier.write(NAMESPACE, b"k", memoryview(bytes(CHUNK_BYTES)), NOBODY) is Outcome.OK
    return fake, tier


def read(tier, key=b"k"):
    return tier.read(NAMESPACE, key, memoryview(bytearray(CHUNK_BYTES)))


def test_a_slow_link_takes_the_time_that_its_bandwidth_says():
    """One write and one read of a chunk at a chunk per second take a second each."""
    fake, tier = throttled(rate=CHUNK_BYTES)
    assert fake.now == pytest.approx(1.0)
    assert read(tier)[0] is Outcome.OK
    assert fake.now == pytest.approx(2.0)


def test_transfers_of_one_direction_wait_for_each_other():
    """Two reads that begin together end one after the other."""
    _, tier = throttled(rate=CHUNK_BYTES)
    rests = []
    tier._sleep = rests.append  # both begin now: nobody lets the time pass
    for _ in range(2):
        read(tier)
    assert rests == pytest.approx([1.0, 2.0])


def test_a_fast_link_and_an_absent_chunk_cost_nothing():
    """Without a bound nobody sleeps; with one, what moves no payload does not wait."""
    fake, tier = throttled(rate=0)
    read(tier)
    assert fake.now == 0
    fake, tier = throttled(rate=CHUNK_BYTES)
    before = fake.now
    assert read(tier, b"absent")[0] is Outcome.MISS
    assert tier.present(NAMESPACE, [b"k"]) == (Outcome.OK, 1)
    assert fake.now == before


def test_each_host_has_a_link_that_is_seen_by_whoever_opens_its_file(tmp_path):
    """The demo sets the rates, a host's mapping of its own file shows it: one may be fast while the other is slow."""
    made, theirs = World(tmp_path, Ending(), 0, DEMO), [link_rate(tmp_path / f"{host}.link") for host in HOSTS]
    assert [rate for (rate,) in theirs] == [0, 0]
    made.limit(1000.0)
    made.limit(0.0, HOSTS[0])
    assert [rate for (rate,) in theirs] == [0.0, 1000.0]


# -- wrong use


def test_a_short_run_is_refused(tiertune):
    """Below 60 seconds there are too few windows to decide by."""
    code, _, err = tiertune("demo", "--seconds", 59)
    assert (code, "--seconds" in err, "60" in err) == (2, True, True)


def test_a_trace_that_cannot_be_read_is_refused(tmp_path, tiertune):
    """The message names the file."""
    code, _, err = tiertune("demo", "--trace", tmp_path / "none.parquet")
    assert (code, "none.parquet" in err) == (2, True)


@pytest.mark.parametrize("trace", BUILTIN)
def test_a_taken_port_is_refused(tiertune, trace):
    """The message names the port and the way out; a trace that comes along was found before."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err = tiertune("demo", "--trace", trace, "--port", port)
    assert (code, f"--port {port}" in err) == (2, True)


def test_without_a_trace_the_shipped_one_is_taken(tiertune, tmp_path, monkeypatch):
    """No file in the working folder, whatever its name: nobody asked for it."""
    monkeypatch.chdir(tmp_path)
    Path(BUILTIN[0]).write_text("notes")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err = tiertune("demo", "--port", port)
    assert (code, f"--port {port}" in err) == (2, True)
