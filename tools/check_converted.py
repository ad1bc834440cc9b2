"""What `mlex convert` writes, loaded by mlx-lm: the same tokens as mlex gives.

`python tools/check_converted.py MLEX [SOURCE]...` writes `tools/results/converted.md` (with names of checkpoints:
only prints). MLEX is the program, a debug build is fine. Small checkpoints of mlex-models/tests/data are converted
in every scheme; mlx-lm loads the directory, which must have exactly the tensors that its model has, and continues
a prompt greedily. mlex must rank the same tokens first at each of these positions, with the same log-probabilities.

Both compute in float32: MLX's CPU backend sums in the type of the activations, and half of one decides near ties
by chance.
"""

import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from goldens import ROOT, mlex, widen

DATA = ROOT / "mlex-models/tests/data"
RESULT = ROOT / "tools/results/converted.md"
PROMPT = [3, 41, 7, 29, 11, 58, 23, 5]
TOKENS = 24
# The most by which log-probabilities may differ, sums being in another order.
TOLERANCE = 1e-3

EVERY_SCHEME = [
    *([f"--bits={bits}", f"--group-size={group}"] for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64)),
    *([f"--mode={mode}"] for mode in ("mxfp4", "mxfp8", "nvfp4")),
    *([f"--recipe={name}"] for name in ("mixed_2_6", "mixed_3_4", "mixed_3_6", "mixed_4_6")),
]
SOME_SCHEMES = [
    ["--bits=4", "--group-size=32"],
    ["--bits=8", "--group-size=64"],
    *([f"--mode={mode}"] for mode in ("mxfp4", "mxfp8", "nvfp4")),
]
WIDE_GROUPS = [[f"--bits={bits}", "--group-size=128"] for bits in (2, 3, 4, 5, 6, 8)]


def cases():
    """Checkpoints, each with the flags that it is converted with."""
    # A dense model, from weights whose columns every group size divides.
    yield from (("llama-4bit", ["--dequantize", *flags]) for flags in ([], *EVERY_SCHEME))
    yield from (("quant-4bit-g128", ["--dequantize", *flags]) for flags in WIDE_GROUPS)
    # Other dense ones: as they are, cast, in shards, of 8-bit floats.
    for source in ("llama-f32", "llama-sharded", "llama-tied", "qwen2-bf16", "qwen3-f32", "smollm3", "mistral"):
        yield source, []
        yield source, ["--dtype=float16"]
    yield from ((source, flags) for source in ("fp8-block", "fp8-channel") for flags in ([], ["--bits=8"]))
    yield from (("quant-optiq", flags) for flags in ([], ["--dequantize", "--mode=mxfp8"]))
    # Mixtures of experts, gated delta nets, language models of others that see.
    for source in ("qwen3_moe-hf", "qwen3_next-hf", "qwen3_5-hf", "qwen3_5_moe-hf", "gemma4-large", "gemma4-experts"):
        yield source, []
        yield source, ["--mode=nvfp4"]
    for source in ("qwen3_moe-4bit", "qwen3_next-4bit", "qwen3_5-4bit", "qwen3_5_moe-4bit", "gemma4-experts-4bit"):
        yield source, []
        yield from ((source, ["--dequantize", *flags]) for flags in SOME_SCHEMES)
    # GGUF files.
    for source in ("llama", "llama-blocks", "qwen2", "qwen3"):
        yield f"gguf/{source}.gguf", []
        yield f"gguf/{source}.gguf", ["--dequantize", "--bits=4", "--group-size=32"]


def of_mlx_lm(folder):
    """What mlx-lm gives after the prompt, greedily: tokens and their log-probabilities."""
    model, _ = load_model(folder)
    widen(model)
    cache, step, found = make_prompt_cache(model), mx.array(PROMPT)[None], []
    for _ in range(TOKENS):
        logits = model(step, cache=cache)[0, -1].astype(mx.float32)
        best = mx.argmax(logits).item()
        found.append((best, (logits[best] - mx.logsumexp(logits)).item()))
        step = mx.array([[best]])
    return found


def of_mlex(program, folder, tokens):
    """What mlex has for the likeliest token at the same positions."""
    ids = " ".join(map(str, [*PROMPT, *tokens]))
    score = mlex(program, "score", "--model", folder, "--tokens", ids, "--top", 1, "--dtype", "float32", "--json")
    # What is at a position are the rivals of the token there, so the prompt's do not count.
    top = json.loads(score)["top"][len(PROMPT):]
    return [(row[0]["id"], row[0]["logprob"]) for row in top]


def check(program, source, flags, folder):
    mlex(program, "convert", "--model", DATA / source, "--out", folder, *flags)
    report = json.loads(mlex(program, "inspect", "--model", folder, "--json"))
    theirs = of_mlx_lm(folder)
    ours = of_mlex(program, folder, [token for token, _ in theirs])
    same = sum(a == b for (a, _), (b, _) in zip(ours, theirs))
    difference = max(abs(a - b) for (_, a), (_, b) in zip(ours, theirs))
    return report, same, difference


def main():
    mx.set_default_device(mx.cpu)
    program, only = sys.argv[1], sys.argv[2:]
    lines, failures = [], 0
    for source, flags in cases():
        if only and source not in only:
            continue
        with tempfile.TemporaryDirectory() as temporary:
            report, same, difference = check(program, source, flags, Path(temporary) / "converted")
        passed = same == TOKENS and difference <= TOLERANCE
        failures += not passed
        cells = [source, report["model_type"], " ".join(flags) or "as it is", f"{report['bits_per_weight']:.2f}"]
        cells += [f"{same} of {TOKENS}", f"{difference:.1e}", *([] if passed else ["**differs**"])]
        lines.append("| " + " | ".join(cells) + " |")
        print(lines[-1], flush=True)
    if not only:
        heads = ["Source", "Architecture", "Flags", "Bits per weight", "Tokens as mlx-lm", "Log-probabilities off by"]
        text = [
            "# Converted checkpoints in mlx-lm",
            "",
            f"Written by `tools/check_converted.py`: {len(lines)} conversions, {failures} that differ. "
            f"mlx-lm {version('mlx-lm')}, MLX {version('mlx')}.",
            "",
            "| " + " | ".join(heads) + " |",
            "|" + "---|" * len(heads),
            *lines,
        ]
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text("\n".join(text) + "\n")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
