"""Tiers: media that hold chunks, behind one contract; ``base`` has it."""
