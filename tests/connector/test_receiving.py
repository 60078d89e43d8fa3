"""Who receives: the one who waits for a reply, else a thread of its own; nobody is forgotten when they take turns."""

import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager

import msgspec
import pytest

from connector.stores import Engine, chain, eventually, running
from tiertune_connector.client.receiving import PendingReply, Receiver
from tiertune_connector.protocol.frames import Frames
from tiertune_connector.protocol.messages import CommitReply, Reply

PATIENCE_S = 10.0


class Line:
    """A receiver on one end of a socket, with a future for every number."""

    def __init__(self) -> None:
        self.here, self.there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.store = Frames(self.there, Reply)
        self.receiver = Receiver(self.here, Frames(self.here, Reply), self.take, lambda: None)
        self.asked = {number: PendingReply[str](self.receiver) for number in range(100)}
        self.ended: list[BaseException] = []
        self.interrupt: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        self._thread.start()

    def take(self, message: object) -> None:
        if self.interrupt is not None:
            raise self.interrupt
        if isinstance(message, CommitReply):
            self.asked[message.id].set_result(threading.current_thread().name)

    def answer(self, *numbers: int) -> None:
        for number in numbers:
            self.store.send(CommitReply(number, []))

    def stop(self) -> None:
        self.there.close()
        if self._thread.ident is not None:
            self._thread.join(PATIENCE_S)
            assert not self._thread.is_alive()
        self.receiver.close()
        self.here.close()

    def _run(self) -> None:
        try:
            self.receiver.run()
        except BaseException as error:  # noqa: BLE001 (whatever it is, the tests look at it)
            self.ended.append(error)


@contextmanager
def line(*, started: bool = True) -> Iterator[Line]:
    made = Line()
    if started:
        made.start()
    try:
        yield made
    finally:
        made.stop()


def test_who_waits_receives_and_hands_others_theirs():
    """Even where no other thread receives at all."""
    with line(started=False) as made:
        made.answer(2, 1, 3)
        me = threading.current_thread().name
        assert [made.asked[number].result(PATIENCE_S) for number in (3, 2, 1)] == [me] * 3


def test_what_has_come_is_taken_without_waiting():
    """By whose it is, and with it what came for others; of what has not come nobody hears."""
    with line(started=False) as made:
        made.answer(2, 1)
        assert made.asked[1].result(0) == threading.current_thread().name
        assert made.asked[2].done()
        with pytest.raises(TimeoutError):
            made.asked[3].result(0)


def test_without_one_who_waits_replies_come_all_the_same():
    """By the thread that is there for it; callbacks run."""
    with line() as made:
        came: list[int] = []
        for number in range(5):
            made.asked[number].add_done_callback(lambda _, number=number: came.append(number))
        made.answer(*range(5))
        assert wait([made.asked[number] for number in range(5)], PATIENCE_S).not_done == set()
        eventually(lambda: came == list(range(5)))


def test_who_waits_in_vain_leaves_in_time_and_the_reply_still_comes():
    """The thread takes over; nothing that came in between is lost."""
    with line() as made:
        for timeout_s in (0, 0.02):
            with pytest.raises(TimeoutError):
                made.asked[1].result(timeout_s)
        made.answer(1)
        eventually(made.asked[1].done)


def test_several_wait_at_once_and_each_gets_its_own():
    """Only one of them receives; when it leaves, the others are served as well."""
    with line() as made, ThreadPoolExecutor(20) as threads:
        waiting = [threads.submit(made.asked[number].result, PATIENCE_S) for number in range(20)]
        for number in reversed(range(20)):
            made.answer(number)
        assert len([future.result(PATIENCE_S) for future in waiting]) == 20


def test_messages_read_with_the_greeting_are_taken():
    """They are in the buffer already: nothing on the socket tells of them."""
    with line(started=False) as made:
        made.answer(1, 2)
        assert next(made.receiver.frames.receive()) == CommitReply(1, [])
        made.start()
        eventually(made.asked[2].done)
        assert not made.asked[1].done()


@pytest.mark.parametrize("patience_s", [None, PATIENCE_S])
def test_the_end_of_the_connection_ends_the_waiting(patience_s):
    """Who received leaves; the owner of the connection is told, and resolves what is pending."""
    with line() as made, ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(made.receiver.receive, made.asked[1].done, patience_s)
        made.there.shutdown(socket.SHUT_RDWR)
        waiting.result(PATIENCE_S)
        eventually(lambda: [type(error) for error in made.ended] == [EOFError])


@pytest.mark.parametrize(
    ("data", "error"),
    [(struct.pack("<I", 1 << 31), msgspec.DecodeError), (struct.pack("<I", 1) + b"\xff", msgspec.ValidationError)],
)
def test_nonsense_that_one_who_waits_receives_ends_the_connection(data, error):
    """It is told where the thread would have told it."""
    with line(started=False) as made:
        made.there.sendall(data)
        made.receiver.receive(made.asked[1].done, None)
        made.start()
        eventually(lambda: [type(ended) for ended in made.ended] == [error])
        assert made.there.recv(1) == b""


def test_one_who_is_interrupted_while_receiving_leaves_no_half_message():
    """It may have lost one: the connection ends, and with it every wait."""
    with line(started=False) as made:
        made.interrupt = KeyboardInterrupt()
        made.answer(1)
        with pytest.raises(KeyboardInterrupt):
            made.asked[2].result(PATIENCE_S)
        made.start()
        eventually(lambda: [type(ended) for ended in made.ended] == [ConnectionAbortedError])


def test_after_the_close_nobody_receives():
    """A descriptor that is closed may be another file's a moment later."""
    with line(started=False) as made:
        made.answer(1)
        made.receiver.close()
        with pytest.raises(TimeoutError):
            made.asked[1].result(0.01)


def test_many_threads_on_one_client_all_get_what_they_asked(home):
    """Each at times receives itself, at times leaves it to the others."""
    with running(home) as store, Engine(store) as engine:
        keys = chain("k", 10)
        engine.put_all(keys)

        def ask(number: int) -> None:
            for turn in range(200):
                length = 1 + (number + turn) % 10
                future = engine.client.lookup(f"r{number}", keys[:length], prompt_tokens=16 * length)
                if not turn % 3:
                    assert wait([future], PATIENCE_S).done
                assert len(future.result(PATIENCE_S if turn % 2 else None).tiers) == length

        with ThreadPoolExecutor(6) as threads:
            list(threads.map(ask, range(6)))
        assert engine.get(keys) == 10
        assert engine.client.errors == 0
