"""What reaches the device, byte by byte: vLLM's scheduler and managers with TierTune's, and a played model."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import vllm
from vllm.config import WeightTransferConfig
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

from connector.stores import eventually
from e2e.vllm_model import planned
from engine import beside
from engine.conftest import BLOCK, PATIENCE_S, on
from engine.played import Played, alone
from engine.rank import answer
from engine.scheduler import tokens
from tiertune_connector.cost import decide
from tiertune_connector.vllm import gate

HEAD = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
PAGE = 8 * BLOCK
ROW = 4096
TURNS = 700
TWO_RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", "ahead": True}
TWO_STAGES = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}


def whole():
    return {"a.attn": FullAttentionSpec(**HEAD)}


def window():
    return whole() | {"b.attn": SlidingWindowSpec(sliding_window=100, **HEAD)}


def two_whole():
    """As many layers with a window as others make one group; twice as many others make two."""
    return window() | {"c.attn": FullAttentionSpec(**HEAD)}


def narrow():
    return whole() | {"b.attn": SlidingWindowSpec(sliding_window=40, **HEAD)}


def recurrent():
    state = MambaSpec(block_size=BLOCK, shapes=((PAGE // 4,),), dtypes=(torch.float32,), mamba_cache_mode="align")
    return whole() | {"b.mixer": state}


def drafting():
    """Recurrent, with room for the states after two drafts."""
    layers = recurrent()
    return layers | {"b.mixer": replace(layers["b.mixer"], num_speculative_blocks=2)}


def dear(*tiers, **costs):
    """A gate for which recomputing is dear beyond all measure: a played model is quicker than any store."""
    return decide(*tiers, **(costs | {"prefill": lambda first, end: 0.1 * (end - first)}))


@pytest.fixture
def played(configured, store, monkeypatch):
    """Makes engines on the store, with few blocks and rows, that fetch all they find; all end with the test."""
    monkeypatch.setattr(gate, "decide", dear)
    made = []
    beside.KEPT.clear()

    def make(layers, chunk, *, ahead=False, drafts=0, other=None, **arguments):
        """``ahead``: steps are scheduled before the one before has ended; ``other``: settings of `beside.Beside`."""
        if drafts:
            found = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_max": 4}
            arguments["speculative_config"] = found
        settings = on(store, staging=60 * ROW, chunk_tokens=chunk)
        usual = {"max_num_batched_tokens": 256, "max_num_seqs": 8, "max_model_len": 1024}
        config = configured(extra=settings, engine_id=f"tt-played-{len(made)}", **(usual | arguments))
        config.scheduler_config.async_scheduling = ahead
        if layers in (recurrent, drafting):
            config.cache_config.mamba_cache_mode = "align"
        if other is not None:
            config.kv_transfer_config = beside.transfer(config.kv_transfer_config, **other)
        talks = alone if other is None else beside.both
        made.append(Played(config, planned(config, layers(), 70 * PAGE), seed=len(made), make=talks))
        return made[-1]

    yield make
    for each in made:
        each.close()


class Crowd:
    """Requests that begin alike, on two engines: added, aborted, their caches emptied, now and then."""

    def __init__(self, pair, store, seed):
        self.pair, self.store = pair, store
        self.random = np.random.default_rng(seed)
        self.heads = [self.random.integers(10, 4000, length).tolist() for length in (70, 150, 300, 480)]
        self.asked = {engine: {} for engine in pair}
        self.ended = 0

    def turn(self, number):
        engine, chance = self.pair[self.random.integers(2)], self.random.random()
        asked = self.asked[engine]
        if chance < 0.1 and len(asked) < 10:
            self.add(engine, f"r{number}")
        elif chance < 0.12 and asked:
            name = str(self.random.choice(list(asked)))
            del asked[name]
            engine.abort(name)
        elif chance < 0.13:
            engine.scheduler.reset_prefix_cache(reset_connector=bool(self.random.integers(2)))
        elif chance < 0.135:
            engine.drain()
            if not engine.loading:  # vLLM refuses this amid a load
                engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        elif chance < 0.14:
            self.store.store.flushes.drop()
        engine.step()
        self.look(engine)

    def add(self, engine, name):
        """What begins as another did, or goes on from an answer."""
        head = self.heads[self.random.integers(len(self.heads))]
        head = head[: self.random.integers(1, len(head))] if self.random.random() < 0.3 else head
        prompt = [*head, *self.random.integers(10, 4000, self.random.integers(1, 80)).tolist()][:900]
        self.asked[engine][name] = prompt, int(self.random.integers(1, 60))
        engine.add(name, prompt, most=self.asked[engine][name][1])

    def look(self, engine):
        """Whatever has ended has the answer that it has to have."""
        for name in [name for name in self.asked[engine] if name not in engine.scheduler.requests]:
            prompt, most = self.asked[engine].pop(name)
            assert engine.answers[name] == answer(prompt, most)
            self.ended += 1
            if len(prompt) < 600:
                self.heads.append(prompt + engine.answers[name])


@pytest.mark.parametrize(
    ("layers", "chunk", "arguments"),
    [
        (whole, 64, {}),
        (window, 64, {}),
        (narrow, 128, {}),
        (recurrent, 64, {}),
        (recurrent, 32, {"prefix_match_unit": 16}),
        (whole, 64, {"ahead": True, "drafts": 3}),
        (window, 64, {"drafts": 2}),
        (drafting, 32, {"drafts": 2}),
        (whole, 64, TWO_RANKS),
        (window, 64, TWO_STAGES),
        (whole, 64, {"other": {"at_once": False, "fails": 0.3}}),
        (whole, 64, {"other": {"at_once": True, "fails": 0.5}, "enable_prefix_caching": False}),
    ],
    ids=[
        *("whole", "window", "narrow window", "recurrent", "recurrent, with parts of blocks"),
        *("ahead, with drafts", "window, with drafts", "recurrent, with drafts"),
        *("two ranks", "window, two stages"),
        *("beside another that fails", "beside another that fails in the step"),
    ],
)
def test_every_byte_that_is_used_is_the_one_that_was_computed(played, store, layers, chunk, arguments):
    """Whatever comes from the store, and whoever is aborted, preempted or emptied meanwhile; nothing is left of any."""
    pair = [played(layers, chunk, **arguments) for _ in range(2)]
    crowd = Crowd(pair, store, seed=1)
    for number in range(TURNS):
        crowd.turn(number)
    for engine in pair:
        engine.run()
        crowd.look(engine)
        assert crowd.asked[engine] == {}
        assert engine.knows_nothing()
    assert crowd.ended > 30
    assert sum(engine.loaded for engine in pair) > 10, "next to nothing came from the store"
    assert all(engine.rejected > 10 for engine in pair) or not arguments.get("drafts")


def test_what_a_session_computes_is_found_again(played):
    """A request that goes on with more input (`resumable`): each chunk is stored from the blocks that it lies in."""
    one, other = played(whole, 64), played(whole, 64)
    said = tokens(500, seed=2)
    text = []
    for part in (said[:200], said[200:210], said[210:]):
        one.answers["session"] = []
        one.add("session", part, most=3, resumable=True)
        one.answers["session"], before = [], text
        one.run()
        assert one.answers["session"] == answer([*before, *part], 3)
        text = [*before, *part, *one.answers["session"][:-1]]  # vLLM takes back the last token of a turn
    one.abort("session")
    one.run()
    assert one.knows_nothing()

    other.add("again", text, most=3)
    other.run()
    assert other.answers["again"] == answer(text, 3)
    assert other.loaded == len(text) // 64 * 64 // BLOCK


def spoil(patch, rank):
    """It computes with what vLLM tells it to, whatever that is; states that follow from wrong ones are wrong."""
    carry, keep = rank._carry_states, rank._keep_states

    def carry_states(name, first, end):
        try:
            carry(name, first, end)
        except AssertionError:
            rank._states[name, 1] = (end - 1) // BLOCK, 0

    patch.setattr(rank, "_carry_states", carry_states)
    patch.setattr(rank, "_keep_states", lambda name, group, numbers, *more: keep(name, group, ~numbers, *more))
    patch.setattr(rank, "_check_tokens", lambda *_: None)


@pytest.mark.parametrize(
    ("layers", "ahead"),
    [(whole, False), (drafting, False), (drafting, True)],
    ids=["whole", "recurrent", "recurrent ahead"],
)
def test_what_a_session_with_drafts_computes_nobody_finds(played, monkeypatch, layers, ahead):
    """vLLM 0.32 has it wrong: drafts that were accepted behind the end of a turn lie where the next input stands."""
    one, other = (played(layers, 32, ahead=ahead, drafts=2) for _ in range(2))
    monkeypatch.setattr(one, "_draft", lambda text, place, _: text.said(place, 2))
    said = tokens(500, seed=2)
    session = one.add("session", said[:94], most=2, resumable=True)
    one.run()
    if vllm.__version__.startswith("0.32"):
        assert (session.num_computed_tokens > session.num_tokens) is not ahead, "it ended where the drafts did"
    with monkeypatch.context() as later:
        spoil(later, one.ranks[0])
        one.add("session", said[94:], most=20, resumable=True)
        one.run()
    one.abort("session")
    one.run()
    text = list(session.prompt_token_ids)
    assert len(text) > 500
    assert one.knows_nothing()

    for engine in (other, one):
        engine.add("again", text, most=3)
        engine.run()
        assert engine.answers["again"] == answer(text, 3)
    assert other.loaded == 0


def pictures(name):
    """An image of that name at tokens 70 to 169."""
    place = PlaceholderRange(offset=70, length=100)
    return [MultiModalFeatureSpec(MultiModalKwargsItem(), modality="image", identifier=name, mm_position=place)]


def test_prompts_with_other_images_in_the_same_places_are_told_apart(played):
    """Their tokens are the same; what is before the image is found."""
    one, other = played(whole, 64), played(whole, 64)
    prompt = tokens(230, seed=6)
    prompt[70:170] = [7] * 100

    one.add("cat", prompt, mm_features=pictures("cat"))
    one.run()
    for name, blocks in (("dog", 2), ("cat", 6)):
        other.add(name, prompt, mm_features=pictures(name))
        other.run()
        assert other.answers[name] == answer(prompt, 8, pictures(name))
        assert other.loaded == blocks


def test_an_image_that_was_fetched_can_be_encoded_after_all(played, store):
    """The engine has never seen it; then the request is preempted, and the store has lost what it gave."""
    one, other = played(whole, 64), played(whole, 64)
    prompt = tokens(230, seed=7)
    one.add("cat", prompt, mm_features=pictures("cat"))
    one.run()
    other.add("cat", prompt, most=60, mm_features=pictures("cat"))
    while not other.answers["cat"]:
        other.step()
    assert (other.loaded, other.ranks[0].encoded) == (6, 0)
    store.store.flushes.drop()
    other.drain()
    other.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    other.run()
    assert other.answers["cat"] == answer(prompt, 60, pictures("cat"))
    assert other.ranks[0].encoded == 1
    assert other.knows_nothing()


def test_a_request_that_a_reset_preempts_goes_on(played):
    """It comes again in the very next step, and finds in staging what the device has lost."""
    engine = played(whole, 64)
    prompt = tokens(300, seed=3)
    engine.add("asked", prompt, most=600)  # steps enough for the store to take the chunks meanwhile
    while engine.tier._staging._num_evictable_cache_chunks < 300 // 64:
        engine.step()
    while engine.scheduler.connector.connector_scheduler._jobs:
        engine.step()
    assert len(engine.answers["asked"]) < 600, "it has ended by now"
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.run()
    assert engine.answers["asked"] == answer(prompt, 600)
    assert engine.loaded > 0
    assert engine.knows_nothing()


@pytest.mark.parametrize(
    ("weights", "loaded"),
    [({}, 8), ({"weight_transfer_config": WeightTransferConfig()}, 0), ({"load_format": "dummy"}, 0)],
    ids=["from files", "from a trainer", "invented"],
)
def test_an_engine_that_gets_new_weights_loses_what_the_old_ones_made(played, weights, loaded):
    """Even if only the device's cache is emptied for them; other engines go on with what staging has."""
    engine = played(whole, 64, **weights)
    prompt = tokens(300, seed=8)
    for name in ("old", "new"):
        engine.add(name, prompt)
        engine.run()
        assert engine.answers[name] == answer(prompt, 8)
        assert engine.scheduler.reset_prefix_cache()
    assert engine.loaded == loaded
    assert engine.knows_nothing()


