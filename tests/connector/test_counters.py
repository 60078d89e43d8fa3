"""Counting: exact under threads, told once per reader, rendered as the catalogue says."""

import threading

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from connector.stores import at_once, counted
from tiertune_connector.catalogue import BY_NAME, IDLE_BUCKETS, METRICS, PREFIX, SECONDS_BUCKETS
from tiertune_connector.counters import Counters, PrometheusCollector

LABELS = ("remote", "read", "ok")


def rendered(counters: Counters) -> dict:
    registry = CollectorRegistry()
    registry.register(PrometheusCollector(counters, "host-a"))
    return {family.name: family for family in text_string_to_metric_families(generate_latest(registry).decode())}


def test_the_catalogue_is_well_formed():
    """Names are unique and tell their kind; buckets rise from 100 µs to about a minute."""
    assert len(BY_NAME) == len(METRICS)
    assert all(metric.name.endswith("_total") == (metric.kind == "counter") for metric in METRICS)
    assert all(metric.help and "store" not in metric.labels for metric in METRICS)
    assert SECONDS_BUCKETS[0] == 1e-4
    assert 50 < SECONDS_BUCKETS[-1] < 70
    for buckets in (SECONDS_BUCKETS, IDLE_BUCKETS):
        assert list(buckets) == sorted(set(buckets))


def test_threads_lose_no_count():
    """Many threads, one number."""
    counters = Counters()

    def count(_: int) -> None:
        for _ in range(2000):
            counters.add("probes_total", ("remote", "ok"))
            counters.observe("tier_operation_seconds", LABELS, 0.001)

    at_once(count, 4)
    _, metrics = counters.snapshot()
    assert metrics["probes_total"]["rows"] == [["remote", "ok", 8000.0]]
    *_, buckets, total, number = metrics["tier_operation_seconds"]["rows"][0]
    assert (number, sum(buckets)) == (8000.0, 8000.0)
    assert total == pytest.approx(8.0)


