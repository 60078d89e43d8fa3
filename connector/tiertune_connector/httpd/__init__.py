"""What the store's and the agent's HTTP have in common: where they listen, and who may call."""
