"""What sources tell of themselves, in the shape that real ones gave it: one engine of vLLM, one server of LMCache."""

import httpx

VLLM = """\
# HELP vllm:prompt_tokens_total Number of prefill tokens processed.
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="llama"} 24704.0
# TYPE vllm:prompt_tokens_cached_by_source_total counter
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="llama",source="device"} 4096.0
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="llama",source="host"} 2048.0
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="llama",source="p2p"} 0.0
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="llama",source="disk"} 8192.0
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="llama",source="external_unspecified"} 0.0
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.5",model_name="llama"} 24.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="llama"} 24.0
vllm:time_to_first_token_seconds_count{engine="0",model_name="llama"} 24.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="llama"} 7.2
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0",model_name="llama"} 24704.0
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{engine="0",model_name="llama"} 4096.0
# TYPE vllm:external_prefix_cache_queries_total counter
vllm:external_prefix_cache_queries_total{engine="0",model_name="llama"} 20608.0
# TYPE vllm:external_prefix_cache_hits_total counter
vllm:external_prefix_cache_hits_total{engine="0",model_name="llama"} 10240.0
# TYPE vllm:request_prefill_time_seconds histogram
vllm:request_prefill_time_seconds_sum{engine="0",model_name="llama"} 3.5
# TYPE vllm:request_prefill_kv_computed_tokens histogram
vllm:request_prefill_kv_computed_tokens_sum{engine="0",model_name="llama"} 10368.0
# TYPE vllm:kv_offload_load_bytes_total counter
vllm:kv_offload_load_bytes_total{engine="0",model_name="llama"} 41943040.0
# TYPE vllm:kv_offload_load_time_total counter
vllm:kv_offload_load_time_total{engine="0",model_name="llama"} 0.06
# TYPE vllm:kv_offload_store_bytes_total counter
vllm:kv_offload_store_bytes_total{engine="0",model_name="llama"} 33554432.0
# TYPE vllm:kv_offload_lookup_async_delay_seconds histogram
vllm:kv_offload_lookup_async_delay_seconds_sum{engine="0",model_name="llama"} 0.24
# TYPE vllm:kv_offload_allocation_failure_total counter
# TYPE vllm:kv_offload_tiering_promotion_allocation_failures_total counter
# TYPE vllm:kv_offload_tiering_chunk_queries_total counter
vllm:kv_offload_tiering_chunk_queries_total{engine="0",model_name="llama",tier="0:primary"} 384.0
vllm:kv_offload_tiering_chunk_queries_total{engine="0",model_name="llama",tier="1:fs"} 264.0
# TYPE vllm:kv_offload_tiering_read_bytes_total counter
vllm:kv_offload_tiering_read_bytes_total{engine="0",model_name="llama",tier="1:fs"} 33554432.0
# TYPE vllm:kv_offload_tiering_write_bytes_total counter
vllm:kv_offload_tiering_write_bytes_total{engine="0",model_name="llama",tier="1:fs"} 16777216.0
# TYPE vllm:kv_offload_tiering_cascade_job_failures_total counter
# TYPE vllm:kv_offload_tiering_promotion_job_failures_total counter
# TYPE process_start_time_seconds gauge
process_start_time_seconds 1.7952891417e+09
# TYPE process_cpu_seconds_total counter
process_cpu_seconds_total 15.45
"""

LMCACHE_MP = """\
# TYPE process_start_time_seconds gauge
process_start_time_seconds 1.79528938235e+09
# TYPE lmcache_mp_lookups_requests_total counter
lmcache_mp_lookups_requests_total{cache_salt="",model_name="llama"} 18.0
# TYPE lmcache_mp_lookup_requested_tokens_total counter
lmcache_mp_lookup_requested_tokens_total{cache_salt="",model_name="llama"} 18432.0
# TYPE lmcache_mp_lookup_hit_l1_tokens_total counter
lmcache_mp_lookup_hit_l1_tokens_total{cache_salt="",model_name="llama"} 6144.0
# TYPE lmcache_mp_lookup_hit_l2_tokens_total counter
lmcache_mp_lookup_hit_l2_tokens_total{cache_salt="",model_name="llama"} 4096.0
# TYPE lmcache_mp_l1_write_chunks_total counter
lmcache_mp_l1_write_chunks_total{l1_tag="_default"} 48.0
# TYPE lmcache_mp_l1_read_chunks_total counter
lmcache_mp_l1_read_chunks_total{l1_tag="_default"} 72.0
# TYPE lmcache_mp_l1_memory_usage_bytes gauge
lmcache_mp_l1_memory_usage_bytes{backend="dram",l1_tag="_default"} 25165824.0
# TYPE lmcache_mp_l1_usage_ratio gauge
lmcache_mp_l1_usage_ratio{backend="dram",l1_tag="_default"} 0.25
# TYPE lmcache_mp_l2_usage_bytes gauge
lmcache_mp_l2_usage_bytes{l2_name="fs"} 1.2582912e+07
# TYPE lmcache_mp_l2_prefetch_lookup_objects_chunks_total counter
lmcache_mp_l2_prefetch_lookup_objects_chunks_total 72.0
# TYPE lmcache_mp_l2_store_submitted_objects_chunks_total counter
lmcache_mp_l2_store_submitted_objects_chunks_total 24.0
# TYPE lmcache_mp_l2_store_completed_requests_total counter
lmcache_mp_l2_store_completed_requests_total{l2_name="fs"} 6.0
# TYPE lmcache_mp_l2_store_completed_objects_chunks_total counter
lmcache_mp_l2_store_completed_objects_chunks_total 20.0
# TYPE lmcache_mp_l2_prefetch_load_completed_chunks_total counter
lmcache_mp_l2_prefetch_load_completed_chunks_total 16.0
"""

