"""What the golden data makers share: writing safetensors and JSON, seeded arrays, running mlex and mlx-lm."""

import json
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map

ROOT = Path(__file__).resolve().parent.parent


def later_than(version):
    """Whether the installed MLX is later than `version`."""
    numbers = [tuple(int(part) for part in text.split(".")[:3]) for text in (mx.__version__, version)]
    return numbers[0] > numbers[1]


def normal(seed, *shape, scale=1.0):
    """Seeded normal values as float32. `seed` is a number or a list of numbers."""
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def to_mx(value):
    """An mlx array from an mlx or numpy array; numpy float64 becomes float32, int64 int32."""
    if isinstance(value, mx.array):
        return value
    value = np.asarray(value)
    if value.dtype == np.float64:
        value = value.astype(np.float32)
    if value.dtype == np.int64:
        value = value.astype(np.int32)
    return mx.array(np.array(value, order="C"))


def save_tensors(path, tensors, metadata=None):
    """Writes tensors (numpy or mlx) to a safetensors file, in sorted order."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {name: to_mx(tensors[name]) for name in sorted(tensors)}
    mx.save_safetensors(str(path), arrays, metadata=metadata or {})


def save_json(path, value, indent=1):
    """Writes JSON with a final newline, keys in the order given."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=indent, ensure_ascii=True) + "\n")


def save_json_lines(path, rows):
    """Writes a JSON array with one element a line."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    body = ",\n".join(json.dumps(row, ensure_ascii=True) for row in rows)
    path.write_text("[\n" + body + "\n]\n")


class Cases:
    """Named cases of one file: tensors `NAME.in0`, ..., `NAME.out0`, ... and a row of parameters each."""

    def __init__(self):
        self.tensors = {}
        self.rows = []

    def add(self, name, op, inputs, outputs, source, /, **params):
        """Adds a case. `source` says what computed the outputs: "numpy" or "mlx"."""
        if any(row["name"] == name for row in self.rows):
            raise ValueError(f"two cases are called {name}")
        if not isinstance(outputs, (list, tuple)):
            outputs = [outputs]
        for i, value in enumerate(inputs):
            self.tensors[f"{name}.in{i}"] = value
        for i, value in enumerate(outputs):
            self.tensors[f"{name}.out{i}"] = value
        self.rows.append(
            {
                "name": name,
                "op": op,
                "inputs": len(inputs),
                "outputs": len(outputs),
                "source": source,
                "params": params,
            }
        )

    def keep(self, since):
        """Keeps the cases that `since` names; its value becomes their parameter `since`."""
        missing = since.keys() - {row["name"] for row in self.rows}
        if missing:
            raise ValueError(f"no cases {sorted(missing)}")
        self.rows = [row for row in self.rows if row["name"] in since]
        for row in self.rows:
            row["params"]["since"] = since[row["name"]]
        self.tensors = {name: value for name, value in self.tensors.items() if name.rsplit(".", 1)[0] in since}

    def save(self, stem):
        """Writes STEM.safetensors and STEM.json."""
        stem = Path(stem)
        save_tensors(stem.with_suffix(".safetensors"), self.tensors)
        save_json_lines(stem.with_suffix(".json"), self.rows)
        print(f"{stem.relative_to(ROOT)}: {len(self.rows)} cases")


def mlex(program, *args):
    """The stdout of a command of mlex."""
    result = subprocess.run([program, *map(str, args)], capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"mlex {' '.join(map(str, args))}: {result.stderr}")
    return result.stdout


class WideEmbedding(nn.QuantizedEmbedding):
    """One whose rows are float32, which holds them exactly where scales are bytes."""

    def __call__(self, x):
        return super().__call__(x).astype(mx.float32)


def widen(model):
    """Makes a model of mlx-lm compute in float32."""
    for _, module in model.named_modules():
        if type(module) is nn.QuantizedEmbedding:
            module.__class__ = WideEmbedding
    model.update(
        tree_map(lambda p: p.astype(mx.float32) if mx.issubdtype(p.dtype, mx.floating) else p, model.parameters())
    )
