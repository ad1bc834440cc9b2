"""Op cases: reductions, element-wise ops, shapes, products, indexing, sorting."""

import mlx.core as mx
import numpy as np

import op_reference as ref
from goldens import later_than, normal


def reductions(c):
    x = normal(1, 2, 3, 5, scale=3.0)
    c.add("softmax_last", "softmax", [x], ref.softmax(x), "numpy", axes=[-1], precise=False)
    c.add("softmax_axis1", "softmax", [x], ref.softmax(x, 1), "numpy", axes=[1], precise=False)
    c.add("softmax_axes02", "softmax", [x], ref.softmax(x, (0, 2)), "numpy", axes=[0, 2], precise=False)
    far = x.copy()
    far[0, 0, :3] = -np.inf
    far[1, 1] += 1e4
    c.add("softmax_inf", "softmax", [far], ref.softmax(far), "numpy", axes=[-1], precise=False)
    half = mx.array(x * 10).astype(mx.bfloat16)
    exact = np.array(half.astype(mx.float32))
    c.add(
        "softmax_bf16_precise",
        "softmax",
        [half],
        mx.array(ref.softmax(exact).astype(np.float32)).astype(mx.bfloat16),
        "numpy",
        axes=[-1],
        precise=True,
    )
    none = far.copy()
    none[1, 2] = -np.inf
    c.add("logsumexp_last", "logsumexp", [none], ref.logsumexp(none, -1), "numpy", axes=[-1], keepdims=False)
    c.add("logsumexp_axes01", "logsumexp", [x], ref.logsumexp(x, (0, 1), True), "numpy", axes=[0, 1], keepdims=True)
    y = x.astype(np.float64)
    for op in ("mean", "sum", "prod", "max", "min"):
        c.add(f"{op}_axis1", op, [x], getattr(np, op)(y, axis=1), "numpy", axes=[1], keepdims=False)
        c.add(f"{op}_all", op, [x], getattr(np, op)(y), "numpy", axes=[0, 1, 2], keepdims=False)
        c.add(
            f"{op}_axes02_keep",
            op,
            [x],
            getattr(np, op)(y, axis=(0, 2), keepdims=True),
            "numpy",
            axes=[0, 2],
            keepdims=True,
        )
    for op in ("var", "std"):
        c.add(f"{op}_axis2", op, [x], getattr(np, op)(y, axis=2), "numpy", axes=[2], keepdims=False, ddof=0)
        c.add(
            f"{op}_axes01_ddof1",
            op,
            [x],
            getattr(np, op)(y, axis=(0, 1), ddof=1, keepdims=True),
            "numpy",
            axes=[0, 1],
            keepdims=True,
            ddof=1,
        )
    b = np.random.default_rng(2).random((3, 4)) > 0.4
    for op in ("all", "any"):
        c.add(f"{op}_axis0", op, [b], getattr(np, op)(b, axis=0), "numpy", axes=[0], keepdims=False)
    tied = np.array([[3, 1, 3, 2], [0, 5, 5, 5]], dtype=np.float32)
    for op in ("argmax", "argmin"):
        c.add(
            f"{op}_ties", op, [tied], getattr(np, op)(tied, axis=-1).astype(np.uint32), "numpy", axis=-1, keepdims=False
        )
    x = normal(3, 3, 4)
    y = x.astype(np.float64)
    for reverse in (False, True):
        for inclusive in (True, False):
            tag = f"{'reverse' if reverse else 'forward'}_{'inclusive' if inclusive else 'exclusive'}"
            for axis in (0, 1):
                params = dict(axis=axis, reverse=reverse, inclusive=inclusive)
                c.add(f"cumsum_{tag}_{axis}", "cumsum", [x], _scan(np.add, y, 0.0, **params), "numpy", **params)
                c.add(f"cumprod_{tag}_{axis}", "cumprod", [x], _scan(np.multiply, y, 1.0, **params), "numpy", **params)
                c.add(f"cummax_{tag}_{axis}", "cummax", [x], _scan(np.maximum, y, -np.inf, **params), "numpy", **params)
                c.add(f"cummin_{tag}_{axis}", "cummin", [x], _scan(np.minimum, y, np.inf, **params), "numpy", **params)
    c.add("logcumsumexp", "logcumsumexp", [x], ref.logcumsumexp(x, 1), "numpy", axis=1, reverse=False, inclusive=True)


