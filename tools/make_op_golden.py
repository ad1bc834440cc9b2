"""Golden data for the ops of mlex-core: mlex-core/tests/data/ops/ops.{safetensors,json}.

Run from anywhere: `python tools/make_op_golden.py`. Outputs come from numpy (op_reference.py, in
float64) except where the op is defined by MLX itself (quantization layouts, random bits).

With a later MLX (0.32.4) it makes ops-later.{safetensors,json} instead: the cases in which that one
gives other values.
"""

import mlx.core as mx

import op_cases_basic as basic
import op_cases_compute as compute
from goldens import ROOT, Cases, later_than, to_mx

SECTIONS = (
    basic.reductions,
    basic.elementwise,
    basic.shapes,
    basic.products,
    basic.indexing,
    compute.convolutions,
    compute.fast,
    compute.quantized,
    compute.random,
)


STEM = ROOT / "mlex-core/tests/data/ops/ops"

# The first MLX that gives other values, found by running the Python packages.
SINCE = {
    "random_randint": "0.32.1",  # rounds down, no longer towards zero
    "quantize_mxfp4_4_32": "0.32.2",  # other scales
    "quantize_mxfp8_8_32": "0.32.2",
    "floor_divide_i32": "0.32.3",  # rounds down, no longer towards zero
}


def changed(cases):
    """The names of the cases with the inputs of ops.safetensors and other outputs."""
    former = mx.load(str(STEM.with_suffix(".safetensors")))

    def same(row, kind):
        keys = [f"{row['name']}.{kind}{i}" for i in range(row[f"{kind}puts"])]
        return all(close(to_mx(cases.tensors[key]), former[key]) for key in keys)

    return {row["name"] for row in cases.rows if same(row, "in") and not same(row, "out")}


def close(a, b):
    if mx.issubdtype(a.dtype, mx.floating):
        return mx.allclose(a, b, rtol=1e-5, atol=1e-5, equal_nan=True).item()
    return mx.array_equal(a, b).item()


def main():
    cases = Cases()
    for section in SECTIONS:
        section(cases)
    if not later_than("0.31.2"):
        cases.save(STEM)
        return
    if changed(cases) != SINCE.keys():
        raise SystemExit(f"changed: {sorted(changed(cases))}, expected {sorted(SINCE)}")
    cases.keep(SINCE)
    cases.save(STEM.with_name("ops-later"))


if __name__ == "__main__":
    main()
