"""A tiny Llama made on the fly: random weights of a fixed seed, no tokenizer, prompts are token ids."""

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

VOCABULARY = 4096
WIDTH, MLP_WIDTH, LAYERS, HEADS, KV_HEADS = 256, 1024, 4, 4, 2
KV_WIDTH = WIDTH // HEADS * KV_HEADS
KV_BYTES_PER_TOKEN = 2 * LAYERS * KV_WIDTH * 4
"""In float32."""

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32",
    "hidden_size": WIDTH, "intermediate_size": MLP_WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "head_dim": WIDTH // HEADS, "vocab_size": VOCABULARY, "hidden_act": "silu",
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "attention_bias": False, "mlp_bias": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def write_model(folder: Path, *, seed: int = 0) -> Path:
    """config.json and model.safetensors (24 MB); weights so large that answers differ from prompt to prompt."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    random = np.random.default_rng(seed)
    header, offset = {}, 0
    for name, shape in _shapes():
        size = 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for name, shape in _shapes():
            ones = name.endswith("norm.weight")
            file.write((np.ones(shape) if ones else random.normal(0, 0.08, shape)).astype("<f4").tobytes())
    return folder


def _shapes() -> Iterator[tuple[str, list[int]]]:
    yield "model.embed_tokens.weight", [VOCABULARY, WIDTH]
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for part, shape in (
            ("self_attn.q_proj", [WIDTH, WIDTH]), ("self_attn.k_proj", [KV_WIDTH, WIDTH]),
            ("self_attn.v_proj", [KV_WIDTH, WIDTH]), ("self_attn.o_proj", [WIDTH, WIDTH]),
            ("mlp.gate_proj", [MLP_WIDTH, WIDTH]), ("mlp.up_proj", [MLP_WIDTH, WIDTH]),
            ("mlp.down_proj", [WIDTH, MLP_WIDTH]),
            ("input_layernorm", [WIDTH]), ("post_attention_layernorm", [WIDTH]),
        ):  # fmt: skip
            yield f"{prefix}{part}.weight", shape
    yield "model.norm.weight", [WIDTH]
    yield "lm_head.weight", [VOCABULARY, WIDTH]


if __name__ == "__main__":
    write_model(Path(sys.argv[1]))
