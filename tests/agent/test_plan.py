"""The closed form: the reference's break-even table, bandwidths, and verdicts that follow from stated principles."""

import json
from math import floor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiertune_agent.plan import PlannedFleet, isolated_hit_share, plan
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
    return plan(fleet(**changes))


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

    def test_a_codec_divides_the_break_even_bandwidth(self):
        """Four times smaller makes 25 GbE a win for 70B on eight H100."""
        base = {"gpu": "h100x8", "link": {"gbps": 25}, "links": 64}
        plain, packed = of(**base), of(**base, codec_ratio=4)
        assert packed.break_even.gb_per_s == pytest.approx(plain.break_even.gb_per_s / 4)
        assert "recomputing them" in plain.verdict
        assert (plain.worth, packed.worth) == (False, True)


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

    @pytest.mark.parametrize("popularity", ["equal", "skewed"])
    @pytest.mark.parametrize(("share", "replicas"), [(1e-300, 3), (1e-17, 3), (0.5, 10**9)])
    def test_hardly_any_hits_or_any_number_of_replicas_are_told(self, share, replicas, popularity):
        """What rounding leaves is between nothing and what a shared cache hits, and no share is outside."""
        told = of(hit_share=share, replicas=replicas, popularity=popularity)
        assert 0 <= told.compute.isolated_hit_share <= share
        assert 0 <= told.network.fetched_load <= told.network.load
        assert told.compute.shared_load <= told.compute.isolated_load


class TestVerdict:
    def test_ten_busy_replicas_need_160_gigabytes_per_second(self):
        """10 x 100 requests/s x 0.5 x 320 MB, thirteen links of 100 GbE: not worth it on one."""
        told = plan(load_yaml(FLEETS / "ten-replicas.yaml", PlannedFleet))
        assert told.network.needed_gb_per_s == pytest.approx(160)
        assert told.network.load == pytest.approx(160 / 11.25)
        assert not told.worth
        assert "it takes 13 of them, or a codec" in told.verdict

    def test_three_quiet_replicas_are_not_worth_it(self):
        """They free 0.18 of a replica, whatever a GPU costs; the fetch itself would pay."""
        document = load_yaml(FLEETS / "three-replicas.yaml", PlannedFleet)
        told = plan(document)
        assert told.network.fetch_s + told.network.wait_s < told.compute.recompute_s
        assert not told.worth
        assert "worth 0.18 of a replica: none can be given back" in told.verdict
        assert not plan(
            document.model_copy(update={"prices": document.prices.model_copy(update={"gpu_hour": 90})})
        ).worth

    def test_many_replicas_with_long_prompts_are_worth_it(self):
        """Sixteen replicas of agents: it frees nine of them, the sentence says so, and the other seven keep up."""
        told = plan(load_yaml(FLEETS / "agents-70b.yaml", PlannedFleet))
        assert told.worth
        assert "75% hits instead of 9% free 9 of 16 replicas" in told.verdict
        assert told.compute.isolated_load > 1 > told.compute.shared_load * 16 / 7

    @pytest.mark.parametrize("requests_per_s", [0.3, 0.8, 1.0, 1.5, 2.2])
    def test_those_that_are_left_are_no_busier_and_keep_up(self, requests_per_s):
        """Whatever the fleet's load was without sharing."""
        told = of(requests_per_s=requests_per_s, links=100)
        left = 16 - floor(told.compute.freed_replicas)
        assert told.compute.shared_load * 16 / left <= min(0.9, told.compute.isolated_load) + 1e-9

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"replicas": 1}, "the replicas' own caches have all but 0.0% of the hits"),
            ({"routing": "sticky"}, "the replicas' own caches have all but 0.0% of the hits"),
            ({"hit_share": 0}, "nothing to hit"),
            ({"link": {"gbps": 10}, "links": 100}, "recomputing them 952 ms"),
            ({"links": 4}, "it takes 5 of them"),
            ({"requests_per_s": 0.05}, "none can be given back"),
            ({"requests_per_s": 2.6, "links": 20}, "prefill needs 97% of all replicas' time with sharing too"),
            ({"remote": 0}, "0 B of remote tier do not hold the 3.7 GiB of one prompt that hit"),
            ({"remote": "1GiB", "codec_ratio": 2}, "1.0 GiB of remote tier do not hold the 1.8 GiB of one prompt"),
            ({"remote": "64TiB"}, "64.0 TiB of remote tier and the network cost 359.10"),
            ({"prices": {"gpu_hour": 10, "network_gib": 0.01}}, "and the network cost"),
        ],
    )
    def test_each_reason_against_it_is_told(self, changes, said):
        """One thing wrong is enough, and named."""
        told = of(**changes)
        assert not told.worth
        assert said in told.verdict

    def test_what_does_not_hit_takes_no_time_to_fetch(self):
        """Not even the latency."""
        assert of(hit_share=0).network.fetch_s == 0

    def test_the_number_of_links_that_it_asks_for_is_enough(self):
        """With as many as told the load is under 1, with one less it is not."""
        assert of(links=5).network.fetched_load < 1
        assert of(links=4).network.fetched_load >= 1

    def test_a_full_link_makes_fetches_wait(self):
        """M/D/1: half loaded, a transfer waits for half of one."""
        told = of(links=1, requests_per_s=1)
        half = of(links=1, requests_per_s=0.5 / told.network.fetched_load)
        sending_s = half.hit_tokens * 327_680 / 11.25e9
        assert half.network.wait_s == pytest.approx(sending_s / 2)

    def test_no_more_replicas_are_freed_than_there_are(self):
        """A fleet that cannot keep up is told so."""
        told = of(replicas=4, requests_per_s=50, links=1000)
        assert told.compute.freed_replicas < 4
        assert "cannot keep up" in told.verdict


