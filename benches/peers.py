#!/usr/bin/env python3
"""Compares `mlex bench` with llama.cpp and mlx-lm: the same weights, the same machine, in turns.

    python benches/peers.py                        SmolLM2-135M, prompts of 512 tokens
    python benches/peers.py --sweep threads        the same with 1, 2, 4 .. threads
    python benches/peers.py --sweep context        the same with prompts of 512 and 4096 tokens
    python benches/peers.py --model qwen3-0.6b     Qwen3-0.6B's shape, random 4-bit weights
    python benches/peers.py --model gemma4-e2b     the same of Gemma 4 E2B (2.9 GB)
    python benches/peers.py --model qwen3.5-0.8b   the same of Qwen3.5-0.8B: most layers are gated delta nets
    python benches/peers.py --model qwen3-8b --device gpu      mlex and mlx-lm on a GPU

Prints Markdown tables of medians. On a CPU they have the kernels alone too, without MLX, at shapes
of the model: what is left of their rates in a whole model. The peers are the packages
`llama-cpp-python` and `mlx-lm` of the Python that runs this; one that is not installed is left out,
with a note on stderr. Each measurement is a process of its own, and the programs take turns, so
that a change of the machine's speed meets all of them.

All of them get random tokens, and a short run before the one that counts. mlex takes its rates
from `mlex bench`, sampling included; llama.cpp and mlx-lm are measured without sampling (mlx-lm
takes the likeliest token on the device), in their favour. On a CPU mlx-lm's prompts are short, as
MLX's CPU operations are slow on Linux: a long prompt would take minutes and not make it faster. On
a GPU it generates as its own program does, one token ahead.
"""

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mlex" / "bench"
WARM_UP_TOKENS = 16
# What mlx-lm is given at most.
MLX_LM_PROMPT_TOKENS = 32
MLX_LM_GEN_TOKENS = 4

SHORT = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}

QWEN3_0_6B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "vocab_size": 151936,
    "rope_theta": 1000000,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
# mlx-lm's defaults have the sizes of Gemma 4 E2B.
GEMMA4_E2B = {"architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "vocab_size": 262144}
QWEN3_5_0_8B = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5",
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "intermediate_size": 3584,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "rms_norm_eps": 1e-6,
    "vocab_size": 248320,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
    },
    "max_position_embeddings": 262144,
    "tie_word_embeddings": True,
}
QWEN3_8B = dict(
    QWEN3_0_6B,
    hidden_size=4096,
    num_hidden_layers=36,
    intermediate_size=12288,
    num_attention_heads=32,
    tie_word_embeddings=False,
)
RANDOM_MODELS = {
    "qwen3-8b": QWEN3_8B,
    "qwen3-0.6b": QWEN3_0_6B,
    "qwen3.5-0.8b": QWEN3_5_0_8B,
    "gemma4-e2b": GEMMA4_E2B,
}
# By model and dtype: the rows of mlex-kernels' example `kernel_speed` for FLOP/s and for bytes a second.
KERNELS = {
    "smollm2": {
        "f32": ("smollm2 up 4 bit 1536x576 M=512 F32", "smollm2 decode step f32"),
        "bf16": ("smollm2 up 4 bit 1536x576 M=512 Bf16", "smollm2 decode step bf16"),
    },
    "qwen3-0.6b": {
        "f32": ("qwen3-0.6b up 4 bit 3072x1024 M=512 F32", "qwen3-0.6b up 4 bit 3072x1024 M=1 f32"),
        "bf16": ("qwen3-0.6b up 4 bit 3072x1024 M=512 Bf16", "qwen3-0.6b up 4 bit 3072x1024 M=1 bf16"),
    },
}
MEMORY = "read of memory"


@dataclass(frozen=True)
class Setting:
    """What the measurements of a table have in common."""

    threads: int
    prompt_tokens: int
    gen_tokens: int

    def __str__(self):
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        return f"{threads}, prompt of {self.prompt_tokens}"


