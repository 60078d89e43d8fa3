"""How namespaces share a tier."""

from types import SimpleNamespace

import pytest

from tiertune_connector.tiers.shares import retune


def shared(total, asked, kept, lent, needed):
    """Bytes by namespace: ``kept`` were found at the start, ``lent`` are nobody's, with what they hold."""
    told = [(dict.fromkeys(asked, 0), {}), (kept, {"found": True}), (lent, {"lends": True})]
    held = {
        name: SimpleNamespace(
            **{"found": False, "lends": False, "resident_bytes": holds, "needed_bytes": needed, "stride": 1} | kind,
            pool=SimpleNamespace(algorithm="lru"),
        )
        for some, kind in told
        for name, holds in some.items()
    }
    retune(held, total, {name: (nbytes, "") for name, nbytes in asked.items()})
    return {name: each.allowed for name, each in held.items()}


@pytest.mark.parametrize(
    ("asked", "lent", "needed", "shares"),
    [
        ({}, {}, 0, {}),
        ({"a": None, "b": 50, "c": None}, {}, 10, {"a": 20, "b": 50, "c": 20}),
        ({"a": None, "b": None}, {"c": 10}, 10, {"a": 40, "b": 40, "c": 10}),
        ({"a": None, "b": None}, {"c": 80}, 10, {"a": 10, "b": 10, "c": 70}),
        ({"a": None}, {"b": 40, "c": 40}, 30, {"a": 30, "b": 20, "c": 40}),
        ({"a": None, "b": 50}, {"c": 30}, 60, {"a": 40, "b": 50, "c": 0}),
        ({"a": 95}, {"b": 30}, 0, {"a": 90, "b": 0}),
        ({"a": 50}, {"b": 60}, 0, {"a": 50, "b": 40}),
    ],
)
def test_what_nobody_uses_is_kept_where_no_other_needs_the_room(asked, lent, needed, shares):
    """Numbers come first, then what the others need, each alike; never more than the total."""
    assert shared(90, asked, {}, lent, needed) == shares


@pytest.mark.parametrize(
    ("asked", "kept", "lent", "needed", "shares"),
    [
        ({}, {"a": 60, "b": 20}, {}, 0, {"a": 60, "b": 20}),
        ({}, {"a": 80, "b": 20}, {}, 0, {"a": 70, "b": 20}),
        ({}, {"a": 80, "b": 70, "c": 10}, {}, 0, {"a": 40, "b": 40, "c": 10}),
        ({"a": None}, {"b": 60}, {}, 20, {"a": 30, "b": 60}),
        ({"a": None}, {"b": 80}, {}, 20, {"a": 20, "b": 70}),
        ({"a": None}, {"b": 80}, {}, 70, {"a": 45, "b": 45}),
        ({"a": None}, {"b": 10, "c": 10}, {}, 80, {"a": 70, "b": 10, "c": 10}),
        ({"a": None, "d": 30}, {"b": 60}, {}, 70, {"a": 30, "d": 30, "b": 30}),
        ({"a": None}, {"b": 20}, {"c": 60}, 40, {"a": 40, "b": 20, "c": 30}),
    ],
)
def test_what_was_found_is_kept_but_for_the_others_even_part(asked, kept, lent, needed, shares):
    """It gives way for what they need, up to that; before it does, what is lent."""
    assert shared(90, asked, kept, lent, needed) == shares
