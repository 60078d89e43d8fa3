"""Clients that do not fit, talk nonsense or say nothing, and stores that do: nobody else is harmed."""

import contextlib
import itertools
import os
import socket
import struct
import time
from unittest.mock import Mock

import pytest

from connector.peers import dial, hello, raw, say
from connector.stores import CHUNK_BYTES, NAMESPACE, PATIENCE_S, Engine, at_best, chain, eventually
from tiertune_connector.client.store_client import StoreClient
from tiertune_connector.protocol.frames import MAX_FRAME_BYTES, Frames
from tiertune_connector.protocol.messages import Hello, Lookup, NewSegment, Own, Reply, Reserve, ReserveReply, brief

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("greeting", "refusal", "reason"),
    [
        (hello(protocol=99), "protocol 99 is not served, only (1,): the engine has TierTune test", "protocol"),
        (hello(protocol=0), "protocol 0 is not served", "protocol"),
        (hello(chunk_bytes=0), "at least one byte", "chunk_size"),
        (hello(chunk_bytes=CHUNK_BYTES + 1), "another chunk size", "chunk_size"),
    ],
)
def test_a_client_that_does_not_fit_is_refused_with_a_reason(store, http, greeting, refusal, reason):
    """It is told, counted, and the connection ends; others are served."""
    with Engine(store) as engine:
        sock, _, welcome = raw(store.server.path, greeting)
        assert refusal in welcome.refusal
        assert sock.recv(1) == b""
        sock.close()
        engine.put_all(chain("k", 2))
    assert http.total("rejected_hellos_total", reason=reason) == 1


@pytest.mark.parametrize(
    ("greeting", "why"),
    [
        (["hello", 99, "test"], "at least length"),
        (["hallo"], "Invalid value 'hallo'"),
        (["hello", 1, "test", "c", "e", "all", {"model": "m", "wanted": 1}, 64, 16], "unknown field `wanted`"),
    ],
)
def test_a_client_whose_greeting_is_not_understood_is_told_so(store, http, greeting, why):
    """One of another version does not see a connection that ends for no reason."""
    with dial(store.server.path) as sock:
        say(sock, greeting)
        welcome = next(Frames(sock, Reply).receive())
        assert "a version that greets otherwise" in welcome.refusal
        assert why in welcome.refusal
        assert sock.recv(1) == b""
    assert http.total("rejected_hellos_total", reason="protocol") == 1


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        os.urandom(5000),
        b"\0" * 100,
        struct.pack("<I", 0xFFFFFFFF),
        struct.pack("<I", 10) + b"short",
        b"",
    ],
)
def test_garbage_on_the_socket_harms_nobody(store, http, data):
    """Its connection ends; others go on; it is no internal error."""
    with Engine(store) as engine:
        for _ in range(3):
            with dial(store.server.path) as sock:
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
                sock.recv(100)
        engine.put_all(chain("k", 3))
        assert engine.get(chain("k", 3)) == 3
        assert http.total("internal_errors_total") == 0
        eventually(lambda: len(store.server._connections) == 1)


def test_garbage_after_the_greeting_harms_nobody(store, http):
    """What the client held goes; its connection ends. A checksum that fits no header would fail every tier's writes."""
    sum_below_0 = ["commit", 1, [b"key"], [[1, 0, 1, -1]]]
    with Engine(store) as engine:
        for message in ([9], ["welcome", ""], ["lookup", 1], ["load", 1, [b""], 1.0], sum_below_0):
            sock, _, welcome = raw(store.server.path, hello(client=str(message)))
            assert welcome.refusal == ""
            say(sock, message)
            assert sock.recv(100) == b""
            sock.close()
        engine.put_all(chain("k", 3))
        assert http.total("internal_errors_total") == 0


