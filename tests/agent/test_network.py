"""Many asked at once, and what a failure is told as."""

import ssl
from threading import Barrier
from unittest.mock import Mock

import httpx
import pytest

from tiertune_agent.network import at_once, http_client, said, web_address


def test_all_are_asked_and_answer_in_their_order():
    """More than are asked at a time; and of none comes nothing."""
    assert at_once(lambda number: -number, range(100)) == [-number for number in range(100)]
    assert at_once(lambda number: -number, []) == []


def test_as_many_silent_servers_as_a_large_fleet_may_lose_take_no_longer_than_one():
    """All of them are asked before any has answered: else a round would be longer than its window."""
    met = Barrier(64)
    assert len(set(at_once(lambda _: met.wait(10), range(64)))) == 64


def test_a_failure_without_a_message_is_told_by_its_kind():
    """An empty reason tells nobody anything."""
    assert said(httpx.ReadTimeout("")) == "ReadTimeout"
    assert said(httpx.ReadTimeout("too late")) == "too late"


def test_an_answer_that_is_no_success_is_told_in_one_line():
    """The library's own message links to a page about the status."""
    asked = httpx.Request("GET", "http://host-a:8000/metrics")
    with pytest.raises(httpx.HTTPStatusError) as caught:
        httpx.Response(404, request=asked).raise_for_status()
    assert said(caught.value) == "it answers 404 Not Found"


def test_clients_share_the_systems_authorities(monkeypatch, tmp_path):
    """Reading them takes longer than an answer, and a large fleet has hundreds of clients. Plain ones need none."""
    monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path))
    read = Mock(wraps=ssl.create_default_context)
    monkeypatch.setattr(ssl, "create_default_context", read)
    http_client(base_url="http://host-a:7410").close()
    assert read.call_count == 0
    for url in ("", "https://host-a:7410", "https://host-b:7410"):
        http_client(base_url=url).close()
    assert read.call_count == 1


NO_ADDRESSES = {
    "write it as x": [
        "host:7410",
        "http://",
        "http://[::1",
        "http://ho st",
        " http://host",
        "http://\u2603.net:1",
        "http://[v1.a]:1",
        "http://[::1]x:7",
        "http://host-a,host-b:7410",
        "http://host..a:7410",
        "http://host/\x01",
    ],
    "a port is a number": ["http://host:7410 ", "http://host:0", "http://host:99999"],
    "no user and no password in an address: y": ["http://anna:secret@host"],
}


@pytest.mark.parametrize(("why", "url"), [(why, url) for why, urls in NO_ADDRESSES.items() for url in urls])
def test_what_is_no_address_is_refused_before_anybody_is_asked(url, why):
    """Looking such a host up would fail as if a server were away; the message repeats no password."""
    with pytest.raises(ValueError, match=f"^{why}") as told:
        web_address(url, "it as x", login="y")
    assert "secret" not in str(told.value)


@pytest.mark.parametrize("url", ["http://host_a:7410", "https://b\u00fccher.example", "http://[fe80::1%eth0]:1/path"])
def test_addresses_are_as_servers_have_them(url):
    """Also of compose files, in other alphabets, and with a zone."""
    assert web_address(url, "it as x", login="y") == url
