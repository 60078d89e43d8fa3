"""A store tells absurd numbers: an incident of its own. It is not remembered, and the other stores go on."""

import itertools
import json
import re

import httpx
import pytest

from agent.agents import pass_windows
from agent.fakes import SLOW, START, FakeStore, fetch, ledger_rows, open_incidents
from tiertune_agent.collector.counters import FASTEST
from tiertune_agent.collector.schema import LEVELS, STATUS, check

pytestmark = pytest.mark.slow

DRAM = '"dram": {"capacity_bytes": 1073741824'
NUMBERS = ["-1", "1e30", "1e999", "1" + 400 * "0", '"12"', '"nan"', "true"]
DEEP = 100_000 * "[" + 100_000 * "]"


@pytest.fixture
def odd(clock):
    return FakeStore(clock, "host-b")


@pytest.fixture
def both(agents, clock, store, odd):
    """Two stores and their agent; ``round()`` is a window with traffic at both, and the open incidents after it."""
    agent = agents(store, odd)

    def pass_one():
        pass_windows(agent, (store, odd), clock)
        return open_incidents(agent)

    pass_one()
    return agent, pass_one


def answering(store, name, change):
    """From now on that answer of the store is what ``change`` makes of its text; a tuning is a new one."""
    told = getattr(store, name)
    store.tuning = {**store.tuning, "version": store.tuning["version"] + (name == "get_tuning")}

    def answer(request):
        sound = told(request)
        text = change(json.dumps(json.loads(sound.content)))
        return httpx.Response(200, content=text.encode(errors="surrogatepass"), headers={**sound.headers})

    setattr(store, name, answer)
    return lambda: setattr(store, name, told)


def with_metric(text, name, cells):
    table = f'{{"labels": ["tier"], "rows": [["remote", {cells}]]}}'
    return text.replace('"metrics": {', f'"metrics": {{"{name}": {table}, ')


def counter(value):
    return "get_counters", lambda text: with_metric(text, "lost_seconds_total", value)


def histogram(value):
    return "get_counters", lambda text: with_metric(text, "gate_actual_seconds", f"[1, {value}], 1.0, 2.0")


def clock_of(value):
    return "get_counters", lambda text: json.dumps(json.loads(text) | {"time_s": "@"}).replace('"@"', value)


def capacity(value):
    return "get_tuning", lambda text: text.replace(DRAM, DRAM.replace("1073741824", value))


def chunk(value):
    return "get_status", lambda text: text.replace('"chunk_bytes": 1048576', f'"chunk_bytes": {value}')


@pytest.mark.parametrize("where", [counter, histogram, clock_of, capacity, chunk])
def test_no_number_of_one_store_stops_the_others(both, store, odd, where):
    """It is told by its incident, nothing of it is remembered, and the other one is switched off as it should be."""
    agent, pass_one = both
    pass_one()
    store.bandwidth = SLOW
    seen = len(agent.history.measured.windows("host-b", tier="remote"))
    for value in NUMBERS:
        sound_again = answering(odd, *where(value))
        assert ("store_nonsense", "host-b") in pass_one(), value
        sound_again()
    assert fetch(store) == "off"
    assert len(agent.history.measured.windows("host-b", tier="remote")) == seen
    assert ("store_nonsense", "host-b") not in pass_one()


@pytest.mark.parametrize(("said", "says"), [(', "holdout": 0.0', ""), ('"holdout": 0.0', '"holdout": null')])
def test_a_setting_that_one_store_does_not_have_stops_nobody(both, store, odd, said, says):
    """It is of another version: the other one is switched off as it should be."""
    _, pass_one = both
    answering(odd, "get_tuning", lambda text: text.replace(said, says))
    store.bandwidth = SLOW
    for _ in range(6):
        pass_one()
    assert fetch(store) == "off"


def test_an_answer_that_is_nested_without_end_is_nonsense(both, odd):
    """Reading it would take more of Python's stack than there is."""
    _, pass_one = both
    for name in ("get_counters", "get_status", "get_tuning"):
        sound_again = answering(odd, name, lambda text: text.replace("{", '{"deep": ' + DEEP + ", ", 1))
        assert ("store_nonsense", "host-b") in pass_one(), name
        sound_again()


