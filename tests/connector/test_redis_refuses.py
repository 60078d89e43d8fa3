"""A server that says what it should not, or says it too slowly: to the tier it is an outcome, and a connection less."""

import socket
import socketserver
import threading
import time
from contextlib import closing, contextmanager

import hiredis
import pytest

from connector.stores import at_best, payload, read_chunk, redis_tier, view
from tiertune_connector.chunk import HEADER_BYTES, Header, Origin
from tiertune_connector.tiers.base import Outcome
from tiertune_connector.tiers.redis import WINDOW_BYTES

A = "a" * 32
NBYTES = 6 * WINDOW_BYTES
MINE = Origin("host-a")
TIMEOUT_S = 0.3
SLACK_S = 0.2
"""For a busy machine."""


class Server(socketserver.ThreadingTCPServer):
    """Holds one chunk, called anything, and none of what is written; ``odd`` may answer in its place, in pieces."""

    daemon_threads = True
    block_on_close = False

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Connection)
        data = payload(b"key", NBYTES)
        self.value = Header.of(A, b"key", view(data), MINE).encode() + data.tobytes()
        self.connections = 0
        self.odd = lambda _: None
        self.stopped = threading.Event()

    def answer(self, words):
        match words:
            case [b"GETRANGE", _, first, last]:
                part = self.value[int(first) : int(last) + 1]
                return b"$%d\r\n%b\r\n" % (len(part), part)
            case [b"EXISTS", *_]:
                return b":0\r\n"
        return b"+OK\r\n"

    def slowly(self, data):
        """A byte, and a moment."""
        for number in range(len(data)):
            yield data[number : number + 1]
            if self.stopped.wait(0.02):
                return

    def silently(self, data):
        """And nothing of what comes is taken."""
        yield data
        self.stopped.wait(10)


class Connection(socketserver.BaseRequestHandler):
    def handle(self):
        self.server.connections += 1
        reader = hiredis.Reader()
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            while data := self.request.recv(1 << 16):
                reader.feed(data)
                while (words := reader.gets()) is not False:
                    odd = self.server.odd(words)
                    for piece in [self.server.answer(words)] if odd is None else odd:
                        self.request.sendall(piece)
        except OSError:
            pass  # who asked has gone


