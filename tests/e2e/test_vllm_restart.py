"""An engine that was restarted, as one of two connectors."""

from e2e.vllm_engines import of_engines
from e2e.vllm_fixtures import prompts
from e2e.vllm_model import LAYERS

pytestmark = of_engines(600)


def test_a_restarted_engine_is_warm_and_first_hit_loads_while_all_save(fleet, reference, engine_a, engine_b):
    """Engine A finds what it had stored in its life before, behind MultiConnector; both connectors save.

    The stub, asked first, has nothing: TierTune's is the first hit, and loads. New prompts are handed to the stub layer
    by layer, and reach engine B through the store.
    """
    stored, new = prompts(2, seed=61), prompts(2, seed=62)
    fleet.computed(engine_a, stored)
    again = fleet.restart_a()
    fleet.fetched(again, stored)

    seen = again.ask("stub")
    assert seen["asked"] >= len(stored)
    assert seen["external_tokens"] == 0, "what another connector loads is not the stub's"
    fleet.computed(again, new)
    after = again.ask("stub")
    assert after["finished"] - seen["finished"] == len(new)
    assert after["saved_layers"] - seen["saved_layers"] >= LAYERS
    engine_b.reset()
    fleet.fetched(engine_b, new)
