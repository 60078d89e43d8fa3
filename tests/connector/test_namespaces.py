"""Namespaces that come and go: who lends a share of the tiers, and who has it again."""

import pytest

from connector.small_store import CHUNKS, NEW, OLD, OTHER, SLOT, Served, replaced
from connector.stores import (
    chain,
    eventually,
    payload,
    view,
)
from tiertune_connector.chunk import NOBODY
from tiertune_connector.protocol.messages import Reserve
from tiertune_connector.sessions.namespaces import LENT_AFTER_S
from tiertune_connector.tiers.base import Outcome
from tiertune_connector.tiers.segment import PAGE
from tiertune_connector.tuning import parse_tuning

# -- of namespaces that nobody uses


def test_an_unused_namespace_lends_its_share_after_an_hour(served):
    """Until then engines that only start anew would find it; its chunks leave as the others' come, the oldest first."""
    replaced(served, after_s=LENT_AFTER_S - 1)
    half = CHUNKS // 2
    assert served.held(OLD) == [(half, half)] * 2
    assert served.held(NEW) == [(0, half)] * 2
    served.clock.now += 2
    served.settle()
    assert served.held(OLD) == [(half, half)] * 2, "nobody needs its room yet"
    served.fill(NEW, half)
    for (kept, allowed), (mine, room) in zip(served.held(OLD), served.held(NEW), strict=True):
        assert (mine, kept) == (half, allowed), "nothing had to leave for what came"
        assert 0 < kept < half, "only as much as was needed"
        assert mine < room <= CHUNKS - kept
    assert served.dram.present(OLD.digest, chain(OLD.digest, CHUNKS)[-1:])[1] == 1
    served.fill(NEW, CHUNKS)
    assert served.held(NEW) == [(CHUNKS, CHUNKS)] * 2
    assert served.held(OLD) == [None, None]
    assert len(served.dram.pools[NEW.digest].segments) < 10, "not one for each chunk that left"


