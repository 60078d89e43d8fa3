"""What a store keeps between runs."""

import errno
import fcntl
import json
import os
import stat
from unittest.mock import Mock

import pytest

from connector.stores import running
from tiertune_connector.documents import where
from tiertune_connector.state import Served, StateDir, StateError, body_digest, latest
from tiertune_connector.tiers.disk import DiskTier
from tiertune_connector.tuning import Tuning, parse_tuning


def tuning(version: int = 1) -> Tuning:
    return parse_tuning({"version": version, "tiers": {"dram": {"capacity_bytes": 5}}})


def test_the_last_tuning_comes_back(tmp_path):
    """With the changes that made it; before the first there is none."""
    state = StateDir(tmp_path / "new" / "state")
    assert state.load() == (None, {})
    state.save(tuning(7), {"key": "digest"})
    state.close()
    again = StateDir(tmp_path / "new" / "state")
    assert again.load() == (tuning(7), {"key": "digest"})
    again.close()


def test_it_is_its_users_alone(tmp_path, umask):
    """Who could open the lock could hold it, and no store would start again."""
    umask(0o022)
    StateDir(tmp_path / "state").close()
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700


def test_a_second_store_is_refused(tmp_path):
    """Until the first has ended; the message names the directory."""
    state = StateDir(tmp_path)
    with pytest.raises(StateError, match=f"{tmp_path}: another store"):
        StateDir(tmp_path)
    state.close()
    StateDir(tmp_path).close()


@pytest.mark.parametrize(("use", "error"), [(StateDir, StateError), (DiskTier, OSError)])
def test_a_lock_that_is_there_no_more_holds_nobody_off(tmp_path, monkeypatch, use, error):
    """A store that could not start removed it before we had it: the next one would lock a new file beside ours."""
    lock = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", lambda *how: lock(*how) or (tmp_path / "lock").unlink())
    with pytest.raises(error, match=f"{tmp_path}: another store"):
        use(tmp_path)


@pytest.mark.parametrize(("use", "error"), [(StateDir, StateError), (DiskTier, OSError)])
def test_where_nothing_can_be_locked_no_other_store_is_to_blame(tmp_path, monkeypatch, use, error):
    """As on some network file systems: the message has the path, and the system's reason."""
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    with pytest.raises(error, match="No locks available") as refused:
        use(tmp_path)
    assert f"{tmp_path}/lock" in str(refused.value)


def test_a_directory_that_cannot_be_used_says_why(tmp_path):
    """A file in its place."""
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match="file/state: Not a directory"):
        StateDir(tmp_path / "file" / "state")
    with pytest.raises(StateError, match="file: is there, and is no directory"):
        StateDir(tmp_path / "file")


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"tuning": 5, "changes": {}}', '{"tuning": {"tiers": {}}, "changes": {}}', "\xff",
     '{"tuning": {"tiers": {"dram": {"capacity_bytes": 5}}}}',
     '{"tuning": {"tiers": {"dram": {"capacity_bytes": 5}}}, "changes": 7}',
     '{"tuning": {"tiers": {"dram": {"capacity_bytes": 5}}}, "changes": {"key": 7}}', '{"tuning":' * 100_000],
)  # fmt: skip
def test_a_spoilt_file_is_named_with_what_to_do(tmp_path, text):
    """The store does not start with another tuning than the last one behind the operator's back."""
    state = StateDir(tmp_path)
    state.tuning_path.write_bytes(text.encode("latin-1"))
    with pytest.raises(StateError, match=r"tuning\.json: .*mend it, or remove it"):
        state.load()
    state.close()


def test_a_number_that_is_too_large_is_named(tmp_path):
    """An earlier version may have kept it."""
    state = StateDir(tmp_path)
    tiers = {"dram": {"capacity_bytes": 5}, "remote": {"min_fetch_tokens": 10**20}}
    state.write("tuning.json", json.dumps({"tuning": {"tiers": tiers}, "changes": {}}))
    with pytest.raises(StateError, match=r"tuning\.json: tiers\.remote\.min_fetch_tokens: .*mend it, or remove it"):
        state.load()
    state.close()


def test_a_crash_while_saving_leaves_the_old_tuning(tmp_path, monkeypatch):
    """Written aside and renamed: never half a file."""
    state = StateDir(tmp_path)
    state.save(tuning(1), {})
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            state.save(tuning(2), {})
    assert state.load()[0] == tuning(1)
    state.save(tuning(3), {})
    assert state.load()[0] == tuning(3)
    state.close()


def test_a_tuning_that_is_not_kept_for_want_of_descriptors_leaves_the_old_one(tmp_path, monkeypatch):
    """Its sender is told that nothing was changed: a restart must not come up with it."""
    state = StateDir(tmp_path)
    state.save(tuning(1), {})
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))
        with pytest.raises(OSError, match="Too many"):
            state.save(tuning(2), {"key": "digest"})
    assert state.load() == (tuning(1), {})
    state.close()