@pytest.mark.parametrize("other", [None, {"at_once": True, "fails": 0.0}], ids=["alone", "beside another connector"])
def test_weights_exchanged_past_vllms_configuration(played, other):
    """Even if no cache is emptied but the device's, nothing comes that the old ones made: neither staged nor stored.

    What the new ones make comes again, until the device's cache is emptied for the next. Others go on with the old.
    """
    engine, old = played(whole, 64, other=other), played(whole, 64)
    prompt = tokens(300, seed=8)

    def asked(each, name):
        before = each.loaded
        each.add(name, prompt)
        each.run()
        assert each.answers[name] == answer(prompt, 8)
        assert each.knows_nothing()
        return each.loaded - before

    asked(engine, "a")
    assert asked(old, "a") == 8
    engine.exchanges("update_weight_from_tensors")
    assert engine.scheduler.reset_prefix_cache()
    assert [asked(engine, "b"), asked(engine, "c")] == [0, 0], "the device has it"
    assert old.scheduler.reset_prefix_cache(reset_connector=True)
    assert asked(old, "b") == 8
    assert engine.scheduler.reset_prefix_cache()
    assert asked(engine, "d") == 0


def test_weights_exchanged_amid_loads_and_stores(played):
    """Requests that are kept end, with right answers; what is under way is not taken for what the new weights make."""
    one, engine = played(whole, 64), played(whole, 64)
    prompts = [tokens(300, seed=seed) for seed in range(4)]
    for seed, prompt in enumerate(prompts[:2]):
        one.add(f"r{seed}", prompt)
    one.run()
    for seed, prompt in enumerate(prompts):
        engine.add(f"r{seed}", prompt, most=40)
    while not engine.loading:
        engine.step()
    for method in ("start_weights", "update_weights", "finish_weights"):
        engine.exchanges(method)
        engine.step()
    engine.run()
    assert [engine.answers[f"r{seed}"] for seed in range(4)] == [answer(prompt, 40) for prompt in prompts]
    assert engine.knows_nothing()


