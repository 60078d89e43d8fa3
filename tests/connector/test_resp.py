"""Redis' protocol on a socket: replies in any pieces, refusals, ends, and what no Redis would say."""

import socket
from contextlib import suppress

import hiredis
import numpy as np
import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from connector.stores import amid, payload, view
from tiertune_connector.tiers.resp import Wire, command, set_once

LENGTHS = st.integers(0, 2000)
REPLIES = st.lists(
    st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1), st.sampled_from([b"OK", b""]), LENGTHS.map(bytearray)),
    min_size=1,
    max_size=8,
)
"""Nothing, a number, a status, and as a bytearray a value."""


class Pieces:
    """A socket from which data comes in pieces of these lengths, over and over, and then its end."""

    def __init__(self, data, lengths=(1 << 20,)):
        self.data, self.lengths, self.received = bytes(data), lengths, 0

    def recv(self, most):
        piece = self.data[: min(most, self.lengths[self.received % len(self.lengths)])]
        self.data = self.data[len(piece) :]
        self.received += 1
        return piece

    def recv_into(self, out):
        piece = self.recv(len(out))
        out[: len(piece)] = piece
        return len(piece)

    def sendall(self, data):
        pass


def wire(sock, check=lambda: None, awaited=1):
    told = Wire(sock, check)
    for _ in range(awaited):
        told.send(b"")
    return told


def encoded(reply):
    match reply:
        case None:
            return b"$-1\r\n"
        case int():
            return b":%d\r\n" % reply
        case bytes():
            return b"+%b\r\n" % reply
    return b"$%d\r\n%b\r\n" % (len(reply), filled(len(reply)))