@pytest.mark.parametrize("before", [None, tuning(1)])
def test_a_tuning_whose_name_cannot_be_made_to_last_leaves_the_old_one(tmp_path, monkeypatch, before):
    """As where a directory takes no fsync: who sent it was told that nothing was changed."""
    state, synced = StateDir(tmp_path), os.fsync
    if before:
        state.save(before, {})

    def refuse(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        synced(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        with pytest.raises(OSError, match="Invalid argument"):
            state.save(tuning(2), {"key": "digest"})
    assert state.load() == (before, {})
    state.close()


def test_where_nothing_has_room_a_store_starts_again(home, monkeypatch):
    """On the same port and with the same tiers: all that it would write is there; what is not is named."""
    with running(home) as process:
        http = {"port": int(process.address.rpartition(":")[2])}
        kept = process.control.bypass(on=True)
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with running(home, http=http) as process:
        assert process.control.tuning == kept
    with pytest.raises(OSError, match="No space left on device") as failed, running(home, http={"port": 0}):
        pass
    assert where(failed.value) == f"{home}/state/http: No space left on device"


def test_a_store_without_a_name_gets_one_that_stays(tmp_path):
    """A configured name wins."""
    state = StateDir(tmp_path)
    made = state.name("")
    assert made.startswith("store-")
    assert state.name("") == made
    assert state.name("host-a") == "host-a"
    state.close()
    again = StateDir(tmp_path)
    assert again.name("") == made
    again.close()


@pytest.mark.parametrize("kept", [b"", b"\xff\xfe", b"a\nb", b"a b", b"x" * 65])
def test_a_name_that_is_spoilt_is_named_with_what_to_do(tmp_path, kept):
    """It would stand on every metric, or start with a traceback; what else the directory has does not matter."""
    state = StateDir(tmp_path)
    (tmp_path / "name").write_bytes(kept)
    (tmp_path / "tiers").write_bytes(b"\xff")
    with pytest.raises(StateError, match=f"^{tmp_path}/name: .* is no name of a store: remove it"):
        state.name("")
    assert state.name("host-a") == "host-a"
    assert state.tiers() is None
    state.close()


@pytest.mark.parametrize("text", ["", "{", "{}", "\xff", "[" * 100_000])
def test_writes_are_not_known_where_they_are_spoilt(tmp_path, text):
    """No store stays away for a spoilt file."""
    state = StateDir(tmp_path)
    state.keep("writes.json", [{"path": "/v1/tuning"}])
    assert state.kept("writes.json", list) == [{"path": "/v1/tuning"}]
    (tmp_path / "writes.json").write_bytes(text.encode("latin-1"))
    assert state.kept("writes.json", list) == []
    state.close()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "\xff", '{"a": 5}', '{"a": {"model": 5, "epoch": 1}}', '{"a":' * 100_000]
)
def test_namespaces_come_back_or_are_not_known(tmp_path, text):
    """In their order; no store stays away for a spoilt file."""
    state = StateDir(tmp_path)
    assert state.kept("namespaces.json", dict[str, Served]) == {}
    served = {"b": Served("llama", 2), "a": Served("qwen", 0)}
    state.keep("namespaces.json", served)
    assert list(state.kept("namespaces.json", dict[str, Served]).items()) == list(served.items())
    (tmp_path / "namespaces.json").write_bytes(text.encode("latin-1"))
    assert state.kept("namespaces.json", dict[str, Served]) == {}
    state.close()


def test_only_the_latest_changes_are_remembered():
    """Memory and file stay small, the newest stay."""
    kept = latest({str(number): "x" for number in range(100)})
    assert list(kept) == [str(number) for number in range(36, 100)]


def test_a_bodys_digest_depends_on_what_it_says_only():
    """Not on the order of its fields."""
    assert body_digest(json.loads('{"a": 1, "b": [2]}')) == body_digest(json.loads('{"b":[2],"a":1}'))
    assert body_digest({"a": 1}) != body_digest({"a": 2})


def test_a_tuning_of_a_later_version_is_taken_as_far_as_it_is_known(tmp_path, caplog):
    """An upgrade that is undone leaves one; what the store cannot do it does not have, and says so."""
    state = StateDir(tmp_path)
    tiers = {"dram": {"capacity_bytes": 5}, "remote": {"min_fetch_tokens": 7, "wanted": 1}}
    state.write("tuning.json", json.dumps({"tuning": {"version": 5, "tiers": tiers}, "changes": {"k": "5 x"}}))
    tuning, changes = state.load()
    assert (tuning.version, tuning.tiers.remote.min_fetch_tokens, changes) == (5, 7, {"k": "5 x"})
    assert "tiers.remote.wanted: unknown field" in caplog.text
    state.save(tuning, changes)
    caplog.clear()
    assert state.load() == (tuning, changes)
    assert caplog.text == ""
    state.close()
