"""How long an engine's accounting of its requests and steps takes its scheduler thread."""

from collections.abc import Callable
from functools import wraps
from time import perf_counter
from typing import Any

from tiertune_connector.cost import PrefillCost
from tiertune_connector.profile.steps import Steps
from tiertune_connector.tracing import Tracing
from tiertune_connector.vllm.telemetry import Telemetry

TIMED = {
    Steps: ("given", "output", "measured"),
    Tracing: ("arrived",),
    Telemetry: ("answered", "settled", "begun", "loaded", "stored", "finished", "first_token", "changes"),
}


class Accounting:
    """Times the calls of all engines that this process makes from now on, one at a time."""

    def __init__(self) -> None:
        self.overhead_s = 0.0
        """Seconds of these calls."""
        self.step_s = 0.0
        """Seconds of the steps that they account for."""
        self._inside = False
        for kind, names in TIMED.items():
            for name in names:
                setattr(kind, name, self._timed(getattr(kind, name)))
        observe = PrefillCost.observe_step

        def observed(cost: PrefillCost, spans: Any, seconds: float) -> None:
            self.step_s += seconds
            observe(cost, spans, seconds)

        PrefillCost.observe_step = observed  # type: ignore[method-assign]

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def timed(*arguments: Any, **more: Any) -> Any:
            if self._inside:  # of a call that is timed
                return method(*arguments, **more)
            self._inside, began = True, perf_counter()
            try:
                return method(*arguments, **more)
            finally:
                self.overhead_s += perf_counter() - began
                self._inside = False

        return timed
