"""Golden data for the layers of mlex-nn: mlex-nn/tests/data/nn.{safetensors,json}.

`python tools/make_nn_golden.py`. Norms, activations and attention come from numpy (op_reference.py, in
float64), rope frequencies and quantization from mlx and mlx-lm. Inputs of a case stand in the order
that its row's `names` gives.
"""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.rope_utils import initialize_rope

import op_reference as ref
from goldens import ROOT, Cases, normal

OUT = ROOT / "mlex-nn/tests/data/nn"


def norms(c):
    x, w, b = normal([2, 1], 2, 3, 48, scale=2.0), 1 + normal([2, 2], 48, scale=0.3), normal([2, 3], 48, scale=0.3)
    for eps in (1e-6, 1e-5, 0.1):
        c.add(
            f"rms_norm_eps_{eps:g}",
            "rms_norm",
            [x, w],
            ref.rms_norm(x, w, eps),
            "numpy",
            names=["x", "weight"],
            eps=eps,
        )
    tiny = x * 1e-4
    c.add("rms_norm_tiny", "rms_norm", [tiny, w], ref.rms_norm(tiny, w, 1e-5), "numpy", names=["x", "weight"], eps=1e-5)
    half = mx.array(x).astype(mx.bfloat16), mx.array(w).astype(mx.bfloat16)
    c.add(
        "rms_norm_bf16", "rms_norm", list(half), mx.fast.rms_norm(*half, 1e-5), "mlx", names=["x", "weight"], eps=1e-5
    )
    c.add(
        "layer_norm_bias",
        "layer_norm",
        [x, w, b],
        ref.layer_norm(x, w, b, 1e-5),
        "numpy",
        names=["x", "weight", "bias"],
        eps=1e-5,
    )
    c.add(
        "layer_norm_no_bias",
        "layer_norm",
        [x, w],
        ref.layer_norm(x, w, None, 1e-5),
        "numpy",
        names=["x", "weight"],
        eps=1e-5,
    )
    c.add("layer_norm_plain", "layer_norm", [x], ref.layer_norm(x, None, None, 1e-6), "numpy", names=["x"], eps=1e-6)


# name: (scaling config as in config.json, base, max_position_embeddings)
ROPES = {
    "default": (None, 10000.0, None),
    "default_named": ({"rope_type": "default"}, 1000000.0, 4096),
    "linear": ({"type": "linear", "factor": 4.0}, 10000.0, 4096),
    "llama3": (
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        500000.0,
        131072,
    ),
    "llama3_defaults": ({"rope_type": "llama3", "factor": 32.0}, 10000.0, 131072),
    "yarn": ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 1000000.0, 131072),
    "yarn_defaults": ({"type": "yarn", "factor": 8.0}, 10000.0, 32768),
    "yarn_mscale": (
        {
            "type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.707,
            "mscale_all_dim": 1.0,
        },
        10000.0,
        163840,
    ),
    "yarn_mscale_equal": (
        {
            "type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        10000.0,
        163840,
    ),
    "longrope": (
        {
            "type": "longrope",
            "original_max_position_embeddings": 64,
            "short_factor": [1.0] * 16,
            "long_factor": [1.0 + 0.25 * i for i in range(16)],
        },
        10000.0,
        2048,
    ),
    "longrope_unscaled": (
        {
            "rope_type": "longrope",
            "original_max_position_embeddings": 4096,
            "short_factor": [1.0] * 16,
            "long_factor": [1.5] * 16,
        },
        10000.0,
        4096,
    ),
    "proportional": ({"rope_type": "proportional", "partial_rotary_factor": 0.25}, 1000000.0, 4096),
}


