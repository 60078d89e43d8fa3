"""An answer is read whole, or not at all: neither a trickle nor a flood holds a round up."""

import gzip
import socket
import threading
import time
import tracemalloc
from contextlib import closing, contextmanager

import httpx
import pytest

from tiertune_agent import engines, network, prewarm
from tiertune_agent.client import call
from tiertune_agent.collector import stores
from tiertune_agent.collector.stores import StoreHttp
from tiertune_agent.credentials import Access
from tiertune_agent.doctor import gathered
from tiertune_agent.network import CallError, read_whole
from tiertune_agent.preview import prometheus
from tiertune_agent.preview.prometheus import Prometheus

pytestmark = pytest.mark.slow


@contextmanager
def sending(part, every_s):
    """A server that sends its parts for ever."""
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            with listener.accept()[0] as connection:
                connection.recv(1000)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n")
                while not ended.wait(every_s):
                    try:
                        connection.sendall(part)
                    except OSError:
                        return

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        ended.set()
        thread.join()


def test_a_trickle_ends_with_its_time():
    """Each part comes in time, the whole does not."""
    with sending(b"# nothing\n", 0.05) as url, httpx.Client(timeout=5) as http:
        began = time.monotonic()
        with pytest.raises(httpx.ReadTimeout, match=r"more than 0\.3 s"):
            read_whole(http, url, within_s=0.3)
        assert time.monotonic() - began < 5


def test_a_flood_ends_with_its_size(monkeypatch):
    """No more is kept than an answer may have."""
    monkeypatch.setattr(network, "MOST_BYTES", 1 << 20)
    told = pytest.raises(httpx.ReadError, match="more than 1048576 bytes")
    with sending(b"x" * 65536, 0.0001) as url, httpx.Client(timeout=5) as http, told:
        read_whole(http, url, within_s=60)


@contextmanager
def answering(head, body):
    """A server of one answer; yields its address, and what it was asked."""
    heard = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            with listener.accept()[0] as connection:
                heard.append(connection.recv(1000).decode())
                told = f"HTTP/1.1 200 OK\r\n{head}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
                connection.sendall(told.encode() + body)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/", heard
        thread.join()


@pytest.mark.parametrize("packed", ["gzip, gzip", "deflate", "zstd"])
def test_an_answer_that_may_grow_without_bound_is_not_unpacked(packed):
    """3 KB that were packed twice were 4 GB of an agent, whose limits ended it: its size was looked at too late."""
    bomb = gzip.compress(gzip.compress(bytes(1 << 24)))
    with answering(f"Content-Encoding: {packed}", bomb) as (url, heard), network.http_client(timeout=5) as http:
        tracemalloc.start()
        with pytest.raises(httpx.DecodingError, match=f"packed by {packed}, not by gzip"):
            read_whole(http, url)
        assert tracemalloc.get_traced_memory()[1] < 1 << 23
        tracemalloc.stop()
    assert "accept-encoding: gzip\r\n" in heard[0].lower()


def test_a_whole_answer_is_one_as_ever():
    """Status, headers and body, also of a body that was packed."""
    packed = gzip.compress(b'{"a": 1}')
    headers = {"Content-Encoding": "GZIP", "X-Told": "yes"}
    answer = httpx.MockTransport(lambda _: httpx.Response(200, content=packed, headers=headers))
    with httpx.Client(transport=answer, base_url="http://a") as http:
        whole = read_whole(http, "/", within_s=5)
    assert (whole.json(), whole.headers["x-told"]) == ({"a": 1}, "yes")
    refusing = httpx.MockTransport(lambda _: httpx.Response(500))
    with httpx.Client(transport=refusing, base_url="http://a") as http, pytest.raises(httpx.HTTPStatusError):
        read_whole(http, "/", within_s=5)


@pytest.mark.parametrize(
    "ask",
    [
        lambda store: store.tuning(),
        lambda store: store.put_tuning({}, expected=1, key="k"),
        lambda store: store.put_sampling({}),
        lambda store: store.post("/v1/bypass", {"on": True}, 0.5),
    ],
    ids=["tuning", "put", "sampling", "post"],
)
def test_nothing_that_is_asked_of_a_store_is_waited_for_without_end(monkeypatch, ask):
    """A change and a command, too, end with their time: one store that trickles would hold every round up."""
    monkeypatch.setattr(stores, "TIMEOUT_S", 0.5)
    with sending(b" ", 0.02) as url:
        store = StoreHttp(url)
        with pytest.raises(httpx.ReadTimeout, match="more than 1 s"):
            ask(store)
        store.close()


def warmed(url):
    with pytest.raises(CallError) as told:
        prewarm.first_model(httpx.Client(timeout=prewarm.TIMEOUT_S), url)
    return str(told.value)


def called(url):
    with pytest.raises(CallError) as told:
        call("GET", url, "/api/v1/fleet", timeout_s=0.5)
    return str(told.value)


def shown(url):
    with closing(Prometheus(url)) as source, pytest.raises(CallError) as told:
        source.scrape_s()
    return str(told.value)


@pytest.mark.parametrize(
    "ask",
    [
        called,
        warmed,
        shown,
        lambda url: gathered.Reader().agent(url).problem,
        lambda url: gathered.Reader().stores({url: ""}, Access())[0].problem,
        lambda url: gathered.Reader().engines([url])[0].problem,
        lambda url: engines.Engines([url]).reset()[url]["reason"],
    ],
    ids=["command", "prewarm", "preview", "doctor: agent", "doctor: store", "doctor: engine", "reset"],
)
def test_no_command_waits_without_end(monkeypatch, ask):
    """Whoever trickles is told of as one who does not answer."""
    for module in (gathered, prewarm, prometheus):
        monkeypatch.setattr(module, "TIMEOUT_S", 0.5)
    monkeypatch.setattr(engines, "RESET_TIMEOUT_S", 0.5)
    with sending(b" ", 0.02) as url:
        assert "the answer took more than 1 s" in ask(url)
