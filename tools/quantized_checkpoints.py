"""Quantized checkpoints for make_model_golden.py: MLX's schemes, mixed ones, and 8-bit floats with scales."""

import json

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.convert import mixed_quant_predicate_builder

from goldens import save_tensors

FP8_BLOCK = (32, 48)
FP8_SECTIONS = {
    # As DeepSeek and Qwen have it, with smaller blocks.
    "block": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": list(FP8_BLOCK),
        "modules_to_not_convert": ["lm_head"],
    },
    # As llm-compressor writes it: a scale per row.
    "channel": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
                "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
            }
        },
        "ignore": ["lm_head"],
    },
    # As NVIDIA's modelopt writes it: one scale for all, others for activations and the cache.
    "tensor": {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": None, "ignore": ["lm_head"]},
}


def layers(special, default=True):
    """A predicate: the settings of the first of `special` that is in the path, else `default`."""

    def predicate(path, _module):
        return next((dict(s) if isinstance(s, dict) else s for part, s in special.items() if part in path), default)

    return lambda _model: predicate


def affine(bits, group_size):
    return {"group_size": group_size, "bits": bits, "mode": "affine"}


# An 8-bit embedding, an unquantized head and one unquantized projection in a 4-bit model.
mixed_layers = layers({"model.embed_tokens": affine(8, 32), "lm_head": False, "layers.1.mlp.down_proj": False})


def recipe(name):
    """mlx-lm's own recipe; without a group size, as its command line gives it."""
    return lambda model: mixed_quant_predicate_builder(name, model, None)


def note_dense_layers(model, config, predicate):
    """Marks what the predicate has left alone, as converters do."""
    for path, module in model.named_modules():
        if hasattr(module, "to_quantized") and not predicate(path, module):
            config["quantization"][path] = False


def quantized_checkpoints(main, llama, qwen3):
    small = {**main, **llama, "intermediate_size": 64, "vocab_size": 64}
    wide = {**main, **llama, "hidden_size": 128, "intermediate_size": 128, "vocab_size": 64, "num_hidden_layers": 1}
    checkpoints = {
        f"quant-{bits}bit-g64": (small, dict(quantize=dict(group_size=64, bits=bits))) for bits in (2, 3, 4, 5, 6, 8)
    }
    for bits in (2, 5):
        checkpoints[f"quant-{bits}bit-g32"] = (small, dict(quantize=dict(group_size=32, bits=bits)))
    for bits in (3, 4, 6):
        checkpoints[f"quant-{bits}bit-g128"] = (wide, dict(quantize=dict(group_size=128, bits=bits)))
    checkpoints["quant-6bit-f16"] = (small, dict(dtype=mx.float16, quantize=dict(group_size=64, bits=6)))
    for mode, bits, group in (("mxfp8", 8, 32), ("nvfp4", 4, 16)):
        options = dict(group_size=group, bits=bits, mode=mode)
        checkpoints[f"quant-{mode}"] = (small, dict(quantize=options))
        checkpoints[f"quant-{mode}-bf16"] = (small, dict(dtype=mx.bfloat16, quantize=options))
    deep = {**small, "num_hidden_layers": 8, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    checkpoints["quant-mixed-3-6"] = (
        deep,
        dict(quantize=dict(group_size=None, bits=None), predicate=recipe("mixed_3_6")),
    )
    # Every layer named, as OptiQ does, and widths and groups of all kinds.
    optiq = {
        "embed_tokens": affine(6, 32),
        "lm_head": affine(8, 64),
        "0.self_attn": affine(8, 64),
        "0.mlp.down_proj": affine(2, 32),
        "1.self_attn.o_proj": affine(3, 64),
        "1.mlp": affine(5, 32),
    }
    checkpoints["quant-optiq"] = (
        {**small, "tie_word_embeddings": False},
        dict(quantize=dict(group_size=64, bits=4), predicate=layers(optiq, affine(4, 64))),
    )
    # Layers that name no mode are affine, whatever the section's mode is (gpt-oss has its router so).
    checkpoints["quant-mxfp4-affine"] = (
        small,
        dict(
            quantize=dict(group_size=32, bits=4, mode="mxfp4"),
            predicate=layers({"lm_head": {"group_size": 64, "bits": 8}, "o_proj": {"bits": 6}, "embed_tokens": {}}),
        ),
    )
    # A tied head, multiplied in the width of the embedding.
    checkpoints["quant-tied-own-width"] = (
        {**small, **qwen3, "tie_word_embeddings": True},
        dict(quantize=dict(group_size=64, bits=3), predicate=layers({"embed_tokens": affine(8, 32)})),
    )
    for kind in FP8_SECTIONS:
        # Not `small`, so that blocks are cut at both edges.
        checkpoints[f"fp8-{kind}"] = (
            {**main, **qwen3, "vocab_size": 64, "head_dim": 16},
            dict(dtype=mx.bfloat16, fp8=kind),
        )
    return checkpoints


def is_fp8(name):
    return name.endswith("_proj.weight")


def fp8_scales(weight, kind):
    """The scales of an 8-bit weight, and the same spread over its rows and columns."""
    rows, columns = weight.shape
    largest = mx.abs(weight.astype(mx.float32))
    if kind == "tensor":
        scale = largest.max() / 448
        return scale, scale
    if kind == "channel":
        scales = (largest.max(axis=1, keepdims=True) / 448).astype(mx.bfloat16)
        return scales, scales.astype(mx.float32)
    high, wide = FP8_BLOCK
    bands = [
        mx.stack([largest[i : i + high, j : j + wide].max() for j in range(0, columns, wide)])
        for i in range(0, rows, high)
    ]
    scales = mx.stack(bands) / 448
    return scales, mx.repeat(mx.repeat(scales, high, axis=0), wide, axis=1)[:rows, :columns]


def fp8_weights(model, kind):
    """Gives the model's projections the values that they have as 8-bit floats, rounded to bfloat16.

    Returns what is stored for them."""
    weights, stored = [], {}
    for name, weight in tree_flatten(model.parameters()):
        if is_fp8(name):
            scales, spread = fp8_scales(weight, kind)
            codes = mx.to_fp8(weight.astype(mx.float32) / spread)
            weight = (mx.from_fp8(codes, dtype=mx.float32) * spread).astype(mx.bfloat16)
            stored[name] = codes
            stored[name + ("_scale_inv" if kind == "block" else "_scale")] = scales
            if kind == "tensor":
                stored[name.replace("weight", "input_scale")] = mx.array(0.5)
        weights.append((name, weight))
    if kind == "tensor":
        stored |= {f"model.layers.0.self_attn.{name}_proj.{name}_scale": mx.array(0.25) for name in "kv"}
    model.update(tree_unflatten(weights))
    return stored


def save_fp8(path, weights):
    """Writes tensors, the codes of 8-bit floats under their own type, which MLX has no array for."""
    save_tensors(path, weights, {"format": "pt"})
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    for name, info in header.items():
        if info.get("dtype") == "U8":
            info["dtype"] = "F8_E4M3"
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])
