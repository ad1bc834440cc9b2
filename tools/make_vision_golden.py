"""What the processors of Qwen3.5 and Gemma 4 make of images: mlex-vision/tests/data.

    pip install -r tools/requirements-vlm.txt
    python tools/make_vision_golden.py

Writes the images, `cases.json` and `expected.safetensors`. A row of `cases` is an image file with a family
and its settings; `grid`, `tokens` and `length` are those of the processor's output. Tensor NAME is a sample of
the output: value i * STRIDE of the patches in one line, for all i. Further tensors:

  resize.FILTER.WxH        [H, W, 3] bytes, Pillow's resize of resize.png
  decode.FILE              [H, W, 3] bytes, the upright RGB image as mlx-vlm's load_image gives it
  video.FAMILY             sampled like the images
`sampling` has the frames that mlx-vlm's load_video takes, `sizes` the sides for many images and budgets.

The images are read with mlx-vlm's load_image. Gemma's patches are those of transformers; mlx-vlm leaves
the cutting to the tower. transformers' Qwen processor must agree with mlx-vlm's.
"""

import math
import struct
import sys
import types
import zlib
from pathlib import Path

import numpy as np
from mlx_vlm.models.gemma4.processing_gemma4 import (
    Gemma4ImageProcessor,
    Gemma4VideoProcessor,
    get_aspect_ratio_preserving_size,
)
from mlx_vlm.models.gemma4_unified.processing_gemma4_unified import Gemma4UnifiedImageProcessor
from mlx_vlm.models.qwen3_vl.processing_qwen3_vl import (
    Qwen3VLImageProcessor,
    Qwen3VLVideoProcessor,
    _smart_resize_image,
    _smart_resize_video,
    _video_group_timestamps,
)
from mlx_vlm.utils import VideoSampling, load_image, load_video
from PIL import Image
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil, convert_image_to_patches
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from goldens import ROOT, save_json, save_tensors

DATA = ROOT / "mlex-vision/tests/data"
STRIDE = 503
QWEN = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2}


def picture(width, height, seed=0):
    """Slow waves of colour with a little noise: smooth enough for JPEG, no two rows alike."""
    y, x = np.mgrid[0:height, 0:width].astype(np.float64)
    waves = [
        128 + 100 * np.sin(x / (width * 0.21) + seed + 2 * c) * np.cos(y / (height * 0.17) + c) for c in range(3)
    ]
    noise = np.random.default_rng([5, seed, width, height]).integers(-6, 7, (height, width, 3))
    return (np.stack(waves, axis=-1) + noise).clip(0, 255).astype(np.uint8)


def png16(path, samples):
    """A PNG with 16 bits, which Pillow does not write: `samples` [H, W, 3]."""
    height, width, _ = samples.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in samples)
    chunk = lambda kind, body: struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
    header = struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + body)


