"""Production's pools, eviction and gate under a virtual clock, fed by a trace; engines and links are models."""
