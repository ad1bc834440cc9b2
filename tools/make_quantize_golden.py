"""What `mx.quantize` makes of weights that are hard to quantize: mlex-core/tests/data/quantize.safetensors.

`python tools/make_quantize_golden.py`. Tensors, for each type of the weights (float32, float16, bfloat16):

  TYPE [18, 128]                           the weights
  TYPE.MODE.BITS.GROUP.weight|scales|biases    their packed form; biases for affine alone

The rows are random at several magnitudes, and what rounds or divides badly: zeros of both signs, one value,
one value among zeros, values halfway between two codes, steps of a power of two, the smallest and
large numbers of the type, one sign only. MLX quantizes on the CPU.
"""

import mlx.core as mx
import numpy as np

from goldens import ROOT, normal, save_tensors

COLUMNS = 128
TYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
LAYOUTS = [("affine", bits, group) for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)] + [
    ("mxfp4", 4, 32),
    ("mxfp8", 8, 32),
    ("nvfp4", 4, 16),
]


def rows(dtype):
    """The weights: [18, COLUMNS] of `dtype`."""
    info = mx.finfo(dtype)
    column = np.arange(COLUMNS)
    noise = lambda seed, scale=1.0: normal([7, seed], COLUMNS, scale=scale)
    one_hot = np.where(column % 32 == 5, 1.0, 0.0)
    values = [
        noise(0),
        noise(1, 0.02),
        noise(2, 1e-3),
        noise(3, 40.0),
        noise(4, 1.0) ** 3,
        np.abs(noise(5)),
        -np.abs(noise(6)),
        noise(7) + 10.0,
        np.zeros(COLUMNS),
        np.full(COLUMNS, -0.0),
        np.full(COLUMNS, 0.37),
        np.full(COLUMNS, -1.0),
        one_hot,
        -one_hot * 0.013,
        # Halves of codes, for 4 bits and for the floats.
        (column % 16 - 8) / 2.0,
        np.exp2(column % 9 - 6.0) * np.where(column % 2, 1, -1),
        noise(8) * (6e-5 if dtype == mx.float16 else 1e-38),
        # Not so large that the range of a group is infinite.
        np.sign(noise(9)) * float(info.max) / 4 * (column % 7) / 7,
    ]
    # As numpy rounds to the type, but for bfloat16, which it does not have.
    return mx.array(np.stack(values).astype(np.float32)).astype(dtype)


def main():
    mx.set_default_device(mx.cpu)
    tensors = {}
    for name, dtype in TYPES.items():
        weights = rows(dtype)
        tensors[name] = weights
        for mode, bits, group in LAYOUTS:
            packed = mx.quantize(weights, group_size=group, bits=bits, mode=mode)
            for part, array in zip(("weight", "scales", "biases"), packed):
                tensors[f"{name}.{mode}.{bits}.{group}.{part}"] = array
    path = ROOT / "mlex-core/tests/data/quantize.safetensors"
    save_tensors(path, tensors)
    print(f"{path.relative_to(ROOT)}: {len(tensors)} tensors, {path.stat().st_size // 1024} KB")


if __name__ == "__main__":
    main()
