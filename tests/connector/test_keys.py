"""Namespaces: what may share chunks, and nothing else."""

import msgspec
import pytest

from tiertune_connector.keys import Namespace, tenant_digest

BASE = Namespace(
    model="llama", weights="w", dtype="bf16", kv_layout="k", parallel="tp2", chunk_tokens=256,
    hash_algorithm="sha256", hash_seed="0", epoch=1,
)  # fmt: skip


@pytest.mark.parametrize("field", Namespace.__struct_fields__)
def test_every_field_makes_another_namespace(field):
    """Two engines that differ in anything share nothing."""
    value = getattr(BASE, field)
    other = msgspec.structs.replace(BASE, **{field: value + 1 if isinstance(value, int) else value + "x"})
    assert other.digest != BASE.digest
    assert len(other.digest) == 32


def test_fields_do_not_run_into_each_other():
    """What moves from the end of one field to the start of the next is seen."""
    assert Namespace(model="ab", weights="c").digest != Namespace(model="a", weights="bc").digest


def test_a_digest_is_the_same_in_every_process():
    """It is a function of the fields alone: stores and engines of a fleet must agree."""
    assert Namespace(model="llama", chunk_tokens=16).digest == "ee5939e933b803c55d00f9a29cd1d923"


def test_a_namespace_keeps_its_digest_over_the_wire():
    """The store computes the same from what the client sent."""
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(BASE), type=Namespace).digest == BASE.digest


def test_a_field_that_is_not_known_is_refused():
    """Of a later version: a store that left it out would let unlike engines share."""
    told = msgspec.msgpack.encode(msgspec.structs.asdict(BASE) | {"wanted": "x"})
    with pytest.raises(msgspec.ValidationError, match="unknown field `wanted`"):
        msgspec.msgpack.decode(told, type=Namespace)


def test_a_tenant_is_a_keyed_digest():
    """It tells nothing of the salt, depends on the secret, and is empty without a salt."""
    assert len(tenant_digest("salt", b"secret")) == 16
    assert tenant_digest("salt", b"secret") != tenant_digest("salt", b"other")
    assert tenant_digest("salt", b"secret") != tenant_digest("pepper", b"secret")
    assert tenant_digest("", b"secret") == b""


def test_whatever_a_salt_or_secret_is_made_of_makes_a_tenant():
    """JSON may hold half a character, of which vLLM makes keys, too; a variable may hold any bytes."""
    assert len({tenant_digest(salt, b"\xff") for salt in ("\ud800", "\ud801", "a")}) == 3
    assert tenant_digest("a", b"\xff") != tenant_digest("a", b"")


def test_two_namespaces_tell_in_what_they_differ():
    """By parts that are short, and tell nobody a seed."""
    one, other = Namespace(model="llama", hash_seed="1", kv_layout="x" * 4000), Namespace(model="llama", hash_seed="2")
    differing = {name for name in one.parts if one.parts[name] != other.parts[name]}
    assert differing == {"hash_seed", "kv_layout"}
    assert one.parts["model"] == "llama"
    assert one.parts["dtype"] == ""
    assert all(len(text) <= 12 for text in one.parts.values())
