"""Op cases: convolutions, norms, rope, attention, quantization, random numbers."""

import mlx.core as mx
import numpy as np

import op_reference as ref
from goldens import normal


def convolutions(c):
    x = normal(30, 2, 9, 4)
    for name, out, kernel, stride, padding, dilation, groups in (
        ("plain", 6, 3, 1, 0, 1, 1),
        ("padded_strided", 6, 3, 2, 1, 1, 1),
        ("dilated", 6, 3, 1, 2, 2, 1),
        ("groups2", 6, 3, 1, 1, 1, 2),
        ("depthwise", 4, 4, 1, 3, 1, 4),
        ("pointwise", 3, 1, 1, 0, 1, 1),
    ):
        w = normal(31, out, kernel, 4 // groups, scale=0.5)
        c.add(
            f"conv1d_{name}",
            "conv1d",
            [x, w],
            ref.conv(x, w, [stride], [padding], [dilation], groups),
            "numpy",
            stride=stride,
            padding=padding,
            dilation=dilation,
            groups=groups,
        )
    x = normal(32, 2, 7, 6, 4)
    for name, kernel, stride, padding, dilation, groups in (
        ("plain", (3, 2), (1, 1), (0, 0), (1, 1), 1),
        ("padded_strided", (3, 3), (2, 1), (1, 2), (1, 1), 1),
        ("dilated", (2, 2), (1, 1), (0, 1), (2, 3), 1),
        ("groups2", (3, 3), (1, 1), (1, 1), (1, 1), 2),
        ("depthwise", (3, 3), (1, 1), (1, 1), (1, 1), 4),
        ("patches", (3, 3), (3, 3), (1, 0), (1, 1), 1),
    ):
        w = normal(33, 8, *kernel, 4 // groups, scale=0.3)
        c.add(
            f"conv2d_{name}",
            "conv2d",
            [x, w],
            ref.conv(x, w, stride, padding, dilation, groups),
            "numpy",
            stride=list(stride),
            padding=list(padding),
            dilation=list(dilation),
            groups=groups,
        )
    x, w = normal(34, 1, 4, 5, 6, 3), normal(35, 4, 2, 3, 3, 3, scale=0.3)
    c.add(
        "conv3d_patches",
        "conv3d",
        [x, w],
        ref.conv(x, w, (2, 1, 3), (0, 1, 0), (1, 1, 1)),
        "numpy",
        stride=[2, 1, 3],
        padding=[0, 1, 0],
        dilation=[1, 1, 1],
        groups=1,
    )
    x, w = normal(36, 2, 5, 3), normal(37, 4, 3, 3, scale=0.3)
    c.add(
        "conv_transpose1d",
        "conv_transpose1d",
        [x, w],
        ref.conv_transpose1d(x, w, 2, 1),
        "numpy",
        stride=2,
        padding=1,
        dilation=1,
        groups=1,
    )


def fast(c):
    x, w, b = normal(40, 2, 3, 32, scale=2.0), normal(41, 32, scale=0.3) + 1, normal(42, 32, scale=0.3)
    for tag, weight in (("weight", w), ("plain", None)):
        c.add(
            f"rms_norm_{tag}",
            "rms_norm",
            [x] if weight is None else [x, weight],
            ref.rms_norm(x, weight, 1e-5),
            "numpy",
            eps=1e-5,
        )
    c.add("rms_norm_large_eps", "rms_norm", [x, w], ref.rms_norm(x, w, 0.5), "numpy", eps=0.5)
    c.add("layer_norm_weight_bias", "layer_norm", [x, w, b], ref.layer_norm(x, w, b, 1e-5), "numpy", eps=1e-5)
    c.add("layer_norm_weight", "layer_norm", [x, w], ref.layer_norm(x, w, None, 1e-5), "numpy", eps=1e-5)
    c.add("layer_norm_plain", "layer_norm", [x], ref.layer_norm(x, None, None, 1e-3), "numpy", eps=1e-3)
    x = normal(43, 2, 3, 5, 16)
    freqs = np.geomspace(1, 500, 8).astype(np.float32)
    per_row = np.array([3, 11], np.int32)
    for traditional in (False, True):
        tag = "traditional" if traditional else "halves"
        for name, dims, base, scale, offset in (
            ("start", 16, 10000.0, 1.0, 0),
            ("offset", 16, 10000.0, 1.0, 37),
            ("partial", 8, 500.0, 1.0, 5),
            ("scaled", 16, 10000.0, 0.25, 100),
        ):
            out = ref.rope(x, dims, ref.rope_inv_freq(dims, base), traditional, scale, offset)
            c.add(
                f"rope_{tag}_{name}",
                "rope",
                [x],
                out,
                "numpy",
                dims=dims,
                traditional=traditional,
                base=base,
                scale=scale,
                offset=offset,
            )
        c.add(
            f"rope_{tag}_freqs",
            "rope_freqs",
            [x, freqs],
            ref.rope(x, 16, 1 / freqs.astype(np.float64), traditional, 1.0, 9),
            "numpy",
            dims=16,
            traditional=traditional,
            scale=1.0,
            offset=9,
            note="in1: divisors of the position",
        )
        c.add(
            f"rope_{tag}_offsets",
            "rope_offsets",
            [x, per_row],
            ref.rope(x, 16, ref.rope_inv_freq(16, 1e4), traditional, 1.0, per_row),
            "numpy",
            dims=16,
            traditional=traditional,
            base=10000.0,
            scale=1.0,
            note="in1: one offset a batch row",
        )
    q, k, v = normal(44, 2, 4, 5, 16), normal(45, 2, 2, 9, 16), normal(46, 2, 2, 9, 16)
    scale = 16**-0.5

    def attend(name, form, mask=None, inputs=(), sinks=None, q=q):
        c.add(
            f"sdpa_{name}",
            "scaled_dot_product_attention",
            [q, k, v, *inputs],
            ref.attention(q, k, v, scale, mask, sinks),
            "numpy",
            scale=scale,
            mask=form,
            sinks=sinks is not None,
        )

    attend("none", "none")
    attend("causal", "causal", ref.causal_mask(5, 9))
    attend("one_query", "none", q=q[:, :, :1])
    allowed = np.random.default_rng(47).random((2, 1, 5, 9)) > 0.4
    allowed[..., 0] = True
    attend("bool", "array", allowed, [allowed])
    attend("bool_2d", "array", allowed[0, 0], [allowed[0, 0]])
    window = ref.sliding_mask(5, 9, 3)
    attend("sliding", "array", window, [window])
    bias = normal(48, 2, 4, 5, 9)
    attend("additive", "array", bias, [bias])
    sinks = normal(49, 4)
    attend("sinks_causal", "causal", ref.causal_mask(5, 9), [sinks], sinks)
    square = [normal(seed, 1, 2, 7, 8) for seed in (50, 51, 52)]
    c.add(
        "sdpa_square_causal",
        "scaled_dot_product_attention",
        square,
        ref.attention(*square, 0.3, ref.causal_mask(7, 7)),
        "numpy",
        scale=0.3,
        mask="causal",
        sinks=False,
    )


QUANTIZATIONS = (
    ("affine", 32, 2),
    ("affine", 64, 3),
    ("affine", 32, 4),
    ("affine", 64, 4),
    ("affine", 128, 5),
    ("affine", 32, 6),
    ("affine", 32, 8),
    ("affine", 64, 8),
    ("mxfp4", 32, 4),
    ("nvfp4", 16, 4),
    ("mxfp8", 32, 8),
)


def quantized(c):
    w, x = normal(60, 16, 128, scale=0.1), normal(61, 3, 128)
    columns = normal(62, 3, 16)
    for mode, group, bits in QUANTIZATIONS:
        params = dict(group_size=group, bits=bits, mode=mode)
        packed = mx.quantize(mx.array(w), **params)
        restored = np.array(mx.dequantize(*packed, **params).astype(mx.float32))
        tag = f"{mode}_{bits}_{group}"
        c.add(f"quantize_{tag}", "quantize", [w], list(packed), "mlx", **params)
        c.add(f"dequantize_{tag}", "dequantize", list(packed), restored, "mlx", **params, dtype="float32")
        c.add(
            f"quantized_matmul_{tag}",
            "quantized_matmul",
            [x, *packed],
            x.astype(np.float64) @ restored.T,
            "numpy",
            **params,
            transpose=True,
        )
        c.add(
            f"quantized_matmul_{tag}_plain",
            "quantized_matmul",
            [columns, *packed],
            columns.astype(np.float64) @ restored,
            "numpy",
            **params,
            transpose=False,
        )
    experts = normal(63, 4, 16, 64, scale=0.1)
    tokens = normal(64, 6, 1, 64)
    lhs, rhs = np.array([0, 5, 2, 2, 3], np.uint32), np.array([0, 0, 1, 3, 3], np.uint32)
    for mode, group, bits in (("affine", 32, 4), ("affine", 64, 8), ("mxfp4", 32, 4)):
        params = dict(group_size=group, bits=bits, mode=mode)
        packed = mx.quantize(mx.array(experts), **params)
        restored = np.array(mx.dequantize(*packed, **params).astype(mx.float32)).astype(np.float64)
        c.add(
            f"gather_qmm_{mode}_{bits}_{group}",
            "gather_qmm",
            [tokens, *packed, lhs, rhs],
            tokens[lhs] @ restored[rhs].transpose(0, 2, 1),
            "numpy",
            **params,
            transpose=True,
            sorted=False,
            note="inputs: x, weight, scales, biases (affine only), lhs, rhs indices",
        )
    half = mx.array(w).astype(mx.bfloat16)
    c.add(
        "quantize_bf16",
        "quantize",
        [half],
        list(mx.quantize(half, group_size=64, bits=4)),
        "mlx",
        group_size=64,
        bits=4,
        mode="affine",
    )


def random(c):
    key = mx.random.key(0)
    logits = normal(70, 4, 6, scale=2.0)
    c.add("random_key", "random_key", [], key, "mlx", seed=0)
    c.add("random_key_large", "random_key", [], mx.random.key(2**40 + 5), "mlx", seed=2**40 + 5)
    c.add("random_split", "random_split", [key], mx.random.split(key, 3), "mlx", num=3)
    c.add(
        "random_uniform",
        "random_uniform",
        [key],
        mx.random.uniform(-1.0, 3.0, (3, 5), key=key),
        "mlx",
        low=-1.0,
        high=3.0,
        shape=[3, 5],
    )
    c.add(
        "random_normal",
        "random_normal",
        [key],
        mx.random.normal((3, 5), loc=1.0, scale=2.0, key=key),
        "mlx",
        loc=1.0,
        scale=2.0,
        shape=[3, 5],
    )
    c.add("random_gumbel", "random_gumbel", [key], mx.random.gumbel((7,), key=key), "mlx", shape=[7])
    c.add(
        "random_bernoulli",
        "random_bernoulli",
        [key],
        mx.random.bernoulli(0.3, (20,), key=key),
        "mlx",
        p=0.3,
        shape=[20],
    )
    c.add(
        "random_randint",
        "random_randint",
        [key],
        mx.random.randint(-5, 50, (11,), key=key),
        "mlx",
        low=-5,
        high=50,
        shape=[11],
    )
    c.add(
        "random_truncated_normal",
        "random_truncated_normal",
        [key],
        mx.random.truncated_normal(-1.0, 2.0, (9,), key=key),
        "mlx",
        low=-1.0,
        high=2.0,
        shape=[9],
    )
    c.add(
        "random_categorical",
        "random_categorical",
        [logits, key],
        mx.random.categorical(mx.array(logits), key=key),
        "mlx",
        axis=-1,
    )
    c.add(
        "random_categorical_samples",
        "random_categorical",
        [logits, key],
        mx.random.categorical(mx.array(logits), num_samples=5, key=key),
        "mlx",
        axis=-1,
        num_samples=5,
    )
    c.add("random_permutation", "random_permutation", [key], mx.random.permutation(10, key=key), "mlx", n=10)
