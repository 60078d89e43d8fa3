"""Frames and messages: whole or refused."""

import os
import socket
import struct
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.stores import NAMESPACE, amid
from tiertune_connector.cost import FetchEstimate, GateSettings
from tiertune_connector.protocol.frames import MAX_FRAME_BYTES, Frames
from tiertune_connector.protocol.messages import (
    PROTOCOL,
    Abort,
    Commit,
    CommitReply,
    DropSegments,
    Hello,
    Load,
    LoadReply,
    Lookup,
    LookupReply,
    NewSegment,
    PrefillLine,
    Release,
    Reply,
    Report,
    Request,
    Reserve,
    ReserveReply,
    Side,
    SlotRef,
    StepReport,
    Steps,
    TierReport,
    Welcome,
    brief,
)

REF = SlotRef(1, 2, 3, 2**64 - 1)
REPORT = TierReport("remote", 3, 48, 16, "cheaper", 0.1, None, 0.2, "won")
REQUESTS = [
    Hello(1, "0.1", "c", "e", "all", NAMESPACE, 4096, 16),
    Lookup(1, "r", [b"k", b"\0" * 64], 32, b""),
    Load(2, [b"k"], 0.5),
    Release(7),
    Reserve(3, "r", [b"k"], b"t" * 16),
    Commit(4, [b"k"], [REF]),
    Abort([b"k"]),
    Abort([]),
    Report([REPORT]),
    Steps([StepReport("all", "prefill", 0.25, 100)]),
]
REPLIES = [
    Welcome("boot", ""),
    LookupReply(1, ["dram", "remote"], {"remote": FetchEstimate(0.1, 0.0, 1e9)}, {"remote": GateSettings()}, ""),
    LoadReply(2, 5, [REF], ["hit", "late"], {"remote": 0.1}),
    ReserveReply(3, [REF, None], ["", "full"]),
    CommitReply(4, [True, False]),
    DropSegments([1, 2]),
]

FIELDS = """
hello protocol version client engine stage namespace chunk_bytes chunk_tokens gpus looks
lookup id request keys prompt_tokens tenant sides defer prefill deadline_s
own request gpu_chunks staging_chunks
load id keys deadline_s parts
release lease damaged
reserve id request keys tenant
commit id keys slots
abort keys slots
report tiers
first_token tokens seconds group
steps steps gpus
welcome boot_id refusal
segment number slots chunk_bytes
index layout buckets
drop numbers
looked id tiers costs gate reason group room
part id positions slots nbytes
loaded id lease slots outcomes seconds
reserved id slots reasons
committed id committed
SlotRef segment index generation checksum
Side keys chunk_tokens window_chunks
PrefillLine overhead_s seconds_per_flop params layers width step_tokens
TierReport tier chunks tokens fetched_tokens reason fetch_s recompute_s actual_s outcome backlog_s prefills vain_tokens
StepReport stage phase gpu_seconds tokens
FetchEstimate t0_s per_chunk_s bytes_per_s queue_s age_s samples doubt transfers
GateSettings fetch_on margin min_fetch_tokens deadline_factor
"""
"""Of protocol 1, in their order, which is all that tells them apart."""


@pytest.fixture
def pair():
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with left, right:
        yield left, right


def through(messages, kind, size=1 << 30):
    """What comes of messages that are sent in pieces of so many bytes."""
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    stream = b"".join(map(Frames(left, kind).encode, messages))

    def send(*_):
        for start in range(0, len(stream), size):
            left.sendall(stream[start : start + size])
        left.shutdown(socket.SHUT_WR)

    with left, right, amid(send, 1):
        return list(Frames(right, kind).receive())


def test_every_message_survives_the_way():
    """All requests and replies, in order."""
    assert through(REQUESTS, Request) == REQUESTS
    assert through(REPLIES, Reply) == REPLIES


def test_a_store_that_does_not_tell_its_room_is_taken_at_its_word():
    """One of before: its replies are shorter, and all that it found may be fetched."""
    found = msgspec.msgpack.decode(msgspec.msgpack.encode(["looked", 1, ["remote"] * 40, {}, {}, "", ""]), type=Reply)
    assert found.reach(0) == found.reach(9) == 40


def test_what_protocol_1_says_stays_where_it_is():
    """Clients and stores are upgraded apart. A field with a default may come last; all else is another protocol.

    A greeting, of whatever protocol, begins as it does here, else no refusal could be told.
    """
    parts = (SlotRef, Side, PrefillLine, TierReport, StepReport, FetchEstimate, GateSettings)
    kinds = {kind.__struct_config__.tag or kind.__name__: kind for kind in (*get_args(Request | Reply), *parts)}
    known = {name: tuple(fields) for name, *fields in map(str.split, FIELDS.strip().splitlines())}
    assert PROTOCOL == 1
    assert kinds.keys() == known.keys()
    for name, fields in known.items():
        now = kinds[name].__struct_fields__
        assert now[: len(fields)] == fields, name
        assert len(now) - len(kinds[name].__struct_defaults__) <= len(fields), name


def test_large_and_small_frames_mix():
    """A frame of megabytes among small ones."""
    messages = [Abort([b"k"]), Abort([b"%064d" % number for number in range(50_000)]), Release(1)]
    assert through(messages, Request) == messages


@given(st.lists(st.integers(0, len(REQUESTS) - 1), max_size=6), st.integers(1, 64))
def test_frames_may_arrive_in_any_pieces(which, size):
    """A byte at a time, or many frames at once."""
    messages = [REQUESTS[number] for number in which]
    assert through(messages, Request, size) == messages


