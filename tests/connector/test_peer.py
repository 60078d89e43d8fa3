"""Whether a client's process lives: what tells it, and what is said where nothing does."""

import os
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from connector.stores import Engine, Http, eventually, running
from tiertune_connector.serve import connection as peer
from tiertune_connector.serve.connection import Peer

CLIENT = "import socket, sys; one = socket.socket(socket.AF_UNIX); one.connect(sys.argv[1]); one.recv(1)"
NO_OPTION = 9999


def unknown(*_):
    """As of a process of another pid namespace."""
    raise OSError(3, "No such process")


@pytest.mark.parametrize("by_socket", [True, False], ids=["another pid namespace", "a Linux that knows no such option"])
def test_the_end_of_a_client_is_seen(home, monkeypatch, by_socket):
    """By its socket alone, where its number says nothing here; else by its number."""
    if by_socket:
        monkeypatch.setattr(os, "pidfd_open", unknown)
    else:
        monkeypatch.setattr(peer, "_SO_PEERPIDFD", NO_OPTION)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(home / "c.sock"))
        listening.listen()
        client = subprocess.Popen([sys.executable, "-c", CLIENT, str(home / "c.sock")])
        try:
            sock, _ = listening.accept()
            mine = Peer(sock)
            if mine.process is None and by_socket:
                pytest.skip("this Linux tells no process by its socket (before 6.5)")
            assert not mine.ended()
        finally:
            client.kill()
            client.wait()
        eventually(mine.ended)
        sock.close()
        mine.forget()


def test_a_client_whose_end_cannot_be_seen_is_told_of(home, monkeypatch, caplog):
    """It is served, and the log says what it may cost, and what helps; its number here is none, not 0."""
    monkeypatch.setattr(peer, "struct", SimpleNamespace(unpack=lambda *_: (0, 10001, 10001)))
    monkeypatch.setattr(peer, "_SO_PEERPIDFD", NO_OPTION)
    monkeypatch.setattr(os, "pidfd_open", unknown)
    with running(home) as process, Engine(process) as engine:
        engine.put_all([b"k" * 32])
        with Http(process.address) as http:
            assert [client["pid"] for client in http.get("/v1/status")["clients"]] == [None]
    assert "engine-0 runs where this store cannot see it end" in caplog.text
    assert "share its pid namespace" in caplog.text
