#!/usr/bin/env python3
"""Random JSON schemas against what `mlex generate --json-schema` writes, and at what speed.

    python tools/check_schemas.py --mlex target/release/mlex --model MODEL [--count 100] [--seed 0]

Each answer is validated by Python's jsonschema (`pip install jsonschema`), formats included. After
each one the same prompt is continued freely for as many tokens, so that the speeds compare. Prints
the answers that are not valid and one line of totals; ends with 1 if there are any.
"""

import argparse
import json
import random
import subprocess
import sys

import jsonschema

WORDS = (
    "name age city color size title count price tags items owner status kind note "
    "active score level email code width height author year ratio"
).split()
TOPICS = "a cat, a shop, a book, the weather, a city, a recipe, a car, a game, a song, a tree".split(", ")


def leaf(rng):
    kind = rng.randrange(10)
    if kind == 0:
        return {"type": "string", "maxLength": rng.randint(1, 40)}
    if kind == 1:
        low = rng.randint(1, 8)
        return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 20)}
    if kind == 2:
        return {"enum": rng.sample(WORDS, rng.randint(1, 5))}
    if kind == 3:
        low = rng.randint(-1000, 1000)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 5000)}
    if kind == 4:
        return {"type": "boolean"}
    if kind == 5:
        return {"const": rng.choice([1, "x", None, True, [1, 2], {"a": 1}])}
    if kind == 6:
        return {"type": "string", "pattern": rng.choice(["^[a-z]{2,8}$", "^[A-Z][a-z]{1,9}$", r"^\d{3}-\d{4}$"])}
    if kind == 7:
        return {"type": "string", "format": rng.choice(["date", "ipv4", "uuid"])}
    if kind == 8:
        return {"type": ["integer", "null"], "minimum": 0, "maximum": rng.randint(1, 99)}
    return {"type": "number", "minimum": 0, "maximum": rng.randint(1, 100), "multipleOf": 0.25}


def schema(rng, depth):
    kind = rng.random()
    if depth == 0 or kind < 0.45:
        return leaf(rng)
    if kind < 0.65:
        low = rng.randint(0, 2)
        return {
            "type": "array",
            "items": schema(rng, depth - 1),
            "minItems": low,
            "maxItems": low + rng.randint(0, 3),
        }
    if kind < 0.75:
        return {"anyOf": [schema(rng, depth - 1), leaf(rng)]}
    return record(rng, depth - 1)


def record(rng, depth):
    names = rng.sample(WORDS, rng.randint(1, 5))
    return {
        "type": "object",
        "properties": {name: schema(rng, depth) for name in names},
        "required": rng.sample(names, rng.randint(0, len(names))),
        "additionalProperties": False,
    }


def whole(rng):
    made = record(rng, 3)
    if rng.random() < 0.3:
        made["$defs"] = {"part": record(rng, 1)}
        made["properties"]["part"] = {"$ref": "#/$defs/part"}
        made["required"].append("part")
    return made


def generate(args, prompt, extra):
    command = [args.mlex, "generate", "--model", args.model, "--json", "--prompt", prompt, *args.extra]
    done = subprocess.run(command + extra, capture_output=True, text=True)
    if done.returncode != 0:
        return None, done.stderr.strip()
    return json.loads(done.stdout), None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mlex", default="target/release/mlex")
    parser.add_argument("--model", required=True)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=800)
    parser.add_argument("extra", nargs="*", help="further flags of generate, after --")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    wrong, tokens, times = 0, 0, [0.0, 0.0]
    for index in range(args.count):
        made = whole(rng)
        prompt = f"Write a JSON object about {rng.choice(TOPICS)}."
        text = json.dumps(made)
        found, error = generate(args, prompt, ["--json-schema", text, "--max-tokens", str(args.max_tokens)])
        if error is None:
            try:
                value = json.loads(found["text"])
                checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
                jsonschema.validate(value, made, jsonschema.Draft202012Validator, format_checker=checker)
            except (ValueError, jsonschema.ValidationError) as failure:
                error = f"{found['finish_reason']}: {str(failure).splitlines()[0]}: {found['text'][:300]!r}"
        if error is not None:
            wrong += 1
            print(f"{index}: {error}\n  {text}")
            continue
        count = len(found["tokens"])
        if count < 24:
            continue
        free, error = generate(args, prompt, ["--ignore-eos", "--max-tokens", str(count)])
        if error is not None:
            sys.exit(error)
        tokens += count - 1
        times[0] += (count - 1) / found["timings"]["decode_tps"]
        times[1] += (count - 1) / free["timings"]["decode_tps"]
    speeds = [tokens / time if time else 0.0 for time in times]
    share = 100 * speeds[0] / speeds[1] if speeds[1] else 0.0
    print(
        f"{args.count - wrong} of {args.count} valid; {tokens} tokens: {speeds[0]:.1f} tokens/s,"
        f" free {speeds[1]:.1f}: {share:.1f} %"
    )
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
