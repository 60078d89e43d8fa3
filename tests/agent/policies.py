"""The policy of the contract's example."""

CONTRACT = """\
version: 1
mode: recommend                 # observe | recommend | auto; a tuner may say its own
objectives: {ttft_p99: 2s}      # may be left out
prices: {gpu_hour: 2.5, dram_gib_month: 3.0, disk_gib_month: 0.1, remote_gib_month: 4.0, network_gib: 0.0}
budgets: {dram: 256GiB, disk: 2TiB, remote: 512GiB}      # per fleet; any may be left out; or total: 1TiB
guard: {changes_per_hour: 4, min_requests: 500, soak: 10m, roll_back_if_worse_by: 0.02,
        freeze: [{days: [fri, sat], from: "18:00", to: "06:00", zone: UTC}], holdout: 0.0}
tuners:
  remote_fetch: {mode: auto, period: 30s, margin: 1.1, disable_after: 4, enable_after: 4, min_fetch_tokens: 0}
  tier_size:    {period: 5m, min: {dram: 4GiB}, max: {dram: 128GiB}, max_step: 0.5, min_gain: 0.03, hold_off: 15m}
  eviction:     {period: 30m, candidates: [lru, arc, s3fifo], min_gain: 0.03, hold_off: 6h}
  admission:    {period: 30m, hold_off: 6h}
remote: {manage: false}
overrides:                      # each entry whose match fits is laid over the above, in order
  - match: {model: "llama-*", store: "gpu-a*"}
    tuners: {tier_size: {max: {dram: 32GiB}}}
"""

GIB = 1 << 30
