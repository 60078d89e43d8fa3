"""All tuners, and their settings in a policy file: a tuner added here is asked, and can be set."""

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
"""Asked about every store, in this order; after a change the rest wait for the next window."""
OF_SOURCES: tuple[type[Tuner], ...] = (Loading,)
"""Asked about sources that are only observed."""
OF_REMOTE: tuple[type[Tuner], ...] = (TierSize, RemotePolicy)
"""Asked about the remote, if it is managed."""
TUNERS = (*OF_STORES, *OF_SOURCES, *OF_REMOTE)


class Tuners(Document):
    remote_fetch: RemoteFetchSettings = RemoteFetchSettings()
    tier_size: TierSizeSettings = TierSizeSettings()
    eviction: EvictionSettings = EvictionSettings()
    admission: AdmissionSettings = AdmissionSettings()
    advice: AdviceSettings = AdviceSettings()
    """Routing, sharing as such, prefill against decode, loading at observed engines: only ever recommended."""


def check(tuner: type[Tuner]) -> None:
    """Raise TypeError if it is not written as `Tuner` promises; the message says what to write."""
    if (key := getattr(tuner, "key", "")) not in Tuners.model_fields:
        raise TypeError(
            f"{tuner.__name__}: a policy has no settings for it under {key!r}: write a field of that name in "
            f"{Tuners.__name__}, {__name__}, or give it the key of one whose settings it shares"
        )
    if tuner.targets is Tuner.targets and not tuner.tiers:
        raise TypeError(f"{tuner.__name__}: nothing says what it is asked about: name its tiers, or write its targets")


for _tuner in TUNERS:  # at start, as no round could ask it
    check(_tuner)
