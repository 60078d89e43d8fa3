"""Many connections served by one thread."""

import os
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from connector.stores import amid, eventually
from tiertune_connector.protocol.frames import Frames
from tiertune_connector.protocol.glance import Glance
from tiertune_connector.protocol.messages import Abort, NewSegment, Reply, Welcome
from tiertune_connector.serve import turns
from tiertune_connector.serve.connection import Connection
from tiertune_connector.serve.turns import Turns

WORDS = "word " * 2000


@pytest.fixture
def pair():
    """A connection of the store's, and the client's frames."""
    here, there = socket.socketpair()
    here.setblocking(False)
    connection = Connection(here)
    yield connection, Frames(there, Reply), there
    connection.close()
    connection.peer.forget()
    there.close()


class Served:
    """Connections that are served once ``start`` is called; ``ended`` are those that are no more."""

    def __init__(self, handle, count=1):
        self.ended = []
        self._turns = Turns(handle, self._end)
        pairs = [socket.socketpair() for _ in range(count)]
        for here, _ in pairs:
            here.setblocking(False)
        self.connections = [Connection(here) for here, _ in pairs]
        self.sockets = [there for _, there in pairs]
        for connection in self.connections:
            self._turns.add(connection)
        self._thread = threading.Thread(target=self._turns.run)
        self.start = self._thread.start

    def __enter__(self):
        return self

    def __exit__(self, *_):
        """All that was said is handled before."""
        for sock in self.sockets:
            sock.close()
        self._turns.stop()
        self._thread.join(10)
        assert not self._thread.is_alive()
        self._turns.close()
        assert {connection for connection, _ in self.ended} == set(self.connections)

    def clients(self):
        return [Frames(sock, Reply) for sock in self.sockets]

    def _end(self, connection, error):
        connection.close()
        connection.peer.forget()
        self.ended.append((connection, error))


def stick(connection):
    """Its client takes nothing, until its socket takes no more."""
    while not connection.stuck:
        connection.send(Welcome("", WORDS))


def copies(descriptor):
    """How many descriptors of this process are of the same file."""
    count, inode = 0, os.fstat(descriptor).st_ino
    for each in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # of another thread, and closed meanwhile
            count += os.fstat(int(each.name)).st_ino == inode
    return count


def test_who_says_much_waits_for_who_says_little():
    """A message of each in turn: one after a hundred of another's is handled second."""
    said = []
    with Served(lambda connection, message: said.append((connection, message.keys)), 2) as served:
        much, little = served.clients()
        for number in range(100):
            much.send(Abort([b"%d" % number]))
        little.send(Abort([b"x"]))
        served.start()
        eventually(lambda: len(said) == 101)
    talker, other = served.connections
    assert (other, [b"x"]) in said[:3]
    assert [keys for connection, keys in said if connection is talker] == [[b"%d" % number] for number in range(100)]


@pytest.mark.parametrize(("speakers", "looks"), [(1, True), (2, False)])
def test_the_store_looks_for_the_next_question_where_one_client_asks_alone(speakers, looks, monkeypatch):
    """Where several do, the processor that a look takes may be the one that a client needs."""
    looked, said = [], []

    class Looked(Glance):
        def comes(self):
            looked.append(len(said))
            return super().comes()

    monkeypatch.setattr(turns, "Glance", Looked)
    with Served(lambda _, message: said.append(message.keys), speakers) as served:
        served.start()
        for number in range(6):
            served.clients()[number % speakers].send(Abort([b"k"]))
            eventually(lambda number=number: len(said) > number)
        assert bool([after for after in looked if after < 6]) == looks


@pytest.mark.parametrize(("speakers", "yields"), [(1, False), (2, True)])
def test_the_processor_is_offered_where_several_clients_speak_at_once(speakers, yields, monkeypatch):
    """One that has its answer may wait for it; a client alone does not, and whoever else computes could keep it."""
    offered, said = [], []
    monkeypatch.setattr(turns.os, "sched_yield", lambda: offered.append(len(said)))
    with Served(lambda _, message: said.append(message.keys), speakers) as served:
        for client in served.clients():
            for _ in range(3):
                client.send(Abort([b"k"]))
        served.start()
        eventually(lambda: len(said) == 3 * speakers)
    assert offered == ([2, 4, 6] if yields else [])


def test_what_was_said_before_the_end_is_handled():
    """Then the end is told, once; also where all is to stop."""
    said = []
    with Served(lambda _, message: said.append(message), 2) as served:
        one, other = served.clients()
        for _ in range(10):
            one.send(Abort([b"k"]))
        served.sockets[0].close()
        served.start()
        eventually(lambda: served.ended)
        assert len(said) == 10
        for _ in range(10):
            other.send(Abort([b"k"]))
    assert len(said) == 20
    assert [type(error) for _, error in served.ended] == [EOFError, EOFError]


def test_a_failure_ends_one_connection_and_no_other():
    """Whatever it is."""
    said = []

    def handle(_, message):
        said.append(message.keys)
        if message.keys == [b"bad"]:
            raise RuntimeError("a defect")

    with Served(handle, 2) as served:
        bad, good = served.clients()
        bad.send(Abort([b"bad"]))
        bad.send(Abort([b"more"]))
        good.send(Abort([b"one"]))
        served.start()
        eventually(lambda: served.ended)
        assert [connection for connection, _ in served.ended] == served.connections[:1]
        good.send(Abort([b"two"]))
        eventually(lambda: [b"two"] in said)
    assert [b"more"] not in said


