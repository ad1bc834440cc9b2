"""Makes mlex-core/tests/data/gguf: a GGUF file with every readable type, and its values.

    python tools/make_gguf_golden.py            needs: pip install -r tools/requirements.txt

all_types.gguf is written by the `gguf` package: metadata of every type, and a tensor of random
blocks for every tensor type. values.safetensors has what `gguf.quants.dequantize` makes of the
blocks (arithmetic for Q8_K, which that package does not read). mlx_packing.safetensors has random
words and the elements that MLX's dequantize finds in them.
"""

from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np
from gguf import GGMLQuantizationType as Type
from safetensors.numpy import save_file

DATA = Path(__file__).resolve().parent.parent / "mlex-core/tests/data/gguf"

# Where a block has halves: random bytes there could be infinities.
HALVES = {
    Type.Q4_0: [0],
    Type.Q4_1: [0, 2],
    Type.Q5_0: [0],
    Type.Q5_1: [0, 2],
    Type.Q8_0: [0],
    Type.Q2_K: [80, 82],
    Type.Q3_K: [108],
    Type.Q4_K: [0, 2],
    Type.Q5_K: [0, 2],
    Type.Q6_K: [208],
    Type.Q8_K: [],
    Type.IQ4_NL: [0],
    Type.IQ4_XS: [0],
    Type.MXFP4: [],
}


def random_blocks(rng: np.random.Generator, kind: Type, shape: tuple[int, ...]) -> np.ndarray:
    """Blocks of random bytes with finite scales; `shape` counts elements."""
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    count = int(np.prod(shape)) // elements
    blocks = rng.integers(0, 256, (count, size), dtype=np.uint8)
    for at in HALVES[kind]:
        halves = rng.normal(0, 0.1, count).astype(np.float16)
        blocks[:, at : at + 2] = halves.view(np.uint8).reshape(count, 2)
    if kind == Type.Q8_K:
        scales = rng.normal(0, 0.1, count).astype(np.float32)
        blocks[:, 0:4] = scales.view(np.uint8).reshape(count, 4)
    if kind == Type.MXFP4:
        blocks[:, 0] = rng.integers(100, 140, count)
    return blocks.reshape(*shape[:-1], -1)


def values_of(kind: Type, blocks: np.ndarray) -> np.ndarray:
    if kind == Type.Q8_K:
        flat = blocks.reshape(-1, 292)
        values = flat[:, 0:4].copy().view(np.float32) * flat[:, 4:260].view(np.int8).astype(np.float32)
        return values.reshape(*blocks.shape[:-1], -1)
    return gguf.quants.dequantize(blocks, kind)


def add_metadata(writer: gguf.GGUFWriter) -> None:
    writer.add_uint8("test.u8", 200)
    writer.add_int8("test.i8", -100)
    writer.add_uint16("test.u16", 60000)
    writer.add_int16("test.i16", -30000)
    writer.add_uint32("test.u32", 4_000_000_000)
    writer.add_int32("test.i32", -2_000_000_000)
    writer.add_float32("test.f32", 1.5)
    writer.add_bool("test.bool", True)
    writer.add_string("test.string", "grüße 🦙")
    writer.add_uint64("test.u64", 2**63 + 1)
    writer.add_int64("test.i64", -(2**62))
    writer.add_float64("test.f64", 0.1)
    writer.add_array("test.strings", ["<s>", "", "Ġthe"])
    writer.add_array("test.floats", [0.0, -1.5, 2.25])
    writer.add_array("test.ints", [1, -2, 3])
    writer.add_array("test.bools", [True, False])


def main() -> None:
    DATA.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(DATA / "all_types.gguf", "llama")
    add_metadata(writer)
    expected: dict[str, np.ndarray] = {}

    for kind in HALVES:
        columns = max(64, gguf.GGML_QUANT_SIZES[kind][0])
        blocks = random_blocks(rng, kind, (3, columns))
        writer.add_tensor(kind.name, blocks, raw_dtype=kind)
        expected[kind.name] = values_of(kind, blocks)
    experts = random_blocks(rng, Type.Q8_0, (2, 3, 32))
    writer.add_tensor("experts", experts, raw_dtype=Type.Q8_0)
    expected["experts"] = values_of(Type.Q8_0, experts)

    floats = rng.normal(0, 1, (3, 5)).astype(np.float32)
    # A BF16 has the upper half of a single: the values' lower halves are taken off.
    uppers = (floats.view(np.uint32) >> 16).astype(np.uint16)
    writer.add_tensor("F32", floats)
    writer.add_tensor("F16", floats.astype(np.float16))
    writer.add_tensor("BF16", uppers.view(np.uint8), raw_dtype=Type.BF16)
    expected["F32"] = floats
    expected["F16"] = floats.astype(np.float16).astype(np.float32)
    expected["BF16"] = (uppers.astype(np.uint32) << 16).view(np.float32)
    plain = {
        "F64": floats.astype(np.float64),
        "I8": rng.integers(-128, 128, 7, dtype=np.int8),
        "I16": rng.integers(-(2**15), 2**15, 7, dtype=np.int16),
        "I32": rng.integers(-(2**31), 2**31, 7, dtype=np.int32),
        "I64": rng.integers(-(2**63), 2**63 - 1, 7, dtype=np.int64),
    }
    for name, values in plain.items():
        writer.add_tensor(name, values)
        expected[name] = values

    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file(expected, DATA / "values.safetensors", metadata={"made_by": "make_gguf_golden.py"})

    packing: dict[str, np.ndarray] = {}
    for bits in (4, 5, 8):
        words = rng.integers(0, 2**32, (2, 64 * bits // 32), dtype=np.uint32)
        ones = mx.ones((2, 2), mx.float32)
        elements = mx.dequantize(
            mx.array(words), scales=ones, biases=ones * 0, group_size=32, bits=bits
        )
        packing[f"{bits}.words"] = words
        packing[f"{bits}.elements"] = np.array(elements).astype(np.uint8)
    save_file(packing, DATA / "mlx_packing.safetensors")


if __name__ == "__main__":
    main()
