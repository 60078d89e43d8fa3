"""All tuners, and their settings in a policy file: a tuner added here is asked, and can be set."""

from tiertune_agent.tuners.admission import AdmissionSettings, AdmissionTuner
from tiertune_agent.tuners.advice import AdviceSettings, Balance, Loading, Routing, Sharing
from tiertune_agent.tuners.base import Tuner
from tiertune_agent.tuners.eviction import EvictionSettings, EvictionTuner, RemotePolicy
from tiertune_agent.tuners.gate_settings import GateTuner, Holdout
from tiertune_agent.tuners.remote_fetch import RemoteFetch, RemoteFetchSettings
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