def _scan(ufunc, x, start, axis, reverse, inclusive):
    if reverse:
        x = np.flip(x, axis)
    out = ufunc.accumulate(x, axis=axis)
    if not inclusive:
        first = np.full_like(np.take(out, [0], axis), start)
        out = np.concatenate([first, np.delete(out, -1, axis)], axis)
    return np.flip(out, axis) if reverse else out


def elementwise(c):
    x = np.concatenate([np.linspace(-6, 6, 25), [-20.0, 20.0, 1e-4, -1e-4]]).astype(np.float32)
    y = x.astype(np.float64)
    for op, out in {
        "erf": ref.erf(y),
        "sigmoid": ref.sigmoid(y),
        "silu": ref.silu(y),
        "gelu": ref.gelu(y),
        "gelu_approx": ref.gelu_tanh(y),
        "gelu_fast_approx": ref.gelu_fast(y),
        "relu": np.maximum(y, 0),
        "softplus": np.logaddexp(y, 0),
        "mish": y * np.tanh(np.logaddexp(y, 0)),
        "tanh": np.tanh(y),
        "expm1": np.expm1(y),
        "exp": np.exp(y),
        "sin": np.sin(y),
        "cos": np.cos(y),
        "square": y * y,
        "arctan": np.arctan(y),
        "sinh": np.sinh(y),
        "cosh": np.cosh(y),
        "arcsinh": np.arcsinh(y),
        "abs": np.abs(y),
        "sign": np.sign(y),
        "floor": np.floor(y),
        "ceil": np.ceil(y),
        "negative": -y,
    }.items():
        c.add(op, op, [x], out, "numpy")
    inside = np.linspace(-0.999, 0.999, 21).astype(np.float32)
    y = inside.astype(np.float64)
    c.add("erfinv", "erfinv", [inside], ref.erfinv(y), "numpy")
    for op in ("arcsin", "arccos", "arctanh", "log1p"):
        c.add(op, op, [inside], getattr(np, op)(y), "numpy")
    positive = np.geomspace(1e-6, 1e6, 19).astype(np.float32)
    y = positive.astype(np.float64)
    for op in ("log", "log2", "log10", "sqrt"):
        c.add(op, op, [positive], getattr(np, op)(y), "numpy")
    c.add("rsqrt", "rsqrt", [positive], 1 / np.sqrt(y), "numpy")
    c.add("reciprocal", "reciprocal", [positive], 1 / y, "numpy")
    halves = np.array([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 2.4999], np.float32)
    c.add("round_half_to_even", "round", [halves], np.round(halves), "numpy", decimals=0)
    c.add(
        "round_decimals",
        "round",
        [np.array([1.2345, -2.7182], np.float32)],
        np.array([1.23, -2.72]),
        "numpy",
        decimals=2,
    )
    a, b = np.array([7, -7, 7, -7, 6], np.float32), np.array([3, 3, -3, -3, 2.5], np.float32)
    for op in ("floor_divide", "remainder", "divide", "logaddexp", "maximum", "minimum", "arctan2"):
        c.add(op, op, [a, b], getattr(np, op)(a.astype(np.float64), b.astype(np.float64)), "numpy")
    ia, ib = a[:4].astype(np.int32), b[:4].astype(np.int32)
    c.add(
        "floor_divide_i32",
        "floor_divide",
        [ia, ib],
        np.floor_divide(ia, ib) if later_than("0.32.2") else np.trunc(ia / ib).astype(np.int32),
        "numpy",
        note="MLX before 0.32.3 divides integers towards zero, unlike numpy",
    )
    c.add("remainder_i32", "remainder", [ia, ib], np.remainder(ia, ib), "numpy")
    c.add("power", "power", [np.abs(a), b], np.abs(a).astype(np.float64) ** b, "numpy")
    bits = np.array([0b1100, 0b1010, 255], np.uint32), np.array([0b1010, 3, 7], np.uint32)
    for op in ("bitwise_and", "bitwise_or", "bitwise_xor", "left_shift", "right_shift"):
        c.add(op, op, list(bits), getattr(np, op)(*bits), "numpy")
    odd = np.array([np.nan, np.inf, -np.inf, 1.0], np.float32)
    for op in ("isnan", "isinf", "isposinf", "isneginf", "isfinite"):
        c.add(op, op, [odd], getattr(np, op)(odd), "numpy")
    c.add("nan_to_num", "nan_to_num", [odd], np.array([0.5, 9, -9, 1]), "numpy", nan=0.5, posinf=9.0, neginf=-9.0)
    x = normal(4, 2, 3)
    c.add("clip", "clip", [x], np.clip(x, -0.5, 0.25), "numpy", low=-0.5, high=0.25)
    condition = np.array([[True], [False]])
    c.add(
        "where_broadcast",
        "where",
        [condition, x, np.float32(7).reshape(1)],
        np.where(condition, x, np.float32(7)),
        "numpy",
    )
    wide = np.concatenate([normal(5, 30, scale=100.0), [65504.0, 1e-7, 3.4e38, 1.00390625, 1.01171875]]).astype(
        np.float32
    )
    bits16 = ((wide.view(np.uint32).astype(np.uint64) + 0x7FFF + ((wide.view(np.uint32) >> 16) & 1)) >> 16).astype(
        np.uint16
    )
    c.add("astype_bf16", "astype", [wide], mx.array(bits16).view(mx.bfloat16), "numpy", dtype="bfloat16")
    with np.errstate(over="ignore"):
        c.add("astype_f16", "astype", [wide], wide.astype(np.float16), "numpy", dtype="float16")
    small = normal(6, 12, scale=10.0)
    c.add("astype_i32", "astype", [small], small.astype(np.int32), "numpy", dtype="int32", note="towards zero")


