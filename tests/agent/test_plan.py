"""The closed form: the reference's break-even table, bandwidths, and verdicts that follow from stated principles."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiertune_agent.plan import PlannedFleet, isolated_hit_share, plan, rows
from tiertune_agent.replay.engine import break_even_bandwidth, break_even_tokens, prefill_s, token_s
from tiertune_agent.replay.scenario import GPUS, MODELS
from tiertune_connector.documents import DocumentError, load_yaml, parse_yaml

FLEETS = Path(__file__).parents[2] / "policies" / "fleets"
BANDWIDTHS = (1.125e9, 2.81e9, 11.25e9, 1.9e9, 22.5e9)
"""Of 10, 25 and 100 GbE, one Redis, RDMA."""
ROWS = {
    ("llama-3-70b", "h100x8"): (
        (0.0357, 0.0033), (9.18, 7.04, 4.14), (0.2913, 0.1166, 0.0291), (771_384, 244_230, 152, 412_799, 47)
    ),
    ("llama-3-70b", "h100x4"): (
        (0.0714, 0.0066), (4.59, 3.52, 2.07), (0.2913, 0.1166, 0.0291), (331_829, 68_252, 24, 152_536, 18)
    ),
    ("qwen-32b", "h100x2"): (
        (0.0663, 0.0066), (3.95, 2.98, 1.71), (0.2330, 0.0933, 0.0233), (251_547, 40_685, 23, 108_113, 18)
    ),
    ("llama-3-8b", "h100"): (
        (0.0325, 0.0053), (4.04, 2.63, 1.29), (0.1165, 0.0466, 0.0117), (158_514, 26_725, 48, 68_868, 38)
    ),
    ("llama-3-8b", "a10"): ((0.2570, 0.0419), (0.51, 0.33, 0.16), (0.1165, 0.0466, 0.0117), (7, 5, 4, 5, 4)),
    ("deepseek-v3", "h200x8"): (
        (0.0187, 0.0063), (3.76, 1.78, 0.69), (0.0625, 0.0250, 0.0062), (69_283, 9_978, 80, 28_942, 64)
    ),
}  # fmt: skip


def fleet(**changes):
    """Sixteen replicas that sharing pays for, changed."""
    document = {
        "name": "test", "replicas": 16, "requests_per_s": 1.0, "hit_share": 0.75, "prompt_tokens": 16000,
        "model": "llama-3-70b", "gpu": "h100x4", "link": {"gbps": 100}, "links": 8, "prices": {"gpu_hour": 10},
    }  # fmt: skip
    return PlannedFleet.model_validate({key: value for key, value in (document | changes).items() if value is not None})


def of(**changes):
    """The plan of that one."""
    return figures(fleet(**changes))


def figures(planned_fleet):
    """A plan's, by their names."""
    return SimpleNamespace(**plan(planned_fleet))


class TestReference:
    @pytest.mark.parametrize("row", ROWS)
    def test_costs_per_token_and_break_evens(self, row):
        """Recompute and fetch per token, and GB/s at h0 + h1 = 0, 32k and 128k, to the reference's digits.

        And h* on 10, 25 and 100 GbE, one Redis and RDMA, to the token.
        """
        model, gpu = MODELS[row[0]], GPUS[row[1]]
        (head, per_10k), bandwidths, fetches, lengths = ROWS[row]
        linear, quadratic = token_s(model, gpu)
        assert (round(1e3 * linear, 4), round(1e7 * quadratic, 4)) == (head, per_10k)
        told = [break_even_bandwidth(model, gpu, around) / 1e9 for around in (0, 2**15, 2**17)]
        assert [round(value, 2) for value in told] == list(bandwidths)
        told = [1e3 * model.kv_token_bytes / bandwidth for bandwidth in BANDWIDTHS[:3]]
        assert [round(value, 4) for value in told] == list(fetches)
        told = [break_even_tokens(model, gpu, model.kv_token_bytes / bandwidth, 0.001) for bandwidth in BANDWIDTHS]
        assert [round(length) for length in told] == list(lengths)

    @pytest.mark.parametrize("row", ROWS)
    @pytest.mark.parametrize("bandwidth", BANDWIDTHS)
    def test_at_the_break_even_length_both_take_equally_long(self, row, bandwidth):
        """Fetch and recompute of h* tokens, with the millisecond that a fetch takes before its bytes: within 0.5 %."""
        model, gpu = MODELS[row[0]], GPUS[row[1]]
        length = break_even_tokens(model, gpu, model.kv_token_bytes / bandwidth, 0.001)
        recompute = prefill_s(model, gpu, 0, length) - prefill_s(model, gpu, length, length)
        assert recompute == pytest.approx(0.001 + length * model.kv_token_bytes / bandwidth, rel=0.005)