@pytest.fixture
def server():
    with Server() as started:
        thread = threading.Thread(target=started.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield started
        started.stopped.set()
        started.shutdown()
        thread.join()


@contextmanager
def opened(server, timeout_s=5.0):
    tier = redis_tier(f"redis://127.0.0.1:{server.server_address[1]}/0", timeout_s=timeout_s)
    yield tier
    tier.close()


@pytest.fixture
def tier(server):
    with opened(server) as tier:
        yield tier


def read(tier):
    return read_chunk(tier, A, b"key", NBYTES)[0]


def write(tier):
    return tier.write(A, b"new", view(payload(b"new", NBYTES)), MINE)


def answers(command, pieces, after=0):
    """To this command, when it was answered so often as it should be."""
    asked = iter(range(after))
    return lambda words: pieces if words[0] == command and next(asked, None) is None else None


REFUSALS = [
    b"-READONLY You can't write against a read only replica.\r\n",
    b"-LOADING Redis is loading the dataset in memory\r\n",
    b"-NOAUTH Authentication required.\r\n",
    b"-NOPERM no permissions\r\n",
    b"-MOVED 1 127.0.0.1:1\r\n",
    b"-ERR something\r\n",
    b"*1\r\n+OK\r\n",
    b">1\r\n+invalidate\r\n",
    b"no protocol of Redis\r\n",
]


STEPS = [
    (read, b"GETRANGE", 0),
    (read, b"GETRANGE", 1),
    (read, b"GETRANGE", 5),
    (write, b"EXISTS", 0),
    (write, b"SET", 0),
]
"""What is asked of the tier, and the command of it that is not answered as it should be."""


@pytest.mark.parametrize("said", REFUSALS)
@pytest.mark.parametrize("step", STEPS)
def test_a_refusal_is_an_error_and_the_connection_is_not_used_again(server, tier, step, said):
    """At whatever step; a master that has become a replica is so asked for no more. Then all is as before."""
    operate, command, after = step
    server.odd = answers(command, [said], after)
    assert operate(tier) is Outcome.ERROR
    assert server.connections == 1
    server.odd = lambda _: None
    assert operate(tier) is Outcome.OK
    assert server.connections == 2


@pytest.mark.parametrize("after", [0, 1, 4])
@pytest.mark.parametrize("said", [b"$-2\r\n", b"$99999999\r\n", b"$abc\r\n", b":1\r\n"])
def test_a_length_that_was_not_asked_for_is_an_error(server, tier, said, after):
    """Neither damage nor a miss: who knows what it belongs to."""
    server.odd = answers(b"GETRANGE", [said], after)
    assert read(tier) is Outcome.ERROR
    server.odd = lambda _: None
    assert read(tier) is Outcome.OK


def test_what_comes_unasked_is_no_answer(server, tier):
    """A connection on which something still lies is not used."""
    server.odd = answers(b"SET", [b"+OK\r\n$3\r\nabc\r\n"])
    assert write(tier) is Outcome.OK
    assert read(tier) is Outcome.OK
    assert server.connections == 2


def test_answers_as_they_should_be_take_one_connection(server, tier):
    """Chunks and misses in turn."""
    for _ in range(3):
        assert [read(tier), write(tier)] == [Outcome.OK] * 2
        server.odd = answers(b"GETRANGE", [b"$0\r\n\r\n"])
        assert read(tier) is Outcome.MISS
        server.odd = lambda _: None
    assert server.connections == 1


@pytest.mark.parametrize("windows", [1, 2])
def test_a_header_and_the_first_windows_are_one_round_trip(server, tier, windows):
    """A server that answers only when all of it is asked for would be waited for in vain otherwise."""
    data, asked = payload(b"key", windows * WINDOW_BYTES), []
    server.value = Header.of(A, b"key", view(data), MINE).encode() + data.tobytes()

    def answered_together(words):
        if words[0] != b"GETRANGE":
            return None
        asked.append(server.answer(words))
        return asked if len(asked) > windows else []

    server.odd = answered_together
    assert read_chunk(tier, A, b"key", len(data))[0] is Outcome.OK


@pytest.mark.parametrize("step", STEPS)
def test_a_server_that_trickles_cannot_stretch_an_operation(server, step):
    """Every byte comes within the time-out, and all of them never would."""
    operate, command, after = step
    length = HEADER_BYTES if after == 0 else WINDOW_BYTES
    data = b"+" + b"x" * 500 if operate is write else b"$%d\r\n" % length + bytes(length)

    def trickled():
        server.odd = answers(command, server.slowly(data), after)
        with opened(server, TIMEOUT_S) as tier:
            started = time.monotonic()
            assert operate(tier) is Outcome.TIMEOUT
            return time.monotonic() - started

    assert at_best(trickled, 2 * TIMEOUT_S + SLACK_S)


def test_a_server_that_takes_nothing_cannot_either(server):
    """What is sent lies in the kernel's buffers, and no more goes into them."""
    server.odd = lambda words: server.silently(b":0\r\n") if words[0] == b"EXISTS" else None

    def stuck():
        with opened(server, TIMEOUT_S) as tier:
            started = time.monotonic()
            assert tier.write(A, b"new", memoryview(bytes(32 << 20)), MINE) is Outcome.TIMEOUT
            return time.monotonic() - started

    assert at_best(stuck, 2 * TIMEOUT_S + SLACK_S)


def test_asking_in_vain_for_a_master_keeps_no_connection():
    """A remote behind Sentinels that know none is probed every second, for days: what was made for it is used again."""
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        port = silent.getsockname()[1]
    tier = redis_tier(f"redis+sentinel://127.0.0.1:{port}/chunks/0", timeout_s=TIMEOUT_S)
    assert [tier.present(A, [b"key"])[0] for _ in range(20)] == [Outcome.ERROR] * 20
    assert len(tier._redis.connection_pool._connections) <= 2
    tier.close()
