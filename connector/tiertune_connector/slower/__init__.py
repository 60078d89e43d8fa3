"""The way of chunks to tiers that are slower than memory, and back."""