class TestHitShares:
    @pytest.mark.parametrize("caches", [1, 2, 3, 10, 32])
    def test_what_is_asked_twice_hits_one_nth(self, caches):
        """With two requests for each prefix an isolated cache sees the second with probability 1/N."""
        assert isolated_hit_share(0.5, caches) == pytest.approx(0.5 / caches)

    @pytest.mark.parametrize(("asked", "caches"), [(4, 3), (10, 4), (25, 8)])
    def test_it_is_what_a_simulation_gives(self, asked, caches):
        """Prefixes asked R times in all, each time of a random cache."""
        placed = np.random.default_rng(1).integers(0, caches, (20_000, asked))
        misses = np.mean([len(set(row)) for row in placed.tolist()])
        assert isolated_hit_share(1 - 1 / asked, caches) == pytest.approx(1 - misses / asked, abs=0.003)

    @given(st.floats(0, 0.99), st.integers(1, 1000))
    def test_it_lies_between_nothing_and_the_shared_one(self, share, caches):
        """More caches never hit more, one cache loses nothing."""
        told = isolated_hit_share(share, caches)
        assert -1e-9 <= told <= share + 1e-9
        assert isolated_hit_share(share, caches + 1) <= told + 1e-9
        assert isolated_hit_share(share, 1) == pytest.approx(share)

    @pytest.mark.parametrize(("share", "replicas"), [(1e-300, 3), (1e-17, 3), (0.5, 10**9)])
    def test_hardly_any_hits_or_any_number_of_replicas_are_told(self, share, replicas):
        """What rounding leaves is between nothing and what a shared cache hits, and no share is outside."""
        told = of(hit_share=share, replicas=replicas)
        assert 0 <= told.isolated_hit_share <= share
        assert 0 <= told.fetched_gb_per_s <= told.needed_gb_per_s
        assert told.shared_load <= told.isolated_load


class TestVerdict:
    def test_ten_busy_replicas_need_160_gigabytes_per_second(self):
        """10 x 100 requests/s x 0.5 x 320 MB, thirteen links of 100 GbE: not worth it on one."""
        told = figures(load_yaml(FLEETS / "ten-replicas.yaml", PlannedFleet))
        assert told.needed_gb_per_s == pytest.approx(160)
        assert told.load == pytest.approx(0.9 * 160 / 11.25)  # a tenth is in the replica's own cache
        assert not told.worth
        assert "it takes 13 of them" in told.verdict

    def test_three_quiet_replicas_are_not_worth_it(self):
        """They save ten minutes of GPU time an hour, for less than the rent; the fetch itself would pay."""
        told = figures(load_yaml(FLEETS / "three-replicas.yaml", PlannedFleet))
        assert told.fetch_s < told.recompute_s
        assert not told.worth
        assert "it saves is worth 0.44 an hour, 512.0 GiB of remote tier and the network cost 2.81" in told.verdict

    def test_many_replicas_with_long_prompts_are_worth_it(self):
        """Sixteen replicas of agents: the GPU time saved pays for the remote six times, and the sentence says so."""
        told = figures(load_yaml(FLEETS / "agents-70b.yaml", PlannedFleet))
        assert told.worth
        assert "75% hits instead of 9% save GPU time worth 134.07 an hour for 22.44 of remote tier" in told.verdict
        assert told.isolated_load > 1 > told.shared_load

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"replicas": 1}, "the replicas' own caches have all but 0.0% of the hits"),
            ({"routing": "sticky"}, "the replicas' own caches have all but 0.0% of the hits"),
            ({"hit_share": 0}, "nothing to hit"),
            ({"link": {"gbps": 10}, "links": 100}, "recomputing them 952 ms"),
            ({"links": 4}, "it takes 5 of them"),
            (
                {"requests_per_s": 0.01},
                "is worth 1.34 an hour, 512.0 GiB of remote tier and the network cost 2.81",
            ),
            ({"remote": 0}, "0 B of remote tier do not hold the 3.7 GiB of one prompt that hit"),
            ({"remote": "1GiB"}, "1.0 GiB of remote tier do not hold the 3.7 GiB of one prompt that hit"),
            ({"remote": "64TiB"}, "64.0 TiB of remote tier and the network cost 359.10"),
            ({"prices": {"gpu_hour": 10, "network_gib": 0.01}}, "and the network cost"),
        ],
    )
    def test_each_reason_against_it_is_told(self, changes, said):
        """One thing wrong is enough, and named."""
        told = of(**changes)
        assert not told.worth
        assert said in told.verdict

    def test_of_hardly_any_hits_it_tells_how_many_are_lost_and_how_few_they_are(self):
        """Sixteen caches lose nearly all of the hits, which are too few to win anything."""
        told = of(hit_share=1e-3)
        lost = 1 - told.isolated_hit_share / told.shared_hit_share
        assert lost > 0.9
        assert f"have all but {lost:.1%} of the hits, and these are 0.1% of the prompts' tokens" in told.verdict

    def test_what_does_not_hit_takes_no_time_to_fetch(self):
        """Not even the latency."""
        assert of(hit_share=0).fetch_s == 0

    def test_the_number_of_links_that_it_asks_for_is_enough(self):
        """With as many as told the load is under 1, with one less it is not."""
        assert of(links=5).load < 1
        assert of(links=4).load >= 1


