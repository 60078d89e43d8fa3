"""Pure functions from history to a proposal. No I/O, no clock, no SQL."""
