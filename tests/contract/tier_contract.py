"""What every tier promises."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from connector.stores import amid, chain, in_turns, payload, view
from tiertune_connector.chunk import Origin, checksum
from tiertune_connector.tiers.base import Outcome, Tier

NBYTES = 5000
ONE, TWO = "1" * 32, "2" * 32
ALICE, BOB = b"a" * 16, b"b" * 16
MINE = Origin("host-a")
KEYS = chain("contract", 8)


@dataclass
class Medium:
    """A tier, and what a test may do behind its back."""

    tier: Tier
    reopen: Callable[[], Tier]
    damage: Callable[[str, bytes, int], None]
    """Flip a bit of a payload, that many bytes from its start."""
    truncate: Callable[[str, bytes], None] = lambda *_: None
    """Cut a chunk short."""


def read(
    tier: Tier, namespace: str = ONE, key: bytes = KEYS[0], nbytes: int = NBYTES, data: bytes = b""
) -> tuple[Outcome, Origin]:
    """What a tier answers; AssertionError if it brings other bytes than the key's, or those of ``data``."""
    out = np.zeros(nbytes, np.uint8)
    outcome, origin = tier.read(namespace, key, view(out))
    assert outcome is not Outcome.OK or np.array_equal(out, payload(data or key, nbytes))
    return outcome, origin


def write(
    tier: Tier, namespace: str = ONE, key: bytes = KEYS[0], origin: Origin = MINE, nbytes: int = NBYTES
) -> Outcome:
    return tier.write(namespace, key, view(payload(key, nbytes)), origin)


