"""Conversations with images, videos and sounds, from files to greedy tokens, for make_media_golden.py.

The files are those of mlex-vision/tests/data and mlex-audio/tests/data. mlx-vlm's processors make ids and
inputs of them, its towers features, and its language model the tokens. The tokenizer has a token for each
byte that the prompts have, and the template is made in the manner of the family's own.
"""

import json
import types
import wave

import mlx.core as mx
import numpy as np
from mlx_audio.resample import resample_audio_array
from mlx_vlm.models.gemma4.audio_feature_extractor import Gemma4AudioFeatureExtractor
from mlx_vlm.models.gemma4.processing_gemma4 import Gemma4ImageProcessor, Gemma4Processor, Gemma4VideoProcessor
from mlx_vlm.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from mlx_vlm.models.qwen3_vl.processing_qwen3_vl import (
    Qwen3VLImageProcessor,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)
from mlx_vlm.utils import load_image
from PIL import Image
from transformers import AutoTokenizer
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor as Original

from goldens import ROOT, save_json

IMAGES, SOUNDS = ROOT / "mlex-vision/tests/data", ROOT / "mlex-audio/tests/data"
GENERATED = 8
# Frames of moving.png, which has five at 10 per second, as they are sampled at two per second and at least four.
FRAMES, FPS = [0, 1, 3, 4], 10.0