class TestPopularity:
    @pytest.mark.parametrize(("hit_share", "caches"), [(0.5, 3), (0.75, 16), (0.9, 8), (0.3, 1)])
    def test_skewed_is_what_caches_of_geometric_prompts_hit(self, hit_share, caches):
        """The closed form against the sum over the numbers of times that a prompt is asked."""
        numbers = np.arange(1, 400)
        chance = (1 - hit_share) * hit_share ** (numbers - 1)
        computed = chance @ (caches * (1 - (1 - 1 / caches) ** numbers))
        expected = 1 - computed / (chance @ numbers)
        assert isolated_hit_share(hit_share, caches, skewed=True) == pytest.approx(expected)

    def test_equal_is_the_most_that_sharing_wins(self):
        """Where some prompts are asked more often, caches alone hit more of them; the plan says what it assumed."""
        equal, skewed = (of(requests_per_s=0.8, popularity=one) for one in ("equal", "skewed"))
        assert equal.compute.isolated_hit_share < skewed.compute.isolated_hit_share < skewed.compute.shared_hit_share
        assert skewed.money.net < equal.money.net
        assert (equal.popularity, skewed.document()["popularity"]) == ("equal", "skewed")


GIVEN = {
    "link": {
        "gbps": 100,
        "efficiency": 0.8,
        "latency_s": 0.01,
        "per_chunk_s": 0.001,
        "probe_s": 60,
        "fluctuation": {"kind": "ar1", "sigma": 0.9, "phi": 0.9},
    },
    "prices": {
        "gpu_hour": 10,
        "dram_gib_month": 5.0,
        "disk_gib_month": 0.2,
        "remote_gib_month": 5.0,
        "network_gib": 0.01,
    },
}


def test_every_key_of_a_link_and_a_price_changes_the_plan_or_is_told_as_not_weighed():
    """None is taken without a word."""
    bare = {"link": {"gbps": 99}, "prices": {"gpu_hour": 9}}
    before = of(**bare).document()
    assert {part: set(keys) for part, keys in GIVEN.items()} == {
        part: set(type(getattr(fleet(), part)).model_fields) for part in GIVEN
    }
    assert before["unweighed"] == ()
    for part, keys in GIVEN.items():
        for key, value in keys.items():
            made = of(**{**bare, part: {**bare[part], key: value}})
            changed = {name for name, told in made.document().items() if told != before[name]}
            assert changed == {"unweighed"} if made.unweighed else changed, (part, key)
            assert made.unweighed in {(), (f"{part}.{key}",)}
            assert dict(made.rows()).get("not weighed", "") == ", ".join(made.unweighed)


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
    *("replicas: 16", "requests_per_s: 1.0", "hit_share: 0.75", "prompt_tokens: 16000", "links: 8", "codec_ratio: 2"),
    *("chunk_tokens: 512", "remote: 1TiB", "params: 7e10", "layers: 80", "width: 8192", "kv_heads: 8", "head_dim: 128"),
    *("flops: 4e15", "utilisation: 0.5", "gbps: 100", "efficiency: 0.9", "latency_s: 0.001", "per_chunk_s: 0.0002"),
    *("gpu_hour: 10", "remote_gib_month: 4", "network_gib: 0.1"),
]
WHOLE = """\
name: test
replicas: 16
requests_per_s: 1.0
hit_share: 0.75
prompt_tokens: 16000
links: 8
codec_ratio: 2
chunk_tokens: 512
remote: 1TiB
model: {params: 7e10, layers: 80, width: 8192, kv_heads: 8, head_dim: 128}
gpu: {flops: 4e15, utilisation: 0.5}
link: {gbps: 100, efficiency: 0.9, latency_s: 0.001, per_chunk_s: 0.0002}
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
            json.dumps(told.document(), allow_nan=False)
            assert not any(word in " ".join(map(" ".join, told.rows())).split() for word in ("inf", "nan"))


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
        assert f"{document['network']['needed_gb_per_s']:.3g} GB/s to fetch every hit" in done.stdout
        assert "assumed equal, every prompt asked as often as any other" in " ".join(done.stdout.split())

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
