#!/usr/bin/env python3
"""What the MTP head of the small checkpoint `qwen3_5-mtp` says: `mtp.safetensors` in its directory.

mlx-lm has no such heads. Its layers are put together here as vLLM does (`qwen3_5_mtp.py`): the last layer's
normed states of the model and the embeddings of the tokens after them, each with a norm of its own, go through
`fc`, one layer of attention and a norm. The tensors: `tokens` [L], and `logits` [L - 1, V] of the tokens after
the next ones. Run `make_model_golden.py qwen3_5-mtp` before.
"""

import mlx.core as mx
from mlx.utils import tree_unflatten
from mlx_lm.models.qwen3_5 import DecoderLayer
from mlx_lm.utils import load_model

from goldens import ROOT, save_tensors

FOLDER = ROOT / "mlex-models/tests/data/qwen3_5-mtp"


def main():
    model = load_model(FOLDER)[0].language_model
    args = model.args
    weights = mx.load(str(FOLDER / "model.safetensors"))
    head = {name.removeprefix("mtp."): value for name, value in weights.items() if name.startswith("mtp.")}
    # Stored as w, used as 1 + w.
    head = {name: value + 1.0 if "norm" in name else value for name, value in head.items()}
    layer = DecoderLayer(args, args.full_attention_interval - 1)
    prefix = "layers.0."
    layer.update(tree_unflatten([(name.removeprefix(prefix), head[name]) for name in head if name.startswith(prefix)]))

    def norm(x, name):
        return mx.fast.rms_norm(x, head[f"{name}.weight"], args.rms_norm_eps)

    tokens = mx.load(str(FOLDER / "expected.safetensors"))["tokens"].astype(mx.int32)
    hidden = model.model(tokens[None])[:, :-1]
    embedded = model.model.embed_tokens(tokens[None, 1:])
    both = [norm(embedded, "pre_fc_norm_embedding"), norm(hidden, "pre_fc_norm_hidden")]
    states = mx.concatenate(both, -1) @ head["fc.weight"].T
    states = norm(layer(states, "causal"), "norm")
    save_tensors(FOLDER / "mtp.safetensors", {"tokens": tokens, "logits": model.lm_head(states)[0]})


if __name__ == "__main__":
    main()
