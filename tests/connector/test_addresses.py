"""Addresses of the remote: what each form means, what is refused, and that nothing secret is repeated."""

import pytest

from tiertune_connector.addresses import parse_address, parse_addresses


@pytest.mark.parametrize(
    ("url", "told", "user"),
    [
        ("redis://cache", "redis://cache:6379/0", None),
        ("redis://tiertune@cache:7/3", "redis://cache:7/3", "tiertune"),
        ("rediss://a%40b@cache", "rediss://cache:6379/0", "a@b"),
        ("redis://[::1]:7/1", "redis://[::1]:7/1", None),
        ("unix:///run/redis.sock", "unix:///run/redis.sock?db=0", None),
        ("unix://tiertune@/run/redis.sock?db=2", "unix:///run/redis.sock?db=2", "tiertune"),
        ("redis+sentinel://a,b:7/chunks", "redis+sentinel://a:26379,b:7/chunks/0", None),
        ("rediss+sentinel://me@a:1/chunks/4", "rediss+sentinel://a:1/chunks/4", "me"),
    ],
)
def test_every_form_says_where_a_redis_is(url, told, user):
    """Ports and database have their defaults; the address as it is told has no user."""
    address = parse_address(url)
    assert (str(address), address.user) == (told, user)
    assert str(parse_address(told)) == told


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("memcached://cache", "expected a redis://"),
        ("redis://", "an address needs a host"),
        ("redis://cache..west:7/0", "parts of 1 to 63 characters"),
        (f"redis+sentinel://a,{'b' * 64}/chunks", "parts of 1 to 63 characters"),
        ("redis://cache:port/0", "a port is a number"),
        ("redis://cache:70000/0", "a port is a number"),
        ("redis://cache/first", "the number of a database"),
        ("redis://cache/0?socket_timeout=9", "no options after a"),
        ("redis://cache/0#x", "no part after #"),
        ("redis://a,b/0", "write them as a list"),
        ("redis://a:0/0", "a port is a number from 1"),
        ("redis://ho st/0", "no spaces"),
        ("redis+sentinel://a:26379", "name the service"),
        ("redis+sentinel://a:26379,/chunks", "an address needs a host"),
        ("unix://cache/socket", "unix:///absolute/path"),
        ("unix:///run/redis.sock?timeout=1", "the only option"),
        ("redis://me:secret@cache", "leave the password out"),
        ("redis://:sec/ret@cache", "leave the password out"),
        ("redis://cache/0?password=secret", "leave the password out"),
        ("unix:///run/redis.sock?password=secret", "leave the password out"),
        ("redis://me:secret@[cache", "cannot be understood"),
    ],
)
def test_what_is_not_understood_says_what_to_mend(url, told):
    """With no part of what may be a password."""
    with pytest.raises(ValueError, match=told) as caught:
        parse_address(url)
    assert "sec" not in str(caught.value)


def test_turning_tls_on_or_naming_a_user_moves_no_chunk():
    """Chunks are spread over server and database alone."""
    assert parse_address("redis://cache:7/1").place == parse_address("rediss://me@cache:7/1").place
    assert parse_address("redis://cache:7/1").place != parse_address("redis://cache:7/2").place


def test_several_are_told_by_their_number_and_none_twice():
    """One maxmemory is counted once, whatever the database."""
    assert [str(one) for one in parse_addresses(["redis://a", "unix:///b"])] == ["redis://a:6379/0", "unix:///b?db=0"]
    with pytest.raises(ValueError, match=r"a port is a number from 1 to 65535 \(address 2 of 2\)"):
        parse_addresses(["redis://a", "redis://b:x"])
    with pytest.raises(ValueError, match="a:6379 is named twice"):
        parse_addresses(["redis://a/0", "rediss://me@a:6379/1"])
    with pytest.raises(ValueError, match="at least one"):
        parse_addresses([])
