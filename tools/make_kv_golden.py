"""What mlx-lm generates with keys and values that are packed or limited: mlex-models/tests/data/kv.json.

`python tools/make_kv_golden.py`. For small checkpoints of tests/data, in float32, with mlx-lm's own loop
(`generate_step`: all but the last token of the prompt in one chunk, then token by token):

  checkpoint, prompt, tokens      greedy tokens
  margins                         the logit of each token minus the next best
  logprobs                        (packed) log-probabilities after the prompt, minus the largest, [V]
  bits, group_size, start         QuantizedKVCache, from `start` tokens on
  max_kv_size                     RotatingKVCache(max_size, keep=4)

mlx-lm's Llama has caches of its own kinds and does not take `max_kv_size`; the caches are made here as
`make_prompt_cache` makes them for models that have none.
"""

import json
import random

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import KVCache, RotatingKVCache
from mlx_lm.utils import load_model

from goldens import ROOT

DATA = ROOT / "mlex-models/tests/data"
GENERATED = 24

# checkpoint, length of the prompt, settings
PACKED = [
    ("qwen3-f32", 40, dict(bits=8, group_size=32, start=0)),
    ("qwen3-f32", 40, dict(bits=4, group_size=32, start=0)),
    ("qwen3-f32", 40, dict(bits=4, group_size=32, start=48)),
    ("qwen3-f32", 40, dict(bits=8, group_size=32, start=40)),
]
LIMITED = [
    ("qwen3-f32", 10, dict(max_kv_size=16)),
    ("qwen3-f32", 40, dict(max_kv_size=16)),
    ("qwen3-f32", 40, dict(max_kv_size=41)),
    ("llama-f32", 20, dict(max_kv_size=24)),
    ("llama-f32", 50, dict(max_kv_size=9)),
]


def prompt_of(length, vocab_size):
    draw = random.Random(length)
    return [draw.randrange(3, vocab_size) for _ in range(length)]


def run(checkpoint, length, settings):
    model, config = load_model(DATA / checkpoint, strict=False)
    prompt = prompt_of(length, config["vocab_size"])
    size = settings.get("max_kv_size")
    cache = [RotatingKVCache(max_size=size, keep=4) if size else KVCache() for _ in model.layers]
    kv = {}
    if "bits" in settings:
        kv = dict(
            kv_bits=settings["bits"], kv_group_size=settings["group_size"], quantized_kv_start=settings["start"]
        )
    tokens, margins, first = [], [], None
    steps = generate_step(mx.array(prompt), model, max_tokens=GENERATED, prompt_cache=cache, **kv)
    for token, logprobs in steps:
        best = mx.sort(logprobs)[-2:].tolist()
        tokens.append(int(token))
        margins.append(round(best[1] - best[0], 6))
        if first is None:
            first = [round(x, 6) for x in (logprobs - logprobs.max()).tolist()]
    result = dict(checkpoint=checkpoint, prompt=prompt, **settings, tokens=tokens, margins=margins)
    if "bits" in settings:
        result["logprobs"] = first
    return result


def main():
    cases = [run(*case) for case in PACKED + LIMITED]
    lines = ",\n".join(json.dumps(case) for case in cases)
    (DATA / "kv.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
