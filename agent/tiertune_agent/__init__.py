"""TierTune's agent: collect, remember, tune, guard, apply, judge; the command line; the replay."""