def test_what_is_computed_over_an_exchange_is_staged_no_more(played):
    """Its head is the old weights'. Staging's keys do not tell, and with no cache on the device nobody empties it."""
    engine = played(whole, 64, enable_prefix_caching=False)
    prompt = tokens(300, seed=9)
    engine.add("over", prompt, most=20)
    while not engine.answers["over"]:
        engine.step()
    engine.exchanges("update_weights")
    engine.run()
    for name, found in (("first", 0), ("second", 8)):
        before = engine.loaded
        engine.add(name, prompt)
        engine.run()
        assert engine.loaded - before == found
    assert engine.knows_nothing()


@pytest.mark.parametrize("computed", [0, 256])
def test_what_a_faulty_step_was_to_compute_nobody_finds(played, computed):
    """vLLM goes on (`enable_fault_tolerance`): it takes it for computed, and does not hear which copies have ended."""
    one, other = played(whole, 64), played(whole, 64)
    prompt = tokens(500, seed=3)
    request = one.add("faulty", prompt)
    one.tier._requests["faulty"].ask.reply.result(PATIENCE_S)
    while request.num_computed_tokens < computed:
        one.step()
    one.drain()
    one.fault()
    one.run()
    assert one.knows_nothing()
    steps = one.tier.telemetry.steps
    assert steps.ended == steps.last, "an output is taken for that of the step before"

    assert one.scheduler.reset_prefix_cache(), "it still has that step's blocks"
    for engine in (other, one):
        engine.add("again", prompt)
        engine.run()
        assert engine.answers["again"] == answer(prompt, 8)
        assert engine.loaded == 0


