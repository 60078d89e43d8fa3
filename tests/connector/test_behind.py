"""Writing behind: which chunks are admitted to which slower tier, which are offered again, and which are lost."""

import pytest

from connector.local_dram import LocalDram, fill, resize
from connector.stores import A, B, chain, payload, view
from tiertune_connector.chunk import NOBODY
from tiertune_connector.slower import behind as module
from tiertune_connector.slower.behind import BELIEVED_S, WriteBehind
from tiertune_connector.tiers.base import Outcome
from tiertune_connector.tiers.breaker import Breaker, Breakers
from tiertune_connector.tiers.disk import DiskTier
from tiertune_connector.tiers.segment import PAGE
from tiertune_connector.tuning import parse_tuning


class FakeLane:
    """Takes everything and keeps what it was given: it waits, or ends at once in an ``outcome``."""

    def __init__(self, outcome=None):
        self.outcome = outcome
        self.breaker, self.writers = Breaker(), self
        self.keys, self.waiting, self.lost = [], 0, 0
        self.namespaces = set()

    def queue(self, write, *, at_most):
        assert at_most > 0
        self.keys.append(write.key)
        self.namespaces.add(write.namespace)
        if self.outcome is None:
            self.waiting += 1
        else:
            write.done(self.outcome)

    def missed(self, count):
        self.lost += count

    def queued(self, namespace):
        return self.waiting if namespace == A else 0

    def given(self):
        """Keys since the last call."""
        keys, self.keys = self.keys, []
        return keys


@pytest.fixture
def tier(clock):
    tier = LocalDram(segment_bytes=16 * PAGE, clock=clock)
    tier.attach(A, PAGE, "lru")
    resize(tier, 16 * PAGE)
    yield tier
    tier.close()


def tuning(write="commit", **admission):
    tiers = {"dram": {"capacity_bytes": 16 * PAGE}, "disk": {"capacity_bytes": PAGE, "write": write}}
    return parse_tuning({"tiers": {**tiers, "remote": {"write": write}}, "admission": admission})


def use(tier, keys):
    for key in keys:
        tier.pin(A, key)
        tier.unpin(A, key)


def test_a_copy_to_one_tier_is_no_use_for_another(tier, clock):
    """Everything goes to disk, to remote only what was used a second time: writing to disk is no use."""
    lanes = {"disk": FakeLane(), "remote": FakeLane()}
    behind, (key,) = WriteBehind(tier, None, lanes, clock, lambda: rules), chain("k", 1)
    ((_, slot),) = fill(tier, [key])
    rules = tuning(disk="always", remote="second_access")
    behind.used(A, [(key, slot)])
    assert (lanes["disk"].keys, lanes["remote"].keys) == ([key], [])
    slot.uses += 1
    behind.used(A, [(key, slot)])
    assert (lanes["disk"].keys, lanes["remote"].keys) == ([key], [key])


def test_a_namespace_without_a_share_of_the_disk_is_not_written_there(tier, tmp_path, clock):
    """Else its refusals would look like a disk that is full."""
    disk, lanes = DiskTier(tmp_path), {"disk": FakeLane()}
    behind, (key,) = (
        WriteBehind(tier, disk, lanes, clock, lambda: tuning(disk="always")),
        chain("k", 1),
    )
    used = fill(tier, [key])
    disk.attach(A, PAGE)
    for capacity, offered in ((0, []), (8 * PAGE, [key])):
        disk.retune(capacity, {})
        behind.used(A, used)
        assert lanes["disk"].keys == offered
    disk.close()


def test_what_leaves_tells_whether_it_was_used(tier):
    """A chunk that nobody read after it came, written behind or not, leaves unused; a pin for a reader is a use."""
    left = []
    tier.on_evicted = left.extend
    keys = chain("k", 2)
    fill(tier, keys)
    for key in keys:
        tier.pin(A, key, use=key == keys[1])
        tier.unpin(A, key)
    resize(tier, 0)
    assert sorted(chunk.used for chunk in left) == [False, True]


# -- what a tier lost


def committing(tier, lane, clock):
    """Writes to the remote at commit."""
    return WriteBehind(tier, None, {"remote": lane}, clock, tuning)


def test_what_is_used_long_after_it_was_written_is_offered_again(tier, clock):
    """The tier may have lost it meanwhile: once in that time, however often the chunk is used."""
    lane = FakeLane(Outcome.OK)
    behind, keys = committing(tier, lane, clock), chain("k", 3)
    chunks = fill(tier, keys)
    for passed_s, offered in ((0, keys), (0, []), (BELIEVED_S, []), (1, keys), (1, []), (BELIEVED_S, keys)):
        clock.now += passed_s
        use(tier, keys)
        behind.used(A, chunks)
        assert lane.given() == offered