@dataclass(frozen=True)
class Contestant:
    """A program with its options: mlex with a dtype, or a worker below."""

    name: str
    model: Path
    worker: str = ""
    dtype: str = ""
    device: str = "cpu"

    @property
    def is_slow(self):
        return self.worker == "mlx-lm" and self.device == "cpu"

    def measure(self, args, setting):
        """The rates of one process: `{"prefill_tps": .., "decode_tps": ..}`."""
        if self.worker:
            options = {
                "model": str(self.model),
                "threads": setting.threads,
                "prompt_tokens": setting.prompt_tokens,
                "gen_tokens": setting.gen_tokens,
            }
            if self.worker == "mlx-lm":
                options["device"] = self.device
            if self.is_slow:
                options["prompt_tokens"] = min(setting.prompt_tokens, MLX_LM_PROMPT_TOKENS)
                options["gen_tokens"] = min(setting.gen_tokens, MLX_LM_GEN_TOKENS)
            return worker(self.worker, options)
        command = [args.mlex, "bench", "--json", "--repeats", "1", "--model", self.model]
        command += ["--device", self.device, "--threads", setting.threads, "--dtype", self.dtype]
        command += ["--prompt-tokens", setting.prompt_tokens, "--gen-tokens", setting.gen_tokens]
        return json.loads(output(command))


def output(command, **more):
    """The stdout of a command; the script ends with its stderr when it fails."""
    command = [str(word) for word in command]
    done = subprocess.run(command, capture_output=True, text=True, check=False, **more)
    if done.returncode != 0:
        sys.exit(f"peers: {' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def worker(name, options):
    """Runs this script's other half; its last line is its answer."""
    threads = str(options.get("threads", os.cpu_count()))
    environment = dict(os.environ, OPENBLAS_NUM_THREADS=threads, OMP_NUM_THREADS=threads)
    command = [sys.executable, __file__, "--worker", name, json.dumps(options)]
    return json.loads(output(command, env=environment).splitlines()[-1])


def note(line):
    print(f"peers: {line}", file=sys.stderr, flush=True)


# The workers: each in a process of its own, which alone imports the peer.


def random_ids(vocab_size, count):
    source = random.Random(0)
    return [source.randrange(vocab_size) for _ in range(count)]


def rates(prefill, decode, prompt_tokens, gen_tokens):
    """Runs both parts and takes their times."""
    start = time.perf_counter()
    prefill()
    first = time.perf_counter()
    decode()
    end = time.perf_counter()
    return {"prefill_tps": prompt_tokens / (first - start), "decode_tps": gen_tokens / (end - first)}


def run_llama_cpp(model, threads, prompt_tokens, gen_tokens):
    import llama_cpp

    context = prompt_tokens + gen_tokens + WARM_UP_TOKENS
    llama = llama_cpp.Llama(
        model, n_ctx=context, n_batch=512, n_threads=threads, n_threads_batch=threads, verbose=False
    )
    ids = random_ids(llama.n_vocab(), prompt_tokens + gen_tokens)

    def evaluate(ids):
        llama.eval(ids)
        llama_cpp.llama_synchronize(llama.ctx)

    def decode():
        for token in ids[prompt_tokens:]:
            evaluate([token])

    evaluate(ids[:WARM_UP_TOKENS])
    evaluate(ids[:1])
    llama.reset()
    return rates(lambda: evaluate(ids[:prompt_tokens]), decode, prompt_tokens, gen_tokens)


def run_mlx_lm(model, threads, prompt_tokens, gen_tokens, device):
    if device == "gpu":
        return run_mlx_lm_gpu(model, prompt_tokens, gen_tokens)
    del threads  # it has none to set: the environment tells BLAS
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import load_model

    mx.set_default_device(mx.cpu)
    network, config = load_model(Path(model))
    ids = mx.array(random_ids(config["vocab_size"], prompt_tokens))

    def step(cache, token):
        token = mx.argmax(network(token[None], cache=cache)[:, -1], axis=-1)
        mx.eval(token)
        return token

    def prefill(cache, ids):
        # As its own generation does: no logits but the last token's.
        if len(ids) > 1:
            network(ids[None, :-1], cache=cache)
            mx.eval([layer.state for layer in cache])
        return step(cache, ids[-1:])

    prefill(make_prompt_cache(network), ids[:2])
    cache = make_prompt_cache(network)
    token = None

    def read():
        nonlocal token
        token = prefill(cache, ids)

    def decode():
        nonlocal token
        for _ in range(gen_tokens):
            token = step(cache, token)

    return rates(read, decode, prompt_tokens, gen_tokens)


def run_mlx_lm_gpu(model, prompt_tokens, gen_tokens):
    import mlx.core as mx
    from mlx_lm.generate import generate_step
    from mlx_lm.utils import load_model

    network, config = load_model(Path(model))
    ids = mx.array(random_ids(config["vocab_size"], prompt_tokens))

    def run():
        """Until the first token, and from there until the last."""
        steps = generate_step(ids, network, max_tokens=gen_tokens + 1)
        return rates(lambda: next(steps), lambda: [None for _ in steps], prompt_tokens, gen_tokens)

    run()
    return run()


def make_random_model(config, out):
    """Writes a checkpoint of the shape of `config`: random weights, affine 4 bits, group 64."""
    import copy

    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_flatten

    mx.set_default_device(mx.cpu)
    mx.random.seed(0)
    kind = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = kind.Model(kind.ModelArgs.from_dict(copy.deepcopy(config)))
    # bfloat16 and this layout are what the published 4-bit checkpoints have.
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, group_size=64, bits=4)
    folder = Path(out)
    folder.mkdir(parents=True)

    def drawn(name, value):
        """Packed weights drawn as such: to quantize random ones would take longer and more memory."""
        if name.endswith(".scales"):
            return mx.full(value.shape, 0.004, value.dtype)
        if name.endswith(".biases"):
            return mx.full(value.shape, -0.03, value.dtype)
        if value.dtype == mx.uint32:
            return mx.random.randint(0, 2**32 - 1, value.shape, mx.uint32)
        return value

    weights = {name: drawn(name, value) for name, value in tree_flatten(model.parameters())}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    config = dict(config, quantization={"group_size": 64, "bits": 4})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return {"out": out}