def test_a_reset_right_after_another(played):
    """Before any step has told the worker what it is to end: both are done, and the worker is told of all of it."""
    engine = played(whole, 64)
    prompt = tokens(300, seed=4)
    engine.add("asked", prompt, most=60)
    scheduler = engine.scheduler.connector.connector_scheduler
    while not scheduler._jobs:
        engine.step()
    jobs = set(scheduler._jobs)
    for _ in range(2):
        assert engine.scheduler.reset_connector_cache()
    assert scheduler._current_batch_jobs_to_flush == jobs
    engine.run()
    assert engine.answers["asked"] == answer(prompt, 60)
    assert engine.knows_nothing()


@pytest.mark.parametrize(("most", "loaded"), [(None, 2), (48, 2), (47, 2), (31, 0), (0, 0)])
def test_of_a_recurrent_model_no_more_is_stored_than_a_request_asks_for(played, most, loaded):
    """Of 60 tokens 48 are stored, one and a half blocks, or one: vLLM failed if the half was more than asked for."""
    one, other = (played(recurrent, 32, prefix_match_unit=16) for _ in range(2))
    prompt = tokens(60, seed=5)
    one.add("asked", prompt, transfer=None if most is None else {"max_offload_tokens": most})
    other_prompt = prompt[:50]
    one.run()
    assert one.answers["asked"] == answer(prompt, 8)
    other.add("again", other_prompt)
    other.run()
    assert other.answers["again"] == answer(other_prompt, 8)
    assert other.loaded == loaded


@pytest.mark.parametrize(("layers", "each"), [(whole, 1), (window, 1), (recurrent, 1), (two_whole, 2)])
def test_a_prompt_takes_the_room_that_is_reckoned_with(played, store, layers, each):
    """Of a group with a window vLLM keeps only the last chunks of a prompt, though a lookup names all of them."""
    one = played(layers, 64, max_model_len=832)
    one.add("asked", tokens(800, seed=5))
    one.run()
    one.drain()
    ((digest, held),) = store.store.dram.pools.items()
    assert store.store.observer.terms(digest)["chunks_each"] == each
    eventually(lambda: 12 * each <= len(held.pool) <= 12 * each + 2)
