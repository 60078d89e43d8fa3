"""Who shares chunks with whom: namespaces of real configurations."""

import json
import shutil

import pytest
import torch
from vllm.config import MultiModalConfig

from e2e.vllm_model import write_model
from engine.conftest import cache_of, full_attention
from tiertune_connector.vllm.compat import Engine
from tiertune_connector.vllm.identity import namespace

NAME = {"served_model_name": "llama"}


def identify(config, cache=None):
    cache = cache or cache_of(config)
    engine = Engine(config, cache)
    return namespace(config, cache, engine.config, engine.groups)


@pytest.fixture
def usual(configured):
    return identify(configured(**NAME))


def test_the_same_model_elsewhere_is_the_same(configured, usual, model, tmp_path):
    """Another engine, another path, other sizes of caches and batches: the chunks are exchangeable."""
    copy = shutil.copytree(model, tmp_path / "copy")
    settings = {"socket": "/elsewhere.sock", "chunk_tokens": 64, "stage": "decode"}
    other = configured(model=str(copy), engine_id="other", extra=settings, max_num_seqs=3, max_model_len=1024, **NAME)
    assert identify(other).digest == usual.digest


@pytest.mark.parametrize(
    "changed",
    [
        {"served_model_name": "other"},
        {"dtype": "bfloat16"},
        {"block_size": 64},
        {"extra": {"chunk_tokens": 128}},
        {"prefix_caching_hash_algo": "sha256_cbor"},
        {"hf_overrides": {"rope_theta": 500.0}},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_what_changes_the_bytes_or_their_keys_is_another_namespace(configured, usual, changed):
    """Name, dtype, block, chunk, hash algorithm, and what overrides the model's own configuration."""
    assert identify(configured(**(NAME | changed))).digest != usual.digest


def test_other_weights_under_the_same_name_are_another_namespace(configured, usual, tmp_path):
    """A new revision of a model is told by its files."""
    other = identify(configured(model=str(write_model(tmp_path / "other", seed=1)), **NAME))
    assert other.weights != usual.weights
    assert other.digest != usual.digest


def test_a_hub_model_is_told_by_its_commit(configured, usual, monkeypatch):
    """Its files are wherever the cache has them."""
    config = configured(**NAME)
    monkeypatch.setattr(config.model_config, "model", "someone/llama")
    config.model_config.hf_config._commit_hash = "0123abcd"
    assert identify(config).weights == "0123abcd"


def test_how_media_are_processed_is_part_of_it(configured, usual, tmp_path, model):
    """Settings of the engine and files beside the weights change what an image becomes, and not its hash."""

    def digest(folder=model, **fields):
        config = configured(model=str(folder), **NAME)
        config.model_config.multimodal_config = MultiModalConfig(**fields)
        return identify(config).digest

    other = shutil.copytree(model, tmp_path / "other")
    (other / "preprocessor_config.json").write_text('{"image_mean": [0, 0, 0]}')
    digests = [digest(), digest(mm_processor_kwargs={"do_rescale": False}), digest(other), usual.digest]
    assert len(set(digests)) == 4
    assert digest() == digests[0]


def test_the_hash_seed_is_part_of_it(configured, monkeypatch):
    """Engines whose hashes begin otherwise have other keys for the same tokens."""
    pytest.importorskip("xxhash")
    digests = set()
    for seed in ("0", "1"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        digests.add(identify(configured(prefix_caching_hash_algo="xxhash", **NAME)).hash_seed)
    assert len(digests) == 2


@pytest.mark.parametrize("fields", [{"num_kv_heads": 4}, {"head_size": 128}, {"dtype": torch.float16}])
def test_another_layout_of_the_cache_is_another_namespace(configured, usual, fields):
    """Pages of other bytes, as tensor parallelism or a quantised cache makes them."""
    config = configured(**NAME)
    layers = {f"model.layers.{index}.attn": full_attention(**fields) for index in range(4)}
    assert identify(config, cache_of(config, layers)).digest != usual.digest


def test_layouts_in_memory_are_part_of_it(configured, usual):
    """The same pages with their parts in another order."""
    config = configured(**NAME)
    cache = cache_of(config)
    config.cache_config.kv_cache_layout = "BLHNC"
    assert identify(config, cache).digest != usual.digest


def test_instruction_sets_are_part_of_it_on_the_cpu(configured, usual, monkeypatch):
    """K and V are packed as they like it."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another")
    assert identify(configured(**NAME)).digest != usual.digest


def test_a_drafter_is_part_of_it(configured, usual, tmp_path):
    """Its layers' keys and values lie in the same chunks."""
    digests = set()
    for seed in (1, 2):
        drafter = write_model(tmp_path / f"drafter-{seed}", seed=seed)
        speculative = {"model": str(drafter), "method": "draft_model", "num_speculative_tokens": 2}
        config = configured(speculative_config=speculative, **NAME)
        digests.add(identify(config).digest)
    assert len(digests | {usual.digest}) == 3


@pytest.mark.parametrize("unknown", ["made up", "no shards", "overrides by a function"])
def test_weights_that_cannot_be_told_are_the_engines_own(configured, model, tmp_path, unknown):
    """No two engines take each other's for theirs."""
    arguments = dict(NAME)
    if unknown == "made up":
        arguments["load_format"] = "dummy"
    elif unknown == "no shards":
        folder = tmp_path / "bare"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(json.loads((model / "config.json").read_text())))
        arguments["model"] = str(folder)
    else:
        arguments["hf_overrides"] = lambda config: config
    digests = {identify(configured(engine_id=engine, **arguments)).digest for engine in ("a", "b")}
    assert len(digests) == 2
