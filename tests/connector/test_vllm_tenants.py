"""Whose a request is."""

import pytest

from tiertune_connector.keys import tenant_digest
from tiertune_connector.vllm.tenants import KEY_VARIABLE, Tenants


def test_a_salt_makes_a_tenant_and_none_makes_none():
    """Equal salts are one tenant, others are others, and an unsalted request has none."""
    tenants = Tenants("shared", {KEY_VARIABLE: "secret"})
    assert tenants.digest("a") == tenants.digest("a")
    assert len({tenants.digest("a"), tenants.digest("b"), b""}) == 3
    assert tenants.digest(None) == tenants.digest("") == b""
    assert len(tenants.digest("a")) == 16


def test_the_key_hides_the_salt():
    """Whoever guesses salts needs the key too; engines find it in the environment."""
    keyed, plain = Tenants("shared", {KEY_VARIABLE: "secret"}), Tenants("shared", {})
    assert keyed.digest("a") == tenant_digest("a", b"secret") != plain.digest("a")
    assert plain.digest("a") == tenant_digest("a", b"")


def test_whatever_a_salt_or_key_is_made_of_makes_a_tenant():
    """JSON may hold half a character, of which vLLM makes keys, too; a variable may hold any bytes."""
    odd = Tenants("shared", {KEY_VARIABLE: "\udcff"})
    assert len({odd.digest("\ud800"), odd.digest("\ud801"), odd.digest("a")}) == 3
    assert odd.digest("a") == tenant_digest("a", b"\xff")


@pytest.mark.parametrize(
    ("isolation", "salt", "allowed"),
    [
        ("shared", None, True),
        ("shared", "a", True),
        ("require_salt", "a", True),
        ("require_salt", None, False),
        ("require_salt", "", False),
    ],
)
def test_unsalted_requests_stay_out_where_a_salt_is_required(isolation, salt, allowed):
    """They neither read nor write."""
    assert Tenants(isolation, {}).allowed(salt) is allowed
