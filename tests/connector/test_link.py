"""What is said over a link, and when it goes out."""

import socket
import struct
import threading
from contextlib import suppress
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from connector.peers import hello
from connector.stores import short_folder
from tiertune_connector.client import link as links
from tiertune_connector.client.link import StoreLink
from tiertune_connector.protocol.frames import Frames
from tiertune_connector.protocol.messages import Commit, Hello, Release, Request, Welcome

PATIENCE_S = 10.0


class Store:
    """The other end, which hears and says nothing but welcome."""

    def __init__(self, path):
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(str(path))
        self.listener.listen(4)
        self.listener.settimeout(PATIENCE_S)

    def accept(self, refusal=""):
        self.sock, _ = self.listener.accept()
        self.sock.settimeout(PATIENCE_S)
        frames = Frames(self.sock, Request)
        heard = frames.receive()
        assert isinstance(next(heard), Hello)
        frames.send(Welcome("boot", refusal))
        return heard

    def close(self):
        self.sock.close()
        self.listener.close()


@pytest.fixture
def ends():
    with short_folder() as folder:
        store = Store(folder / "s")
        link = StoreLink(str(folder / "s"), hello())
        link.connect(0)
        heard = store.accept()
        assert link.connect(PATIENCE_S)
        yield link, heard
        link.close()
        store.close()


@pytest.fixture
def quiet(ends):
    """The same, of a link that tells nothing by itself."""
    ends[0]._live.receiver.tick = lambda: None
    return ends


def test_a_user_of_a_large_number_is_known():
    """Linux has four billion of them."""
    link = StoreLink("s", hello(), owner=3_000_000_000)
    assert link._trusts(SimpleNamespace(getsockopt=lambda *_: struct.pack("iII", 1, link.owner, 0)))


def commit(link):
    return link.ask(lambda number: Commit(number, [], []), lambda reply, _: reply)


def test_what_is_told_goes_out_by_itself(ends):
    """Also if nothing is asked any more: a pinned chunk does not wait for the next request."""
    link, heard = ends
    link.tell(Release(7, []))
    assert next(heard) == Release(7, [])


def test_what_is_told_goes_before_what_is_asked_after_it(ends, monkeypatch):
    """In one piece: the store is woken once, and a release makes room for the reserve behind it."""
    link, heard = ends
    sent = []
    monkeypatch.setattr(Frames, "put", lambda self, encoded: sent.append(len(encoded)) or self._socket.sendall(encoded))
    with link._sending:  # a tick waits
        link.tell(Release(1, []))
        link.tell(Release(2, []))
    commit(link)
    assert [type(next(heard)) for _ in range(3)] == [Release, Release, Commit]
    assert len(sent) <= 2


def test_many_that_are_told_do_not_wait_for_a_tick(quiet):
    """They are not kept without bound."""
    link, heard = quiet
    told = 0
    while not told or link._untold:
        told += 1
        link.tell(Release(told, []))
    assert told * len(link._live.frames.encode(Release(told, []))) >= links._MOST_UNTOLD_BYTES
    assert [next(heard).lease for _ in range(told)] == list(range(1, told + 1))


def test_who_tells_does_not_wait_for_a_store_that_does_not_listen(quiet):
    """What it does not take is kept until it does; nothing is lost, and the connection holds."""
    link, heard = quiet
    told = 0
    while link._live.frames.takes():
        told += 1
        link.tell(Release(told, [bytes(32)] * 100))
    before = len(link._untold)
    while len(link._untold) < 2 * links._MOST_UNTOLD_BYTES:
        told += 1
        link.tell(Release(told, [bytes(32)] * 100))
    assert len(link._untold) > before
    asking = threading.Thread(target=commit, args=[link])  # it waits until there is room
    asking.start()
    assert [next(heard).lease for _ in range(told)] == list(range(1, told + 1))
    assert isinstance(next(heard), Commit)
    asking.join(PATIENCE_S)


def test_the_end_tells_what_was_not_told(quiet):
    """What became of the last requests is not lost."""
    link, heard = quiet
    link.tell(Release(9, []))
    link.close()
    assert [message.lease for message in heard] == [9]


def test_what_is_meant_for_another_connection_is_not_said(ends):
    """A lease's number means something else to a store that was restarted."""
    link, heard = ends
    link.tell(Release(1, []), connection=0)
    assert not link.send(Release(2, []), connection=0)
    link.tell(Release(3, []), connection=1)
    assert next(heard).lease == 3


def test_a_tick_does_not_wait_for_who_sends(quiet):
    """The thread that would wait is the one that receives, and the store may wait for that."""
    link, heard = quiet
    link.tell(Release(1, []))
    with link._sending:
        link._tell_all()
        assert link._untold == link._live.frames.encode(Release(1, []))
    link._tell_all()
    assert next(heard).lease == 1


def test_a_tick_does_not_wait_for_a_store_that_does_not_read(quiet):
    """What was told waits with what was told before."""
    link, _ = quiet
    link._socket.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            link._socket.send(bytes(1 << 16))
    link._socket.setblocking(True)
    link.tell(Release(1, []))
    link._tell_all()
    assert link._untold == link._live.frames.encode(Release(1, []))
    assert link.connected


def test_a_question_that_cannot_be_said_takes_nothing_with_it(quiet):
    """It alone fails, for who asked it."""
    link, heard = quiet
    link.tell(Release(1, []))
    with pytest.raises(TypeError):
        link.send(Release(object(), []))
    link.send()
    assert next(heard).lease == 1


def test_a_question_of_a_lost_connection_is_not_asked_on_the_next(ends):
    """It names slots that may be another's by now."""
    link, heard = ends
    asked = link.ask(lambda number: Commit(number, [], []), lambda reply, _: reply, link._connection - 1)
    assert asked.result(0) is None
    link.send(Release(1, []))
    assert next(heard).lease == 1


def test_a_store_that_refuses_is_not_used():
    """Even if it stays on the line: the link hangs up, and tells why."""
    with short_folder() as folder:
        store = Store(folder / "s")
        link = StoreLink(str(folder / "s"), hello())
        link.connect(0)
        heard = store.accept("no room")
        assert next(heard, None) is None
        assert (link.refusal, link.boot_id, link.connected) == ("no room", "", False)
        link.close()
        store.close()


def test_a_link_whose_store_is_away_pauses_before_it_tries_again():
    """Else an engine without a store would keep a processor busy."""
    link = StoreLink("/nowhere/s", hello())
    link._closed = Mock(**{"is_set.side_effect": [False, False, True]})
    link._keep_connected()
    link._closed.wait.assert_called_once_with(links._RECONNECT_S)
    assert link.failure == "No such file or directory"


def test_a_link_that_is_closed_before_it_has_connected_does_not_connect(ends):
    """However late its thread begins."""
    link, _ = ends
    late = StoreLink(link.path, link.hello)
    late._closed.set()
    late._converse()
    assert late._socket is None
    assert not late.connected


def test_a_socket_that_is_closed_takes_nothing():
    """A moment later the link forgets it; who tells or looks up meanwhile must not fail."""
    ours, theirs = socket.socketpair()
    frames = Frames(ours, Request)
    assert (frames.takes(), frames.ended()) == (True, False)
    ours.close()
    assert (frames.takes(), frames.ended()) == (False, True)
    theirs.close()
