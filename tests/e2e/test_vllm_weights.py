"""An engine that loads its model's files again while it runs, and another that goes on with the old ones."""

from pathlib import Path

from e2e.vllm_engines import CHUNK_TOKENS, differences, engine, of_engines, regions, through_store
from e2e.vllm_fixtures import CHUNK_BYTES, chunks, prompts
from e2e.vllm_model import write_model
from e2e.vllm_stores import Host

pytestmark = of_engines(600)


def test_weights_loaded_again_are_told_from_others(tmp_path_factory):
    """The same files: what was stored is found. Other files: nothing that the old ones made, on either side."""
    folder = Path(tmp_path_factory.mktemp("weights"))
    model, asked = write_model(folder / "model"), prompts(3, seed=81)
    whole = chunks(asked) * CHUNK_TOKENS
    with (
        Host(folder / "store", "host-w", remote=None, dram="256MiB") as store,
        engine(
            model, folder / "one.log", transfer=through_store(store.socket, "weights-1", gated=False), processes=True
        ) as one,
        engine(model, folder / "other.log", transfer=through_store(store.socket, "weights-2", gated=False)) as other,
    ):
        one.wait_ready()
        other.wait_ready()
        old = one.generate(asked)
        store.wait_resident(chunks(asked) * CHUNK_BYTES)
        one.ask("call", method="reload_weights")
        one.reset()
        same = one.generate(asked)
        assert differences(same.answers, old.answers) == []
        assert same.external >= whole

        write_model(model, seed=1)
        one.ask("call", method="reload_weights")
        one.reset(staging=False)
        new = one.generate(asked)
        assert all(mine.tokens != theirs.tokens for mine, theirs in zip(new.answers, old.answers, strict=True))
        assert new.external == 0
        one.reset(staging=False)
        assert one.generate(asked).external == 0, "whoever empties the device's cache may have exchanged them again"
        assert "reload_weights gave this engine other weights" in one.log()

        still = other.generate(asked)
        assert differences(still.answers, old.answers) == []
        assert still.external >= whole
        assert [one.end(), other.end()] == [0, 0]
    assert regions(["weights-1", "weights-2"]) == []
