"""How namespaces share a tier."""

import pytest

from tiertune_connector.tiers.shares import share_capacity


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
    assert share_capacity(90, asked, lent, needed=needed, kept={}) == shares


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
    assert share_capacity(90, asked, lent, needed=needed, kept=kept) == shares
