"""What operators allow the agent to do: policy files, and the bounds that a proposal must pass."""
