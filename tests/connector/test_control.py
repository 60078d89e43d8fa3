"""Change of a running store: whole or not at all, once, and kept."""

import os
import re
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any
from unittest.mock import Mock

import pytest

from connector.stores import NAMESPACE, PATIENCE_S, eventually
from tiertune_connector.counters import Counters
from tiertune_connector.documents import FieldError
from tiertune_connector.state import StateDir
from tiertune_connector.store import control as module
from tiertune_connector.store.control import Control, KeyReusedError, NotKeptError, VersionConflictError
from tiertune_connector.store.tiered import TieredStore
from tiertune_connector.tiers.dram import DramTier
from tiertune_connector.tuning import Tuning, parse_tuning

FIRST = parse_tuning(
    {
        "tiers": {
            "dram": {"capacity_bytes": 1 << 20},
            "disk": {"write": "off"},
            "remote": {"fetch": "off", "write": "off"},
        }
    }
)


@pytest.fixture
def state(tmp_path):
    state = StateDir(tmp_path)
    yield state
    state.close()


@pytest.fixture
def store(clock):
    store = TieredStore(
        "host-a",
        FIRST,
        dram=DramTier(segment_bytes=1 << 18, clock=clock),
        disk=None,
        lanes={},
        counters=Counters(),
        clock=clock,
    )
    yield store
    store.close()


@pytest.fixture
def control(store, state):
    return Control(store, state)


@pytest.fixture
def put(control):
    """Makes a change to so many bytes of DRAM, of a version; ``more`` stands in its document."""

    def change(nbytes: int, expected: int = 1, key: str = "a", by: Control = control, **more: Any) -> Tuning:
        return by.put(with_capacity(nbytes) | more, expected_version=expected, key=key)

    return change


def with_capacity(nbytes: int) -> dict:
    document = FIRST.document()
    document["tiers"]["dram"]["capacity_bytes"] = nbytes
    return document


def test_a_change_is_applied_numbered_and_kept(put, store, state):
    """In force when the answer comes, and after a crash from then on."""
    tuning = put(5)
    assert (tuning.version, store.tuning.tiers.dram.capacity_bytes) == (2, 5)
    assert state.load()[0] == tuning


def test_the_version_in_the_document_does_not_matter(put):
    """The one that the change is for does."""
    assert put(5, version=77).version == 2


@pytest.mark.parametrize("version", ["x", None, 0, 1.5, [2]])
def test_a_version_that_is_none_is_refused_as_any_other_field(put, store, version):
    """Ours to give, but not free of form."""
    with pytest.raises(FieldError) as refused:
        put(5, version=version)
    assert refused.value.field == "version"
    assert store.tuning.version == 1


def test_no_tier_grows_beyond_the_machine(put, store, monkeypatch):
    """As settings refuse it; what was allowed on a larger machine may stay, or become less."""
    with pytest.raises(FieldError, match="the machine has") as refused:
        put(1 << 59)
    assert refused.value.field == "tiers.dram.capacity_bytes"
    put(50)
    monkeypatch.setattr("tiertune_connector.store.control.memory_bytes", lambda: 10)
    assert put(40, 2, "c").tiers.dram.capacity_bytes == 40
    with pytest.raises(FieldError, match="the machine has 10 B: "):
        put(41, 3, "d")
    assert store.tuning.version == 3