def test_a_version_that_no_database_holds_is_nonsense(both, store, odd):
    """A decision would rest on it, and take the other store's with it."""
    _, pass_one = both
    store.bandwidth = odd.bandwidth = SLOW
    for version in ("-1", "1" + 30 * "0", '"x"'):
        absurd = f'"version": {version}'
        sound_again = answering(odd, "get_tuning", lambda text, new=absurd: re.sub(r'"version": \d+', new, text))
        assert ("store_nonsense", "host-b") in pass_one(), version
        sound_again()
    assert fetch(store) == "off"


def test_a_counter_that_leaps_is_told_and_counted_from_anew(both, odd):
    """To nowhere and back: neither way is a window, and the counters since stand in the ledger as before."""
    agent, pass_one = both
    moved = ("tier_transfer_bytes_total", (("tier", "remote"), ("operation", "write")))
    odd.counters[moved] = 5e12
    pass_one()
    pass_one()
    before = transferred(agent)
    odd.counters[moved] = 16 * FASTEST
    assert ("store_nonsense", "host-b") in pass_one()
    odd.counters[moved] = 5e12 + 1000
    assert ("store_nonsense", "host-b") not in pass_one()
    odd.counters[moved] += 2000
    pass_one()
    assert transferred(agent) - before == 2000


def test_squares_of_long_prompts_are_not_absurd(both, odd):
    """A holdout times ten prompts of a million tokens each second, and has done so for months."""
    agent, pass_one = both
    moved = ("holdout_sums_total", (("tier", "remote"), ("group", "held"), ("sum", "tokens2")))
    for odd.counters[moved] in (1e20, 1e20 + 150 * 1e12):
        assert ("store_nonsense", "host-b") not in pass_one()
    last = agent.history.measured.windows("host-b", tier="remote")[-1]
    assert last.total("holdout_sums_total", sum="tokens2") == pytest.approx(150 * 1e12, rel=1e-3)


def transferred(agent):
    """Bytes of the odd one, in the ledger."""
    return sum(row["transferred"] or 0 for row in ledger_rows(agent.history, START) if row["store"] == "host-b")


def test_a_part_of_a_tier_that_tells_little_stops_nobody(both, odd):
    """Dead, without a name and a reason; or no parts at all."""
    _, pass_one = both
    for servers in ('[{"health": "dead"}]', "null"):
        sound_again = answering(
            odd,
            "get_status",
            lambda text, servers=servers: text.replace('"remote": {', f'"remote": {{"servers": {servers}, '),
        )
        assert (("tier_dead", "host-b") in pass_one()) == ("dead" in servers)
        sound_again()


@pytest.mark.parametrize("name", ["fleet", "fleet\0"])
def test_a_store_that_calls_itself_the_fleet_is_misnamed(both, odd, name):
    """What is decided for the whole fleet is not its. The database knows no zero byte."""
    agent, _ = both
    odd.name = name
    told = agent.loop.collector.collect()[1]
    assert (told.kind, told.store) == ("store_misnamed", "host-b")
    assert "give it another name" in told.message


@pytest.mark.parametrize("name", ["get_counters", "get_status", "get_tuning"])
def test_half_a_character_stops_nobody(both, odd, name):
    """JSON can write it, and no database takes it: another stands for it. A whole one of that kind is as any other."""
    agent, pass_one = both
    windows = len(agent.history.measured.windows("host-b", tier="remote"))
    answering(odd, name, lambda text: text.replace("{", '{"later": "\\ud83d\\ude00 \\ud800", ', 1))
    assert ("store_nonsense", "host-b") not in pass_one()
    assert len(agent.history.measured.windows("host-b", tier="remote")) == windows + 1


def test_a_pool_whose_model_is_not_told_stops_nobody(both, store, odd, policy_file):
    """Not even where the policy looks at models: it is one without a name, and the other store is tuned."""
    _, pass_one = both
    answering(odd, "get_status", lambda text: text.replace('"model": "llama"', '"model": null'))
    policy_file.write_text(policy_file.read_text() + "overrides: [{match: {model: other-*}, mode: observe}]\n")
    store.bandwidth = SLOW
    for _ in range(6):
        assert ("store_nonsense", "host-b") not in pass_one()
    assert fetch(store) == "off"


@pytest.mark.parametrize("labels", [[], ["tier"], ["tier", "tokens"]])
def test_a_length_that_is_none_stops_nobody(both, store, odd, labels):
    """Fetches by the tokens of the prompt, from a version that tells them otherwise: the other store is tuned."""
    _, pass_one = both
    numbers = itertools.count(1)

    def change(text):
        told = {"labels": labels, "rows": [[*("remote", "short")[: len(labels)], next(numbers)]]}
        document = json.loads(text)
        document["metrics"] |= dict.fromkeys(("gate_length_requests_total", "gate_length_seconds_total"), told)
        return json.dumps(document)

    answering(odd, "get_counters", change)
    store.bandwidth = SLOW
    for _ in range(6):
        pass_one()
    assert fetch(store) == "off"


