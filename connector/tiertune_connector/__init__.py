"""TierTune's connector: the store, its client, the gate, and the adapter for vLLM."""

__version__ = "0.1.0"
