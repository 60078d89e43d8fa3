"""What is wrong with stores, sources and tiers: detectors, and what opens and closes incidents."""