def test_descriptors_that_a_client_sends_are_not_kept(store):
    """They would be the store's until the client goes: nobody else could connect once it has no more of its own."""
    sock, frames, _ = raw(store.server.path, hello())
    reader, sent = os.pipe2(os.O_NONBLOCK)
    with sock, os.fdopen(reader, "rb", buffering=0) as held:
        with os.fdopen(sent, "wb"):
            for _ in range(10):
                socket.send_fds(sock, [frames.encode(Reserve(1, "r", [], b""))], [sent] * 10)
                assert isinstance(next(frames.receive()), ReserveReply)
        assert held.read(1) == b"", "somebody has the other end still"


def test_why_a_connection_ended_is_in_the_log(store, caplog):
    """Also where the client closed it, which is an error without a text."""
    caplog.set_level("INFO", logger="tiertune_connector")
    raw(store.server.path, hello())[0].close()
    eventually(lambda: f"connection of engine (pid {os.getpid()}) ended: closed" in caplog.messages)


@pytest.mark.parametrize("length", [1 << 20, MAX_FRAME_BYTES])
def test_a_request_that_its_caller_gave_a_name_of_megabytes_costs_no_more_than_any(store, engine, http, length):
    """A thousand of these were 1.5 GB of the store, and a longer one ended the engine's connection to it."""
    keys, name = chain("k", 3), "x" * length
    engine.client.lookup(name, keys, prompt_tokens=48, defer=True).result(PATIENCE_S)
    engine.client.tell(Own(brief(name), 1, 0))
    engine.put_all(keys, name)
    assert http.total("tier_lookup_tokens_total", tier="gpu", result="hit") == 16
    (session,) = store.server.sessions()
    assert [len(request) for request in session.chains._kept] == [32]
    assert engine.client.connected


def test_a_client_may_not_greet_twice(store):
    """One session a connection."""
    sock, frames, _ = raw(store.server.path, hello())
    frames.send(hello())
    assert sock.recv(100) == b""
    sock.close()


def test_a_client_that_does_not_read_does_not_stop_the_others(store):
    """Its replies fill its own socket, and nobody else's time."""
    sock, frames, _ = raw(store.server.path, hello(client="deaf"))
    keys = chain("k", 2000)
    with Engine(store) as engine:
        sock.settimeout(0.05)
        with contextlib.suppress(OSError):
            for number in range(1000):
                frames.send(Reserve(number, "r", keys, b""))

        def served() -> float:
            started = time.monotonic()
            assert engine.put([b"k"]) in ([""], ["full"], ["present"])
            assert engine.find([b"x"]) == []
            return time.monotonic() - started

        assert at_best(served, 2.0)
    sock.close()
    eventually(lambda: store.server.sessions() == [], timeout_s=15)


def test_a_client_that_never_reads_again_is_let_go(store, monkeypatch):
    """What waits for it would wait for ever; it ends though its side stays open."""
    monkeypatch.setattr("tiertune_connector.serve.server._STUCK_S", 0.2)
    sock, frames, _ = raw(store.server.path, hello(client="deaf"))
    sock.settimeout(PATIENCE_S)  # it asks until it is let go, however slow the store is
    with contextlib.suppress(OSError):
        for number in range(1000):
            frames.send(Reserve(number, "r", chain("k", 2000), b""))
    eventually(lambda: store.server.sessions() == [], timeout_s=15)
    sock.close()


def test_a_client_need_not_wait_for_its_welcome(store):
    """What it says right behind its greeting is answered, after that."""
    with dial(store.server.path) as sock:
        ends = Frames(sock, Reply)
        sock.sendall(ends.encode(hello()) + ends.encode(Lookup(7, "r", chain("k", 1), 16, b"")))
        welcome, reply = itertools.islice(ends.receive(), 2)
        assert (welcome.refusal, reply.id, reply.tiers) == ("", 7, [])


def test_a_client_that_says_nothing_is_let_go(store, monkeypatch):
    """Or one that says half a word: there is no thread for each of them for ever."""
    monkeypatch.setattr("tiertune_connector.serve.server._HELLO_TIMEOUT_S", 2.0)
    with contextlib.ExitStack() as opened:
        socks = [opened.enter_context(dial(store.server.path)) for _ in range(2)]
        socks[1].sendall(b"\1\0")
        for sock in socks:
            sock.settimeout(PATIENCE_S)
            assert sock.recv(1) == b""