class TierContract:
    lasting = True
    """Chunks outlive the process."""

    @pytest.fixture
    def tier(self, medium):
        return medium.tier

    def test_it_has_all_that_a_tier_has(self, tier):
        """What the store asks of every tier without a look at its class; nothing has gone wrong yet."""
        members = [*Tier.__annotations__, *(name for name in vars(Tier) if not name.startswith("_"))]
        assert {"name", "why", "present", "read", "write", "flush", "usage", "close"} <= set(members)
        assert [name for name in members if not hasattr(tier, name)] == []
        assert not tier.why

    def test_a_chunk_is_read_bit_for_bit_with_its_origin(self, tier):
        """What was written comes back unchanged, with who wrote it and for whom."""
        origin = Origin("host-a", ALICE)
        for key in KEYS:
            assert write(tier, ONE, key, origin) is Outcome.OK
        assert [read(tier, ONE, key) for key in KEYS] == [(Outcome.OK, origin)] * len(KEYS)

    def test_a_sum_that_is_told_is_that_of_the_bytes(self, tier):
        """Whether the writer told it or not: who reads need not sum again."""
        told = Origin("host-a", checksum=checksum(view(payload(KEYS[1], NBYTES))))
        assert write(tier) is Outcome.OK
        assert write(tier, ONE, KEYS[1], told) is Outcome.OK
        for key in KEYS[:2]:
            outcome, origin = read(tier, ONE, key)
            assert outcome is Outcome.OK
            assert origin.checksum in (None, checksum(view(payload(key, NBYTES))))

    def test_what_has_come_is_told(self, tier):
        """In order, and what was told is in its place; the last piece is the end of the payload."""
        out, heard = np.zeros(NBYTES, np.uint8), []

        def came(told: int) -> None:
            heard.append(told)
            assert np.array_equal(out[:told], payload(KEYS[0], NBYTES)[:told])

        assert write(tier) is Outcome.OK
        assert tier.read(ONE, KEYS[0], view(out), came)[0] is Outcome.OK
        assert heard == sorted(set(heard))
        assert heard[-1] == NBYTES

    def test_what_was_never_written_is_a_miss(self, tier):
        """A missing key, or namespace, is a miss and no error."""
        write(tier)
        assert read(tier, ONE, KEYS[1])[0] is Outcome.MISS
        assert read(tier, "f" * 32, KEYS[0])[0] is Outcome.MISS
        assert tier.present("f" * 32, KEYS) == (Outcome.OK, 0)

    @pytest.mark.parametrize("here", [0, 1, 2, 3, 5, 7, 8])
    def test_present_is_the_longest_leading_run(self, tier, here):
        """A gap ends the run, whatever follows it."""
        for key in [*KEYS[:here], *KEYS[here + 1 :]]:
            write(tier, ONE, key)
        assert tier.present(ONE, KEYS) == (Outcome.OK, here)

    def test_nothing_asked_is_nothing_present(self, tier):
        """An empty chain has an empty run."""
        assert tier.present(ONE, []) == (Outcome.OK, 0)

    def test_a_second_write_changes_nothing(self, tier):
        """A key that is here stays as it was first written; who writes it hears that."""
        write(tier)
        other = view(payload(b"other bytes", NBYTES))
        assert tier.write(ONE, KEYS[0], other, Origin("host-a", BOB)) is Outcome.THERE
        outcome, origin = read(tier)
        assert (outcome, origin.tenant) == (Outcome.OK, b"")

    def test_namespaces_do_not_meet(self, tier):
        """The same key in two namespaces is two chunks."""
        write(tier)
        assert read(tier, TWO, KEYS[0])[0] is Outcome.MISS
        tier.write(TWO, KEYS[0], view(payload(b"two", NBYTES)), MINE)
        assert read(tier)[0] is read(tier, TWO, KEYS[0], data=b"two")[0] is Outcome.OK

    @pytest.mark.parametrize(
        "key", [b"\0", b"*", b"?[a-z]*\\", bytes(range(64)), b"\xff" * 64, b"a/../b", b"tiertune:"]
    )
    def test_keys_are_opaque(self, tier, key):
        """Any 1 to 64 bytes are a key, also those that mean something to a medium; a flush finds them."""
        assert write(tier, ONE, key) is Outcome.OK
        assert tier.present(ONE, [key]) == (Outcome.OK, 1)
        assert read(tier, ONE, key)[0] is Outcome.OK
        assert tier.flush(ONE) == (Outcome.OK, 1)
        assert tier.present(ONE, [key]) == (Outcome.OK, 0)

    @pytest.mark.parametrize(
        ("what", "left"),
        [
            ({}, []),
            ({"namespace": ONE}, [(TWO, 0), (TWO, 1), (TWO, 2)]),
            ({"tenant": ALICE}, [(ONE, 0), (ONE, 2), (TWO, 0), (TWO, 2)]),
            ({"namespace": TWO, "tenant": BOB}, [(ONE, 0), (ONE, 1), (ONE, 2), (TWO, 0), (TWO, 1)]),
            ({"tenant": b"c" * 16}, [(ONE, 0), (ONE, 1), (ONE, 2), (TWO, 0), (TWO, 1), (TWO, 2)]),
        ],
    )
    def test_flush_drops_what_is_named_and_counts_it(self, tier, what, left):
        """By namespace, by tenant, by both, or all; nothing else goes."""
        tenants = (b"", ALICE, BOB)
        for namespace in (ONE, TWO):
            for key, tenant in zip(KEYS, tenants, strict=False):
                write(tier, namespace, key, Origin("host-a", tenant))
        assert tier.flush(**what) == (Outcome.OK, 6 - len(left))
        here = [
            (namespace, index)
            for namespace in (ONE, TWO)
            for index in range(3)
            if read(tier, namespace, KEYS[index])[0] is Outcome.OK
        ]
        assert here == left

    @pytest.mark.parametrize("offset", [0, NBYTES // 2, NBYTES - 1])
    def test_damaged_bytes_are_corrupt_and_then_gone(self, medium, offset):
        """One flipped bit is found, the chunk leaves, and may be written anew."""
        tier = medium.tier
        write(tier)
        medium.damage(ONE, KEYS[0], offset)
        assert read(tier)[0] is Outcome.CORRUPT
        assert read(tier)[0] is Outcome.MISS
        assert tier.present(ONE, KEYS[:1]) == (Outcome.OK, 0)
        assert write(tier) is Outcome.OK
        assert read(tier)[0] is Outcome.OK

    def test_readers_never_see_half_a_chunk(self, tier):
        """While threads write, read and flush the same keys, a read is a miss or the whole chunk."""

        def reading(turn: int) -> None:
            assert read(tier, ONE, KEYS[turn % 4])[0] in (Outcome.OK, Outcome.MISS)

        with amid(in_turns(reading, reading), 2):
            for _ in range(30):
                for key in KEYS[:4]:
                    assert write(tier, ONE, key).kept  # a reader may have one still that was flushed
                tier.flush(ONE)

    def test_usage_follows_writes_and_flushes(self, tier):
        """Resident bytes cover the payloads held, and fall with a flush."""
        empty = tier.usage().resident_bytes
        for key in KEYS:
            write(tier, ONE, key)
        full = tier.usage()
        assert full.resident_bytes - empty >= len(KEYS) * NBYTES
        assert full.chunks in (len(KEYS), None)
        tier.flush()
        assert tier.usage().resident_bytes < full.resident_bytes

    def test_close_leaves_a_lasting_medium_as_it_was(self, medium):
        """Another process finds the chunks where the medium lasts, and nothing where it does not."""
        origin = Origin("host-a", ALICE)
        for key in KEYS:
            write(medium.tier, ONE, key, origin)
        medium.tier.close()
        again = medium.reopen()
        if not self.lasting:
            assert again.present(ONE, KEYS) == (Outcome.OK, 0)
            return
        assert again.present(ONE, KEYS) == (Outcome.OK, len(KEYS))
        assert [read(again, ONE, key) for key in KEYS] == [(Outcome.OK, origin)] * len(KEYS)
        assert again.flush(tenant=ALICE) == (Outcome.OK, len(KEYS))


class FileContract(TierContract):
    def test_a_chunk_cut_short_is_corrupt_and_then_gone(self, medium):
        """Bytes that are missing at the end are found, too."""
        write(medium.tier)
        medium.truncate(ONE, KEYS[0])
        assert read(medium.tier)[0] is Outcome.CORRUPT
        assert medium.tier.present(ONE, KEYS[:1]) == (Outcome.OK, 0)

    @pytest.mark.parametrize("nbytes", [NBYTES - 1, NBYTES + 1], ids=["shorter", "longer"])
    def test_a_chunk_of_another_length_is_not_read(self, tier, nbytes):
        """A reader has room for its own: what would fill a part of it, or more, is not the chunk that it asks for."""
        assert write(tier) is Outcome.OK
        assert read(tier, ONE, KEYS[0], nbytes)[0] is Outcome.CORRUPT