@pytest.mark.parametrize("name", ["get_status", "get_tuning"])
def test_a_number_that_no_database_takes_is_nonsense_wherever_it_is(both, store, odd, name):
    """In a part of the answer that nobody reads, too: PostgreSQL refuses the document, and with it all stores'."""
    _, pass_one = both
    sound_again = answering(odd, name, lambda text: text.replace("{", '{"later": {"figure": 1e999}, ', 1))
    store.bandwidth = SLOW
    for _ in range(6):
        assert ("store_nonsense", "host-b") in pass_one()
    assert fetch(store) == "off"
    sound_again()
    assert ("store_nonsense", "host-b") not in pass_one()


@pytest.mark.parametrize("levels", [101, 500, 950])
@pytest.mark.parametrize("where", ["get_status", "get_tuning", "writes"])
def test_what_is_nested_deeper_than_can_be_kept_stops_nobody(both, store, odd, where, levels):
    """It can be read, but not written: the other store is tuned. Of commands, the one is left out."""
    _, pass_one = both
    deep = f"{'[' * levels}{']' * levels}"
    if where == "writes":
        told = '"at": "2025-03-05T12:00:00Z", "who": "a", "source": "b", "what": "c", "client": "d"'
        command = f'{{{told}, "detail": {{"e": {deep}}}}}'
        answering(odd, "get_status", lambda text: text.replace("{", f'{{"writes": [{command}], ', 1))
    else:
        answering(odd, where, lambda text: text.replace("{", f'{{"later": {deep}, ', 1))
    store.bandwidth = SLOW
    for _ in range(6):
        assert (("store_nonsense", "host-b") in pass_one()) is (where != "writes")
    assert fetch(store) == "off"


def test_as_many_levels_as_can_be_kept_are_no_nonsense():
    """Nobody reads them; one more is nested too deep."""
    told = 1.0
    for _ in range(LEVELS):
        told = {"later": told}
    check(told, STATUS, "status")
    with pytest.raises(ValueError, match="nested over 100 levels"):
        check({"later": told}, STATUS, "status")


@pytest.mark.parametrize("name", ["n" * 256, "n\0"])
@pytest.mark.parametrize("where", ["get_status", "get_tuning"])
def test_a_pool_that_the_database_would_call_otherwise_is_nonsense(both, odd, where, name):
    """What is decided about it would not be found again. The incident says what is wrong."""
    agent, pass_one = both
    answering(odd, where, lambda text: json.dumps(json.loads(text) | {"pools": {name: {}}}))
    assert ("store_nonsense", "host-b") in pass_one()
    (told,) = [one["message"] for one in agent.history.journal.incidents() if one["kind"] == "store_nonsense"]
    assert f"in {where.removeprefix('get_')}.pools something is called 'n" in told


def test_a_name_that_nothing_is_left_of_is_none(both, odd):
    """The database knows no zero byte."""
    _, pass_one = both
    odd.name = "\0"
    assert ("store_nonsense", "host-b") in pass_one()


@pytest.mark.parametrize("name", ["host-a\0", "host-a" * 60])
def test_names_that_the_database_cannot_tell_apart_stop_nobody(both, store, odd, name):
    """The second of them is told, as one that has the other's name is; every other store is tuned."""
    agent, pass_one = both
    store.name, odd.name = name.replace("\0", ""), name if "\0" in name else f"{name}-too"
    for _ in range(2):
        told = pass_one()
    assert [kind for kind, _ in told] == ["duplicate_store"]
    (kept,) = [one for one in agent.history.stores() if one.name == store.name[:255]]
    assert kept.url == "http://host-a:7410"


@pytest.mark.parametrize(("half", "left"), [(r"\ud800", "?"), ("\ud800", 3 * "\ufffd")], ids=["escaped", "raw"])
def test_half_a_character_in_a_stores_name_stops_nobody(both, store, odd, half, left):
    """It is called by what is left of it, and the other one is tuned."""
    agent, pass_one = both
    answering(odd, "get_counters", lambda text: text.replace('"host-b"', f'"host-{half}"'))
    store.bandwidth = SLOW
    for _ in range(3):
        pass_one()
    assert fetch(store) == "off"
    assert f"host-{left}" in [one.name for one in agent.history.stores()]