def filled(nbytes):
    """A value with ends of lines in it."""
    return (b"\r\n-ERR $3\r\n" * (nbytes // 10 + 1))[:nbytes]


def taken(told, like):
    """The next reply, read as what it should be."""
    if not isinstance(like, bytearray):
        return told.reply()
    out = bytearray(b"?" * (len(like) + 5))
    size = told.fill(memoryview(out))
    assert out[size:] == b"?" * (len(out) - size), "nothing is written behind a value"
    return out[:size]


def meant(reply):
    return filled(len(reply)) if isinstance(reply, bytearray) else encoded(reply).removesuffix(b"\r\n")


# -- replies


@given(REPLIES, st.lists(st.integers(1, 700), min_size=1))
def test_replies_come_in_any_pieces(replies, lengths):
    """Each is what was sent, and after the last one nothing is awaited."""
    told = wire(Pieces(b"".join(map(encoded, replies)), lengths), awaited=len(replies))
    assert [taken(told, reply) for reply in replies] == [meant(reply) for reply in replies]
    assert told.in_step


def test_more_than_was_asked_for_is_out_of_step():
    """What came with an answer, or was not awaited any more."""
    told = wire(Pieces(b":1\r\n:2\r\n"))
    assert not told.in_step
    assert told.reply() == b":1"
    assert not told.in_step


@given(REPLIES, st.data())
def test_an_end_anywhere_is_an_error(replies, data):
    """What came whole before is right; the one that broke off is never taken for an answer."""
    parts = [encoded(reply) for reply in replies]
    cut = data.draw(st.integers(0, sum(map(len, parts)) - 1))
    told, read = wire(Pieces(b"".join(parts)[:cut]), awaited=len(replies)), []
    with pytest.raises(redis.ConnectionError):
        read.extend(taken(told, reply) for reply in replies)
    whole = [number for number in range(len(parts) + 1) if sum(map(len, parts[:number])) <= cut]
    assert told.awaited == len(replies) - whole[-1]


@given(st.binary(max_size=700), st.sampled_from([b"", b"$", b":", b"$12\r\n", b"+", b"-"]))
def test_whatever_comes_is_an_answer_or_an_error(rest, start):
    """Nothing but the library's errors, and no more than was asked for."""
    out = bytearray(20)
    with suppress(redis.RedisError):
        assert wire(Pieces(start + rest)).fill(memoryview(out)[:12]) <= 12
    assert out[12:] == bytes(8)
    with suppress(redis.RedisError):
        wire(Pieces(start + rest)).reply()


@pytest.mark.parametrize(
    "text", ["ERR no", "READONLY no", "LOADING no", "NOAUTH no", "MOVED 1 a:1", "OOMPH", "x" * 9000]
)
@pytest.mark.parametrize("read", [Wire.reply, lambda told: told.fill(memoryview(bytearray(9)))])
def test_a_refusal_is_told(text, read):
    """With the server's own words, as far as they are read."""
    with pytest.raises(redis.ResponseError, match=text[:400]) as caught:
        read(wire(Pieces(b"-" + text.encode() + b"\r\n")))
    assert not isinstance(caught.value, redis.exceptions.OutOfMemoryError)
    with pytest.raises(redis.exceptions.OutOfMemoryError):
        read(wire(Pieces(b"-OOM command not allowed when used memory > 'maxmemory'.\r\n")))


@pytest.mark.parametrize(
    "answer",
    [
        b"$13\r\n" + bytes(13) + b"\r\n",
        b"$-2\r\n",
        *(b"$%b\r\n123456789012\r\n" % size for size in (b"", b"+3", b" 3", b"1_2", b"0x3", b"99999999999999999999")),
        b"$12\r\n1234567890123\r\n",
        b":3\r\n",
        b"+OK\r\n",
        b"*1\r\n$3\r\nabc\r\n",
        b">2\r\n+a\r\n+b\r\n",
        b"_\r\n",
        b"\r\n",
        b"x" * 9000,
    ],
)
def test_no_value_of_at_most_twelve_bytes_is_an_error(answer):
    """A length that was not asked for or is none, another kind of answer, an endless line, what RESP3 alone has."""
    with pytest.raises(redis.InvalidResponse):
        wire(Pieces(answer)).fill(memoryview(bytearray(12)))


@pytest.mark.parametrize(
    "answer", [b"$2\r\nOK\r\n", b":\r\n", b":x\r\n", b":1_0\r\n", b"_\r\n", b"*0\r\n", b"x" * 9000]
)
def test_no_short_answer_is_an_error(answer):
    """Neither a status nor a number nor nothing."""
    with pytest.raises(redis.InvalidResponse):
        wire(Pieces(answer)).reply()


@given(st.integers(1, 60))
def test_a_server_that_trickles_is_given_up_when_it_is_too_late(steps):
    """The clock is looked at before everything that may take time."""
    asked = iter(range(steps))
    source = Pieces(b"$100\r\n" + bytes(100) + b"\r\n", [1])

    def check():
        if next(asked, None) is None:
            raise redis.TimeoutError("too late")

    told = wire(source, check)
    with pytest.raises(redis.TimeoutError):
        told.fill(memoryview(bytearray(100)))
    assert source.received == steps


# -- on a socket


@pytest.fixture
def pair():
    near, far = socket.socketpair()
    near.settimeout(0.2)
    with near, far:
        yield near, far


def test_a_long_payload_there_and_back(pair):
    """As a server understands it, and bit for bit; both sides take it in pieces."""
    near, far = pair
    near.settimeout(10)
    data, reader, out = payload(b"key", 5_000_001), hiredis.Reader(), np.zeros(5_000_001, np.uint8)
    heard = []

    def server(*_):
        while (said := reader.gets()) is False:
            reader.feed(far.recv(1 << 16))
        heard.extend(said)
        far.sendall(b"+OK\r\n$%d\r\n%b\r\n" % (len(data), data.tobytes()))

    told = Wire(near, lambda: None)
    with amid(server, 1):
        told.send(*set_once(b"name", b"header", view(data)))
        assert told.reply() == b"+OK"
        told.send()
        assert told.fill(view(out)) == len(data)
    assert heard == [b"SET", b"name", b"header" + data.tobytes(), b"NX"]
    assert np.array_equal(out, data)


def test_a_server_that_neither_answers_nor_takes_is_a_time_out(pair):
    """The socket's own, for each step."""
    told = wire(pair[0])
    with pytest.raises(TimeoutError):
        told.reply()
    with pytest.raises(TimeoutError):
        told.send(bytes(50_000_000))


def test_a_server_that_went_is_an_error_of_the_socket(pair):
    """When it is written to, and when an answer is awaited."""
    pair[1].close()
    with pytest.raises(OSError, match="pipe"):
        Wire(pair[0], lambda: None).send(b"x")
    with pytest.raises(redis.ConnectionError):
        Wire(pair[0], lambda: None).reply()


@given(st.lists(st.binary(max_size=50), min_size=1, max_size=9))
def test_commands_are_understood(words):
    """By another's parser."""
    reader = hiredis.Reader()
    reader.feed(command(*words))
    assert reader.gets() == words
