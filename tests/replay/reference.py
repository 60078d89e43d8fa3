"""The reference's recipe for always, never and rule, apart from the product's code: two candidates per request."""

from collections import OrderedDict

import numpy as np


class Cache:
    def __init__(self, capacity):
        self.capacity, self.order = capacity, OrderedDict()

    def write(self, block):
        if block in self.order:
            self.order.move_to_end(block)
            return
        if len(self.order) >= self.capacity:
            self.order.popitem(last=False)
        self.order[block] = None


_known = {}


def prefixes_once(trace, engines, placed, dram_share, remote_share):
    """They depend on neither model nor link."""
    key = trace.name, engines, placed.tobytes(), dram_share, remote_share
    if key not in _known:
        _known[key] = prefixes(trace, engines, placed, dram_share, remote_share)
    return _known[key]


def prefixes(trace, engines, placed, dram_share, remote_share):
    """Per request: leading local blocks, leading blocks of both tiers, and how many of those are remote."""
    unique = len({block for chain in trace.chains for block in chain})
    local = [Cache(max(1, int(dram_share * unique / engines))) for _ in range(engines)]
    remote = Cache(int(remote_share * unique))
    found = []
    for chain, engine in zip(trace.chains, placed, strict=True):
        own, h, t, rb = local[engine], 0, 0, 0
        for block in chain:
            if block in own.order:
                h += not rb
            elif block in remote.order:
                rb += 1
            else:
                break
            t += 1
        found.append((h, t, rb))
        for cache in (own, remote):
            for block in reversed(chain):
                cache.write(block)
    return np.array(found)


def replay(trace, model, flops, bytes_per_s, *, seed, moving):
    """Mean TTFT in seconds of always, never, rule (EWMA) and rule_oracle (true bandwidth)."""
    params, layers, width, kv = model
    rng = np.random.default_rng(seed)
    h, t, rb = prefixes_once(trace, 4, rng.integers(0, 4, len(trace)), 0.02, 0.30).T
    n, block = trace.input_len, trace.block_tokens
    bins = ((trace.t - trace.t[0]) // 30).astype(int)
    logs = np.zeros(bins.max() + 2)
    if moving:
        for step in range(1, len(logs)):
            logs[step] = 0.9 * logs[step - 1] + 0.9 * np.sqrt(1 - 0.81) * rng.standard_normal()
    truth = bytes_per_s * np.exp(logs)
    believed = np.full(len(logs), bytes_per_s)
    for step in range(len(logs) - 1):
        believed[step + 1] = 0.5 * believed[step] + 0.5 * truth[step]

    def prefill(have):
        return 0.015 + (2 * params * (n - have) + 2 * layers * width * (n * n - have * have)) / (flops * 0.5)

    def fetch(bandwidth):
        return np.where(rb, 0.001 + 0.0002 * rb + rb * block * kv / bandwidth[bins], 0.0)

    fetched, never = prefill(np.minimum(t * block, n - 1)), prefill(np.minimum(h * block, n - 1))
    always = fetched + fetch(truth)
    rule = np.where(fetched + fetch(believed) < never, always, never)
    return {
        "always": always.mean(),
        "never": never.mean(),
        "rule": rule.mean(),
        "rule_oracle": np.minimum(always, never).mean(),
    }