def ropes(c):
    x = normal([2, 10], 2, 3, 5, 32)
    for name, (scaling, base, longest) in ROPES.items():
        for traditional in (False, True):
            if traditional and name.startswith("longrope"):
                continue  # mlx-lm ignores the flag there
            rope = initialize_rope(32, base, traditional, scaling, longest)
            for offset in (0, 7, 3000):
                tag = f"rope_{name}_{'traditional' if traditional else 'halves'}_{offset}"
                c.add(
                    tag,
                    "rope",
                    [x],
                    rope(mx.array(x), offset=offset),
                    "mlx",
                    names=["x"],
                    dims=32,
                    base=base,
                    traditional=traditional,
                    scaling=scaling,
                    max_position_embeddings=longest,
                    offset=offset,
                )
    partial = normal([2, 11], 1, 2, 4, 48)
    rope = initialize_rope(32, 10000.0, False, None, None)
    c.add(
        "rope_partial",
        "rope",
        [partial],
        rope(mx.array(partial), offset=3),
        "mlx",
        names=["x"],
        dims=32,
        base=10000.0,
        traditional=False,
        scaling=None,
        max_position_embeddings=None,
        offset=3,
        note="the head is longer than dims: the rest passes",
    )
    rope = initialize_rope(32, 10000.0, False, ROPES["yarn"][0], 131072)
    partial_out = rope(mx.array(partial), offset=3)
    c.add(
        "rope_yarn_partial",
        "rope",
        [partial],
        partial_out,
        "mlx",
        names=["x"],
        dims=32,
        base=10000.0,
        traditional=False,
        scaling=ROPES["yarn"][0],
        max_position_embeddings=131072,
        offset=3,
    )
    offsets = np.array([2, 9], np.int32)
    rope = initialize_rope(32, 10000.0, False, ROPES["llama3"][0], 131072)
    c.add(
        "rope_offsets",
        "rope",
        [x, offsets],
        rope(mx.array(x), offset=mx.array(offsets)),
        "mlx",
        names=["x", "offsets"],
        dims=32,
        base=10000.0,
        traditional=False,
        scaling=ROPES["llama3"][0],
        max_position_embeddings=131072,
        note="one offset a batch row",
    )


ATTENTION_SHAPES = {
    # name: (heads, kv heads, queries, keys, head size)
    "grouped": (6, 2, 5, 11, 16),
    "equal_heads": (4, 4, 5, 11, 16),
    "one_kv_head": (4, 1, 5, 11, 32),
    "square": (4, 2, 9, 9, 16),
    "decode": (6, 2, 1, 40, 16),
    "long": (4, 1, 3, 270, 16),
}
LONG_FORMS = ("none", "causal", "bool", "sliding_4")