def shapes(c):
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    for k in (-1, 0, 2):
        c.add(f"tril_{k}", "tril", [x], np.tril(x, k), "numpy", k=k)
        c.add(f"triu_{k}", "triu", [x], np.triu(x, k), "numpy", k=k)
        c.add(f"tri_{k}", "tri", [], np.tri(3, 5, k, dtype=np.float32), "numpy", n=3, m=5, k=k)
        c.add(f"eye_{k}", "eye", [], np.eye(3, 5, k, dtype=np.float32), "numpy", n=3, m=5, k=k)
        c.add(f"diagonal_{k}", "diagonal", [x], np.diagonal(x, k), "numpy", offset=k, axis1=0, axis2=1)
    c.add("diag_matrix", "diag", [np.array([1, 2], np.float32)], np.diag(np.array([1, 2], np.float32), 1), "numpy", k=1)
    c.add("arange", "arange", [], np.arange(1.0, 3.0, 0.25), "numpy", start=1.0, stop=3.0, step=0.25)
    c.add("linspace", "linspace", [], np.linspace(-1, 2, 7), "numpy", start=-1.0, stop=2.0, num=7)
    c.add(
        "pad_constant",
        "pad",
        [x],
        np.pad(x, [(1, 0), (2, 3)], constant_values=9),
        "numpy",
        low=[1, 2],
        high=[0, 3],
        axes=[0, 1],
        value=9.0,
        mode="constant",
    )
    c.add(
        "pad_edge",
        "pad",
        [x],
        np.pad(x, [(1, 1), (0, 2)], mode="edge"),
        "numpy",
        low=[1, 0],
        high=[1, 2],
        axes=[0, 1],
        value=0.0,
        mode="edge",
    )
    c.add("repeat_axis1", "repeat", [x], np.repeat(x, 3, axis=1), "numpy", repeats=3, axis=1)
    c.add("tile", "tile", [x], np.tile(x, (2, 1, 2)), "numpy", reps=[2, 1, 2])
    c.add("roll", "roll", [x], np.roll(x, -1, axis=1), "numpy", shift=-1, axis=1)
    y = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    c.add("transpose", "transpose", [y], y.transpose(2, 0, 1), "numpy", axes=[2, 0, 1])
    c.add("moveaxis", "moveaxis", [y], np.moveaxis(y, 0, -1), "numpy", source=0, destination=-1)
    c.add("swapaxes", "swapaxes", [y], np.swapaxes(y, 0, 1), "numpy", axis1=0, axis2=1)
    c.add(
        "slice_strided", "slice", [y], y[:, 2:0:-1, 1::2], "numpy", start=[0, 2, 1], stop=[2, 0, 4], strides=[1, -1, 2]
    )
    update = -np.ones((2, 1, 2), np.float32)
    done = y.copy()
    done[:, 1:2, 0:4:2] = update
    c.add(
        "slice_update_strided",
        "slice_update",
        [y, update],
        done,
        "numpy",
        start=[0, 1, 0],
        stop=[2, 2, 4],
        strides=[1, 1, 2],
    )
    c.add("concatenate", "concatenate", [x, x + 1], np.concatenate([x, x + 1], 1), "numpy", axis=1)
    c.add("stack", "stack", [x, x + 1], np.stack([x, x + 1], 1), "numpy", axis=1)
    c.add("split_at", "split", [x], np.split(x, [1, 3], axis=1), "numpy", indices=[1, 3], axis=1)
    c.add("split_parts", "split", [y], np.split(y, 2, axis=2), "numpy", parts=2, axis=2)
    c.add("flatten", "flatten", [y], y.reshape(2, 12), "numpy", start_axis=1, end_axis=2)
    strided = np.lib.stride_tricks.as_strided(np.arange(10, dtype=np.float32), (3, 4), (8, 4)).copy()
    c.add(
        "as_strided",
        "as_strided",
        [np.arange(10, dtype=np.float32)],
        strided,
        "numpy",
        shape=[3, 4],
        strides=[2, 1],
        offset=0,
    )