@contextlib.contextmanager
def greeted(home):
    """A client, and what awaits and greets its next connection in the place of a store."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(home / "s.sock"))
        listener.listen()
        client = StoreClient(home / "s.sock", NAMESPACE, chunk_bytes=CHUNK_BYTES, chunk_tokens=16, engine="e")
        assert not client.connect(timeout_s=0)

        def greet(greeting: list | None = ("welcome", "boot")) -> tuple[socket.socket, Frames]:
            sock, _ = listener.accept()
            frames = Frames(sock, Hello | Lookup)
            next(frames.receive())
            if greeting is not None:
                say(sock, greeting)
            return sock, frames

        yield client, greet
        client.close()


@pytest.mark.parametrize(
    ("greeting", "why"),
    [
        (["welcome", 1, "0.1", "boot", "host-a", ""], "a version that greets otherwise: Expected `str`, got `int`"),
        (None, "ended the connection without a greeting"),
    ],
)
def test_a_store_that_greets_in_another_way_is_not_used_and_the_client_says_why(home, greeting, why):
    """One of another version, which the operator of the engine would look for in vain."""
    with greeted(home) as (client, greet):
        greet(greeting)[0].close()
        eventually(lambda: why in client.refusal + client.failure)


def test_pending_futures_resolve_when_the_connection_goes(home):
    """A server that never answers, and hangs up."""
    with greeted(home) as (client, greet):
        sock, _ = greet()
        eventually(lambda: client.connected)
        futures = [
            client.lookup("r", chain("k", 2), prompt_tokens=32),
            client.load(chain("k", 2), deadline_s=100),
            client.reserve(chain("k", 2)),
        ]
        assert not any(future.done() for future in futures)
        sock.close()
        lookup, load, reserve = (future.result(5) for future in futures)
        assert (lookup.tiers, load.outcomes, reserve.slots) == ([], ["error", "error"], [None, None])


@pytest.mark.parametrize("reply", [b"\xff" * 10, b"\x04\0\0\0junk", struct.pack("<I", 1 << 31)])
def test_a_store_that_talks_nonsense_is_left(home, reply):
    """The client reconnects, and waits for no answer."""
    with greeted(home) as (client, greet):
        for _ in range(2):
            sock, _ = greet()
            eventually(lambda: client.connected)
            future = client.lookup("r", chain("k", 1), prompt_tokens=16)
            sock.sendall(reply)
            sock.shutdown(socket.SHUT_WR)
            assert future.result(5).tiers == []
            sock.close()


def test_a_reply_about_other_chunks_than_asked_is_none(home):
    """A store that answers for fewer has reserved nothing that could be written."""
    with greeted(home) as (client, greet):
        sock, _ = greet()
        eventually(lambda: client.connected)
        future = client.reserve(chain("k", 2))
        say(sock, ["reserved", 1, [None], ["full"]])
        assert future.result(5).reasons == ["unreachable"] * 2
        sock.close()


def test_a_failure_of_the_clients_own_costs_it_one_connection(store, monkeypatch):
    """It is counted, and the next one is kept."""
    monkeypatch.setattr(
        StoreClient, "_trusts", Mock(side_effect=itertools.chain([RuntimeError], itertools.repeat(True)))
    )
    client = StoreClient(store.server.path, NAMESPACE, chunk_bytes=CHUNK_BYTES, chunk_tokens=16, engine="e")
    assert client.connect(PATIENCE_S)
    assert client.errors == 1
    client.close()


def test_a_segment_without_its_descriptor_ends_only_the_connection(home):
    """A process that has run out of descriptors loses chunks, not its client."""
    with greeted(home) as (_, greet):
        for _ in range(2):
            sock, frames = greet()
            frames.send(NewSegment(1, 4, CHUNK_BYTES))
            assert sock.recv(1) == b""
            sock.close()
