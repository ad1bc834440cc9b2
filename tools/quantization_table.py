"""SmolLM2 in every scheme: size, perplexity, speed, and whether mlx-lm gives the same tokens.

`python tools/quantization_table.py MLEX MODEL.gguf [--only PART]... [--speed-only]` measures, keeps what it finds
in `tools/results/quantization.json` and writes the table of docs/quantization.md anew from it. MLEX is the
program, built with `--release`. For each scheme the model is dequantized, quantized anew by `mlex convert` with
scales in bfloat16, and then

* scored by `mlex score` on `quantization_text.txt`,
* loaded by mlx-lm, which must continue a prompt with the same 16 tokens as `mlex generate`. Both compute in
  float32: MLX's CPU backend sums in the type of the activations, and half of one decides near ties by chance.

With `--speed-only`, which is for a machine that does nothing else, it is timed by `mlex bench` in place of that:
64 tokens after a prompt of 128.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load

from goldens import ROOT, mlex, save_json, widen

TEXT = Path(__file__).parent / "quantization_text.txt"
RESULTS = ROOT / "tools/results/quantization.json"
DOCUMENT = ROOT / "docs/quantization.md"
BEGIN, END = "<!-- by tools/quantization_table.py -->", "<!-- end -->"
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


def of_mlx_lm(folder, tokens):
    """What mlx-lm gives after `tokens`, greedily, and how clear its closest choice was."""
    model, tokenizer = load(str(folder))
    if tokenizer.encode(PROMPT) != tokens:
        sys.exit(f"{folder}: mlx-lm encodes the prompt as {tokenizer.encode(PROMPT)}, mlex as {tokens}")
    widen(model)
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


def convert(program, source, flags, folder):
    mlex(program, "convert", "--model", source, "--out", folder, "--dequantize", "--dtype", "bfloat16", *flags)


def measure(program, folder):
    report = json.loads(mlex(program, "inspect", "--model", folder, "--json"))
    score = json.loads(mlex(program, "score", "--model", folder, "--text-file", TEXT, "--json"))
    generate = ["generate", "--model", folder, "--raw", "--prompt", PROMPT, "--max-tokens", TOKENS, "--temp", 0]
    ours = json.loads(mlex(program, *generate, "--ignore-eos", "--dtype", "float32", "--json"))
    theirs, margin = of_mlx_lm(folder, ours["prompt_tokens"])
    return {
        "bytes": report["file_bytes"],
        "bits_per_weight": report["bits_per_weight"],
        "perplexity": score["perplexity"],
        "same": sum(a == b for a, b in zip(ours["tokens"], theirs)),
        # How far apart mlx-lm's first two were where they were closest.
        "margin": margin,
    }


def time(program, folder):
    lengths = ["--prompt-tokens", 128, "--gen-tokens", 64]
    return {"decode_tps": json.loads(mlex(program, "bench", "--model", folder, *lengths, "--json"))["decode_tps"]}


def cells(name, row):
    def cell(key, text):
        return text(row[key]) if key in row else "-"

    tokens = cell("same", lambda same: f"{same} of {TOKENS}")
    if row.get("same", TOKENS) != TOKENS:
        tokens += f" (closest choice {row['margin']:.4f})"
    return [
        name,
        cell("bytes", lambda size: f"{size / 1e6:.1f} MB"),
        cell("bits_per_weight", lambda bits: f"{bits:.2f}"),
        cell("perplexity", lambda perplexity: f"{perplexity:.2f}"),
        cell("decode_tps", lambda tps: f"{tps:.0f}"),
        tokens,
    ]


def write_table(results):
    """Puts the table between its marks in the document."""
    heads = ["Scheme", "Size", "Bits per weight", "Perplexity", "Decode, tok/s", "Tokens as mlx-lm"]
    rows = [heads, ["---"] * len(heads), *(cells(name, results[name]) for name, _ in SCHEMES if name in results)]
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    before, rest = DOCUMENT.read_text().split(BEGIN)
    _, after = rest.split(END)
    DOCUMENT.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("source")
    parser.add_argument("--only", action="append", help="schemes with this in their name")
    parser.add_argument("--speed-only", action="store_true")
    args = parser.parse_args()
    mx.set_default_device(mx.cpu)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name, flags in SCHEMES:
        if args.only and not any(part in name for part in args.only):
            continue
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "converted"
            convert(args.program, args.source, flags, folder)
            found = time(args.program, folder) if args.speed_only else measure(args.program, folder)
        results.setdefault(name, {}).update(found)
        print(name, found, flush=True)
        save_json(RESULTS, results)
    write_table(results)


if __name__ == "__main__":
    main()