# The bytes as the tokenizer writes them.
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789<>.:|!\u0120\u010a"
QWEN_TOKENS = {
    70: "<|image_pad|>",
    71: "<|video_pad|>",
    72: "<|vision_start|>",
    73: "<|vision_end|>",
    74: "<|im_start|>",
    75: "<|im_end|>",
}
GEMMA_TOKENS = {
    1: "<eos>",
    2: "<bos>",
    68: "<|turn>",
    69: "<turn|>",
    70: "<|image|>",
    71: "<|audio|>",
    72: "<|video|>",
    73: "<|image>",
    74: "<image|>",
    75: "<|audio>",
    76: "<audio|>",
}
QWEN_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string -%}
{{ message.content }}
{%- else -%}
{%- for item in message.content -%}
{%- if item.type == 'image' -%}
<|vision_start|><|image_pad|><|vision_end|>
{%- elif item.type == 'video' -%}
<|vision_start|><|video_pad|><|vision_end|>
{%- else -%}
{{ item.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""
GEMMA_TEMPLATE = """\
{%- for message in messages -%}
<|turn>{{ message.role }}
{% if message.content is string -%}
{{ message.content }}
{%- else -%}
{%- for item in message.content -%}
{%- if item.type == 'text' -%}
{{ item.text }}
{%- else -%}
{{ '<|' + item.type + '|>' }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
<turn|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|turn>model
{% endif -%}
"""


def said(*parts, role="user"):
    """A message: names of files are media."""
    kinds = dict(png="image", jpg="image", wav="audio")
    content = []
    for part in parts:
        kind = "video" if part == "moving.png" else kinds.get(part.rpartition(".")[2])
        content.append({"type": kind, "file": part} if kind else {"type": "text", "text": part})
    return {"role": role, "content": content}


TURNS = [said("odd.png", "what is it"), said("a box", role="assistant"), said("grey.png", "and this", "turned-6.jpg")]
SESSIONS = {
    "image": [said("odd.png", "what is it")],
    "turns": TURNS,
    "video": [said("moving.png", "what moves")],
    "mixed": [said("look: ", "grey.png", " and ", "moving.png", "odd.png", " and now?")],
}
# Of these the ids alone are compared: some are large, and decoders of JPEG files differ.
FILES = [
    said("tiny.png", "dot.png", "alpha.png", "grey-alpha.png", "deep.png", "palette.png", "a"),
    said("cmyk.jpg", "huge.jpg", "turned-3.jpg", "plain.jpg", "b"),
]
SOUND_SESSIONS = {
    "audio": [said("plain.wav", "what is said")],
    # Two channels at 44.1 kHz, 8 kHz, 24 bits, and silence.
    "stereo": [said("stereo.wav", "what is said")],
    "low": [said("low.wav", "what is said")],
    "odd": [said("odd.wav", "what is said")],
    "silence": [said("what is said", "silence.wav")],
    "sounds": [said("low.wav", "silence.wav", "a"), said("a", role="assistant"), said("stereo.wav", "b")],
    "all": [said("odd.png", "plain.wav", "moving.png", "and now")],
}


def save_tokenizer(folder, special, template, vocab_size):
    ids = {}
    free = (n for n in range(3, vocab_size) if n not in special)
    for letter in LETTERS:
        ids[letter] = next(free)
    added = [
        dict(id=n, content=text, single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
        for n, text in sorted(special.items())
    ]
    byte_level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=False)
    tokenizer = dict(
        version="1.0",
        truncation=None,
        padding=None,
        added_tokens=added,
        normalizer=None,
        pre_tokenizer=byte_level,
        post_processor=None,
        decoder=byte_level,
        model=dict(
            type="BPE",
            dropout=None,
            unk_token=None,
            continuing_subword_prefix=None,
            end_of_word_suffix=None,
            fuse_unk=False,
            byte_fallback=False,
            ignore_merges=False,
            vocab={**ids, **{text: n for n, text in special.items()}},
            merges=[],
        ),
    )
    save_json(folder / "tokenizer.json", tokenizer, indent=None)
    names = {}
    if "<|image|>" in special.values():
        pairs = dict(image="<|image|>", audio="<|audio|>", boi="<|image>", eoi="<image|>", boa="<|audio>", eoa="<audio|>")
        names = {f"{name}_token": text for name, text in pairs.items()}
    save_json(
        folder / "tokenizer_config.json",
        dict(tokenizer_class="PreTrainedTokenizerFast", extra_special_tokens=names),
    )
    (folder / "chat_template.jinja").write_text(template)
    return AutoTokenizer.from_pretrained(folder)


def video_frames():
    image = Image.open(IMAGES / "moving.png")
    frames = []
    for n in FRAMES:
        image.seek(n)
        frames.append(np.asarray(image.convert("RGB")))
    return np.stack(frames).transpose(0, 3, 1, 2)


def sound(file):
    """Samples at 16 kHz, as mlx-vlm's `load_audio` makes them: the mean of the channels, resampled by mlx-audio."""
    with wave.open(str(SOUNDS / file)) as opened:
        rate, width, channels = opened.getframerate(), opened.getsampwidth(), opened.getnchannels()
        data = np.frombuffer(opened.readframes(opened.getnframes()), np.uint8).reshape(-1, width)
    # The bytes of a sample are the upper ones of a 32-bit number.
    filled = np.concatenate([np.zeros((len(data), 4 - width), np.uint8), data], axis=1)
    samples = np.ascontiguousarray(filled).view("<i4").reshape(-1, channels) / 2.0**31
    return resample_audio_array(samples.astype(np.float32).mean(axis=1), rate, 16000)


def sound_tokens(extractor):
    """What transformers' processor counts, by the encoder's frames; mlx-vlm's count by milliseconds is one more at times."""
    names = types.SimpleNamespace(boa_token="", eoa_token="", audio_token="x")

    def count(samples, _rate):
        mask = np.asarray(extractor(samples)["input_features_mask"][0])
        return len(Original.replace_audio_token(names, {"input_features_mask": [mask]}, 0))

    return count


def files_of(messages):
    parts = [part for message in messages for part in message["content"] if "file" in part]
    return {kind: [part["file"] for part in parts if part["type"] == kind] for kind in ("image", "video", "audio")}


def qwen(folder, kind):
    """The processor's ids, and the features of each file in the order of the prompt."""
    settings = dict(patch_size=4, temporal_patch_size=2, merge_size=2)
    limits = dict(min_pixels=256, max_pixels=1024)
    video = dict(min_pixels=256, max_pixels=2048)
    halves = dict(image_mean=[0.5] * 3, image_std=[0.5] * 3)
    if kind.whole:
        # Those of CLIP, as the release has them.
        settings.update(image_mean=[0.48145466, 0.4578275, 0.40821073], image_std=[0.26862954, 0.26130258, 0.27577711])
    save_json(folder / "preprocessor_config.json", {**settings, **limits, **halves, **settings})
    save_json(folder / "video_preprocessor_config.json", {**settings, **video})
    tokenizer = save_tokenizer(folder, QWEN_TOKENS, QWEN_TEMPLATE, kind.config["vocab_size"])
    processor = (Qwen2_5_VLProcessor if kind.whole else Qwen3VLProcessor)(
        image_processor=Qwen3VLImageProcessor(**settings, **limits),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(**settings, **video),
        chat_template=QWEN_TEMPLATE,
    )

    def prepare(messages):
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        files = files_of(messages)
        metadata = [dict(frames_indices=FRAMES, fps=FPS) for _ in files["video"]]
        out = processor(
            images=[load_image(str(IMAGES / file)) for file in files["image"]] or None,
            videos=[video_frames() for _ in files["video"]] or None,
            text=[text],
            **({} if kind.whole else {"video_metadata": metadata or None}),
        )
        kind.media, kind.features, kind.inputs = {}, {}, {}
        for name, pixels in (("image", "pixel_values"), ("video", "pixel_values_videos")):
            if not files[name]:
                continue
            grids = np.array(out[f"{name}_grid_thw"]).tolist()
            start = 0
            for n, grid in enumerate(grids):
                patches = mx.array(out[pixels])[start : start + int(np.prod(grid))]
                start += int(np.prod(grid))
                # By the rate at which frames were taken, of five at 10 per second.
                seconds = settings["temporal_patch_size"] / (len(FRAMES) / 5 * FPS)
                tokens = int(np.prod(grid)) // settings["merge_size"] ** 2
                kind.media[f"{name}{n}"] = dict(kind=name, grid=grid, tokens=tokens, seconds_per_patch=seconds)
                kind.inputs[f"{name}{n}"] = patches
                kind.features[f"{name}{n}"] = kind.tower(patches, grid)
        return text, np.array(out["input_ids"]).reshape(-1).tolist()

    return prepare


def gemma(folder, kind):
    settings = dict(patch_size=2, pooling_kernel_size=3, max_soft_tokens=70)
    extractor = Gemma4AudioFeatureExtractor()
    save_json(
        folder / "processor_config.json",
        dict(
            image_processor=settings,
            video_processor=settings,
            feature_extractor=dict(sampling_rate=16000, feature_size=128),
        ),
    )
    tokenizer = save_tokenizer(folder, GEMMA_TOKENS, GEMMA_TEMPLATE, kind.config["vocab_size"])
    processor = Gemma4Processor(
        image_processor=Gemma4ImageProcessor(**settings),
        tokenizer=tokenizer,
        video_processor=Gemma4VideoProcessor(**settings),
        feature_extractor=extractor,
    )
    processor._compute_audio_num_tokens = sound_tokens(extractor)

    def prepare(messages):
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        files = files_of(messages)
        out = processor(
            images=[load_image(str(IMAGES / file)) for file in files["image"]] or None,
            videos=[video_frames() for _ in files["video"]] or None,
            # As mlx-vlm's load_video counts: the frames that are taken, evenly over the video.
            fps=len(FRAMES) / 5 * FPS,
            audio=[sound(file) for file in files["audio"]] or None,
            text=[text],
        )
        kind.media, kind.features = {}, {}
        model = kind.model
        if files["image"]:
            for n, pixels in enumerate(out["pixel_values"]):
                kind.media[f"image{n}"] = dict(kind="image")
                kind.features[f"image{n}"] = model.encode_image(mx.array(np.array(pixels))[None])[0]
        if files["video"]:
            for n, (frames, place) in enumerate(zip(out["pixel_values_videos"], out["video_position_ids"])):
                frames, place = mx.array(np.array(frames)), mx.array(np.array(place))
                kind.media[f"video{n}"] = dict(kind="video")
                kind.features[f"video{n}"] = model.encode_image(frames, place)[0]
        if files["audio"]:
            for n, mel in enumerate(out["input_features"]):
                mask = ~mx.array(np.array(out["input_features_mask"]))[n : n + 1].astype(mx.bool_)
                encoded, mask = model.audio_tower(mx.array(np.array(mel))[None], mask)
                kind.media[f"audio{n}"] = dict(kind="audio")
                kind.features[f"audio{n}"] = model.embed_audio(encoded)[0, : int((~mask).sum())]
        return text, np.array(out["input_ids"]).reshape(-1).tolist()

    return prepare


def sessions(folder, kind, with_sound):
    """Rows of `sessions` in media.json, and the files that a session loads."""
    prepare = (qwen if "qwen" in folder.name else gemma)(folder, kind)
    rows = []
    all_sessions = {**SESSIONS, **(SOUND_SESSIONS if with_sound else {})}
    # Of the small Gemma the table of positions is too short for it.
    tall = [] if with_sound else [said("tall.png", "d")]
    all_sessions["files"] = tall + FILES
    for name, messages in all_sessions.items():
        text, ids = prepare(messages)
        if name == "files":
            rows.append(dict(name=name, messages=messages, prompt=ids, greedy=[], logprobs=[]))
            continue
        order = []
        counts = dict(image=0, video=0, audio=0)
        for message in messages:
            for part in message["content"]:
                if "file" in part:
                    order.append(f"{part['type']}{counts[part['type']]}")
                    counts[part["type"]] += 1
        tokens, margins, logprobs = [], [], []
        for _ in range(GENERATED):
            logits = np.array(kind.logits(ids + tokens, order)[-1])
            best = np.sort(logits)
            margins.append(float(best[-1] - best[-2]) / float(np.abs(logits).max()))
            tokens.append(int(logits.argmax()))
            shifted = logits.astype(np.float64) - logits.max()
            logprobs.append(round(-float(np.log(np.exp(shifted).sum())), 6))
        print(f"  {name}: {len(ids)} ids, {''.join(text.split())[:60]!r}, smallest margin {min(margins):.4f}")
        # What follows a near tie may differ, and what follows a placeholder is none of the prompt's.
        soft = {kind.config.get(f"{name}_token_id") for name in ("image", "video", "audio")}
        sure = next((n for n, margin in enumerate(margins) if margin < 2e-3), GENERATED)
        sure = min(sure, next((n + 1 for n, token in enumerate(tokens) if token in soft), GENERATED))
        rows.append(dict(name=name, messages=messages, prompt=ids, greedy=tokens[:sure], logprobs=logprobs[:sure]))
    return json.loads(json.dumps(rows))