def test_what_leaves_dram_of_it_takes_no_room_on_disk(served):
    """Others have it all there: nothing is written behind for nobody."""
    replaced(served)
    for key in chain("new", CHUNKS):
        assert served.disk.write(NEW.digest, key, view(payload(key, PAGE)), NOBODY) is Outcome.OK
        served.settle()
    full = [(CHUNKS // 2, CHUNKS // 2), None]
    assert served.held(OLD) == full
    for _ in range(10):
        served.store.behind.clean_ahead()
        eventually(lambda: served.store.lanes["disk"].writers.queued() == 0)
        served.settle()
    assert served.held(OLD) == full
    assert served.held(NEW)[1] == (CHUNKS, CHUNKS)


def test_what_it_does_not_hold_is_lent_at_once(served):
    """It keeps its chunks, and no room beside them."""
    replaced(served, chunks=30)
    assert served.held(OLD) == [(30, 30)] * 2
    assert served.held(NEW) == [(0, CHUNKS - 30)] * 2


def test_engines_that_come_back_have_their_share_again(served):
    """With what is left of their chunks."""
    replaced(served)
    served.fill(NEW, 100)
    left = [kept for kept, _ in served.held(OLD)]
    assert all(0 < kept < CHUNKS // 2 for kept in left)
    served.join(OLD)
    assert served.held(OLD) == [(kept, CHUNKS // 2) for kept in left]
    assert [allowed for _, allowed in served.held(NEW)] == [CHUNKS // 2] * 2


def test_what_was_flushed_of_it_is_no_room_that_is_kept(served):
    """It holds nothing any more: others have all of its room."""
    replaced(served)
    for tier in (served.dram, served.disk):
        tier.flush()
    served.fill(NEW, CHUNKS)
    assert served.held(NEW) == [(CHUNKS, CHUNKS)] * 2
    assert served.held(OLD) == [None, None]


def test_a_smaller_tier_takes_first_from_what_is_lent(served):
    """Those who use theirs lose no chunk for one that nobody uses."""
    replaced(served)
    served.fill(NEW, 75)
    document = served.store.tuning.document()
    document["tiers"]["dram"]["capacity_bytes"] = 80 * PAGE
    served.store.retune(parse_tuning(document))
    served.settle()
    assert served.held(NEW)[0] == (75, 80)
    assert served.held(OLD)[0] is None


def test_a_capacity_of_its_own_is_not_lent(clock, tmp_path):
    """What the operator said of a pool holds, used or not."""
    served = Served(clock, tmp_path, own=40 * PAGE)
    first = served.join(OLD)
    served.fill(OLD, 20)
    served.join(NEW)
    served.leave(first, LENT_AFTER_S)
    served.fill(NEW, CHUNKS)
    assert served.held(OLD) == [(20, 40), (20, 20)]
    assert served.held(NEW) == [(CHUNKS - 40, CHUNKS - 40), (CHUNKS - 20, CHUNKS - 20)]
    served.close()


def test_where_nobody_is_nothing_changes(served):
    """However long: whoever comes first finds what was left."""
    first, second = served.join(OLD), served.join(NEW)
    served.fill(OLD, 30)
    before = served.held(OLD), served.held(NEW)
    served.leave(first)
    served.leave(second, 10 * LENT_AFTER_S)
    assert (served.held(OLD), served.held(NEW)) == before


def test_room_that_was_lent_is_not_taken_back_while_nobody_is_there(served):
    """All engines start anew: nothing leaves for a share of those who are long gone."""
    second = replaced(served)
    served.fill(NEW, 125)
    before = served.held(OLD), served.held(NEW)
    served.leave(second, after_s=60)
    assert (served.held(OLD), served.held(NEW)) == before
    served.join(NEW)
    assert [chunks for chunks, _ in served.held(NEW)] == [125, 125]


def test_while_nobody_is_there_a_capacity_of_its_own_is_followed(served):
    """Also by a pool that lends its share."""
    second = replaced(served)
    served.fill(NEW, 100)
    served.leave(second)
    document = served.store.tuning.document()
    document["pools"] = {OLD.digest: {"disk": {"capacity_bytes": 60 * SLOT}}}
    served.store.retune(parse_tuning(document))
    served.settle()
    assert served.held(OLD)[1][1] == 60


def restarted(served):
    served.close()
    again = Served(served.clock, served.disk.root)
    again.settle()
    return again


def test_a_restart_takes_nothing_off_a_disk_that_has_room(served):
    """What had the room of one that nobody uses has it still: before its engines are back, and after."""
    replaced(served)
    served.fill(NEW, 125)
    (_, (old, _)), (_, (new, room)) = served.held(OLD), served.held(NEW)
    assert new == 125
    again = restarted(served)
    assert (again.held(OLD)[1], again.held(NEW)[1]) == ((old, old), (new, new))
    again.join(NEW)
    assert (again.held(OLD)[1], again.held(NEW)[1]) == ((old, old), (new, room))
    again.join(OLD)
    assert (again.held(OLD)[1], again.held(NEW)[1]) == ((old, CHUNKS // 2), (CHUNKS // 2, CHUNKS // 2))
    again.close()


def test_what_a_restart_found_makes_room_up_to_an_even_part(served):
    """For the engines that are there, as they need it; all of it after an hour."""
    replaced(served)
    served.fill(NEW, 125)
    again = restarted(served)
    again.join(OTHER)
    again.fill(OTHER, CHUNKS)
    third = CHUNKS // 3
    assert again.held(OTHER)[1] == (third + 1, third + 1), "bytes make one chunk more"
    assert again.held(NEW)[1][0] + again.held(OLD)[1][0] == CHUNKS - third - 1
    again.clock.now += LENT_AFTER_S
    again.fill(OTHER, CHUNKS, "more")
    assert again.held(OTHER)[1] == (CHUNKS, CHUNKS)
    assert again.held(OLD)[1] is None
    again.close()


@pytest.mark.parametrize("stays", ["a session", "a reservation"])
def test_a_namespace_in_use_keeps_its_share_though_it_is_empty(served, stays):
    """By an engine that has stored nothing, or by one that is gone and may still be writing."""
    first = served.join(OLD)
    served.join(NEW)
    if stays == "a reservation":
        served.store.storing.reserve(first, Reserve(1, "r", [b"key"], b""))
        served.leave(first, LENT_AFTER_S)
        assert OLD.digest in served.dram.pools
        served.store.holdings.leave_quarantine(first)
        served.settle()
        assert served.held(OLD)[0] is None
    else:
        served.clock.now += 2 * LENT_AFTER_S
        served.settle()
        assert served.held(OLD) == [(0, CHUNKS // 2)] * 2
