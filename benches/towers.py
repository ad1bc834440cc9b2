#!/usr/bin/env python3
"""Times mlx-vlm's towers at the sizes of `cargo bench -p mlex-benches --bench towers`, with random weights.

    pip install -r tools/requirements-vlm.txt
    python benches/towers.py [--dtype float32] [--repeats 3] [NAME]...

Prints seconds: the median, after one run that does not count. On Linux MLX's CPU operations in bfloat16
take minutes for one.
"""

import argparse
import statistics
import time

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map
from mlx_vlm.models import gemma4, qwen3_5


def qwen():
    config = qwen3_5.VisionConfig(
        depth=12,
        hidden_size=768,
        intermediate_size=3072,
        num_heads=12,
        out_hidden_size=1024,
        patch_size=16,
        num_position_embeddings=2304,
        deepstack_visual_indexes=[],
    )
    tower = qwen3_5.VisionModel(config)
    patches = mx.random.uniform(-1, 1, (4096, 1536))
    return [tower], lambda: tower(patches.astype(tower.patch_embed.proj.weight.dtype), mx.array([[1, 64, 64]]))[0]


def gemma_vision():
    tower = gemma4.VisionModel(gemma4.VisionConfig(use_clipped_linears=True))
    projector = gemma4.gemma4.MultimodalEmbedder(768, 1536)
    patches = mx.random.uniform(0, 1, (1, 42 * 60, 768))
    places = mx.array(np.array([[n % 60, n // 60] for n in range(42 * 60)]))[None]
    return [tower, projector], lambda: projector(tower(patches, places))


def gemma_audio():
    config = gemma4.AudioConfig()
    tower = gemma4.audio.AudioEncoder(config)
    projector = gemma4.gemma4.MultimodalEmbedder(1536, 1536)
    mel = mx.random.uniform(-3, 1, (1, 2999, 128))
    mask = mx.zeros((1, 2999), mx.bool_)
    return [tower, projector], lambda: projector(tower(mel, mask)[0])


TOWERS = {
    "qwen3.5-0.8b-1024x1024": qwen,
    "gemma4-e2b-280-tokens": gemma_vision,
    "gemma4-e2b-30-seconds": gemma_audio,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[[], *TOWERS], metavar="NAME")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    dtype = getattr(mx, args.dtype)
    for name in args.names or TOWERS:
        modules, run = TOWERS[name]()
        for module in modules:
            module.update(tree_map(lambda x: x.astype(dtype) if mx.issubdtype(x.dtype, mx.floating) else x, module.parameters()))
            mx.eval(module.parameters())
        mx.eval(run())
        times = []
        for _ in range(args.repeats):
            start = time.perf_counter()
            mx.eval(run())
            times.append(time.perf_counter() - start)
        print(f"{name} {args.dtype}: {statistics.median(times):.3f} s")


if __name__ == "__main__":
    main()
