"""Golden data for the ops of mlex-core: mlex-core/tests/data/ops/ops.{safetensors,json}.

Run from anywhere: `python tools/make_op_golden.py`. Outputs come from numpy (op_reference.py, in
float64) except where the op is defined by MLX itself (quantization layouts, random bits).
"""

import op_cases_basic as basic
import op_cases_compute as compute
from goldens import ROOT, Cases

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


def main():
    cases = Cases()
    for section in SECTIONS:
        section(cases)
    cases.save(ROOT / "mlex-core/tests/data/ops/ops")


if __name__ == "__main__":
    main()
