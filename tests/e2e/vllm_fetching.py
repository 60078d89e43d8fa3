"""An engine without a gate: what it finds it fetches, and waits for.

On a busy machine a gate may believe anything of its costs. `TierTuneConnector` is for an engine whose core is a process
of its own, as its ``kv_connector_module_path``; others are asked (`vllm_fixtures.fetching`).
"""

from typing import Any

from tiertune_connector.vllm import connector, gate

PATIENT_S = 60.0


class TierTuneConnector(connector.TierTuneConnector):
    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        always_fetch(on=True, patient=True)


def always_fetch(*, on: bool, patient: bool = False) -> None:
    """Recomputing seems dear beyond all measure. ``patient``: loads may take as long as they like, too."""
    decide = getattr(gate.decide, "without_gate", gate.decide)
    deadline_s = getattr(gate.deadline_s, "impatient", gate.deadline_s)
    if on:

        def always(*tiers: Any, **costs: Any) -> Any:
            costs["prefill"] = lambda first, end: 0.1 * (end - first)
            return decide(*tiers, **costs)

        always.without_gate = decide  # type: ignore[attr-defined]
        gate.decide = always
    else:
        gate.decide = decide
    if on and patient:

        def patiently(*_: Any, **__: Any) -> float:
            return PATIENT_S

        patiently.impatient = deadline_s  # type: ignore[attr-defined]
        gate.deadline_s = patiently
    else:
        gate.deadline_s = deadline_s
