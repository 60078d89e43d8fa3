"""An engine that was restarted, as one of two connectors."""

from e2e.vllm_engines import CHUNK_TOKENS, differences, of_engines
from e2e.vllm_fixtures import CHUNK_BYTES, chunks, fetching, prompts
from e2e.vllm_model import LAYERS

pytestmark = of_engines(600)


def test_a_restarted_engine_is_warm_and_first_hit_loads_while_all_save(fleet, reference, engine_a, engine_b):
    """Engine A finds what it had stored in its life before, behind MultiConnector; both connectors save.

    The stub, asked first, has nothing: TierTune's is the first hit, and loads. New prompts are handed to the stub layer
    by layer, and reach engine B through the store.
    """
    stored, new = prompts(2, seed=61), prompts(2, seed=62)
    before = fleet.host_a.resident()
    engine_a.generate(stored)
    fleet.host_a.wait_resident(before + chunks(2) * CHUNK_BYTES)

    again = fleet.restart_a()
    with fetching(again):
        warm = again.generate(stored)
    assert differences(warm.answers, fleet.expected(stored)) == []
    assert warm.external >= chunks(2) * CHUNK_TOKENS, fleet.host_a.gate()

    seen = again.ask("stub")
    assert seen["asked"] >= len(stored)
    assert seen["external_tokens"] == 0, "what another connector loads is not the stub's"
    before = fleet.host_a.resident()
    assert differences(again.generate(new).answers, fleet.expected(new)) == []
    after = again.ask("stub")
    assert after["finished"] - seen["finished"] == len(new)
    assert after["saved_layers"] - seen["saved_layers"] >= LAYERS
    fleet.host_a.wait_resident(before + chunks(2) * CHUNK_BYTES)
    engine_b.reset()
    with fetching(engine_b):
        helped = engine_b.generate(new)
    assert differences(helped.answers, fleet.expected(new)) == []
    assert helped.external >= chunks(2) * CHUNK_TOKENS, fleet.host_a.gate()
