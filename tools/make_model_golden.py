"""Small checkpoints with random weights and what mlx-lm computes from them: mlex-models/tests/data/<name>/.

`python tools/make_model_golden.py [NAME]...`. Each directory loads with mlx-lm and holds, besides the
checkpoint, `expected.safetensors`:

  tokens [L]                    a prompt
  logits [L, V]                 of one forward pass over it, without a cache
  batch_tokens [3, L]           three prompts of different lengths, padded on the left with 0
  batch_left_padding [3]        how many padding tokens each row starts with
  batch_logits [3, L, V]        through mlx-lm's BatchKVCache(left_padding); 0 at padding positions
  greedy [16]                   tokens chosen by argmax after the prompt
  greedy_margin [16]            the logit of each chosen token minus the next best (half precision: in float32)
  logits_f32 [L, V]             (half-precision checkpoints) the same weights computed in float32
  logits_cpu [L, V]             (quantized half-precision checkpoints) what MLX's CPU gives as it is

Logits are stored as float32 whatever they were computed in. MLX's quantized matmul adds up in the
half type itself on a CPU (on a GPU in float32), so for a quantized half-precision checkpoint `logits`,
`batch_logits` and `greedy` come from the same quantized weights computed in float32.
"""

import copy
import json
import sys
import zlib

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from mlx_lm.models.cache import ArraysCache, BatchKVCache, BatchRotatingKVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.utils import _get_classes, load_model, quantize_model

import checkpoints_gemma4
import checkpoints_nemotron_h
import qwen_checkpoints
from goldens import ROOT, save_tensors
from quantized_checkpoints import (
    FP8_SECTIONS,
    fp8_weights,
    mixed_layers,
    note_dense_layers,
    quantized_checkpoints,
    save_fp8,
)

DATA = ROOT / "mlex-models/tests/data"
LENGTH, GENERATED, BATCH_LENGTHS = 24, 16, (16, 11, 6)

MAIN = dict(
    hidden_size=64,
    num_hidden_layers=2,
    intermediate_size=80,
    num_attention_heads=4,
    num_key_value_heads=2,
    rms_norm_eps=1e-5,
    vocab_size=130,
    rope_theta=10000.0,
    max_position_embeddings=512,
    bos_token_id=1,
    eos_token_id=2,
)
SMALL = {**MAIN, "hidden_size": 32, "intermediate_size": 36, "head_dim": 16, "vocab_size": 64}
WIDE = {**MAIN, "intermediate_size": 128}
LLAMA = dict(model_type="llama", architectures=["LlamaForCausalLM"], hidden_act="silu", tie_word_embeddings=False)
QWEN2 = dict(
    model_type="qwen2",
    architectures=["Qwen2ForCausalLM"],
    hidden_act="silu",
    tie_word_embeddings=False,
    rope_theta=1000000.0,
)
QWEN3 = dict(
    model_type="qwen3",
    architectures=["Qwen3ForCausalLM"],
    hidden_act="silu",
    tie_word_embeddings=False,
    rope_theta=1000000.0,
    head_dim=32,
    attention_bias=False,
)
BARE = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "num_attention_heads",
    "rms_norm_eps",
    "vocab_size",
)
LONG_FACTORS = [1.0, 1.1, 1.3, 1.7, 2.3, 3.1, 4.0, 5.5]


def rope(**scaling):
    return {**SMALL, **LLAMA, "rope_scaling": scaling}


def minimal(config, *more):
    return {key: config[key] for key in (*BARE, *more)}