def make_images():
    """Writes the images. Those of JPEG are compared with a tolerance."""
    image = lambda *size, seed=0: Image.fromarray(picture(*size, seed=seed))
    save = lambda image, name, **options: image.save(DATA / name, **options)
    save(image(61, 47), "odd.png")
    save(image(9, 300), "tall.png")
    save(image(3, 2), "tiny.png")
    save(image(1, 1), "dot.png")
    save(image(640, 480).quantize(64), "palette.png")
    save(image(70, 50).convert("L"), "grey.png")
    save(image(70, 50).convert("LA"), "grey-alpha.png")
    alpha = picture(50, 70, seed=3)[..., :1]
    save(Image.fromarray(np.concatenate([picture(50, 70), alpha], axis=-1), "RGBA"), "alpha.png")
    png16(DATA / "deep.png", picture(40, 30).astype(np.uint16) * 257 - 100 * (picture(40, 30) > 3))
    save(image(80, 60), "lossless.webp", lossless=True)
    save(image(80, 60).quantize(32), "still.gif")
    save(image(33, 21), "small.bmp")
    save(image(31, 23), "resize.png")
    save(image(3000, 2000).resize((3000, 2000)), "huge.jpg", quality=30)
    save(image(160, 100), "plain.jpg", quality=95)
    save(image(90, 60).convert("CMYK"), "cmyk.jpg", quality=95, subsampling=0)
    save(image(90, 60).convert("L"), "grey.jpg", quality=95)
    for orientation in range(2, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        save(image(48, 32, seed=1), f"turned-{orientation}.jpg", quality=95, subsampling=0, exif=exif)
    frames = [image(64, 48, seed=n) for n in range(5)]
    options = {"save_all": True, "append_images": frames[1:], "duration": 100}
    save(frames[0], "moving.webp", lossless=True, **options)
    save(frames[0], "moving.png", **options)
    save(frames[0].quantize(64), "moving.gif", save_all=True, duration=100, append_images=[f.quantize(64) for f in frames[1:]])


def sample(values):
    return np.asarray(values, dtype=np.float32).reshape(-1)[::STRIDE]


def qwen(image, settings):
    """The patches and grid of mlx-vlm, which transformers must confirm."""
    ours = Qwen3VLImageProcessor(**QWEN, **settings)([image])
    kwargs = {**QWEN, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, **settings}
    other = Qwen2VLImageProcessorPil(**kwargs)([image])
    assert np.array_equal(ours["image_grid_thw"], other["image_grid_thw"])
    assert np.abs(ours["pixel_values"] - other["pixel_values"][0 if other["pixel_values"].ndim == 3 else slice(None)]).max() < 1e-5
    grid = ours["image_grid_thw"][0].tolist()
    return ours["pixel_values"], grid, math.prod(grid) // 4


def gemma(image, settings):
    """The patches of transformers without padding, and mlx-vlm's number of tokens."""
    out = Gemma4ImageProcessorPil(**settings)([image])
    positions = np.asarray(out["image_position_ids"][0])
    real = (positions >= 0).all(axis=-1)
    width, height = (positions[real].max(axis=0) + 1).tolist()
    whole, tokens = Gemma4ImageProcessor(**settings)([image])
    patches = np.asarray(out["pixel_values"][0])[real]
    assert np.abs(convert_image_to_patches(whole["pixel_values"][0], 16) - patches).max() < 1e-6
    return patches, [height, width], tokens[0]


def unified(image, settings):
    out = Gemma4UnifiedImageProcessor(**settings)([image])
    data, tokens = out if isinstance(out, tuple) else (out, out["num_soft_tokens_per_image"])
    positions = np.asarray(data.get("image_position_ids", data.get("pixel_position_ids"))[0])
    real = (positions >= 0).all(axis=-1)
    width, height = (positions[real].max(axis=0) + 1).tolist()
    return np.asarray(data["pixel_values"][0])[real], [height, width], tokens[0]


FAMILIES = {"qwen": qwen, "gemma": gemma, "gemma_unified": unified}


def cases():
    """(name, file, family, settings)"""
    small = {"min_pixels": 64 * 64, "max_pixels": 128 * 128}
    files = ["odd.png", "tall.png", "tiny.png", "dot.png", "palette.png", "grey.png", "grey-alpha.png", "alpha.png"]
    files += ["deep.png", "lossless.webp", "still.gif", "small.bmp", "huge.jpg", "plain.jpg", "cmyk.jpg", "grey.jpg"]
    files += ["turned-6.jpg"]
    for file in files:
        yield f"{file}.qwen", file, "qwen", small
        yield f"{file}.gemma", file, "gemma", {"max_soft_tokens": 70}
    for file in ("odd.png", "palette.png"):
        yield f"{file}.qwen.default", file, "qwen", {}
        yield f"{file}.gemma.default", file, "gemma", {}
        yield f"{file}.gemma.1120", file, "gemma", {"max_soft_tokens": 1120}
        yield f"{file}.unified", file, "gemma_unified", {"max_soft_tokens": 70}
    scaled = {**small, "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
    yield "odd.png.qwen.clip", "odd.png", "qwen", scaled


def make_video(tensors):
    """Frames of moving.webp, as arrays, through both video processors."""
    frames = np.stack([picture(64, 48, seed=n).transpose(2, 0, 1) for n in range(5)])
    settings = {"min_pixels": 64 * 64, "max_pixels": 6 * 96 * 64}
    out = Qwen3VLVideoProcessor(**QWEN, **settings)(frames)
    grid = out["video_grid_thw"][0].tolist()
    metadata = {"frames_indices": [0, 1, 2, 3, 4], "fps": 10.0}
    tensors["video.qwen"] = sample(out["pixel_values_videos"])
    rows = [
        {
            "family": "qwen",
            "settings": settings,
            "grid": grid,
            "tokens": math.prod(grid) // 4,
            "timestamps": _video_group_timestamps(grid[0], 2, 2.0, metadata),
        }
    ]
    out = Gemma4VideoProcessor()([frames], fps=[10.0])
    positions = np.asarray(out["video_position_ids"][0][0])
    real = (positions >= 0).all(axis=-1)
    width, height = (positions[real].max(axis=0) + 1).tolist()
    tensors["video.gemma"] = sample(np.asarray(out["pixel_values_videos"][0])[:, real])
    rows.append(
        {
            "family": "gemma",
            "settings": {},
            "grid": [height, width],
            "tokens": out["num_soft_tokens_per_frame"][0],
            "timestamps": out["frame_timestamps"][0],
        }
    )
    return rows


class Capture:
    """As much of cv2.VideoCapture as load_video uses, for a video of so many frames."""

    def __init__(self, path):
        self.values = dict(zip(("frames", "fps", "width", "height"), map(float, path.split(","))))

    def isOpened(self):
        return True

    def get(self, name):
        return self.values[name]

    def set(self, *_):
        pass

    def read(self):
        return True, np.zeros((1, 1, 3), np.uint8)

    def release(self):
        pass


def sampling():
    cv2 = types.ModuleType("cv2")
    cv2.VideoCapture, cv2.cvtColor, cv2.COLOR_BGR2RGB, cv2.CAP_PROP_POS_FRAMES = Capture, lambda f, _: f, 0, "at"
    cv2.CAP_PROP_FRAME_COUNT, cv2.CAP_PROP_FPS = "frames", "fps"
    cv2.CAP_PROP_FRAME_WIDTH, cv2.CAP_PROP_FRAME_HEIGHT = "width", "height"
    sys.modules["cv2"] = cv2
    for total, source, fps, least, most in [
        (2, 25.0, 2.0, 4, 768),
        (5, 25.0, 2.0, 4, 768),
        (7, 1.0, 2.0, 4, 768),
        (100, 10.0, 2.0, 4, 32),
        (250, 25.0, 2.0, 4, 768),
        (301, 29.97, 2.0, 4, 768),
        (1000, 30.0, 1.5, 4, 32),
        (3000, 23.976, 2.0, 4, 64),
        (400, 24.0, 0.1, 5, 768),
    ]:
        wanted = VideoSampling(fps=fps, min_frames=least, max_frames=most)
        _, metadata = load_video(f"{total},{source},1,1", wanted)
        yield {
            "total": total,
            "source_fps": source,
            "fps": fps,
            "min_frames": least,
            "max_frames": most,
            "indices": metadata.frames_indices,
        }


def sizes():
    """Sides [width, height] that the processors choose; null where they refuse."""
    random = np.random.default_rng(11)
    sides = [(1, 1), (1, 200), (1, 201), (100000, 1), (1, 100000), (48, 48), (32, 64), (4000, 3000), (12000, 9000), (500, 499)]
    sides += [tuple(map(int, np.exp(random.uniform(0, 9, 2)).astype(int) + 1)) for _ in range(40)]
    for width, height in sides:
        try:
            qwen = _smart_resize_image(height, width)[::-1]
        except ValueError:
            qwen = None
        budgets = [get_aspect_ratio_preserving_size(height, width, 16, 9 * tokens, 3)[::-1] for tokens in (70, 280, 1120)]
        # mlx-vlm refuses frames that are smaller than a token, which transformers scales up.
        large = min(width, height) >= 32 and max(width, height) / min(width, height) <= 200
        video = _smart_resize_video(7, height, width, min_pixels=128 * 32 * 32, max_pixels=32 * 32 * 768)[::-1] if large else None
        yield {"size": [width, height], "qwen": qwen, "gemma": budgets, "qwen_video_7": video}


def main():
    DATA.mkdir(parents=True, exist_ok=True)
    make_images()
    tensors, rows = {}, []
    for name, file, family, settings in cases():
        values, grid, tokens = FAMILIES[family](load_image(str(DATA / file)), settings)
        tensors[name] = sample(values)
        row = {"name": name, "file": file, "family": family, "settings": settings}
        rows.append({**row, "grid": grid, "tokens": int(tokens), "length": int(np.asarray(values).size)})
    image = Image.open(DATA / "resize.png").convert("RGB")
    for label, filter in (("bilinear", Image.BILINEAR), ("bicubic", Image.BICUBIC)):
        for size in [(31, 23), (62, 46), (16, 9), (7, 64), (31, 5), (100, 23), (1, 1), (3, 41), (40, 9), (30, 10), (31, 22)]:
            name = f"resize.{label}.{size[0]}x{size[1]}"
            tensors[name] = np.array(image.resize(size, filter))
    for path in sorted(Path(DATA).iterdir()):
        if path.suffix in (".png", ".jpg", ".webp", ".gif", ".bmp") and path.name not in ("huge.jpg", "palette.png"):
            tensors[f"decode.{path.name}"] = np.array(load_image(str(path)))
    videos = make_video(tensors)
    save_tensors(DATA / "expected.safetensors", tensors)
    save_json(
        DATA / "cases.json",
        {"stride": STRIDE, "cases": rows, "videos": videos, "sampling": list(sampling()), "sizes": list(sizes())},
        indent=None,
    )


if __name__ == "__main__":
    main()
