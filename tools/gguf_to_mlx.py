"""Converts a llama GGUF file of F32, Q4_1, Q4_0 and Q8_0 tensors to an MLX directory without loss.

`python tools/gguf_to_mlx.py MODEL.gguf OUT_DIR`. Floats are written as float32. The blocks become MLX's
affine quantization in groups of 32: Q4_1 (d, m) is scale d and bias m; Q4_0 is bias -8 d; Q8_0 is
unsigned with bias -128 d. The q and k rows are put back into the order of Hugging Face's rope.
"""

import json
import sys
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFReader

from gguf_tokenizer import build_tokenizer, read_fields, tokenizer_config
from goldens import save_tensors

GROUP = 32
LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def module_name(tensor):
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj`."""
    parts = tensor.removesuffix(".weight").split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}"
    return TOP_NAMES[parts[0]]


def halves(blocks, at):
    return blocks[..., at : at + 2].copy().view(np.float16)[..., 0].astype(np.float32)


def pack(values, bits):
    """Unsigned values [..., N] to uint32 words, the first value in the lowest bits."""
    per_word = 32 // bits
    values = values.astype(np.uint32).reshape(*values.shape[:-1], -1, per_word)
    return np.bitwise_or.reduce(values << (np.arange(per_word, dtype=np.uint32) * bits), axis=-1)


def nibbles(quants):
    """16 bytes of a block to 32 values: the low nibbles first."""
    return np.concatenate([quants & 15, quants >> 4], axis=-1)


def affine(data, kind):
    """(weight, scales, biases, bits) of raw GGUF rows [N, bytes]."""
    size = {Kind.Q4_0: 18, Kind.Q4_1: 20, Kind.Q8_0: 34}[kind]
    blocks = data.reshape(data.shape[0], -1, size)
    scales = halves(blocks, 0)
    if kind == Kind.Q8_0:
        values, biases, bits = blocks[..., 2:].view(np.int8).astype(np.int16) + 128, -128 * scales, 8
    elif kind == Kind.Q4_1:
        values, biases, bits = nibbles(blocks[..., 4:]), halves(blocks, 2), 4
    else:
        values, biases, bits = nibbles(blocks[..., 2:]), -8 * scales, 4
    return pack(values.reshape(data.shape[0], -1), bits), scales, biases, bits


def unpermute(rows, heads):
    """Undoes llama.cpp's interleaving of each head's two rope halves, on the first axis."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def model_config(fields, tied):
    def get(key):
        return fields[f"llama.{key}"]

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": get("embedding_length"),
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": get("attention.head_count"),
        "num_key_value_heads": get("attention.head_count_kv"),
        "rms_norm_eps": float(np.float32(get("attention.layer_norm_rms_epsilon")).astype(str)),
        "rope_theta": get("rope.freq_base"),
        "max_position_embeddings": get("context_length"),
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": tied,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
    }


def convert(path, out):
    reader = GGUFReader(path)
    fields = read_fields(reader)
    config = model_config(fields, all(t.name != "output.weight" for t in reader.tensors))
    quantization = {"group_size": GROUP, "bits": 4}
    weights = {}
    for tensor in reader.tensors:
        name = module_name(tensor.name)
        if tensor.tensor_type == Kind.F32:
            weights[f"{name}.weight"] = np.array(tensor.data)
            continue
        *parts, bits = affine(np.array(tensor.data), tensor.tensor_type)
        for side in ("q", "k"):
            if name.endswith(f"self_attn.{side}_proj"):
                heads = config["num_attention_heads" if side == "q" else "num_key_value_heads"]
                parts = [unpermute(part, heads) for part in parts]
        for suffix, part in zip(("weight", "scales", "biases"), parts):
            weights[f"{name}.{suffix}"] = part
        if bits != quantization["bits"]:
            quantization[name] = {"group_size": GROUP, "bits": bits}
    config["quantization"] = quantization
    out = Path(out)
    save_tensors(out / "model.safetensors", weights, {"format": "mlx"})
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (out / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(fields), indent=2) + "\n")
    build_tokenizer(fields).save(str(out / "tokenizer.json"))


if __name__ == "__main__":
    convert(*sys.argv[1:])
