"""The whole, proved on this machine: real stores, engines, a Redis and an agent under traffic that shifts."""