WORKERS = {"llama.cpp": run_llama_cpp, "mlx-lm": run_mlx_lm, "random-model": make_random_model}


# The comparison.


def made(path, make):
    """`path`, made once: under another name first, so that an interrupted run leaves nothing."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        note(f"making {path}")
        make(temporary)
        temporary.rename(path)
    return path


def converted(args, gguf, dtype):
    """The MLX directory of a GGUF, made by mlex."""
    command = [args.mlex, "convert", "--model", gguf, "--dtype", dtype, "--out"]
    return made(CACHE / f"{gguf.stem}-{dtype}", lambda out: output([*command, out]))


def installed(package):
    return importlib.util.find_spec(package) is not None


def contestants(args):
    """The programs that are there, and the model that mlex is given."""
    dtypes = ("float32", "bfloat16") if args.device == "cpu" else ("bfloat16",)
    wanted = [Contestant(f"mlex, {SHORT[dtype]}", Path(), dtype=dtype) for dtype in dtypes]
    if args.model == "smollm2":
        gguf = args.gguf or Path(output([ROOT / "scripts" / "smollm2.sh"]).strip())
        model = gguf
        if not installed("llama_cpp"):
            note("llama.cpp is left out: no package llama-cpp-python")
        elif not args.skip_llama_cpp and args.device == "cpu":
            wanted.append(Contestant("llama.cpp", gguf, worker="llama.cpp"))
    else:
        model = args.mlx_dir
        if model is None:
            if not installed("mlx_lm"):
                sys.exit("peers: the random model is made with mlx-lm: pip install mlx-lm 'mlx[cpu]'")
            options = {"config": RANDOM_MODELS[args.model]}
            model = made(
                CACHE / f"{args.model}-random-4bit",
                lambda out: worker("random-model", dict(options, out=str(out))),
            )
    if not installed("mlx_lm"):
        note("mlx-lm is left out: no package mlx-lm")
    elif args.mlx_dir or args.model != "smollm2":
        if not args.skip_mlx_lm:
            wanted.append(Contestant("mlx-lm", args.mlx_dir or model, worker="mlx-lm"))
    elif not args.skip_mlx_lm:
        for dtype in args.mlx_lm_dtype:
            directory = converted(args, model, dtype)
            wanted.append(Contestant(f"mlx-lm, {SHORT[dtype]}", directory, worker="mlx-lm"))
    wanted = [one if one.worker else replace(one, model=model) for one in wanted]
    wanted = [replace(one, device=args.device) for one in wanted]
    return wanted, model


def settings(args):
    base = Setting(args.threads, args.prompt_tokens, args.gen_tokens)
    if args.sweep == "threads":
        counts = [1 << power for power in range(16) if 1 << power < args.threads]
        return [Setting(count, base.prompt_tokens, base.gen_tokens) for count in counts] + [base]
    if args.sweep == "context":
        return [base, Setting(base.threads, args.context, base.gen_tokens)]
    return [base]


def measure(args, programs, chosen):
    """Medians by (program's name, setting), and of the kernels by setting. The programs and the
    kernels take turns in every round."""
    found, kernels = {}, {}
    for turn in range(args.repeats):
        for setting in chosen:
            for program in programs:
                # Once, at the first setting: it takes minutes.
                if program.is_slow and (turn > 0 or setting != chosen[0]):
                    continue
                rate = program.measure(args, setting)
                found.setdefault((program.name, setting), []).append(rate)
                note(
                    f"{program.name}, {setting}: prefill {rate['prefill_tps']:.1f}, "
                    f"decode {rate['decode_tps']:.1f} tokens/s"
                )
            kernels.setdefault(setting, []).append(kernel_rates(args, setting))
    rates_alone = {
        setting: {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        for setting, runs in kernels.items()
    }
    return rates_alone, {
        key: {
            field: statistics.median(run[field] for run in runs)
            for field in ("prefill_tps", "decode_tps")
        }
        for key, runs in found.items()
    }


def work(args, model):
    """Bytes that a decode step reads, and operations that a prompt token takes, of the weights."""
    found = json.loads(output([args.mlex, "inspect", "--json", "--model", model]))
    layers = [row for row in found["quantization"] if ".layers." in row["path"]]
    # Of a table with embeddings per layer a step reads one row. 4 bits in groups of 64 are 4.5 bits.
    tables = [row for row in found["quantization"] if row["path"].endswith("embed_tokens_per_layer")]
    table_bytes = sum(row["parameters"] for row in tables) * 4.5 / 8
    return found["file_bytes"] - table_bytes, 2 * sum(row["parameters"] for row in layers)


def kernel_rates(args, setting):
    """What `kernel_speed` prints of each of its rows for this model, in GFLOP/s or GB/s."""
    speed = args.mlex.parent / "examples" / "kernel_speed"
    if args.device != "cpu" or args.model not in KERNELS:
        return {}
    if not speed.is_file():
        note(
            f"kernels alone are left out: no {speed}: "
            "cargo build --release -p mlex-kernels --example kernel_speed"
        )
        return {}
    names = [MEMORY, *(name for pair in KERNELS[args.model].values() for name in pair)]
    # Its columns are one thread and all.
    column = {1: -3, os.cpu_count(): -2}.get(setting.threads)

    def rate(name):
        """Of the line that begins with the name."""
        lines = output([speed, name]).splitlines()
        return next(float(line.split()[column]) for line in lines if line.startswith(name + " "))

    return {name: rate(name) for name in names if column}


def row(cells):
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def kernel_rows(args, kernels, width):
    """The kernels alone, as rows of the table of programs."""
    found = [
        ("kernels alone, " + dtype, kernels[flops], kernels[bytes_read])
        for dtype, (flops, bytes_read) in KERNELS.get(args.model, {}).items()
        if kernels
    ]
    cells = [[name, "", f"{flops:.1f}", "", f"{rate:.1f}"] for name, flops, rate in found]
    if kernels:
        cells.append(["a plain read of memory", "", "", "", f"{kernels[MEMORY]:.1f}"])
    return [row(some + [""] * (width - len(some))) for some in cells]


def table(args, setting, programs, medians, kernels, size):
    """The programs at one setting, with their ratios to each peer, and the kernels alone."""
    file_bytes, operations = size
    there = [program for program in programs if (program.name, setting) in medians]
    peers = [program.name for program in there if program.worker]
    head = ["", "prefill tok/s", "GFLOP/s", "decode tok/s", "GB/s"]
    head += [f"{part} / {peer}" for peer in peers for part in ("prefill", "decode")]
    lines = [f"### {setting}", "", row(head), row(["---"] + ["--:"] * (len(head) - 1))]
    for program in there:
        rate = medians[program.name, setting]
        prefill, decode = rate["prefill_tps"], rate["decode_tps"]
        cells = [program.name, f"{prefill:.1f}", f"{prefill * operations / 1e9:.1f}"]
        cells += [f"{decode:.1f}", f"{decode * file_bytes / 1e9:.1f}"]
        for peer in peers:
            base = medians[peer, setting]
            cells += [f"{prefill / base['prefill_tps']:.2f}x", f"{decode / base['decode_tps']:.2f}x"]
        lines.append(row(cells))
    lines += kernel_rows(args, kernels, len(head))
    return "\n".join(lines) + "\n"


def sweep_table(chosen, programs, medians):
    """Each program's rates at each setting, by those at the first."""
    head = ["", *(f"{part}, {setting}" for part in ("prefill", "decode") for setting in chosen[1:])]
    lines = [f"### By the rates of {chosen[0]}", "", row(head), row(["---"] + ["--:"] * (len(head) - 1))]
    for program in programs:
        if (program.name, chosen[-1]) not in medians:
            continue
        base = medians[program.name, chosen[0]]
        cells = [
            f"{medians[program.name, setting][field] / base[field]:.2f}x"
            for field in ("prefill_tps", "decode_tps")
            for setting in chosen[1:]
        ]
        lines.append(row([program.name, *cells]))
    return "\n".join(lines) + "\n"


def processor():
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def versions(args):
    found = [output([args.mlex, "--version"]).strip()]
    for package in ("llama-cpp-python", "mlx-lm", "mlx"):
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            pass
    return ", ".join(found)


def default_mlex():
    target = os.environ.get("CARGO_TARGET_DIR")
    return (Path(target) if target else ROOT / "target") / "release" / "mlex"


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", choices=["smollm2", *RANDOM_MODELS], default="smollm2")
    add("--mlex", type=Path, default=default_mlex(), help="the mlex program (a release build)")
    add("--gguf", type=Path, help="SmolLM2's GGUF [default: what scripts/smollm2.sh fetches]")
    add("--mlx-dir", type=Path, help="the model as an MLX directory [default: made, in the cache]")
    add("--device", choices=["cpu", "gpu"], default="cpu", help="what mlex and mlx-lm compute on")
    add("--prompt-tokens", type=int, default=512)
    add("--gen-tokens", type=int, default=64)
    add("--context", type=int, default=4096, help="the longer prompt of --sweep context")
    add("--threads", type=int, default=os.cpu_count() or 1)
    add("--repeats", type=int, default=3, help="rounds, each with every program once")
    add("--sweep", choices=["threads", "context"])
    add(
        "--mlx-lm-dtype",
        nargs="+",
        choices=list(SHORT),
        default=["float32"],
        help="what mlx-lm computes in; MLX's CPU operations are fastest in float32, the default",
    )
    add("--skip-llama-cpp", action="store_true")
    add("--skip-mlx-lm", action="store_true")
    add("--worker", nargs=2, metavar=("NAME", "JSON"), help=argparse.SUPPRESS)
    return parser.parse_args()


def main():
    args = arguments()
    if args.worker:
        name, options = args.worker
        print(json.dumps(WORKERS[name](**json.loads(options))))
        return
    for name in ("prompt_tokens", "gen_tokens", "context", "threads", "repeats"):
        if getattr(args, name) < 1:
            sys.exit(f"peers: --{name.replace('_', '-')}: expected a positive number")
    if not args.mlex.is_file():
        sys.exit(f"peers: no {args.mlex}: cargo build --release -p mlex-cli, or give --mlex")
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > 0.5:
        note(
            f"the machine is busy (load {load:.2f}): rates will be too low, and llama.cpp's, whose "
            "threads wait for each other, much more so than mlex's"
        )
    programs, model = contestants(args)
    chosen = settings(args)
    kernels, medians = measure(args, programs, chosen)
    size = work(args, model)
    print(f"{args.model}, {processor()}, {os.cpu_count()} CPUs, {datetime.date.today()}.")
    print(f"{versions(args)}. Medians of {args.repeats}; load before: {load:.2f}.\n")
    for setting in chosen:
        print(table(args, setting, programs, medians, kernels[setting], size))
    if len(chosen) > 1:
        print(sweep_table(chosen, programs, medians))
    if any(program.is_slow for program in programs):
        print(
            f"mlx-lm: once, on a prompt of {min(MLX_LM_PROMPT_TOKENS, args.prompt_tokens)} tokens "
            f"and {min(MLX_LM_GEN_TOKENS, args.gen_tokens)} generated ones."
        )


if __name__ == "__main__":
    main()
