"""A tiny Llama made on the fly: random weights of a fixed seed, no tokenizer, prompts are token ids."""

import json
import struct
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

VOCABULARY = 4096
WIDTH, MLP_WIDTH, LAYERS, HEADS, KV_HEADS = 256, 1024, 4, 4, 2
KV_WIDTH = WIDTH // HEADS * KV_HEADS
KV_BYTES_PER_TOKEN = 2 * LAYERS * KV_WIDTH * 4
"""In float32."""
ADAPTER_RANK = 8

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32",
    "hidden_size": WIDTH, "intermediate_size": MLP_WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "head_dim": WIDTH // HEADS, "vocab_size": VOCABULARY, "hidden_act": "silu",
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "attention_bias": False, "mlp_bias": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def write_model(folder: Path, *, seed: int = 0, window: int | None = None) -> Path:
    """config.json and model.safetensors (24 MB); weights so large that answers differ from prompt to prompt.

    With ``window``, in tokens, every second layer sees no further back.
    """
    folder.mkdir(parents=True, exist_ok=True)
    windowed = {"sliding_window": window, "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2)}
    (folder / "config.json").write_text(json.dumps(CONFIG | (windowed if window else {})))
    _write(folder / "model.safetensors", dict(shapes(CONFIG)), np.random.default_rng(seed), 0.08)
    return folder


def write_adapter(folder: Path, *, seed: int) -> Path:
    """LoRA of rank ``ADAPTER_RANK`` on queries and values, so large that answers are others than without it."""
    folder.mkdir()
    about = {"peft_type": "LORA", "r": ADAPTER_RANK, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(about))
    shapes = {
        f"base_model.model.model.layers.{layer}.self_attn.{module}.{name}.weight": shape
        for layer in range(LAYERS)
        for module, width in (("q_proj", WIDTH), ("v_proj", KV_WIDTH))
        for name, shape in (("lora_A", [ADAPTER_RANK, WIDTH]), ("lora_B", [width, ADAPTER_RANK]))
    }
    _write(folder / "adapter_model.safetensors", shapes, np.random.default_rng(seed), 0.3)
    return folder


def planned(config: Any, layers: dict[str, Any], nbytes: int) -> Any:
    """The scheduler's KVCacheConfig for a worker of those layers, and so many bytes, as vLLM's engine core makes it."""
    from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config

    try:
        from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
    except ImportError:  # 0.33
        from vllm.v1.core.kv_cache_planning import get_global_kv_cache_groups, get_kv_cache_configs

        get_kv_cache_configs = partial(
            get_kv_cache_configs, global_kv_cache_groups=get_global_kv_cache_groups(config, [layers])
        )
    return generate_scheduler_kv_cache_config(get_kv_cache_configs(config, [layers], [nbytes]))


def _write(path: Path, shapes: dict[str, list[int]], random: np.random.Generator, spread: float) -> None:
    header, offset = {}, 0
    for name, shape in shapes.items():
        size = 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for name, shape in shapes.items():
            ones = name.endswith("norm.weight")
            file.write((np.ones(shape) if ones else random.normal(0, spread, shape)).astype("<f4").tobytes())


def shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, list[int]]]:
    """Of a Llama's weights, by their names."""
    width, mlp, words = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    yield "model.embed_tokens.weight", [words, width]
    for layer in range(config["num_hidden_layers"]):
        for part, shape in (
            ("self_attn.q_proj", [width, width]), ("self_attn.k_proj", [kv, width]),
            ("self_attn.v_proj", [kv, width]), ("self_attn.o_proj", [width, width]),
            ("mlp.gate_proj", [mlp, width]), ("mlp.up_proj", [mlp, width]), ("mlp.down_proj", [width, mlp]),
            ("input_layernorm", [width]), ("post_attention_layernorm", [width]),
        ):  # fmt: skip
            yield f"model.layers.{layer}.{part}.weight", shape
    yield "model.norm.weight", [width]
    yield "lm_head.weight", [words, width]


if __name__ == "__main__":
    write_model(Path(sys.argv[1]))
