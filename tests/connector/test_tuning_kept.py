"""A tuning over restarts: the last one holds, whatever tiers the settings have by then."""

from unittest.mock import Mock

import pytest

from connector.stores import NAMESPACE, Engine, chain, eventually, pool, running, settings
from tiertune_connector.documents import DocumentError
from tiertune_connector.serve.server import Server


def test_a_restarted_store_has_its_last_tuning(home):
    """Not that of its configuration; pools that come later get what it says of them."""
    pools = {NAMESPACE.digest: {"dram": {"eviction": "arc"}}}
    with running(home) as process:
        document = process.control.tuning.document() | {"pools": pools}
        document["tiers"]["dram"]["capacity_bytes"] = 123 * 20480
        process.control.put(document, expected_version=1, key="a")
        process.control.bypass(on=True)
    with running(home) as process:
        tuning = process.control.tuning
        assert (tuning.version, tuning.bypass, tuning.tiers.dram.capacity_bytes) == (3, True, 123 * 20480)
        process.control.bypass(on=False)
        with Engine(process) as engine:
            assert pool(process).pool.algorithm == "arc"
            eventually(lambda: engine.put(chain("k", 3)) in ([""] * 3, ["present"] * 3))


def test_a_tier_taken_out_of_the_configuration_is_off_in_the_kept_tuning(home):
    """The store starts; every other wish stays; it is another version."""
    with running(home, remote={}) as process:
        document = process.control.tuning.document()
        document["tiers"]["dram"]["capacity_bytes"] = 77 * 20480
        kept = process.control.put(document, expected_version=1, key="a")
    with running(home) as process:
        tuning = process.control.tuning
        assert (tuning.tiers.remote.fetch, tuning.tiers.remote.write) == ("off", "off")
        assert (tuning.tiers.dram, tuning.version) == (kept.tiers.dram, kept.version + 1)
        assert process.control.bypass(on=True).version == kept.version + 2


def test_a_kept_tuning_of_tiers_that_are_gone_stops_no_start(home):
    """What was said of them is forgotten once; a pool that asks more than its tier has now stays as it was."""
    own = {"capacity_bytes": 20 * 20480, "eviction": "arc"}
    with running(home, remote={}, disk="2MiB") as process:
        document = process.control.tuning.document()
        document |= {"admission": {"disk": "second_access", "remote": "second_access"}}
        document |= {"pools": {NAMESPACE.digest: {"dram": own, "disk": own}}}
        document["tiers"]["remote"] |= {"margin": 5.0, "holdout": 0.5}
        process.control.put(document, expected_version=1, key="a")
        document["tiers"]["dram"]["capacity_bytes"] = 10 * 20480
        kept = process.control.put(document, expected_version=2, key="b")
    for _ in range(2):
        with running(home) as process:
            left = kept.without("disk").without("remote")
            assert process.control.tuning == left.model_copy(update={"version": 4})
            assert process.control.tuning.pool(NAMESPACE.digest, "dram").capacity_bytes == own["capacity_bytes"]


def test_a_tier_put_into_the_configuration_is_as_in_a_first_tuning(home, caplog):
    """The kept one says that it is off, as a store without it must; what was switched off while it was there stays."""
    new = {"remote": {}, "disk": "2MiB"}
    with running(home) as process:
        document = process.control.tuning.document() | {"defaults": {"eviction": "arc"}}
        kept = process.control.put(document, expected_version=1, key="a")
    with running(home, **new) as process:
        tuning, first = process.control.tuning, settings(home, **new).first_tuning()
        assert tuning == first.model_copy(update={"defaults": kept.defaults, "version": 3})
        assert "new here, and as in a first tuning: disk, remote: the tuning is now at version 3" in caplog.text
        off = tuning.document()
        off["tiers"]["remote"] |= {"fetch": "off", "write": "off"}
        off["tiers"]["disk"] = {"capacity_bytes": 0, "write": "off"}
        kept = process.control.put(off, expected_version=3, key="b")
    with running(home, **new) as process:
        assert process.control.tuning == kept


def test_a_start_that_is_refused_changes_nothing(home, monkeypatch):
    """One edit takes a tier out and has a mistake, or another store has the socket: the edit is taken back."""
    mistaken = {"url": "redis://localhost:1", "password_file": home / "mistyped"}
    with running(home, disk="2MiB") as process:
        document = process.control.tuning.document()
        document["tiers"]["disk"]["capacity_bytes"] = 1 << 20
        kept = process.control.put(document, expected_version=1, key="a")
    with pytest.raises(DocumentError, match="mistyped"), running(home, remote=mistaken):
        pass
    with monkeypatch.context() as patch:
        patch.setattr(Server, "start", Mock(side_effect=OSError(98, "Address already in use")))
        with pytest.raises(OSError, match="in use"), running(home):
            pass
    with running(home, disk="2MiB") as process:
        assert process.control.tuning == kept


def test_a_tier_that_is_new_to_a_store_is_not_larger_than_the_machine(home):
    """As at a first start."""
    with running(home) as process:
        process.control.bypass(on=True)
    with (
        pytest.raises(DocumentError, match=r"disk.capacity: 1048576.0 TiB are asked"),
        running(home, disk=1 << 60),
    ):
        pass
