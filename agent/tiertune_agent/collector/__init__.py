"""From the stores' cumulative counters to windows."""
