"""SmolLM2 in every scheme: size, perplexity, speed, and whether mlx-lm gives the same tokens.

`python tools/quantization_table.py MLEX MODEL.gguf [--only PART]... [--keep DIR] [--no-speed]` prints the table
of docs/quantization.md. MLEX is the program, built with `--release`. For each scheme the model is dequantized,
quantized anew by `mlex convert` with scales in bfloat16, and then

* scored by `mlex score` on `quantization_text.txt`,
* timed by `mlex bench`, 64 tokens after a prompt of 128,
* loaded by mlx-lm, which must continue a prompt with the same 16 tokens as `mlex generate`. Both compute in
  float32: MLX's CPU backend sums in the type of the activations, and half of one decides near ties by chance.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load

TEXT = Path(__file__).parent / "quantization_text.txt"
PROMPT = "The river that drove the mill came down from the hills, and"
TOKENS = 16
SCHEMES = [
    ("bfloat16", []),
    *((f"affine {bits}-bit, group {group}", ["--bits", str(bits), "--group-size", str(group)])
      for bits, group in ((8, 64), (6, 64), (5, 64), (4, 32), (4, 64), (3, 64), (2, 32))),
    ("mxfp8", ["--mode", "mxfp8"]),
    ("mxfp4", ["--mode", "mxfp4"]),
    ("nvfp4", ["--mode", "nvfp4"]),
    *((name, ["--recipe", name]) for name in ("mixed_4_6", "mixed_3_6", "mixed_3_4", "mixed_2_6")),
]


def mlex(program, *args):
    result = subprocess.run([program, *map(str, args)], capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"mlex {' '.join(map(str, args))}: {result.stderr}")
    return result.stdout


def of_mlx_lm(folder, tokens):
    """What mlx-lm gives after `tokens`, greedily, and how clear its closest choice was."""
    model, tokenizer = load(str(folder))
    if tokenizer.encode(PROMPT) != tokens:
        sys.exit(f"{folder}: mlx-lm encodes the prompt as {tokenizer.encode(PROMPT)}, mlex as {tokens}")
    model.update(
        tree_map(lambda p: p.astype(mx.float32) if mx.issubdtype(p.dtype, mx.floating) else p, model.parameters())
    )
    cache, found, margin = make_prompt_cache(model), [], float("inf")
    step = mx.array(tokens)[None]
    for _ in range(TOKENS):
        logits = model(step, cache=cache)[0, -1].astype(mx.float32)
        best = mx.argmax(logits).item()
        second, first = mx.topk(logits, 2).tolist()
        margin = min(margin, abs(first - second))
        found.append(best)
        step = mx.array([[best]])
    return found, margin


def measure(program, source, name, flags, folder, speed):
    mlex(program, "convert", "--model", source, "--out", folder, "--dequantize", "--dtype", "bfloat16", *flags)
    report = json.loads(mlex(program, "inspect", "--model", folder, "--json"))
    score = json.loads(mlex(program, "score", "--model", folder, "--text-file", TEXT, "--json"))
    generate = ["generate", "--model", folder, "--raw", "--prompt", PROMPT, "--max-tokens", TOKENS]
    ours = json.loads(mlex(program, *generate, "--ignore-eos", "--dtype", "float32", "--json"))
    theirs, margin = of_mlx_lm(folder, ours["prompt_tokens"])
    same = sum(a == b for a, b in zip(ours["tokens"], theirs))
    row = [
        name,
        f"{report['file_bytes'] / 1e6:.1f} MB",
        f"{report['bits_per_weight']:.2f}",
        f"{score['perplexity']:.2f}",
    ]
    if speed:
        lengths = ["--prompt-tokens", 128, "--gen-tokens", 64]
        bench = json.loads(mlex(program, "bench", "--model", folder, *lengths, "--json"))
        row.append(f"{bench['decode_tps']:.0f}")
    row.append(f"{same} of {TOKENS}" + ("" if same == TOKENS else f" (closest choice {margin:.4f})"))
    return row


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("source")
    parser.add_argument("--only", action="append", help="schemes with this in their name")
    parser.add_argument("--keep", help="where the converted directories stay")
    parser.add_argument("--no-speed", action="store_true")
    args = parser.parse_args()
    mx.set_default_device(mx.cpu)
    speed = [] if args.no_speed else ["Decode, tok/s"]
    heads = ["Scheme", "Size", "Bits per weight", "Perplexity", *speed, "Tokens as mlx-lm"]
    print("| " + " | ".join(heads) + " |\n|" + "---|" * len(heads))
    for name, flags in SCHEMES:
        if args.only and not any(part in name for part in args.only):
            continue
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(args.keep or temporary) / name.replace(" ", "-").replace(",", "")
            row = measure(args.program, args.source, name, flags, folder, bool(speed))
        print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
