"""Whether mlx-vlm computes the same from the small Gemma4 checkpoints as mlx-lm did.

`pip install "mlx[cpu]==0.32.4" mlx-lm==0.32.2 pillow requests && pip install --no-deps mlx-vlm==0.7.10`, then
`python tools/check_gemma4_vlm.py`. Reads mlex-models/tests/data/gemma4-*/ and writes nothing; fails where the
logits of mlx-vlm's language model are off by more than 1e-4 of the largest. Half-precision checkpoints are
computed in float32.
"""

import json
import sys

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_vlm.models.gemma4.config import TextConfig
from mlx_vlm.models.gemma4.language import LanguageModel
from mlx_vlm.models.gemma4_text.config import ModelConfig as TextOnlyConfig
from mlx_vlm.models.gemma4_text.language import LanguageModel as TextOnlyModel
from mlx_vlm.models.gemma4_unified.config import TextConfig as UnifiedConfig

from goldens import ROOT

DATA = ROOT / "mlex-models/tests/data"


def rows(name, value):
    """A weight under the names that mlx-vlm's language model has."""
    if name.endswith("experts.gate_up_proj"):
        gate, up = mx.split(value, 2, axis=1)
        base = name.removesuffix("gate_up_proj")
        return {f"{base}switch_glu.gate_proj.weight": gate, f"{base}switch_glu.up_proj.weight": up}
    if name.endswith("experts.down_proj"):
        return {name.replace("down_proj", "switch_glu.down_proj.weight"): value}
    return {name: value}


def load(folder):
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    if config["model_type"] == "gemma4_text":
        # Its own file: another default for a rope that is not given, and an own head.
        model = TextOnlyModel(TextOnlyConfig.from_dict(text))
    elif "unified" in config["model_type"]:
        model = LanguageModel(UnifiedConfig.from_dict(text))
    else:
        model = LanguageModel(TextConfig.from_dict(text))
    weights = {}
    for file in folder.glob("model*.safetensors"):
        for name, value in mx.load(str(file)).items():
            name = name.replace("model.language_model.", "language_model.model.").removeprefix("language_model.")
            if name.startswith(("model.layers", "model.embed_tokens", "model.norm", "model.per_layer", "lm_head")):
                weights |= rows(name, value)
    if config.get("tie_word_embeddings", True) and text.get("tie_word_embeddings", True):
        weights = {name: value for name, value in weights.items() if not name.startswith("lm_head")}
    if isinstance(model, TextOnlyModel):
        weights = model.sanitize(weights)
    else:
        weights = model.sanitize({f"language_model.{name}": value for name, value in weights.items()})
        weights = {name.removeprefix("language_model."): value for name, value in weights.items()}

    def layout(path, module):
        if f"{path}.scales" not in weights:
            return False
        layouts = config["quantization"]
        settings = layouts.get(f"language_model.{path}", layouts.get(path))
        return settings if isinstance(settings, dict) else hasattr(module, "to_quantized")

    if "quantization" in config:
        default = config["quantization"]
        nn.quantize(model, default["group_size"], default["bits"], class_predicate=layout)
    model.load_weights(list(weights.items()), strict=True)
    model.update(
        tree_map(lambda p: p.astype(mx.float32) if mx.issubdtype(p.dtype, mx.floating) else p, model.parameters())
    )
    return model


def main():
    failed = 0
    for folder in sorted(DATA.glob("gemma4-*/")):
        values = mx.load(str(folder / "expected.safetensors"))
        expected = values.get("logits_f32", values["logits"])
        found = load(folder)(values["tokens"][None])
        found = getattr(found, "logits", found)[0]
        error = float(mx.abs(found - expected).max() / mx.abs(expected).max())
        failed += error > 1e-4
        print(f"{folder.name}: off by {error:.1e} of the largest logit")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