def attention_forms(heads, queries, keys):
    """(tag, kind, mask, whether the mask is an input, sinks, further parameters) of each mask form."""
    causal = ref.causal_mask(queries, keys)
    padded = np.broadcast_to(causal, (2, 1, queries, keys)).copy()
    padded[1, ..., : keys // 4] = False
    padded[1, ..., -1] |= ~padded[1].any(-1)  # no row without a key
    infinite = np.where(causal, 0, -np.inf).astype(np.float32)
    yield "none", "none", None, False, None, {}
    yield "causal", "causal", causal, False, None, {}
    yield "bool", "array", padded, True, None, {}
    yield "additive", "array", normal([2, 23], 2, heads, queries, keys), True, None, {}
    yield "additive_inf", "array", infinite, True, None, {}
    for window in (1, 4):
        yield f"sliding_{window}", "sliding", ref.sliding_mask(queries, keys, window), False, None, {"window": window}
    yield "sinks", "causal", causal, False, normal([2, 24], heads), {}


def attentions(c):
    """Queries are the last L of S positions."""
    for name, (heads, groups, queries, keys, dim) in ATTENTION_SHAPES.items():
        q = normal([2, 20], 2, heads, queries, dim)
        k, v = normal([2, 21], 2, groups, keys, dim), normal([2, 22], 2, groups, keys, dim)
        scale = dim**-0.5
        for tag, kind, mask, passed, sinks, params in attention_forms(heads, queries, keys):
            if name == "long" and tag not in LONG_FORMS:
                continue
            inputs, names = [q, k, v], ["q", "k", "v"]
            if passed:
                inputs, names = [*inputs, mask], [*names, "mask"]
            if sinks is not None:
                inputs, names = [*inputs, sinks], [*names, "sinks"]
            out = ref.attention(q, k, v, scale, mask, sinks)
            c.add(
                f"attention_{name}_{tag}",
                "attention",
                inputs,
                out,
                "numpy",
                names=names,
                scale=scale,
                mask=kind,
                **params,
            )


def activations(c):
    gate, up = normal([2, 30], 3, 40, scale=3.0), normal([2, 31], 3, 40)
    for op, act in {"swiglu": ref.silu, "geglu": ref.gelu, "geglu_tanh": ref.gelu_tanh}.items():
        c.add(op, op, [gate, up], act(gate) * up, "numpy", names=["gate", "up"])
    for op, out in {
        "silu": ref.silu(gate),
        "gelu": ref.gelu(gate),
        "gelu_tanh": ref.gelu_tanh(gate),
        "gelu_fast": ref.gelu_fast(gate),
        "relu2": np.maximum(gate.astype(np.float64), 0) ** 2,
    }.items():
        c.add(op, op, [gate], out, "numpy", names=["x"])
    half = mx.array(gate).astype(mx.bfloat16), mx.array(up).astype(mx.bfloat16)
    c.add("swiglu_bf16", "swiglu", list(half), nn.silu(half[0]) * half[1], "mlx", names=["gate", "up"])


def linears(c):
    x, w, b = normal([2, 40], 2, 3, 24), normal([2, 41], 10, 24), normal([2, 42], 10)
    c.add("linear", "linear", [x, w], x.astype(np.float64) @ w.T, "numpy", names=["x", "weight"])
    c.add("linear_bias", "linear", [x, w, b], x.astype(np.float64) @ w.T + b, "numpy", names=["x", "weight", "bias"])
    ids = np.array([[0, 9, 3], [3, 1, 0]], np.int32)
    c.add("embedding", "embedding", [ids, w], w[ids], "numpy", names=["ids", "weight"])
    c.add("embedding_as_linear", "linear", [x, w], x.astype(np.float64) @ w.T, "numpy", names=["x", "weight"])


FLOAT_MODES = (("mxfp4", 32, 4), ("nvfp4", 16, 4), ("mxfp8", 32, 8))


def quantized(c):
    """Weights quantized by mlx; y from the dequantized weights in float64."""
    rows, inputs = 24, 128
    w, x, bias = normal([2, 50], rows, inputs, scale=0.1), normal([2, 51], 3, inputs), normal([2, 52], rows, scale=0.1)
    ids = np.array([5, 0, 23, 5], np.int32)
    modes = [("affine", group, bits) for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)] + list(FLOAT_MODES)
    for mode, group, bits in modes:
        params = dict(group_size=group, bits=bits, mode=mode)
        packed = mx.quantize(mx.array(w), **params)
        restored = np.array(mx.dequantize(*packed, **params).astype(mx.float32))
        names = ["weight", "scales", "biases"][: len(packed)]
        tag = f"{mode}_{bits}_{group}"
        y = x.astype(np.float64) @ restored.T
        c.add(
            f"quantized_linear_{tag}",
            "quantized_linear",
            [x, *packed],
            [y, restored],
            "numpy",
            names=["x", *names],
            outputs=["y", "dequantized"],
            **params,
        )
        c.add(
            f"quantized_embedding_{tag}",
            "quantized_embedding",
            [ids, *packed],
            restored[ids],
            "mlx",
            names=["ids", *names],
            **params,
        )
        if mode == "affine" and group == 64:
            c.add(
                f"quantized_linear_bias_{tag}",
                "quantized_linear",
                [x, *packed, bias],
                [y + bias, restored],
                "numpy",
                names=["x", *names, "bias"],
                outputs=["y", "dequantized"],
                **params,
            )
    half = mx.quantize(mx.array(w).astype(mx.bfloat16), group_size=64, bits=4)
    restored = mx.dequantize(*half, group_size=64, bits=4).astype(mx.float32)
    x16 = mx.array(x).astype(mx.bfloat16)
    y = np.array(x16.astype(mx.float32)).astype(np.float64) @ np.array(restored).T
    c.add(
        "quantized_linear_bf16",
        "quantized_linear",
        [x16, *half],
        [y, restored],
        "numpy",
        names=["x", "weight", "scales", "biases"],
        outputs=["y", "dequantized"],
        group_size=64,
        bits=4,
        mode="affine",
        note="out1 is rounded to bf16; out0 is its exact product, in float32",
    )


def main():
    cases = Cases()
    for section in (norms, ropes, attentions, activations, linears, quantized):
        section(cases)
    cases.save(OUT)


if __name__ == "__main__":
    main()