def test_threads_that_come_and_go_leave_their_counts_and_nothing_else():
    """The next one counts on where the last one ended: no sum ever falls, not even by a rounding."""
    counters, told = Counters(), [0.0]

    def count() -> None:
        counters.add("saved_seconds_total", ("remote",), 0.1)
        counters.observe("tier_operation_seconds", LABELS, 0.1)

    for _ in range(50):
        threads = [threading.Thread(target=count) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
            told.append(counters.snapshot()[1]["saved_seconds_total"]["rows"][0][-1])
    assert told == sorted(told)
    assert told[-1] == pytest.approx(15.0)
    assert counters.snapshot()[1]["tier_operation_seconds"]["rows"][0][-1] == 150
    assert len(counters._cells) <= 4


def test_what_was_counted_of_a_namespace_is_forgotten_with_it():
    """By all threads, in all metrics; other namespaces', and what is of none, stays. Back, it begins anew."""
    counters = Counters()

    def count(_: int) -> None:
        for namespace in ("a", "b"):
            counters.add("requests_total", ("no", namespace, "llama"))
            counters.observe("tier_evicted_idle_seconds", ("dram", namespace, "llama"), 1.0)
        counters.add("probes_total", ("remote", "ok"))

    at_once(count, 3)
    counters.forget("a")
    assert counted(counters, "requests_total") == {("no", "b", "llama"): 3}
    assert counted(counters, "tier_evicted_idle_seconds") == {("dram", "b", "llama"): 3}
    assert counted(counters, "probes_total") == {("remote", "ok"): 3}
    count(0)
    assert counted(counters, "requests_total") == {("no", "a", "llama"): 1, ("no", "b", "llama"): 4}


@pytest.mark.parametrize("name", ["clients", "nonsense_total", "tier_operation_seconds"])
def test_what_is_not_declared_as_a_counter_cannot_be_counted(name):
    """A gauge, a histogram, or a name that nobody knows."""
    with pytest.raises(KeyError):
        Counters().add(name, ())


@pytest.mark.parametrize("labels", [(), ("dram", "load"), ("dram", "load", "ok", "more")])
def test_values_that_are_not_those_of_the_labels_cannot_be_counted(labels):
    """Too few or too many: told where it is counted, not when somebody renders it."""
    counters = Counters()
    for count, name in ((counters.add, "tier_errors_total"), (counters.observe, "tier_operation_seconds")):
        with pytest.raises(ValueError, match=f"{name} has labels .*, not values"):
            count(name, labels, 1.0)
    assert not counters.snapshot()[1]


@pytest.mark.parametrize(
    ("value", "bucket"),
    [(0.0, 0), (1e-4, 0), (1.01e-4, 1), (SECONDS_BUCKETS[-1], 25), (1e9, 26)],
)
def test_a_value_falls_into_the_bucket_whose_bound_it_does_not_exceed(value, bucket):
    """As Prometheus has it: bounds are inclusive, what is beyond them overflows."""
    counters = Counters()
    counters.observe("tier_operation_seconds", LABELS, value)
    buckets = counters.snapshot()[1]["tier_operation_seconds"]["rows"][0][3]
    assert [index for index, count in enumerate(buckets) if count] == [bucket]


def test_since_gives_only_what_changed():
    """Rows as they are now, of those that moved after the answer that is named."""
    counters = Counters()
    counters.add("probes_total", ("remote", "ok"))
    first, all_rows = counters.snapshot()
    assert list(all_rows) == ["probes_total"]
    second, nothing = counters.snapshot(first)
    assert (nothing, second > first) == ({}, True)
    counters.add("probes_total", ("remote", "miss"))
    _, changed = counters.snapshot(second)
    assert changed["probes_total"]["rows"] == [["remote", "miss", 1.0]]
    assert len(counters.snapshot(first)[1]["probes_total"]["rows"]) == 1


def test_an_unknown_since_gives_everything():
    """A reader that was away too long, or asks for the future, starts anew; memory stays bounded."""
    counters = Counters()
    counters.add("probes_total", ("remote", "ok"))
    old, _ = counters.snapshot()
    for _ in range(20):
        counters.snapshot()
    for since in (old, 10**9, 0):
        assert counters.snapshot(since)[1]["probes_total"]["rows"]
    assert len(counters._snapshots) <= 8


def test_gauges_are_asked_whenever_somebody_reads():
    """They are what is now, not what was."""
    counters, value = Counters(), [1.0]
    counters.gauges_from(lambda: [("clients", (), value[0])])
    assert counters.snapshot()[1]["clients"]["rows"] == [[1.0]]
    value[0] = 2.0
    assert rendered(counters)["tiertune_clients"].samples[0].value == 2.0


def test_every_family_is_rendered_from_the_start():
    """Constructed is registered: what has no values yet is there by name, help and type."""
    families = rendered(Counters())
    assert set(families) == {(PREFIX + metric.name).removesuffix("_total") for metric in METRICS}
    for metric in METRICS:
        family = families[(PREFIX + metric.name).removesuffix("_total")]
        assert (family.type, family.documentation) == (metric.kind, metric.help)


def test_values_are_rendered_with_the_stores_name():
    """Counter, gauge and histogram, the latter cumulative and with its sum."""
    counters = Counters()
    counters.add("probes_total", ("remote", 'a "quoted"\nreason'), 2)
    counters.observe("tier_operation_seconds", LABELS, 0.5)
    counters.observe("tier_operation_seconds", LABELS, 100.0)
    families = rendered(counters)
    (sample,) = families["tiertune_probes"].samples
    assert sample.labels == {"store": "host-a", "tier": "remote", "outcome": 'a "quoted"\nreason'}
    assert sample.value == 2
    samples = families["tiertune_tier_operation_seconds"].samples
    counts = [s.value for s in samples if s.name.endswith("_bucket")]
    assert counts == sorted(counts)
    assert (counts[0], counts[-2], counts[-1]) == (0, 1, 2)
    assert {s.name.removeprefix("tiertune_tier_operation_seconds"): s.value for s in samples}["_sum"] == 100.5