def test_what_waits_or_failed_is_not_believed_to_be_there(tier, clock):
    """However long it waits it is offered once; if it was not written it is new at its next use."""
    lane = FakeLane()
    behind, keys = committing(tier, lane, clock), chain("k", 1)
    chunks = fill(tier, keys)
    for _ in range(3):
        behind.used(A, chunks)
        clock.now += 2 * BELIEVED_S
        use(tier, keys)
    assert lane.given() == keys
    lane.outcome = Outcome.TIMEOUT
    failing, (chunk,) = chain("f", 1), fill(tier, chain("f", 1))
    for _ in range(2):
        behind.used(A, [chunk])
        assert lane.given() == failing


def test_what_was_used_since_it_was_written_is_offered_before_it_leaves(tier, clock):
    """At commit as well: once after its last use, and not for ever where nothing leaves."""
    lane = FakeLane(Outcome.OK)
    behind, keys = committing(tier, lane, clock), chain("k", 16)
    behind.used(A, fill(tier, keys))
    assert lane.given() == keys
    clock.now += 1
    use(tier, keys[:2])
    for _ in range(4):
        clock.now += BELIEVED_S
        behind.clean_ahead()
    assert lane.given() == keys[:2]


@pytest.mark.parametrize(("outcome", "wrote", "times"), [(Outcome.ERROR, False, 3), (Outcome.FULL, True, 8)])
def test_what_a_server_refuses_is_not_offered_again_and_again(tier, clock, outcome, wrote, times):
    """While it is dead, or full; the chunks of the others are."""
    lane, refusing, keys = FakeLane(outcome), Breaker(), chain("k", 16)
    servers = {"well": Breaker(), "unwell": refusing}
    lane.breaker = Breakers(servers, lambda key: "unwell" if key in keys[:3] else "well")
    for _ in range(times):
        refusing.record(outcome, wrote=wrote)
    fill(tier, keys)
    committing(tier, lane, clock).clean_ahead()
    assert lane.given() == keys[3:5]
    refusing.record(Outcome.OK, wrote=True)
    refusing.record(Outcome.OK, wrote=True)
    committing(tier, lane, clock).clean_ahead()
    assert lane.given() == keys[:5]


def test_what_the_disk_holds_already_is_not_offered(tier, tmp_path, clock):
    """As after a restart: it came to DRAM again, and did not come from there."""
    disk, lane, keys = DiskTier(tmp_path), FakeLane(Outcome.OK), chain("k", 2)
    disk.attach(A, PAGE)
    disk.retune(8 * PAGE, {})
    disk.write(A, keys[0], view(payload(keys[0], PAGE)), NOBODY)
    rules = tuning()
    behind = WriteBehind(tier, disk, {"disk": lane}, clock, lambda: rules)
    tier.on_evicted = behind.lost
    behind.used(A, fill(tier, keys)[:1])
    assert lane.given() == []
    rules = tuning("evict")
    resize(tier, 0)
    assert lane.lost == 1, "the other"
    disk.close()


# -- before it leaves


def evicting(tier, lane, clock):
    """Writes to the disk what is about to leave."""
    return WriteBehind(tier, None, {"disk": lane}, clock, lambda: tuning("evict"))


@pytest.mark.parametrize("write", ["evict", "commit"])
def test_a_quarter_of_a_pool_is_kept_written(tier, clock, write):
    """Not the same few victims again and again: however many are clean, the next ones are looked at."""
    lane = FakeLane(Outcome.OK)
    resize(tier, 256 * PAGE)
    behind, keys = WriteBehind(tier, None, {"disk": lane}, clock, lambda: tuning(write)), chain("k", 256)
    fill(tier, keys[:192])
    behind.clean_ahead()
    assert lane.given() == keys[:1], "with the free ones that is a quarter, and one"
    fill(tier, keys[192:])
    behind.clean_ahead()
    assert lane.given() == keys[1:65]
    behind.clean_ahead()
    assert lane.given() == []


def test_victims_are_looked_at_in_steps(tier, clock, monkeypatch):
    """The lock is held for a few at a time: a step goes on where the last ended, and begins anew after the last."""
    monkeypatch.setattr(module, "LOOKED_AT", 2)
    lane = FakeLane(Outcome.OK)
    behind, keys = evicting(tier, lane, clock), chain("k", 20)
    fill(tier, keys[:16])
    steps = []
    for _ in range(4):
        behind.clean_ahead()
        steps.append(lane.given())
    assert steps == [keys[:2], keys[2:4], keys[4:5], []]
    fill(tier, keys[16:])  # four leave
    for _ in range(6):
        behind.clean_ahead()
    assert lane.given() == keys[5:9]


