"""What mlx-lm's conversions make of the small checkpoints: mlex-models/tests/data/convert.json.

`python tools/make_convert_golden.py`. A row per conversion:

  source, dtype, dequantize, bits, group_size, mode, recipe   what is done to which checkpoint
  layouts    path of each quantized layer: [bits, group size, mode]
  tensors    name: [type, shape, first 16 digits of the SHA-256 of its bytes]

The steps are those of mlx_lm.convert.convert, without the tokenizer; casting comes first there. Where
scales are in a half type, dequantizing is done in float32 and rounded once, which mlx-lm does not do.
"""

import hashlib
import json

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map_with_path, tree_unflatten
from mlx_lm.convert import QUANT_RECIPES, mixed_quant_predicate_builder
from mlx_lm.models.switch_layers import QuantizedSwitchLinear
from mlx_lm.utils import dequantize_model, load_model, quantize_model

from goldens import ROOT

DATA = ROOT / "mlex-models/tests/data"
QUANTIZED = (nn.QuantizedLinear, nn.QuantizedEmbedding, QuantizedSwitchLinear)


def row(source, **options):
    return dict(source=source, **options)


CASES = [
    row("llama-f32"),
    row("llama-extra-keys"),
    row("llama-f32", dtype="bfloat16"),
    row("llama-4bit", dtype="float16"),
    row("llama-mxfp4", dtype="bfloat16"),
    row("llama-bf16", bits=4, group_size=64),
    row("llama-f16", bits=8, group_size=32),
    row("llama-f32", dtype="bfloat16", bits=3, group_size=32),
    row("qwen2-bf16", mode="mxfp4"),
    row("llama-bf16", mode="mxfp8"),
    row("qwen3-f32", mode="nvfp4"),
    # Layers that are quantized stay so.
    row("llama-mixed-bits", bits=6, group_size=64),
    row("llama-4bit", dequantize=True),
    row("llama-8bit-g64", dequantize=True),
    row("llama-mxfp4", dequantize=True, dtype="float32"),
    row("llama-4bit", dequantize=True, bits=5, group_size=64),
    # Hugging Face's names and shapes become mlx-lm's; routers get 8 bits.
    row("qwen3_moe-hf"),
    row("qwen3_next-hf"),
    row("qwen3_5-hf", dtype="bfloat16"),
    row("qwen3_5_moe-hf"),
    row("gemma4-large", dtype="bfloat16"),
    row("gemma4-experts"),
    row("qwen3_moe-4bit", dequantize=True, bits=5, group_size=32),
    row("qwen3_5_moe-4bit", dequantize=True, mode="mxfp8"),
    *(row("quant-mixed-3-6", dequantize=True, recipe=recipe) for recipe in QUANT_RECIPES),
]


def cast(model, dtype):
    casts = getattr(model, "cast_predicate", lambda _: True)
    model.update(
        tree_map_with_path(
            lambda path, p: p.astype(dtype) if casts(path) and mx.issubdtype(p.dtype, mx.floating) else p,
            model.parameters(),
        )
    )


def dequantized(model):
    """mlx-lm's dequantize_model, with scales and biases widened to float32 first."""
    wide, dtypes = [], {}
    for path, module in model.named_modules():
        if isinstance(module, QUANTIZED):
            affine = module.mode == "affine"
            dtypes[path] = module.scales.dtype if affine else mx.bfloat16
            if affine:
                wide += [(f"{path}.{part}", module[part].astype(mx.float32)) for part in ("scales", "biases")]
    model.update(tree_unflatten(wide))
    model = dequantize_model(model)
    model.update(tree_unflatten([(f"{p}.weight", m.weight.astype(dtypes[p])) for p, m in model.named_modules() if p in dtypes]))
    return model


def digest(array):
    """What a tensor is; MLX's bfloat16 has no numpy type."""
    raw = np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)
    name = str(array.dtype).removeprefix("mlx.core.")
    return [name, list(array.shape), hashlib.sha256(raw.tobytes()).hexdigest()[:16]]


def convert(case):
    model, config = load_model(DATA / case["source"])
    dtype = case.get("dtype") and getattr(mx, case["dtype"])
    if case.get("dequantize"):
        config.pop("quantization", None)
        config.pop("quantization_config", None)
        model = dequantized(model)
    if dtype:
        cast(model, dtype)
    settings = {key: case[key] for key in ("bits", "group_size", "mode") if key in case}
    recipe = case.get("recipe")
    if settings or recipe:
        model, config = quantize_model(
            model,
            config,
            settings.get("group_size"),
            settings.get("bits"),
            mode=settings.get("mode", "affine"),
            quant_predicate=recipe and mixed_quant_predicate_builder(recipe, model, settings.get("group_size")),
        )
    return {
        **case,
        "layouts": {
            path: [module.bits, module.group_size, module.mode]
            for path, module in sorted(model.named_modules())
            if isinstance(module, QUANTIZED)
        },
        "tensors": {name: digest(array) for name, array in sorted(tree_flatten(model.parameters()))},
    }


def line(case):
    """A row with its tensors on lines of their own."""
    tensors = case.pop("tensors")
    rows = ",\n   ".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in tensors.items())
    return f'{json.dumps(case)[:-1]}, "tensors": {{\n   {rows}}}}}'


def main():
    mx.set_default_device(mx.cpu)
    path = DATA / "convert.json"
    path.write_text("[\n" + ",\n".join(line(convert(case)) for case in CASES) + "\n]\n")
    print(f"{path.relative_to(ROOT)}: {len(CASES)} conversions, {path.stat().st_size // 1024} KB")


if __name__ == "__main__":
    main()
