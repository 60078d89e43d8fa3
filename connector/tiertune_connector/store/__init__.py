"""The store of one host: all tiers behind lookup, load, reserve and commit, and their tuning."""