GIVEN = {
    "link": {"gbps": 100, "efficiency": 0.8, "latency_s": 0.01},
    "prices": {"gpu_hour": 10, "remote_gib_month": 5.0, "network_gib": 0.01},
}


def test_every_key_of_a_link_and_a_price_changes_the_plan():
    """None is taken without a word, and none but these is taken."""
    bare = {"link": {"gbps": 99}, "prices": {"gpu_hour": 9}}
    assert {part: set(keys) for part, keys in GIVEN.items()} == {
        part: set(type(getattr(fleet(), part)).model_fields) for part in GIVEN
    }
    for part, keys in GIVEN.items():
        for key, value in keys.items():
            assert of(**{**bare, part: {**bare[part], key: value}}) != of(**bare), (part, key)


ODD = [
    "0",
    "-0.0",
    "5e-324",
    "1e-300",
    "1e-9",
    "1e300",
    "1.7e308",
    ".inf",
    ".nan",
    "1" + 400 * "0",
    "99999999999999TiB",
]
PLACES = [
    *("replicas: 16", "requests_per_s: 1.0", "hit_share: 0.75", "prompt_tokens: 16000", "links: 8"),
    *("remote: 1TiB", "params: 7e10", "layers: 80", "width: 8192", "kv_heads: 8", "head_dim: 128"),
    *("flops: 4e15", "utilisation: 0.5", "gbps: 100", "efficiency: 0.9", "latency_s: 0.001"),
    *("gpu_hour: 10", "remote_gib_month: 4", "network_gib: 0.1"),
]
WHOLE = """\
name: test
replicas: 16
requests_per_s: 1.0
hit_share: 0.75
prompt_tokens: 16000
links: 8
remote: 1TiB
model: {params: 7e10, layers: 80, width: 8192, kv_heads: 8, head_dim: 128}
gpu: {flops: 4e15, utilisation: 0.5}
link: {gbps: 100, efficiency: 0.9, latency_s: 0.001}
prices: {gpu_hour: 10, remote_gib_month: 4, network_gib: 0.1}
"""


@pytest.mark.parametrize("place", [*PLACES, "request_kv: 1GiB"])
def test_absurd_numbers_are_planned_with_or_refused_with_their_place(place):
    """In every place: what is told is finite."""
    whole = WHOLE if place in PLACES else WHOLE.replace("prompt_tokens: 16000", place)
    assert plan(parse_yaml(whole, PlannedFleet, name="f.yaml"))
    for odd in ODD:
        told = planned(whole.replace(place, f"{place.split(':')[0]}: {odd}"))
        if isinstance(told, DocumentError):
            assert place.split(":")[0] in str(told)
        else:
            json.dumps(told, allow_nan=False)
            assert not any(word in " ".join(map(" ".join, rows(told))).split() for word in ("inf", "nan"))


def planned(text):
    """The plan, or why there is none."""
    try:
        return plan(parse_yaml(text, PlannedFleet, name="f.yaml"))
    except DocumentError as error:
        return error


class TestCommand:
    @pytest.mark.parametrize("path", sorted(FLEETS.glob("*.yaml")), ids=lambda path: path.stem)
    def test_the_examples_are_told_and_written(self, tiertune, path):
        """The verdict stands under the table, and in --json."""
        done, document = tiertune.json("plan", "--fleet", path)
        assert (done.returncode, done.stderr) == (0, "")
        assert document["fleet"] == path.stem
        assert done.stdout.endswith(f"\n{document['verdict']}\n")
        assert f"{document['needed_gb_per_s']:.3g} GB/s to fetch every hit" in done.stdout

    def test_wrong_fleets_are_told_with_their_places(self, tiertune, tmp_path):
        """Every mistake by file, line and column; exit 2."""
        path = tmp_path / "fleet.yaml"
        text = (FLEETS / "three-replicas.yaml").read_text()
        path.write_text(text.replace("hit_share: 0.5", "hit_share: 1.5").replace("gpu: h100x8", "gqu: h100x8"))
        done = tiertune("plan", "--fleet", path)
        assert (done.returncode, done.stdout) == (2, "")
        assert f"{path}:6:12: hit_share: " in done.stderr
        assert f"{path}:9:1: gqu: unknown key: did you mean gpu?" in done.stderr
        for number, wrong in (("1.0e+300", "less than or equal to 1000000"), ("1.0e-300", "greater than or equal to")):
            path.write_text(text.replace("requests_per_s: 5", f"requests_per_s: {number}"))
            assert f"requests_per_s: Input should be {wrong}" in tiertune("plan", "--fleet", path).stderr
        path.write_text(text + "prompt_tokens: 100\n")
        assert "give either prompt_tokens or request_kv" in tiertune("plan", "--fleet", path).stderr