def products(c):
    a, b = normal(10, 2, 1, 3, 4), normal(11, 5, 4, 2)
    c.add("matmul_broadcast", "matmul", [a, b], a.astype(np.float64) @ b, "numpy")
    v = normal(12, 4)
    c.add("matmul_vector", "matmul", [v, b], v.astype(np.float64) @ b, "numpy")
    p, q, s = normal(13, 3, 4), normal(14, 4, 2), normal(15, 2)
    c.add("addmm", "addmm", [s, p, q], 0.5 * s + 2.0 * (p.astype(np.float64) @ q), "numpy", alpha=2.0, beta=0.5)
    c.add("outer", "outer", [v, s], np.outer(v, s), "numpy")
    c.add("inner", "inner", [p, v], np.inner(p.astype(np.float64), v), "numpy")
    t = normal(16, 3, 4, 2), normal(17, 4, 2, 5)
    c.add(
        "tensordot",
        "tensordot",
        list(t),
        np.tensordot(t[0].astype(np.float64), t[1], ([1, 2], [0, 1])),
        "numpy",
        axes_a=[1, 2],
        axes_b=[0, 1],
    )
    m, e = normal(18, 5, 3, 4), normal(19, 6, 4, 2)
    lhs, rhs = np.array([0, 2, 4, 1], np.uint32), np.array([5, 0, 3, 3], np.uint32)
    c.add("gather_mm", "gather_mm", [m, e, lhs, rhs], m[lhs].astype(np.float64) @ e[rhs], "numpy")


