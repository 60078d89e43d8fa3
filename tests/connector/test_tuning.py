"""The tuning document: strict, whole, and the same after a round trip."""

import json

import pytest

from tiertune_connector.documents import FieldError
from tiertune_connector.tuning import parse_tuning

NS = "0123456789abcdef" * 2
CONTRACT = {
    "version": 12, "bypass": False,
    "tiers": {
        "dram": {"capacity_bytes": 68719476736}, "disk": {"capacity_bytes": 0, "write": "evict"},
        "remote": {"fetch": "on", "write": "commit", "min_fetch_tokens": 0, "margin": 1.1, "deadline_factor": 1.5},
    },
    "pools": {NS: {tier: {"capacity_bytes": None, "eviction": "lru"} for tier in ("dram", "disk")}},
    "defaults": {"eviction": "lru"}, "admission": {"disk": "always", "remote": "second_access"},
    "tenants": {NS: {"quota_bytes": 1073741824}},
}  # fmt: skip


def test_the_document_of_the_contracts_is_understood_and_told_unchanged():
    """The same JSON, with the default of what the contracts leave out."""
    told = parse_tuning(json.loads(json.dumps(CONTRACT))).document()
    remote = told["tiers"]["remote"]
    assert (remote.pop("holdout"), remote.pop("codec")) == (0.0, "raw")
    assert told == CONTRACT


def test_what_is_left_out_has_its_default():
    """Only the size of DRAM must be said."""
    tuning = parse_tuning({"tiers": {"dram": {"capacity_bytes": 5}}})
    assert parse_tuning(tuning.document()) == tuning
    assert (tuning.bypass, tuning.tiers.remote.margin, tuning.pools) == (False, 1.1, {})


def test_a_pools_own_algorithm_wins_over_the_default():
    """Tier by tier."""
    tuning = parse_tuning(CONTRACT | {"pools": {NS: {"dram": {"eviction": "arc"}}}})
    assert (tuning.algorithm(NS, "dram"), tuning.algorithm(NS, "disk")) == ("arc", "lru")
    assert tuning.algorithm("f" * 32, "dram") == "lru"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("tiers", None),
        ("tiers.dram", {}),
        ("tiers.dram.capacity_bytes", -1),
        ("tiers.dram.capacity_bytes", 1.5),
        ("tiers.dram.capacity_bytes", True),
        ("tiers.dram.capacity_bytes", "64GiB"),
        ("tiers.dram.capacity_bytes", 2**60 + 1),
        ("tiers.dram.capacity", 1),
        ("tiers.disk.write", "sometimes"),
        ("tiers.remote.fetch", True),
        ("tiers.remote.margin", 0.9),
        ("tiers.remote.margin", float("nan")),
        ("tiers.remote.margin", 11),
        ("tiers.remote.deadline_factor", float("inf")),
        ("tiers.remote.min_fetch_tokens", -1),
        ("tiers.remote.min_fetch_tokens", 2**31 + 1),
        ("version", 2**53 + 1),
        ("pools", []),
        ("pools.nonsense", {}),
        ("pools." + NS.upper(), {}),
        (f"pools.{NS}.dram.eviction", "mru"),
        (f"pools.{NS}.remote", {}),
        ("defaults.eviction", None),
        ("admission.disk", "never"),
        ("tenants.x", {"quota_bytes": 1}),
        (f"tenants.{NS}.quota_bytes", -1),
        ("bypass", "yes"),
        ("extra", 1),
    ],
)
def test_a_wrong_field_is_named(path, value):
    """The first that is wrong, by its dotted path."""
    document = json.loads(json.dumps(CONTRACT))
    place = document
    *parents, last = path.split(".")
    for part in parents:
        place = place[part]
    place[last] = value
    with pytest.raises(FieldError) as raised:
        parse_tuning(document)
    assert raised.value.field.startswith(path)
    assert raised.value.message


@pytest.mark.parametrize("document", [None, [], "x", 5])
def test_what_is_no_object_is_refused(document):
    """Also at the top."""
    with pytest.raises(FieldError):
        parse_tuning(document)