def test_the_most_memory_that_is_named_is_accepted_and_fits(put):
    """What always stays free of the machine, and of control groups' limits, is not a part of it."""
    with pytest.raises(FieldError) as refused:
        put(1 << 59)
    (most,) = re.findall(r"(\d+)MiB are the most", str(refused.value))
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert total - (int(most) << 20) >= min(512 << 20, total // 4)
    put(int(most) << 20)


def test_a_change_for_another_version_is_refused(put, store):
    """Somebody else was first."""
    put(5)
    with pytest.raises(VersionConflictError, match="at version 2"):
        put(6, 1, "b")
    assert store.tuning.tiers.dram.capacity_bytes == 5


def test_the_same_change_under_the_same_key_is_applied_once(put, store, state):
    """However often it is sent, also after other changes, and after a restart; another one under the key is refused."""
    put(5)
    assert put(5).version == 2
    put(6, 2, "b")
    assert put(5).tiers.dram.capacity_bytes == 6
    with pytest.raises(KeyReusedError):
        put(7, 3)
    again = Control(store, state)
    assert put(6, 2, "b", again).version == 3
    with pytest.raises(KeyReusedError):
        put(7, 3, "b", again)


def test_a_change_whose_answer_was_lost_may_be_sent_for_the_version_that_it_made(put, store):
    """Who looks before it tries again sends the same body and key for another version, and is told that it is done.

    Where it is not in force any more the key is refused: an answer of success would be taken for it.
    """
    put(5)
    assert put(5, 2) == store.tuning
    assert store.tuning.version == 2
    with pytest.raises(KeyReusedError):
        put(5, 2, bypass=True)
    put(6, 2, "b")
    with pytest.raises(KeyReusedError):
        put(5, 3)
    assert (store.tuning.version, store.tuning.tiers.dram.capacity_bytes) == (3, 6)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tiers.remote.fetch", "on"),
        ("tiers.remote.write", "commit"),
        ("tiers.disk.capacity_bytes", 1),
        ("tiers.disk.write", "evict"),
        ("tiers.remote.margin", 5.0),
        ("tiers.remote.min_fetch_tokens", 1),
        ("tiers.remote.deadline_factor", 3.0),
        ("tiers.remote.codec", "lz4"),
        ("tiers.remote.holdout", 0.5),
        (f"pools.{NAMESPACE.digest}.disk.capacity_bytes", 0),
        (f"pools.{NAMESPACE.digest}.disk.eviction", "arc"),
        ("admission.disk", "second_access"),
        ("admission.remote", "second_access"),
        ("tiers.dram.capacity_bytes", -1),
    ],
)
def test_what_the_store_cannot_do_is_refused_and_changes_nothing(control, store, state, field, value):
    """A knob of a tier that is not there is not accepted without effect."""
    document = with_capacity(5)
    *parents, last = field.split(".")
    place = document
    for part in parents:
        place = place.setdefault(part, {})
    place[last] = value
    with pytest.raises(FieldError) as raised:
        control.put(document, expected_version=1, key="a")
    assert raised.value.field == field
    assert store.tuning == FIRST
    assert state.load()[0] is None
    assert control.put(with_capacity(5), expected_version=1, key="a").version == 2, "the key is not used up"


def test_a_whole_document_says_nothing_of_tiers_that_are_not_there(control, put):
    """What a store tells of them is no wish: it may be sent back, beside a change of another field."""
    put(5, pools={NAMESPACE.digest: {"dram": {"eviction": "arc"}}})
    told = control.tuning.document()
    told["defaults"]["eviction"] = "s3fifo"
    assert control.put(told, expected_version=2, key="b").document() == told | {"version": 3}


def test_a_pool_may_not_ask_more_than_its_tier_has(put, store):
    """Both are named. A tier may shrink below what a pool asks: the pool has what is there."""
    digest = NAMESPACE.digest

    def ask(own: int, *change: Any) -> Tuning:
        return put(*change, pools={digest: {"dram": {"capacity_bytes": own}}})

    with pytest.raises(FieldError, match=r"51 bytes are asked, tiers.dram.capacity_bytes gives 50 to") as refused:
        ask(51, 50)
    assert refused.value.field == f"pools.{digest}.dram.capacity_bytes"
    assert store.tuning == FIRST
    ask(50, 50)
    assert ask(50, 40, 2, "c").capacity_bytes("dram") == 40
    with pytest.raises(FieldError, match="45 bytes are asked"):
        ask(45, 40, 3, "d")
    assert ask(60, 60, 3, "e").pool(digest, "dram").capacity_bytes == 60