def test_a_client_that_does_not_take_its_answers_is_heard_again_when_it_does():
    """Nobody waits for it; nothing is lost, or out of order."""
    answered = []

    def handle(connection, message):
        answered.append(message)
        connection.send(Welcome(str(len(answered)), WORDS))

    with Served(handle) as served:
        (client,), (connection,) = served.clients(), served.connections
        served.start()
        for _ in range(200):
            client.send(Abort([b"k"]))
        eventually(lambda: connection.stuck)
        assert len(answered) < 200
        replies = client.receive()
        assert [int(next(replies).boot_id) for _ in range(200)] == list(range(1, 201))
        eventually(lambda: not connection.stuck)
        client.send(Abort([b"again"]))
        assert next(replies).boot_id == "201"


def test_what_several_threads_send_comes_to_a_client_that_reads():
    """However often it is stuck for a moment: no wake-up is lost."""
    each, senders = 400, 4
    with Served(lambda *_: None) as served:
        (client,), (connection,) = served.clients(), served.connections
        served.sockets[0].settimeout(10)
        served.start()

        def send(*_):
            for _ in range(each):
                connection.send(Welcome("", WORDS))

        with amid(send, senders):
            replies = client.receive()
            assert sum(1 for _ in zip(range(each * senders), replies, strict=False)) == each * senders


def test_what_a_client_takes_in_many_pieces_is_whole(pair):
    """Replies longer than a socket holds follow piece by piece, nothing left out and nothing twice."""
    connection, frames, _ = pair
    replies = [Welcome(name, name * (1 << 20)) for name in ("a", "b")]
    for reply in replies:
        connection.send(reply)
    while not connection.flush():
        frames.read()
    received = frames.receive()
    assert [next(received) for _ in replies] == replies
    assert connection.stuck_s() == 0.0


def test_a_stuck_client_is_watched_from_when_it_is_added():
    """What it was sent before included."""
    here, there = socket.socketpair()
    here.setblocking(False)
    connection = Connection(here)
    sent = 0
    while not connection.stuck:
        connection.send(Welcome(str(sent), WORDS))
        sent += 1
    turns = Turns(lambda *_: None, lambda *_: connection.close())
    turns.add(connection)
    thread = threading.Thread(target=turns.run)
    thread.start()
    there.settimeout(10)
    replies = Frames(there, Reply).receive()
    assert [int(next(replies).boot_id) for _ in range(sent)] == list(range(sent))
    there.close()
    turns.stop()
    thread.join(10)
    turns.close()
    connection.peer.forget()


def test_a_client_that_takes_little_is_not_one_that_takes_nothing(pair):
    """How long it is stuck counts from what it took last."""
    connection, _, sock = pair
    stick(connection)
    for _ in range(50):
        connection.send(Welcome("", WORDS))
    eventually(lambda: connection.stuck_s() > 0.2)
    taken = 0
    while taken < 100_000:  # a socket has room again once much of it was read
        taken += len(sock.recv(1 << 16))
    before = time.monotonic()
    assert not connection.flush()
    assert 0 < connection.stuck_s() < time.monotonic() - before


def test_what_waits_for_a_client_is_bounded(pair, monkeypatch):
    """One that takes nothing, and whose answers come from other threads, is given up before it takes all memory."""
    monkeypatch.setattr("tiertune_connector.serve.connection._MOST_UNSENT_BYTES", 1 << 20)
    connection, _, _ = pair
    while connection._unsent_bytes < (1 << 20) - 2 * len(WORDS):
        connection.send(Welcome("", WORDS))
    with pytest.raises(OSError, match="wait for a client"):
        connection.send(Welcome("", 3 * WORDS))


def test_descriptors_wait_with_their_messages(pair):
    """They come in their order, and none is left open when the connection closes before."""
    connection, client, sock = pair
    files = [os.memfd_create(f"f{number}") for number in range(3)]
    inodes = [os.fstat(fd).st_ino for fd in files]
    stick(connection)
    for number, fd in enumerate(files):
        connection.send(NewSegment(number, 1, 4096), fd)
    assert [copies(fd) for fd in files] == [2, 2, 2]
    replies = client.receive()
    taken = 0
    sock.setblocking(False)
    while taken < 3:
        connection.flush()
        taken += isinstance(next(replies), NewSegment)
    assert [os.fstat(fd).st_ino for fd in client.descriptors] == inodes
    assert [copies(fd) for fd in files] == [2, 2, 2], "ours, and those that came"
    client.close()
    stick(connection)
    connection.send(NewSegment(4, 1, 4096), files[0])
    assert copies(files[0]) == 2
    connection.close()
    assert copies(files[0]) == 1
    for fd in files:
        os.close(fd)


def test_a_descriptor_that_can_be_sent_needs_no_other(pair):
    """A store that has none left still tells clients of its segments."""
    connection, client, _ = pair
    descriptor = os.memfd_create("f")
    connection.send(NewSegment(1, 1, 4096), descriptor)
    assert copies(descriptor) == 1
    assert next(client.receive()) == NewSegment(1, 1, 4096)
    assert os.fstat(client.descriptors[0]).st_ino == os.fstat(descriptor).st_ino
    client.close()
    os.close(descriptor)


def test_nothing_can_be_sent_once_it_is_closed(pair):
    """Whoever tries is told."""
    connection, _, _ = pair
    connection.close()
    with pytest.raises(OSError, match="closed"):
        connection.send(Welcome(""))