def frame(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


@pytest.mark.parametrize(
    "body",
    [b"", b"\xc1", b"\x90", b"GET / HTTP/1.1\r\n\r\n", msgspec.msgpack.encode(["nonsense", 1]),
     msgspec.msgpack.encode(["lookup", 1, "r", "no list", 1, b""]),
     b"\x94\xa3own\xa2\xf2\x00\x00\x00", b"\x91\xa4\xac\xf3\xf4\xff",  # text, and a name, that are no UTF-8
     b"\x93\xa5touch\x90" + b"\x91" * 100_000],  # lists in lists, as far as they go
)  # fmt: skip
def test_a_frame_that_is_no_message_ends_the_conversation(pair, body):
    """With an error of the decoder, not another one."""
    left, right = pair
    left.sendall(frame(body))
    with pytest.raises((msgspec.DecodeError, msgspec.ValidationError)):
        next(Frames(right, Request).receive())


def test_a_frame_too_long_is_refused_before_it_is_read(pair):
    """Its length alone ends the conversation."""
    left, right = pair
    left.sendall(struct.pack("<I", MAX_FRAME_BYTES + 1))
    with pytest.raises(msgspec.DecodeError, match="a frame of"):
        next(Frames(right, Request).receive())


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "message",
    [
        ["lookup", 1, "r", [b""], 1, b""],
        ["lookup", 1, "r", [b"x" * 65], 1, b""],
        ["lookup", 1, "r", [b"k"], -1, b""],
        ["load", 1, [b"k"], -0.1],
        ["load", 1, [b"k"], NAN],
        ["load", 1, [b"k"], INF],
        ["load", 1, [b"k", b"k"], 1.0],
        ["reserve", 1, "r", [b"k", b"k"], b""],
        ["reserve", 1, "r", [b"k"], b"short"],
        ["commit", 1, [b"k"], []],
        ["abort", [b""]],
        ["report", [["tape", 1, 1, 1, "x", 0.1, 0.1, 0.1, "won"]]],
        ["report", [["remote", -1, 1, 1, "x", 0.1, 0.1, 0.1, "won"]]],
        ["report", [["remote", 1, 1, 1, "x", NAN, 0.1, 0.1, "won"]]],
        ["report", [["remote", 1, 1, 1, "x", 0.1, INF, 0.1, "won"]]],
        ["report", [["remote", 1, 1, 1, "x", 0.1, 0.1, -0.1, "won"]]],
        ["report", [["remote", 1, 1, 1, "x" * 65, 0.1, 0.1, 0.1, "won"]]],
        ["report", [["remote", 1, 1, 1, "x", 0.1, 0.1, 0.1, "drawn"]]],
        ["abort", [b"a", b"b"], [[1, 2, 3, 4]]],
        ["steps", [["all", "sleeping", 0.1, 1]]],
        ["steps", [["all", "prefill", NAN, 1]]],
    ],
)
def test_values_that_would_do_harm_are_refused(message):
    """Keys that no tier holds, chains that bite their tail, numbers that are none: nothing of it reaches the store."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Request)


def test_a_long_name_of_a_request_is_told_as_a_short_one():
    """A usual one stays as it is. Half a character, too, is no reason to fail."""
    usual, long = f"chatcmpl-{'0' * 32}-{'1' * 8}", "\ud800" * 257
    split = f"cmpl-___prefill_addr_10.0.0.1:21001___decode_addr_10.0.0.2:22001_{'0' * 32}-{'1' * 8}"
    assert (brief(usual), brief(split)) == (usual, split)
    assert (len(brief(long)), brief(brief(long))) == (32, brief(long))
    assert brief(long) != brief(f"{long}x")


def test_a_later_version_may_add_fields():
    """Messages with more than we know are understood as far as we do."""
    longer = [*msgspec.msgpack.decode(msgspec.msgpack.encode(REQUESTS[1])), "new", 5]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(longer), type=Request) == REQUESTS[1]


def test_what_was_taken_is_not_kept(pair):
    """However long a conversation, whose reader takes each message as it comes."""
    left, right = pair
    sender, receiver = Frames(left, Request), Frames(right, Request)
    for _ in range(100):
        sender.send(REQUESTS[1])
        receiver.read()
        assert receiver.next() == REQUESTS[1]
        assert not receiver.waiting
    assert len(receiver._buffer) <= len(sender.encode(REQUESTS[1]))


def test_descriptors_come_in_the_order_of_their_messages(pair):
    """No process that is started gets them, and those that nobody takes are closed."""
    left, right = pair
    sender, receiver = Frames(left, Reply), Frames(right, Reply)
    files = [os.memfd_create(f"f{number}") for number in range(3)]
    for number, fd in enumerate(files):
        socket.send_fds(left, [sender.encode(NewSegment(number, 1, 4096))], [fd])
        sender.send(Welcome(""))
    replies = receiver.receive()
    assert [type(next(replies)).__name__ for _ in range(6)] == ["NewSegment", "Welcome"] * 3
    inodes = [os.fstat(fd).st_ino for fd in files]
    assert [os.fstat(fd).st_ino for fd in receiver.descriptors] == inodes
    got = list(receiver.descriptors)
    assert not any(os.get_inheritable(fd) for fd in got)
    receiver.close()
    for fd in got:
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(fd)
    for fd in files:
        os.close(fd)
