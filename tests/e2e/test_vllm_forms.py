"""Engines of other forms than the fleet's: tensor-parallel ranks, layers with a sliding window, LoRA adapters."""

from pathlib import Path

from e2e.vllm_engines import CHUNK_TOKENS, Request, differences, engine, of_engines, regions, through_store
from e2e.vllm_fixtures import chunks, fetching, prompts
from e2e.vllm_model import ADAPTER_RANK, write_adapter, write_model
from e2e.vllm_stores import Host

pytestmark = of_engines(600)

APART = {"prefix": 0, "tail": 1000}


def test_tensor_parallel_ranks_share_among_themselves_only(fleet, reference, engine_b):
    """Two ranks compute and get back what one engine would; of what an engine of one rank stored they take nothing."""
    asked = prompts(3, seed=71, **APART)
    engine_b.generate(asked)
    ranks = {"tensor_parallel_size": 2, "disable_custom_all_reduce": True}
    transfer = through_store(fleet.host_a.socket, fleet.new_id("tp"), gated=False)
    with engine(fleet.model, fleet.folder / "tp.log", transfer=transfer, processes=True, **ranks) as both:
        both.wait_ready()
        assert fleet.computed(both, asked).external == 0, "chunks of one rank are no chunks of two"
        both.reset()
        assert fleet.right(both, asked).external >= chunks(asked) * CHUNK_TOKENS, fleet.host_a.gate()
        assert both.end() == 0


def test_windows_and_adapters_keep_their_chunks_apart(tmp_path_factory):
    """With a sliding window in every second layer: the model and each of its adapters get back what they computed."""
    folder = Path(tmp_path_factory.mktemp("forms"))
    model = write_model(folder / "model", window=256)
    adapters = ["", *(str(write_adapter(folder / f"lora-{seed}", seed=seed)) for seed in (1, 2))]
    asked = [Request(prompt, adapter=adapter) for adapter in adapters for prompt in prompts(2, seed=73, **APART)]
    lora = {"enable_lora": True, "max_lora_rank": ADAPTER_RANK, "max_loras": len(adapters)}
    with (
        Host(folder / "store", "host-f", remote=None, dram="256MiB") as store,
        engine(model, folder / "engine.log", transfer=through_store(store.socket, "forms"), **lora) as one,
    ):
        one.wait_ready()
        one.generate(prompts(2, seed=74), max_tokens=2)
        before = store.resident()
        alone = one.generate(asked)
        assert [answer.cached for answer in alone.answers] == [0] * len(asked)
        assert len({tuple(answer.tokens) for answer in alone.answers}) == len(asked)
        store.wait_resident(before + 1)
        one.reset()
        with fetching(one):
            again = one.generate(asked)
        assert differences(again.answers, alone.answers) == []
        assert again.external >= len(adapters) * chunks(asked) * CHUNK_TOKENS, store.gate()
        assert one.end() == 0
    assert regions(["forms"]) == []