LMCACHE = """\
# TYPE lmcache:num_lookup_requests_total counter
lmcache:num_lookup_requests_total{model_name="llama",role="scheduler",worker_id="0"} 12.0
# TYPE lmcache:num_lookup_tokens_total counter
lmcache:num_lookup_tokens_total{model_name="llama",role="scheduler",worker_id="0"} 12288.0
# TYPE lmcache:num_lookup_hits_total counter
lmcache:num_lookup_hits_total{model_name="llama",role="scheduler",worker_id="0"} 4096.0
# TYPE lmcache:num_prompt_tokens_total counter
lmcache:num_prompt_tokens_total{model_name="llama",role="scheduler",worker_id="0"} 12300.0
# TYPE lmcache:num_vllm_hit_tokens_total counter
lmcache:num_vllm_hit_tokens_total{model_name="llama",role="scheduler",worker_id="0"} 0.0
# TYPE lmcache:local_cache_usage gauge
lmcache:local_cache_usage{model_name="llama",role="worker",worker_id="0"} 1000.0
lmcache:local_cache_usage{model_name="llama",role="worker",worker_id="1"} 500.0
# TYPE lmcache:local_storage_usage gauge
lmcache:local_storage_usage{model_name="llama",role="worker",worker_id="0"} 0.0
# TYPE lmcache:remote_cache_usage gauge
lmcache:remote_cache_usage{model_name="llama",role="worker",worker_id="0"} 0.0
# TYPE lmcache:num_remote_write_requests_total counter
lmcache:num_remote_write_requests_total{model_name="llama",role="worker",worker_id="0"} 3.0
# TYPE lmcache:num_remote_write_bytes_total counter
lmcache:num_remote_write_bytes_total{model_name="llama",role="worker",worker_id="0"} 3000.0
# TYPE lmcache:num_remote_read_requests_total counter
lmcache:num_remote_read_requests_total{model_name="llama",role="worker",worker_id="0"} 0.0
# TYPE lmcache:num_remote_read_bytes_total counter
lmcache:num_remote_read_bytes_total{model_name="llama",role="worker",worker_id="0"} 0.0
# TYPE lmcache:time_to_retrieve histogram
lmcache:time_to_retrieve_sum{model_name="llama",role="worker",worker_id="0"} 0.5
lmcache:time_to_retrieve_sum{model_name="llama",role="worker",worker_id="1"} 0.4
"""

KV_EXPORTER = """\
# TYPE process_start_time_seconds gauge
process_start_time_seconds 1.79528938235e+09
# TYPE kv_requests_total counter
kv_requests_total{model="llama"} 18.0
# TYPE kv_prompt_tokens_total counter
kv_prompt_tokens_total{model="llama"} 18432.0
# TYPE kv_hit_tokens_total counter
kv_hit_tokens_total{medium="hostmem",model="llama"} 6144.0
kv_hit_tokens_total{medium="nvme",model="llama"} 4096.0
# TYPE kv_moved_mebibytes_total counter
kv_moved_mebibytes_total{direction="load",medium="nvme"} 4.0
kv_moved_mebibytes_total{direction="store",medium="nvme"} 12.0
# TYPE kv_used_mebibytes gauge
kv_used_mebibytes{medium="hostmem"} 24.0
kv_used_mebibytes{medium="nvme"} 12.0
# TYPE kv_limit_mebibytes gauge
kv_limit_mebibytes{medium="hostmem"} 96.0
kv_limit_mebibytes{medium="nvme"} -1.0
# TYPE kv_dropped_blocks_total counter
kv_dropped_blocks_total{medium="hostmem"} 7.0
# TYPE kv_stall_milliseconds_total counter
kv_stall_milliseconds_total 600.0
"""
"""Of a connector that was made up, for docs/extending/adapter.md."""


def without(text, *names):
    """Neither samples nor declarations of these."""
    return "".join(
        line
        for line in text.splitlines(keepends=True)
        if not any(line.removeprefix("# TYPE ").startswith(name) for name in names)
    )


def scaled(text, factor):
    """The same counters some time later."""
    return "".join(f"{_scaled(line, factor)}\n" for line in text.splitlines())


def _scaled(line, factor):
    head, _, value = line.rpartition(" ")
    return line if line.startswith(("#", "process_")) else f"{head} {float(value) * factor!r}"


def second_engine(text):
    """Every sample of an engine once more, for another one behind the same address."""
    lines = []
    for line in text.splitlines():
        lines.append(line)
        if 'engine="0"' in line:
            lines.append(line.replace('engine="0"', 'engine="1"'))
    return "\n".join(lines) + "\n"


class FakeSource:
    """A ``/metrics`` that others fill; it answers at ``http://its-name:8000/metrics``, and keeps what it was asked."""

    def __init__(self, name, kind, text):
        self.name, self.kind, self.text, self.up = name, kind, text, True
        self.methods = []

    @property
    def settings(self):
        return {"name": self.name, "url": f"http://{self.name}:8000/metrics", "kind": self.kind}

    def set(self, name, value, **labels):
        """The sample that carries these labels has this value; it is added where there is none."""
        kept = []
        for line in self.text.splitlines():
            same = line.partition("{")[0].partition(" ")[0] == name
            if not (same and all(f'{label}="{text}"' in line for label, text in labels.items())):
                kept.append(line)
        inner = ",".join(f'{label}="{text}"' for label, text in labels.items())
        self.text = "\n".join([*kept, f"{name}{{{inner}}} {value!r}" if inner else f"{name} {value!r}"]) + "\n"

    def handle(self, request):
        self.methods.append(request.method)
        if not self.up:
            raise httpx.ConnectError("connection refused", request=request)
        return httpx.Response(200, text=self.text)
