"""A storage is measured by the tier that a store has there; whatever happens, nothing is left behind."""

import pytest

from tiertune_connector.documents import DocumentError
from tiertune_connector.serve.measure import CHUNK_BYTES, OPERATIONS, SMALL_BYTES, TIMEOUT_S, measure, storage
from tiertune_connector.settings import RemoteSettings
from tiertune_connector.tiers.base import Outcome


class Slow:
    """A tier on a clock of its own: 2 ms an operation, and 10 ms for a whole chunk."""

    def __init__(self, tier, fail=""):
        self._tier, self._fail, self.now = tier, fail, 0.0

    def write(self, namespace, key, payload, origin):
        self._pass("write", len(payload))
        done = self._tier.write(namespace, key, payload, origin)
        return Outcome.FULL if self._fail == "write" and len(payload) == CHUNK_BYTES else done

    def read(self, namespace, key, out):
        self._pass("read", len(out))
        outcome, origin = self._tier.read(namespace, key, out)
        return Outcome.CORRUPT if self._fail == "read" else outcome, origin

    def _pass(self, what, nbytes):
        self.now += 0.002 + (0.010 if nbytes == CHUNK_BYTES else 0.0)
        if self._fail == f"{what} raises":
            raise KeyboardInterrupt

    def __getattr__(self, name):
        return getattr(self._tier, name)


def run(folder, fail=""):
    """What was measured in a folder, on the clock of a slow tier."""
    made = []

    def wrap(tier):
        made.append(Slow(tier, fail))
        return made[0]

    settings = RemoteSettings(url=f"file://{folder}")
    return measure(settings, clock=lambda: made[0].now, wrap=wrap)


def test_latency_and_bandwidth_are_told_apart(tmp_path):
    """A small chunk takes the latency alone; what a large one takes beyond it is bandwidth."""
    told = run(tmp_path)
    assert told.problem == ""
    assert told.latency_s == pytest.approx(0.002)
    assert told.bytes_per_s == pytest.approx(CHUNK_BYTES / 0.010)
    assert told.write_bytes_per_s == pytest.approx(CHUNK_BYTES / 0.012)
    assert CHUNK_BYTES > SMALL_BYTES


def test_every_operation_is_a_step(tmp_path):
    """As many as are told beforehand."""
    steps = []
    settings = RemoteSettings(url=f"file://{tmp_path}")
    assert not measure(settings, step=lambda: steps.append(1)).problem
    assert len(steps) == OPERATIONS


@pytest.mark.parametrize(("fail", "problem"), [("write", "write: full"), ("read", "read: corrupt")])
def test_what_fails_is_named_and_nothing_is_left(tmp_path, fail, problem):
    """No figure is made up of what did not succeed."""
    (tmp_path / "other").write_text("stays")
    told = run(tmp_path, fail)
    assert told.problem == problem
    assert (told.bytes_per_s, told.write_bytes_per_s) == (0.0, 0.0)
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_who_interrupts_leaves_nothing(tmp_path):
    """Ctrl-C in the middle of reading."""
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, "read raises")
    assert list(tmp_path.iterdir()) == []


def test_a_redis_that_is_away_is_a_problem():
    """Not an exception, and with its reason; what could not be removed is not told, for nothing was written."""
    told = measure(RemoteSettings(url="redis://127.0.0.1:9/0"))
    assert told.problem.startswith("write: error: Error 111 connecting to 127.0.0.1:9. Connection refused")


def test_a_directory_that_is_away_is_named(tmp_path):
    """The medium's own words say what is missing."""
    told = measure(RemoteSettings(url=f"file://{tmp_path}/nowhere"))
    assert told.problem.startswith("write: error: ")
    assert f"{tmp_path}/nowhere" in told.problem


def test_a_login_is_that_of_a_stores_settings(tmp_path):
    """Its password file and TLS, for another address."""
    own = RemoteSettings(url="rediss://a:1/0", password_file=tmp_path / "p", tls={"ca_file": tmp_path / "ca.pem"})
    made = storage("rediss://b:2/0", own)
    assert (made.url, made.timeout) == ("rediss://b:2/0", TIMEOUT_S)
    assert (made.password_file, made.tls) == (own.password_file, own.tls)
    with pytest.raises(DocumentError, match=r"--storage: expected a redis://.* file:///directory"):
        storage("gopher://x", None)
