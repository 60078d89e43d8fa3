"""Copies of chunks between an engine's memory and the store's: summed, shared by threads, and probed."""