def indexing(c):
    x = normal(20, 4, 5)
    i = np.array([[2, 0], [3, 3]], np.int32)
    c.add("take_axis0", "take", [x, i], np.take(x, i, 0), "numpy", axis=0)
    c.add("take_axis1", "take", [x, i], np.take(x, i, 1), "numpy", axis=1)
    c.add("take_flat", "take", [x, np.array([0, 7, 19], np.uint32)], np.take(x, [0, 7, 19]), "numpy", axis=None)
    c.add("take_negative", "take", [x, np.array([-1, -4], np.int32)], np.take(x, [-1, -4], 0), "numpy", axis=0)
    order = np.argsort(x, axis=1, kind="stable").astype(np.int32)
    c.add("take_along_axis", "take_along_axis", [x, order], np.take_along_axis(x, order, 1), "numpy", axis=1)
    one = np.array([[1], [0], [4], [2]], np.int32)
    value = np.array([[9], [8], [7], [6]], np.float32)
    put = x.copy()
    np.put_along_axis(put, one, value, 1)
    c.add("put_along_axis", "put_along_axis", [x, one, value], put, "numpy", axis=1)
    twice = np.array([[1, 1], [0, 2], [4, 4], [2, 0]], np.int32)
    values = normal(21, 4, 2)
    added = x.astype(np.float64)
    for row in range(4):
        np.add.at(added[row], twice[row], values[row])
    c.add("scatter_add_axis", "scatter_add_axis", [x, twice, values], added, "numpy", axis=1)
    y = normal(22, 3, 4, 5)
    rows, columns = np.array([0, 2], np.uint32), np.array([3, 1], np.uint32)
    c.add(
        "gather_one_axis",
        "gather",
        [y, columns],
        ref.gather(y, [columns], [1], [3, 1, 5]),
        "numpy",
        axes=[1],
        slice_sizes=[3, 1, 5],
    )
    c.add(
        "gather_two_axes",
        "gather",
        [y, rows, columns],
        ref.gather(y, [rows, columns], [0, 1], [1, 1, 5]),
        "numpy",
        axes=[0, 1],
        slice_sizes=[1, 1, 5],
    )
    start = np.array([[0], [1]], np.uint32)
    c.add(
        "gather_windows",
        "gather",
        [y, start, np.array([2, 0, 1], np.uint32)],
        ref.gather(y, [start, np.array([2, 0, 1])], [0, 2], [2, 4, 3]),
        "numpy",
        axes=[0, 2],
        slice_sizes=[2, 4, 3],
    )
    same = np.array([1, 3, 1], np.uint32)
    update = normal(23, 3, 3, 1, 5)
    for op, combine in {
        "scatter_add": np.add,
        "scatter_prod": np.multiply,
        "scatter_max": np.maximum,
        "scatter_min": np.minimum,
    }.items():
        c.add(op, op, [y, same, update], ref.scatter(y, [same], update, [1], combine), "numpy", axes=[1])
    update = normal(24, 2, 1, 1, 5)
    c.add(
        "scatter",
        "scatter",
        [y, rows, columns, update],
        ref.scatter(y, [rows, columns], update, [0, 1], lambda old, new: new),
        "numpy",
        axes=[0, 1],
    )
    z = normal(25, 3, 9)
    for axis in (0, 1):
        c.add(f"sort_{axis}", "sort", [z], np.sort(z, axis), "numpy", axis=axis)
        c.add(f"argsort_{axis}", "argsort", [z], np.argsort(z, axis).astype(np.uint32), "numpy", axis=axis)
    c.add("topk", "topk", [z], np.sort(z, 1)[:, -4:], "numpy", k=4, axis=1, note="compare after sorting")
    c.add(
        "partition",
        "partition",
        [z],
        np.sort(z, 1)[:, 3:4],
        "numpy",
        kth=3,
        axis=1,
        note="only column kth is defined: smaller values stand before it, larger ones after",
    )
    c.add(
        "argpartition",
        "argpartition",
        [z],
        np.argsort(z, 1)[:, 3:4].astype(np.uint32),
        "numpy",
        kth=3,
        axis=1,
        note="only column kth is defined",
    )