# name: (config, options). Options of the model: dtype, quantize (arguments of quantize_model), predicate (which
# layers and how), fp8 (how the weights' scales lie), gains (factors of the weights whose names end so), prefix
# (taken off a name before its weight is drawn). Options of the file: shards, layout (gives the tensors the names
# and shapes of another program), extra (tensors that loading must drop, with their shapes), unread (the same,
# which this version of mlx-lm would not drop), omit (tensors left out).
CHECKPOINTS = {
    "llama-f32": ({**MAIN, **LLAMA}, {}),
    "llama-bf16": ({**MAIN, **LLAMA}, dict(dtype=mx.bfloat16)),
    "llama-f16": ({**SMALL, **LLAMA}, dict(dtype=mx.float16)),
    "llama-4bit": ({**WIDE, **LLAMA}, dict(quantize=dict(group_size=32, bits=4))),
    "llama-8bit-g64": ({**WIDE, **LLAMA}, dict(dtype=mx.bfloat16, quantize=dict(group_size=64, bits=8))),
    "llama-mixed-bits": ({**WIDE, **LLAMA}, dict(quantize=dict(group_size=32, bits=4), predicate=mixed_layers)),
    "llama-mxfp4": ({**WIDE, **LLAMA}, dict(quantize=dict(group_size=32, bits=4, mode="mxfp4"))),
    "llama-tied": (
        {
            **SMALL,
            **LLAMA,
            "tie_word_embeddings": True,
            "rope_scaling": None,
            "pretraining_tp": 1,
            "torch_dtype": "float32",
            "use_cache": True,
            "initializer_range": 0.02,
        },
        {},
    ),
    "llama-attn-bias": ({**SMALL, **LLAMA, "attention_bias": True, "mlp_bias": True}, {}),
    "llama-rope-llama3": (
        rope(
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
        {},
    ),
    "llama-rope-linear": (rope(type="linear", factor=4.0), {}),
    "llama-rope-yarn": (
        rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=32, beta_slow=1),
        {},
    ),
    "llama-rope-longrope": (
        rope(
            rope_type="longrope", original_max_position_embeddings=16, long_factor=LONG_FACTORS, short_factor=[1.0] * 8
        ),
        {},
    ),
    "llama-rope-traditional": ({**SMALL, **LLAMA, "rope_traditional": True}, {}),
    "llama-head-dim": ({**SMALL, **LLAMA, "head_dim": 24, "num_attention_heads": 6, "num_key_value_heads": 3}, {}),
    "llama-sharded": ({**SMALL, **LLAMA}, dict(shards=2)),
    "llama-sliding": (
        {
            **SMALL,
            **LLAMA,
            "num_hidden_layers": 3,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        {},
    ),
    "llama-extra-keys": (
        {**SMALL, **LLAMA, "tie_word_embeddings": True},
        dict(
            extra={
                "lm_head.weight": (64, 32),
                "model.layers.0.self_attn.rotary_emb.inv_freq": (8,),
                "model.layers.1.self_attn.rotary_emb.inv_freq": (8,),
            }
        ),
    ),
    "llama-config-minimal": (minimal({**SMALL, **LLAMA}), {}),
    "mistral": (
        {**SMALL, **LLAMA, "model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 8},
        {},
    ),
    "minicpm": (
        {
            **SMALL,
            **LLAMA,
            "model_type": "minicpm",
            "architectures": ["MiniCPMForCausalLM"],
            "num_hidden_layers": 3,
            "head_dim": None,
            "scale_emb": 3,
            "scale_depth": 1.4,
            "dim_model_base": 20,
        },
        {},
    ),
    "minicpm-no-head": (
        {
            **SMALL,
            **LLAMA,
            "model_type": "minicpm",
            "architectures": ["MiniCPMForCausalLM"],
            "head_dim": None,
            "scale_emb": 3,
            "scale_depth": 1.4,
            "dim_model_base": 20,
        },
        dict(omit=("lm_head.weight",)),
    ),
    "smollm3": (
        {
            **SMALL,
            **LLAMA,
            "model_type": "smollm3",
            "architectures": ["SmolLM3ForCausalLM"],
            "num_hidden_layers": 4,
            "tie_word_embeddings": True,
            "no_rope_layers": [1, 0, 1, 1],
        },
        {},
    ),
    "qwen2-f32": ({**MAIN, **QWEN2}, {}),
    "qwen2-bf16": ({**MAIN, **QWEN2}, dict(dtype=mx.bfloat16)),
    "qwen2-4bit": ({**WIDE, **QWEN2}, dict(dtype=mx.bfloat16, quantize=dict(group_size=64, bits=4))),
    "qwen2-config-minimal": (minimal({**SMALL, **QWEN2}, "num_key_value_heads"), {}),
    "qwen3-f32": ({**MAIN, **QWEN3}, {}),
    "qwen3-bf16": ({**MAIN, **QWEN3}, dict(dtype=mx.bfloat16)),
    "qwen3-tied-4bit": ({**WIDE, **QWEN3, "tie_word_embeddings": True}, dict(quantize=dict(group_size=32, bits=4))),
    **checkpoints_nemotron_h.CHECKPOINTS,
    **qwen_checkpoints.CHECKPOINTS,
    **checkpoints_gemma4.CHECKPOINTS,
    **quantized_checkpoints(MAIN, LLAMA, QWEN3),
}
# What mlx-lm knows under other names.
SAME = qwen_checkpoints.SAME | checkpoints_gemma4.SAME


def random_weight(name, shape):
    """A weight whose scale keeps activations near 1 and logits a few units wide; seeded by its name."""
    rng = np.random.default_rng(zlib.crc32(f"{name} {shape}".encode()))
    noise = rng.standard_normal(shape)
    special = qwen_checkpoints.delta_parameter(name, rng, shape)
    if special is not None:
        noise = special
    elif name.endswith("bias"):
        noise *= 0.3
    elif len(shape) == 1:
        noise = 1.0 + 0.3 * noise
    elif name.endswith("lm_head.weight"):
        noise *= 3.0 / shape[1] ** 0.5
    elif name.endswith("model.embed_tokens.weight"):
        noise *= 0.4
    else:
        noise *= 1.5 / shape[-1 if ".switch_" in name else 1] ** 0.5
    return mx.array(noise.astype(np.float32))


def classes(config):
    """mlx-lm's classes for a config, some of whose names it does not know."""
    kind = config["model_type"]
    return _get_classes({**config, "model_type": SAME.get(kind, kind)})


def build(config, dtype=mx.float32, quantize=None, predicate=None, fp8=None, gains=None, prefix=""):
    """mlx-lm's model for `config` with random weights, the config as it is saved, and the 8-bit weights."""
    model_class, args_class = classes(config)
    model = model_class(args_class.from_dict(copy.deepcopy(config)))
    shapes = {
        name: value.shape
        for name, value in tree_flatten(model.parameters())
        if not name.rsplit(".", 1)[-1].startswith("_")
    }
    keeps = getattr(model, "cast_predicate", None) or (lambda _: True)

    def weight(name, shape):
        gain = next((gain for ending, gain in (gains or {}).items() if name.endswith(ending)), 1.0)
        value = gain * random_weight(name.removeprefix(prefix), shape)
        return value.astype(dtype if keeps(name) else mx.float32)

    weights = [(name, weight(name, shape)) for name, shape in sorted(shapes.items())]
    model.update(tree_unflatten(weights))
    stored = None
    if fp8 is not None:
        config = {**config, "quantization_config": FP8_SECTIONS[fp8]}
        stored = fp8_weights(model, fp8)
    if quantize is not None:
        choose = predicate and predicate(model)
        model, config = quantize_model(model, config, quant_predicate=choose, **quantize)
        if choose is not None:
            note_dense_layers(model, config, choose)
    return model, config, stored


def save(folder, model, config, shards=1, extra=None, omit=(), stored=None, layout=None):
    """Writes the MLX directory: config.json, the shards, and an index when there are several."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*"):
        old.unlink()
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    weights = {name: value for name, value in tree_flatten(model.parameters()) if name not in omit}
    if layout is not None:
        weights = layout(weights, config)
    weights |= {name: random_weight(name, shape) for name, shape in (extra or {}).items()}
    names = sorted(weights)
    if stored is not None:
        save_fp8(folder / "model.safetensors", weights | stored)
        return
    if shards == 1:
        save_tensors(folder / "model.safetensors", weights, {"format": "mlx"})
        return
    where = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: weights[name] for name in names[i::shards]}
        save_tensors(folder / file, part, {"format": "mlx"})
        where.update({name: file for name in part})
    index = {
        "metadata": {"total_size": sum(weights[name].nbytes for name in names)},
        "weight_map": {name: where[name] for name in names},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def greedy(model, prompt):
    """Tokens by argmax after `prompt`, and how clear each choice was."""
    cache = make_prompt_cache(model)
    logits = model(mx.array(prompt)[None], cache=cache)[0, -1]
    tokens, margins = [], []
    for _ in range(GENERATED):
        scores = np.array(logits.astype(mx.float32))
        order = np.argsort(scores)
        tokens.append(int(order[-1]))
        margins.append(float(scores[order[-1]] - scores[order[-2]]))
        logits = model(mx.array([[tokens[-1]]]), cache=cache)[0, -1]
    return tokens, margins


def clear_prompt(name, models, vocabulary, margin):
    """The first seeded prompt that all of `models` continue alike, without a near tie in the last of them."""
    for seed in range(5000):
        rng = np.random.default_rng([zlib.crc32(name.encode()), seed])
        prompt = rng.integers(3, vocabulary, LENGTH)
        tokens, margins = greedy(models[-1], prompt)
        if min(margins) < margin or len(set(tokens)) < 5:
            continue
        rows = [rng.integers(3, vocabulary, n) for n in BATCH_LENGTHS]
        # Rounding must not send a token to other experts.
        if len(models) > 1 and qwen_checkpoints.smallest_route_gap(models[-1], [prompt, *rows]) < 0.06:
            continue
        if all(greedy(model, prompt)[0] == tokens for model in models[:-1]):
            return prompt, tokens, margins, rows
    raise RuntimeError(f"{name}: no prompt with a clear greedy continuation")


def batch_caches(model, padding):
    def batched(cache):
        if isinstance(cache, RotatingKVCache):
            return BatchRotatingKVCache(cache.max_size, padding)
        if isinstance(cache, ArraysCache):
            return ArraysCache(len(cache.cache), padding)
        return BatchKVCache(padding)

    return [batched(cache) for cache in make_prompt_cache(model)]


def in_float32(model):
    """The same weights, computed in float32."""
    other = copy.deepcopy(model)
    other.update(
        tree_map(lambda p: p.astype(mx.float32) if mx.issubdtype(p.dtype, mx.floating) else p, model.parameters())
    )
    return other


def one_pass(model, prompt):
    return model(mx.array(prompt)[None])[0].astype(mx.float32)


def expected(name, model, vocabulary, dtype):
    half, native = dtype != mx.float32, model
    quantized = any(path.endswith(".scales") for path, _ in tree_flatten(model.parameters()))
    if half and quantized:
        model = in_float32(model)
    models = [native, in_float32(model)] if half else [model]
    prompt, tokens, margins, rows = clear_prompt(name, models, vocabulary, 0.25 if half else 0.02)
    out = {
        "tokens": prompt,
        "logits": one_pass(model, prompt),
        "greedy": np.array(tokens),
        "greedy_margin": np.array(margins),
    }
    if half:
        out["logits_f32"] = one_pass(models[-1], prompt)
    if half and quantized:
        out["logits_cpu"] = one_pass(native, prompt)

    padding = [max(BATCH_LENGTHS) - n for n in BATCH_LENGTHS]
    batch = np.stack([np.concatenate([np.zeros(pad, np.int64), row]) for pad, row in zip(padding, rows)])
    batch_logits = np.array(model(mx.array(batch), cache=batch_caches(model, padding)).astype(mx.float32))
    for i, (pad, row) in enumerate(zip(padding, rows)):
        batch_logits[i, :pad] = 0
        alone = np.array(one_pass(model, row))
        error = np.abs(batch_logits[i, pad:] - alone).max()
        if not error < (0.25 if half else 2e-4):
            raise RuntimeError(f"{name}: row {i} of the batch differs from the same prompt alone by {error}")
    out |= {"batch_tokens": batch, "batch_left_padding": np.array(padding), "batch_logits": batch_logits}
    return out


def make(name):
    config, options = CHECKPOINTS[name]
    config = {key: value for key, value in config.items() if not (key == "head_dim" and value is None)}
    options = dict(options)
    unread = options.pop("unread", None)
    filing = {key: options.pop(key) for key in ("shards", "extra", "omit", "layout") if key in options}
    built, config, stored = build(config, **options)
    folder = DATA / name
    save(folder, built, config, stored=stored, **filing)
    # mlx-lm's Llama and Qwen3 do not read 8-bit floats; the model has their values already.
    model = built if stored is not None else load_model(folder, get_model_classes=classes)[0]
    if unread is not None:
        save(folder, built, config, **filing | {"extra": filing.get("extra", {}) | unread})
    vocabulary = config.get("text_config", config)["vocab_size"]
    values = expected(name, model, vocabulary, options.get("dtype", mx.float32))
    save_tensors(folder / "expected.safetensors", values)
    size = sum(file.stat().st_size for file in folder.glob("*")) // 1024
    spread = float(mx.std(values["logits"]))
    print(
        f"{name}: {size} KB, logits' deviation {spread:.2f}, smallest greedy margin {values['greedy_margin'].min():.3f}",
        end="",
    )
    if "logits_f32" in values:
        gap = float(mx.abs(values["logits"] - values["logits_f32"]).max())
        print(f", largest distance to float32 {gap:.3f}", end="")
    if "logits_cpu" in values:
        print(f" (as it is: {float(mx.abs(values['logits_cpu'] - values['logits_f32']).max()):.3f})", end="")
    print()


def main(names):
    for name in names or CHECKPOINTS:
        make(name)


if __name__ == "__main__":
    main(sys.argv[1:])
