"""All tuners, and the settings that a policy file has for them: what is added here is asked, and can be set."""

from collections.abc import Iterable

from tiertune_agent.tuners.admission import AdmissionSettings, AdmissionTuner
from tiertune_agent.tuners.advice import AdviceSettings, Balance, Routing, Sharing
from tiertune_agent.tuners.base import Tuner
from tiertune_agent.tuners.eviction import EvictionSettings, EvictionTuner
from tiertune_agent.tuners.gate_settings import GateTuner
from tiertune_agent.tuners.holdout import Holdout
from tiertune_agent.tuners.loading import Loading
from tiertune_agent.tuners.remote_fetch import RemoteFetch, RemoteFetchSettings
from tiertune_agent.tuners.remote_policy import RemotePolicy
from tiertune_agent.tuners.tier_size import TierSize, TierSizeSettings
from tiertune_connector.documents import Document

OF_STORES: tuple[type[Tuner], ...] = (
    RemoteFetch,
    GateTuner,
    Holdout,
    TierSize,
    EvictionTuner,
    AdmissionTuner,
    Routing,
    Sharing,
    Balance,
)
"""Asked about every store, in this order: after a change the others wait for the next window."""
OF_SOURCES: tuple[type[Tuner], ...] = (Loading,)
"""Asked about what is only observed."""
OF_REMOTE: tuple[type[Tuner], ...] = (TierSize, RemotePolicy)
"""Asked about the remote, where it is managed."""
TUNERS = (*OF_STORES, *OF_SOURCES, *OF_REMOTE)


class Tuners(Document):
    remote_fetch: RemoteFetchSettings = RemoteFetchSettings()
    tier_size: TierSizeSettings = TierSizeSettings()
    eviction: EvictionSettings = EvictionSettings()
    admission: AdmissionSettings = AdmissionSettings()
    advice: AdviceSettings = AdviceSettings()
    """Routing, sharing as such, prefill against decode, loading at observed engines: only ever recommended."""


def key_of(tuner: type[Tuner]) -> str:
    """Under which a policy has its settings: its name, where it says nothing else."""
    return getattr(tuner, "key", tuner.name)


class TunerError(ValueError):
    """A tuner is not written as `Tuner` promises; the message says what to write."""


def check(tuners: Iterable[type[Tuner]] = TUNERS) -> None:
    """TunerError where a policy has no settings for one.

    And where one says in a place of its own that it only recommends: nobody reads that there any more.
    """
    for tuner in tuners:
        settings = getattr(Tuners(), key_of(tuner), None)
        if settings is None:
            raise TunerError(
                f"tuner {tuner.name}: a policy has no settings for it under {key_of(tuner)!r}: write a field of that "
                f"name in {Tuners.__name__}, {Tuners.__module__}, or give it the key of one whose settings it shares"
            )
        if hasattr(tuner(settings), "advisory"):
            raise TunerError(
                f"tuner {tuner.name}: advisory is said by its settings, not by itself: take it out of "
                f"{tuner.__name__}; if it only recommends, write advisory: ClassVar = True in {type(settings).__name__}"
            )