def test_victims_that_wait_are_few(tier, clock):
    """They are pinned: half of a pool at most. Where one was dropped for that, the next step offers it."""
    lane = FakeLane()
    behind, keys = evicting(tier, lane, clock), chain("k", 16)
    fill(tier, keys)
    lane.waiting = 6
    behind.clean_ahead()
    behind.clean_ahead()
    assert lane.given() == keys[:2]
    lane.waiting = 0
    behind.clean_ahead()
    assert lane.given() == keys[2:5]


def test_a_queue_that_drains_quickly_is_filled_again_soon(tier, clock, monkeypatch):
    """Else its writers are idle until the next step; not one that drains slowly, nor where nothing more is to come."""
    monkeypatch.setattr(module, "_WAITING", 16)
    lane = FakeLane()
    resize(tier, 256 * PAGE)
    behind = evicting(tier, lane, clock)
    fill(tier, chain("k", 256))
    told = []
    for written in (0, 0, 1, 2, 16, 16, 16, 16):
        lane.waiting -= written
        told.append((behind.clean_ahead(), len(lane.given())))
    assert told == [(True, 16), (False, 0), (False, 1), (True, 2), (True, 16), (True, 16), (False, 14), (False, 0)]
    resize(tier, 512 * PAGE)
    fill(tier, chain("more", 256))
    for dead in (False, True):
        lane.waiting = 0
        for _ in range(3 * dead):
            lane.breaker.record(Outcome.ERROR)
        assert behind.clean_ahead() is not dead


def test_the_victims_of_one_namespace_do_not_wait_for_those_of_another(tier, clock):
    """However many of a large pool wait: what they pin is theirs."""
    lane = FakeLane()
    behind, keys = evicting(tier, lane, clock), chain("k", 16)
    tier.attach(B, PAGE, "lru")
    resize(tier, 32 * PAGE)
    fill(tier, keys)
    fill(tier, keys, B)
    lane.waiting = 1000
    behind.clean_ahead()
    assert lane.namespaces == {B}


def test_a_tier_that_is_full_is_not_offered_victims(tier, clock):
    """Each would count as dropped, twenty times a second; a write that is let through tells when it has room."""
    lane = FakeLane(Outcome.FULL)
    behind, keys = evicting(tier, lane, clock), chain("k", 16)
    fill(tier, keys)
    for _ in range(8):
        lane.breaker.record(Outcome.FULL, wrote=True)
    behind.clean_ahead()
    assert lane.given() == []
    lane.breaker.try_again(asking=False)
    behind.clean_ahead()
    assert lane.given() == keys[:5]


@pytest.mark.parametrize(("admission", "lost"), [("always", 11), ("second_access", 8)])
def test_what_leaves_unwritten_is_counted(tier, clock, admission, lost):
    """Of those that were admitted: five of sixteen had been written; half had been used."""
    lane, rules = FakeLane(Outcome.OK), tuning("evict", disk=admission)
    behind, keys = WriteBehind(tier, None, {"disk": lane}, clock, lambda: rules), chain("k", 16)
    tier.on_evicted = behind.lost
    fill(tier, keys)
    use(tier, keys[8:])
    behind.clean_ahead()
    fill(tier, chain("more", 16))
    assert lane.lost == lost


@pytest.mark.parametrize(("write", "leave", "lost"), [("evict", resize, 16), ("commit", resize, 0), ("evict", None, 0)])
def test_a_smaller_capacity_loses_and_a_flush_does_not(tier, clock, write, leave, lost):
    """What was to be written at its commit is counted when that fails, and not again."""
    lane = FakeLane(Outcome.OK)
    behind = WriteBehind(tier, None, {"disk": lane}, clock, lambda: tuning(write))
    tier.on_evicted = behind.lost
    fill(tier, chain("k", 16))
    leave(tier, 0) if leave else tier.flush(A)
    assert lane.lost == lost


@pytest.mark.parametrize("write", ["commit", "evict"])
def test_what_leaves_while_its_tier_is_dead_is_lost(tier, clock, write):
    """A dead tier is offered nothing at a commit, so nothing was counted there."""
    lane = FakeLane(Outcome.OK)
    for _ in range(3):
        lane.breaker.record(Outcome.ERROR)
    behind = WriteBehind(tier, None, {"disk": lane}, clock, lambda: tuning(write))
    tier.on_evicted = behind.lost
    fill(tier, keys := chain("k", 16))
    use(tier, keys)
    behind.used(A, list(tier.pools[A].pool.places(keys)))
    resize(tier, 0)
    assert (lane.given(), lane.lost) == ([], 16)
