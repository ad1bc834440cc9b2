"""Independent references in numpy (float64 inside): what an op computes, by its definition."""

import math

import numpy as np

erf = np.vectorize(math.erf, otypes=[np.float64])


def f64(x):
    return np.asarray(x, dtype=np.float64)


def erfinv(y):
    """The inverse of erf on (-1, 1) by bisection."""
    y = f64(y)
    low, high = np.full_like(y, -6.0), np.full_like(y, 6.0)
    for _ in range(80):
        mid = (low + high) / 2
        below = erf(mid) < y
        low, high = np.where(below, mid, low), np.where(below, high, mid)
    return (low + high) / 2


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-f64(x)))


def silu(x):
    return f64(x) * sigmoid(x)


def gelu(x):
    return f64(x) * (1.0 + erf(f64(x) / math.sqrt(2.0))) / 2.0


def gelu_tanh(x):
    x = f64(x)
    return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def gelu_fast(x):
    """x times sigmoid(1.702 x)."""
    return f64(x) * sigmoid(1.702 * f64(x))


def softmax(x, axis=-1):
    x = f64(x)
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


def logsumexp(x, axis, keepdims=False):
    x = f64(x)
    top = x.max(axis=axis, keepdims=True)
    shift = np.where(np.isfinite(top), top, 0.0)
    with np.errstate(divide="ignore"):
        out = np.log(np.exp(x - shift).sum(axis=axis, keepdims=True)) + shift
    return out if keepdims else np.squeeze(out, axis=axis)


def logcumsumexp(x, axis=-1):
    return np.logaddexp.accumulate(f64(x), axis=axis)


def rms_norm(x, weight, eps):
    x = f64(x)
    out = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps)
    return out if weight is None else out * f64(weight)


def layer_norm(x, weight, bias, eps):
    x = f64(x)
    out = (x - x.mean(axis=-1, keepdims=True)) / np.sqrt(x.var(axis=-1, keepdims=True) + eps)
    if weight is not None:
        out = out * f64(weight)
    return out if bias is None else out + f64(bias)


def rope_inv_freq(dims, base):
    return base ** (-np.arange(0, dims, 2, dtype=np.float64) / dims)


def rope(x, dims, inv_freq, traditional=False, scale=1.0, offset=0):
    """Rotates the first `dims` of the last axis of x [B, H, T, D]; offset is an int or one per batch row."""
    x = f64(x)
    batch, _, length, _ = x.shape
    offset = np.broadcast_to(np.asarray(offset, dtype=np.float64), (batch,))
    position = (offset[:, None] + np.arange(length)) * scale
    angle = (position[..., None] * f64(inv_freq))[:, None]
    cos, sin = np.cos(angle), np.sin(angle)
    if traditional:
        first, second = x[..., 0:dims:2], x[..., 1:dims:2]
    else:
        first, second = x[..., : dims // 2], x[..., dims // 2 : dims]
    one, two = first * cos - second * sin, first * sin + second * cos
    out = x.copy()
    if traditional:
        out[..., 0:dims:2], out[..., 1:dims:2] = one, two
    else:
        out[..., : dims // 2], out[..., dims // 2 : dims] = one, two
    return out


def causal_mask(queries, keys):
    """True where query i (the last `queries` of `keys` positions) may see key j."""
    return np.arange(keys)[None] <= np.arange(keys - queries, keys)[:, None]


def sliding_mask(queries, keys, window):
    """Causal, and only the last `window` keys (the query's own among them)."""
    row = np.arange(keys - queries, keys)[:, None]
    column = np.arange(keys)[None]
    return (column <= row) & (column > row - window)


def attention(q, k, v, scale, mask=None, sinks=None):
    """softmax(scale q k^T + mask) v with grouped heads. q [B, H, L, D], k and v [B, G, S, D].

    A boolean mask is true where a key may be seen, any other is added. `sinks` [H] are logits of
    a key that is attended to and has no value.
    """
    q, k, v = f64(q), f64(k), f64(v)
    groups = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, groups, axis=1), np.repeat(v, groups, axis=1)
    scores = scale * q @ np.swapaxes(k, -1, -2)
    if mask is not None:
        mask = np.asarray(mask)
        scores = np.where(mask, scores, -np.inf) if mask.dtype == bool else scores + mask
    if sinks is None:
        return softmax(scores) @ v
    column = np.broadcast_to(f64(sinks)[None, :, None, None], scores.shape[:-1] + (1,))
    return softmax(np.concatenate([scores, column], axis=-1))[..., :-1] @ v


def conv(x, weight, stride, padding, dilation, groups=1):
    """Convolution over the spatial axes of x [N, ..., C] with weight [O, ..., C / groups].

    stride, padding and dilation have one number for each spatial axis.
    """
    x, weight = f64(x), f64(weight)
    spatial = len(stride)
    x = np.pad(x, [(0, 0)] + [(p, p) for p in padding] + [(0, 0)])
    kernel = weight.shape[1:-1]
    size = [(x.shape[1 + i] - dilation[i] * (kernel[i] - 1) - 1) // stride[i] + 1 for i in range(spatial)]
    outputs, inputs = weight.shape[0] // groups, weight.shape[-1]
    out = np.zeros((x.shape[0], *size, weight.shape[0]))
    for tap in np.ndindex(*kernel):
        window = tuple(
            slice(tap[i] * dilation[i], tap[i] * dilation[i] + stride[i] * (size[i] - 1) + 1, stride[i])
            for i in range(spatial)
        )
        part = x[(slice(None), *window)]
        for g in range(groups):
            rows = slice(g * outputs, (g + 1) * outputs)
            out[..., rows] += part[..., g * inputs : (g + 1) * inputs] @ weight[(rows, *tap)].T
    return out


def conv_transpose1d(x, weight, stride=1, padding=0):
    """The gradient of conv1d as an op: x [N, L, C], weight [O, K, C]."""
    x, weight = f64(x), f64(weight)
    length, taps = x.shape[1], weight.shape[1]
    full = np.zeros((x.shape[0], stride * (length - 1) + taps, weight.shape[0]))
    for t in range(length):
        for k in range(taps):
            full[:, t * stride + k] += x[:, t] @ weight[:, k].T
    return full[:, padding : full.shape[1] - padding]


def gather(a, indices, axes, slice_sizes):
    """MLX's gather: out[i..., s...] = a[start(i) + s], shape = indices' shape + slice_sizes."""
    a = np.asarray(a)
    indices = np.broadcast_arrays(*indices)
    out = np.zeros(indices[0].shape + tuple(slice_sizes), dtype=a.dtype)
    for at in np.ndindex(indices[0].shape):
        out[at] = a[_window(a.shape, indices, axes, slice_sizes, at)]
    return out


def scatter(a, indices, updates, axes, combine):
    """MLX's scatter: for each i, a[start(i) + s] = combine(a[...], updates[i..., s...])."""
    out = np.array(a)
    indices = np.broadcast_arrays(*indices)
    sizes = np.asarray(updates).shape[indices[0].ndim :]
    for at in np.ndindex(indices[0].shape):
        window = _window(out.shape, indices, axes, sizes, at)
        out[window] = combine(out[window], updates[at])
    return out


def _window(shape, indices, axes, sizes, at):
    start = [0] * len(shape)
    for axis, index in zip(axes, indices):
        start[axis] = int(index[at]) + (shape[axis] if index[at] < 0 else 0)
    return tuple(slice(s, s + n) for s, n in zip(start, sizes))
