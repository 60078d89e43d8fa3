"""Proofs of TierTune's claims on one machine: real stores, engines, a Redis and an agent under shifting traffic."""