def test_a_change_that_cannot_be_kept_is_not_applied(put, store, monkeypatch):
    """A full disk: nothing is half applied, and the same change may be sent again."""
    with monkeypatch.context() as patch:
        patch.setattr(StateDir, "write", Mock(side_effect=OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space"):
            put(5)
    assert store.tuning == FIRST
    assert put(5).version == 2


def test_a_bypass_that_cannot_be_kept_is_in_force_and_says_so(control, store, state, monkeypatch):
    """On a full disk too it works at once; said again when there is room, it is kept."""
    with monkeypatch.context() as patch:
        patch.setattr(StateDir, "write", Mock(side_effect=OSError(28, "No space left on device")))
        for _ in range(2):
            with pytest.raises(NotKeptError, match=r"tuning\.json: No space left on device: bypass is on, until"):
                control.bypass(on=True)
            assert store.tuning.bypass
    assert state.load()[0] is None
    assert control.bypass(on=True).bypass
    assert state.load()[0].bypass


@contextmanager
def hanging(state, monkeypatch, patience_s=PATIENCE_S) -> Iterator[ThreadPoolExecutor]:
    """Threads for calls of which none returns soon, as the state directory does not answer; at the end it does."""
    answers, saved = threading.Event(), state.save
    with monkeypatch.context() as patch, ThreadPoolExecutor() as others:
        patch.setattr(module, "_PATIENCE_S", patience_s)
        patch.setattr(state, "save", lambda *kept: answers.wait() and saved(*kept))
        try:
            yield others
        finally:
            answers.set()


def test_a_bypass_is_in_force_while_a_change_hangs_in_the_state_directory(control, put, store, state, monkeypatch):
    """And stays, once the directory answers, with the change that was there before."""
    applied = Mock(side_effect=store.retune)
    with hanging(state, monkeypatch) as others:
        monkeypatch.setattr(store, "retune", applied)
        changed = others.submit(put, 5)
        eventually(control._lock.locked)
        commanded = others.submit(control.bypass, on=True)
        eventually(lambda: store.tuning.bypass)
        assert not changed.done()
    assert (changed.result().version, commanded.result().version) == (2, 3)
    assert store.tuning.document() == with_capacity(5) | {"version": 3, "bypass": True}
    assert all(call.args[0].bypass for call in applied.call_args_list), "never lifted in between"
    assert state.load()[0] == store.tuning


@pytest.mark.parametrize("wanted", [False, True])
def test_the_last_bypass_of_those_that_wait_for_a_change_stays(control, put, monkeypatch, wanted):
    """Whatever that change says, and whoever has the next turn; no change for what was before takes it back."""
    store, state = control.store, control.state
    with hanging(state, monkeypatch) as others:
        changed = others.submit(put, 5, bypass=not wanted)
        eventually(control._lock.locked)
        for on in (not wanted, wanted):
            others.submit(control.bypass, on=on)
            eventually(lambda on=on: (control._commanded, store.tuning.bypass) == (on, on))
        late = others.submit(put, 6, key="b")
    assert (changed.result().version, state.load()[0]) == (2, store.tuning)
    assert isinstance(late.exception(), VersionConflictError)
    assert store.tuning.document() == with_capacity(5) | {"version": store.tuning.version, "bypass": wanted}


def test_a_change_that_begins_amid_a_bypass_does_not_lift_it(control, put, store, monkeypatch):
    """It is for the version before; nor has a version two contents."""
    retune = store.retune

    def slowly(tuning: Tuning) -> None:
        if tuning.bypass:
            changes.append(others.submit(put, 5))
            wait(changes, 0.2)
        retune(tuning)

    changes: list[Future[Tuning]] = []
    with ThreadPoolExecutor() as others:
        monkeypatch.setattr(store, "retune", slowly)
        assert control.bypass(on=True).version == 2
    assert isinstance(changes[0].exception(), VersionConflictError)
    assert store.tuning.document() == FIRST.document() | {"version": 2, "bypass": True}


def test_a_bypass_that_a_change_agrees_with_is_no_version_more(control, put, store, state, monkeypatch):
    """It was commanded while that change was kept: neither has anything to tell the other."""
    with hanging(state, monkeypatch) as others:
        changed = others.submit(put, 5)
        eventually(control._lock.locked)
        commanded = others.submit(control.bypass, on=False)
        eventually(lambda: control._commanded is False)
    assert changed.result() == commanded.result() == store.tuning == state.load()[0]
    assert store.tuning.version == 2


def test_nobody_waits_for_a_change_that_hangs(control, put, store, state, monkeypatch):
    """Each would hold a thread of the store's HTTP. What was told of a bypass holds when the change gets through."""
    with hanging(state, monkeypatch, patience_s=0.01) as others:
        changed = others.submit(put, 5)
        eventually(control._lock.locked)
        with pytest.raises(NotKeptError, match=r"an earlier change is still being written: nothing was changed"):
            put(5)
        with pytest.raises(NotKeptError, match=r"an earlier change is still being written: bypass is on, until"):
            control.bypass(on=True)
    assert changed.result().version == 2
    assert (store.tuning.version, store.tuning.bypass, store.tuning.capacity_bytes("dram")) == (3, True, 5)
    assert not state.load()[0].bypass
    assert control.bypass(on=True).version == 3
    assert state.load()[0] == store.tuning


def test_a_bypass_that_ends_while_another_hangs_can_be_kept_later(control, store, state, monkeypatch):
    """The one that hung is kept in the end, though it no longer holds: said again, what holds is."""
    with hanging(state, monkeypatch, patience_s=0.01) as others:
        others.submit(control.bypass, on=True)
        eventually(control._lock.locked)
        with pytest.raises(NotKeptError, match="bypass is off, until"):
            control.bypass(on=False)
    assert (store.tuning.bypass, state.load()[0].bypass) == (False, True)
    control.bypass(on=False)
    assert state.load()[0] == store.tuning
    assert not store.tuning.bypass


def test_a_bypass_that_holds_already_is_no_version_after_a_change_that_failed(control, put, state, monkeypatch):
    """Changes for the present version would be refused, though nothing has changed."""
    with monkeypatch.context() as patch:
        patch.setattr(StateDir, "write", Mock(side_effect=OSError(28, "No space left on device")))
        with pytest.raises(NotKeptError):
            put(5)
    assert control.bypass(on=False).version == 1
    assert put(5).version == 2


def test_bypass_is_a_version_of_its_own_and_stays(control, store, state):
    """Switching it on twice is one change; the rest of the tuning stays."""
    assert control.bypass(on=True).version == 2
    assert control.bypass(on=True).version == 2
    assert Control(store, state).tuning.bypass
    assert control.bypass(on=False).document() == FIRST.document() | {"version": 3}
