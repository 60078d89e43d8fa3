"""Benchmarks: every result a ratio against a baseline of the same run."""
