"""The Redis that the fleet shares, where the agent is allowed to tune it."""
