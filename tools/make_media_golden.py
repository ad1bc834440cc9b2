"""Small checkpoints with towers and what mlx-vlm computes from them: mlex-models/tests/data/media-*/.

    pip install -r tools/requirements-vlm.txt
    python tools/make_media_golden.py [NAME]...

Each directory holds a checkpoint with random weights, `media.safetensors` and `media.json`:

  media.json     `media`: of each medium its kind and sizes. `cases`: of each prompt the token ids, the media in
                 its order, and in `turns` where a second turn begins.
               `sessions`: conversations with files, the ids of their prompts, what follows greedily and
               its log-probabilities.
  NAME.input     float16: what the tower takes of a medium: patches [N, P], mel frames [T, 128] or samples [N, P]
  NAME.features  [tokens, D] of the tower, as the language model takes them; of Qwen3-VL with those that
                 are added behind its first layers, [tokens, (1 + layers) * D]
  CASE.logits    [L, V] of one pass over a prompt

mlx-vlm's masks of Gemma 4 are replaced by those of transformers (`masks`), and its tower of `qwen3_vl_moe` by
that of `qwen3_vl`: transformers has one, mlx-vlm other activations. The frames of Qwen2.5-VL's videos are put as
far apart as transformers has them (`Qwen.timed`), where mlx-vlm counts them. The towers' inputs are random: what the processors make of files is compared elsewhere. Prompts of several
kinds are put together from the features here, since mlx-vlm takes one of a kind.
"""

import inspect
import json
import sys
import zlib

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_vlm.models import gemma4, gemma4_unified, qwen2_5_vl, qwen3_5, qwen3_vl, qwen3_vl_moe

from checkpoints_gemma4 import FULL, GAINS, LARGE, SLIDING, SMALL, text as gemma_text
from goldens import ROOT, save_json, save_tensors
from media_sessions import sessions

DATA = ROOT / "mlex-models/tests/data"

QWEN_TEXT = dict(
    model_type="qwen3_5_text",
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    rms_norm_eps=1e-6,
    vocab_size=80,
    max_position_embeddings=512,
    tie_word_embeddings=False,
    attention_bias=False,
    linear_num_value_heads=2,
    linear_num_key_heads=1,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    linear_conv_kernel_dim=4,
    full_attention_interval=2,
    rope_parameters=dict(
        rope_type="default",
        rope_theta=10000.0,
        partial_rotary_factor=0.5,
        mrope_interleaved=True,
        mrope_section=[3, 3, 2],
    ),
)
QWEN_VISION = dict(
    model_type="qwen3_5",
    depth=2,
    hidden_size=32,
    intermediate_size=32,
    out_hidden_size=32,
    num_heads=2,
    in_channels=3,
    patch_size=4,
    temporal_patch_size=2,
    spatial_merge_size=2,
    num_position_embeddings=25,
    hidden_act="gelu_pytorch_tanh",
    deepstack_visual_indexes=[],
)
QWEN = dict(
    model_type="qwen3_5",
    architectures=["Qwen3_5ForConditionalGeneration"],
    image_token_id=70,
    video_token_id=71,
    vision_start_token_id=72,
    vision_end_token_id=73,
    vocab_size=80,
    tie_word_embeddings=False,
    text_config=QWEN_TEXT,
    vision_config=QWEN_VISION,
)
# With heads of 12, which no kernel takes as they are.
UNEVEN = {**QWEN, "vision_config": {**QWEN_VISION, "hidden_size": 24, "depth": 1}}
QWEN3_VL_TEXT = dict(
    model_type="qwen3_vl_text",
    hidden_size=32,
    intermediate_size=16,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    rms_norm_eps=1e-6,
    vocab_size=80,
    max_position_embeddings=512,
    rope_theta=10000.0,
    rope_scaling=dict(rope_type="default", mrope_interleaved=True, mrope_section=[3, 3, 2]),
)
# As the release, whose tower has mergers for some of its blocks; out of order, which tells them apart.
QWEN3_VL_VISION = {
    **QWEN_VISION,
    "model_type": "qwen3_vl",
    "depth": 3,
    "hidden_size": 16,
    "intermediate_size": 16,
    "deepstack_visual_indexes": [2, 0],
}
QWEN3_VL = {
    **QWEN,
    "model_type": "qwen3_vl",
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "text_config": QWEN3_VL_TEXT,
    "vision_config": QWEN3_VL_VISION,
}
QWEN3_VL_MOE = {
    **QWEN3_VL,
    "model_type": "qwen3_vl_moe",
    "architectures": ["Qwen3VLMoeForConditionalGeneration"],
    "text_config": dict(
        QWEN3_VL_TEXT,
        model_type="qwen3_vl_moe_text",
        num_hidden_layers=2,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    ),
    "vision_config": {**QWEN3_VL_VISION, "model_type": "qwen3_vl_moe"},
}
# The settings of the language model beside the others, as published. Windows of two by two tokens.
QWEN2_5_VL = dict(
    model_type="qwen2_5_vl",
    architectures=["Qwen2_5_VLForConditionalGeneration"],
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    rms_norm_eps=1e-6,
    vocab_size=80,
    max_position_embeddings=512,
    rope_theta=10000.0,
    rope_scaling=dict(type="mrope", mrope_section=[2, 3, 3]),
    tie_word_embeddings=False,
    vision_config=dict(
        model_type="qwen2_5_vl",
        depth=3,
        hidden_act="silu",
        hidden_size=16,
        intermediate_size=24,
        out_hidden_size=32,
        num_heads=2,
        in_channels=3,
        patch_size=4,
        temporal_patch_size=2,
        spatial_merge_size=2,
        window_size=16,
        fullatt_block_indexes=[1],
        tokens_per_second=2,
    ),
    **{name: QWEN[name] for name in QWEN if name.endswith("_token_id")},
)
# Whether the head is the embedding is not said: it is, as in mlx-vlm.
QWEN2_5_VL_TIED = {
    **{name: value for name, value in QWEN2_5_VL.items() if name != "tie_word_embeddings"},
    "vision_config": {**QWEN2_5_VL["vision_config"], "hidden_size": 32, "intermediate_size": 32},
}
GEMMA_IDS = dict(
    image_token_id=70,
    audio_token_id=71,
    video_token_id=72,
    boi_token_id=73,
    eoi_token_id=74,
    boa_token_id=75,
    eoa_token_id=76,
    vocab_size=80,
    eos_token_id=[1, 69],
    tie_word_embeddings=True,
)
GEMMA_VISION = dict(
    model_type="gemma4_vision",
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=16,
    rms_norm_eps=1e-6,
    rope_parameters=dict(rope_type="default", rope_theta=100.0),
    patch_size=2,
    position_embedding_size=48,
    pooling_kernel_size=3,
    default_output_length=280,
    use_clipped_linears=False,
    standardize=False,
)
GEMMA_AUDIO = dict(
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    subsampling_conv_channels=[8, 4],
    conv_kernel_size=5,
    attention_chunk_size=6,
    attention_context_left=5,
    attention_context_right=0,
    output_proj_dims=24,
    rms_norm_eps=1e-6,
)


# Of the language models, which other checkpoints are for.
TEXT = dict(vocab_size=80, vocab_size_per_layer_input=80, num_attention_heads=2, intermediate_size=16)
LARGE = {**TEXT, **LARGE}
# As the 2B and 4B models, in fewer layers.
SMALL = {
    **TEXT,
    **SMALL,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "layer_types": [SLIDING, FULL, SLIDING, FULL],
}


def gemma(vision=None, audio=None, **changes):
    return dict(
        model_type="gemma4",
        architectures=["Gemma4ForConditionalGeneration"],
        text_config=gemma_text(**changes),
        vision_config={**GEMMA_VISION, **(vision or {})},
        audio_config=audio,
        **GEMMA_IDS,
    )


UNIFIED = dict(
    model_type="gemma4_unified",
    architectures=["Gemma4UnifiedForConditionalGeneration"],
    text_config=gemma_text(model_type="gemma4_unified_text", **LARGE, use_bidirectional_attention="vision"),
    vision_config=dict(
        model_type="gemma4_unified_vision",
        patch_size=2,
        pooling_kernel_size=2,
        model_patch_size=4,
        mm_embed_dim=32,
        mm_posemb_size=12,
        output_proj_dims=32,
    ),
    audio_config=dict(
        model_type="gemma4_unified_audio",
        audio_samples_per_token=20,
        audio_embed_dim=20,
        hidden_size=20,
        output_proj_dims=20,
    ),
    **GEMMA_IDS,
)


def published_qwen(name, value):
    """As Hugging Face publishes Qwen3.5: other prefixes, norms as w where 1 + w is used, channels first."""
    if name.startswith("vision_tower."):
        name = name.replace("vision_tower.", "model.visual.", 1)
        if name.endswith("patch_embed.proj.weight"):
            value = value.transpose(0, 4, 1, 2, 3)
        return name, value
    ends = ("input_layernorm.weight", "post_attention_layernorm.weight", "model.norm.weight")
    if name.endswith((*ends, "q_norm.weight", "k_norm.weight")):
        value = value - 1.0
    if name.endswith("conv1d.weight"):
        value = value.moveaxis(2, 1)
    if name.startswith("language_model.model."):
        name = name.replace("language_model.model.", "model.language_model.", 1)
    return name.removeprefix("language_model."), value


def published_qwen3_vl(name, value):
    """As Hugging Face publishes Qwen3-VL: other prefixes, channels first, experts with their inputs first."""
    if name.startswith("vision_tower."):
        return published_qwen(name, value)
    if ".switch_mlp." in name:
        name = name.replace(".switch_mlp.", ".experts.").removesuffix(".weight")
        value = value.transpose(0, 2, 1)
    if name.startswith("language_model.model."):
        name = name.replace("language_model.model.", "model.language_model.", 1)
    return name.removeprefix("language_model."), value


def published_qwen2_5_vl(name, value):
    """As Hugging Face publishes Qwen2.5-VL: other prefixes, channels first."""
    if name.endswith("patch_embed.proj.weight"):
        value = value.transpose(0, 4, 1, 2, 3)
    return name.replace("vision_tower.", "visual.", 1).removeprefix("language_model."), value


def joined_experts(weights):
    """Gates and ups of published experts in one tensor each."""
    for gate in [name for name in weights if name.endswith(".experts.gate_proj")]:
        up = gate.replace("gate_proj", "up_proj")
        both = mx.concatenate([weights.pop(gate), weights.pop(up)], axis=-1)
        weights[gate.replace("gate_proj", "gate_up_proj")] = both
    return weights


def published_gemma(name, value):
    """As Hugging Face publishes Gemma 4: other prefixes, channels first."""
    if "subsample_conv_projection" in name and name.endswith("conv.weight"):
        value = value.transpose(0, 3, 1, 2)
    if name.endswith("depthwise_conv1d.weight"):
        value = value.transpose(0, 2, 1)
    if name.startswith("language_model.model."):
        name = name.replace("language_model.model.", "language_model.", 1)
    return "model." + name, value


# name: (module, config, options). Options: layout (gives a tensor the name and form of another program),
# quantize (arguments of nn.quantize), only (the prompts that are kept), sessions (conversations with files too).
CHECKPOINTS = {
    "media-qwen2_5_vl": (qwen2_5_vl, QWEN2_5_VL, dict(layout=published_qwen2_5_vl, sessions=True)),
    "media-qwen2_5_vl-4bit": (
        qwen2_5_vl,
        QWEN2_5_VL_TIED,
        dict(quantize=dict(group_size=32, bits=4), only=["mixed", "turns"]),
    ),
    # Two images are in `turns` too.
    "media-qwen3_5": (qwen3_5, QWEN, dict(only=["one", "video", "mixed", "turns"], sessions=True)),
    "media-qwen3_5-hf": (qwen3_5, UNEVEN, dict(layout=published_qwen, only=["mixed"])),
    "media-qwen3_5-4bit": (qwen3_5, QWEN, dict(quantize=dict(group_size=32, bits=4), only=["mixed", "turns"])),
    "media-qwen3_vl": (qwen3_vl, QWEN3_VL, dict(sessions=True)),
    "media-qwen3_vl-4bit": (
        qwen3_vl,
        {
            **QWEN3_VL,
            "text_config": {**QWEN3_VL_TEXT, "intermediate_size": 32},
            "vision_config": {**QWEN3_VL_VISION, "hidden_size": 32, "intermediate_size": 32},
        },
        dict(quantize=dict(group_size=32, bits=4), only=["mixed", "turns"]),
    ),
    "media-qwen3_vl_moe": (qwen3_vl_moe, QWEN3_VL_MOE, dict(layout=published_qwen3_vl, only=["video", "mixed"])),
    "media-gemma4-small": (
        gemma4,
        gemma(dict(num_hidden_layers=1), GEMMA_AUDIO, **SMALL),
        dict(layout=published_gemma, only=["turns", "audio", "all"], sessions=True),
    ),
    "media-gemma4-large": (
        gemma4,
        gemma(
            dict(use_clipped_linears=True, standardize=True, num_key_value_heads=1),
            **LARGE,
            use_bidirectional_attention="vision",
        ),
        {},
    ),
    "media-gemma4-unified": (gemma4_unified, UNIFIED, {}),
}


def draw(name, shape):
    """A random weight of a scale that keeps activations in bounds."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    if name.endswith(("input_min", "output_min")):
        return np.float32(-1.2)
    if name.endswith(("input_max", "output_max")):
        return np.float32(1.1)
    if name.endswith("A_log"):
        return np.log(rng.uniform(0.02, 4.0, shape))
    value = rng.standard_normal(shape)
    if name.endswith(("norm.weight", "ln_q.weight", "norm1.weight", "norm2.weight", "layernorm.weight")) or "_ln" in name:
        value = 0.2 * value + (1.0 if name.endswith("weight") else 0.0)
    elif name.endswith("std_scale"):
        value = 0.2 * value + 1.0
    elif name.endswith("depthwise_conv1d.weight"):
        value *= 0.5
    elif "embed" in name and "proj" not in name:
        value *= 0.7
    elif len(shape) > 1:
        value /= np.sqrt(np.prod(shape[1:]))
    else:
        value *= 0.2
    if name.startswith("language_model.") and "model.layers" in name:
        for end, gain in GAINS.items():
            if name.endswith(end) and "gemma" in draw.family:
                value *= gain
    return value


def build(module, config):
    if module is qwen3_vl_moe:
        module.qwen3_vl_moe.VisionModel = qwen3_vl.VisionModel
        config = {**config, "vision_config": {**config["vision_config"], "model_type": "qwen3_vl"}}
    draw.family = config["model_type"]
    parts = {
        f"{part}_config": kind.from_dict(config.get(f"{part}_config", config))
        for part, kind in (("text", module.TextConfig), ("vision", module.VisionConfig))
    }
    if config.get("audio_config"):
        parts["audio_config"] = module.AudioConfig.from_dict(config["audio_config"])
    elif "gemma" in config["model_type"]:
        parts["audio_config"] = None
    known = inspect.signature(module.ModelConfig).parameters
    rest = {key: value for key, value in config.items() if key in known and key not in parts}
    model = module.Model(module.ModelConfig(**parts, **rest))
    weights = {
        name: mx.array(np.asarray(draw(name, value.shape), np.float32))
        for name, value in tree_flatten(model.parameters())
    }
    model.update(tree_unflatten(list(weights.items())))
    return model


def masks(model, h, _cache, types=None):
    """The masks of transformers' `create_masks_for_vision_model` in place of mlx-vlm's, which differ.

    Tokens of a picture see each other in sliding layers, within the window, and in no others.
    """
    length = h.shape[1]
    order = np.arange(length)
    back = order[:, None] - order[None]
    seen = back >= 0
    if types is not None and model.config.use_bidirectional_attention == "vision":
        kinds = np.array(types[0])
        vision = (kinds == 1) | (kinds == 2)
        starts = vision & ~np.concatenate([[False], vision[:-1]])
        blocks = np.where(vision, np.cumsum(starts), 0)
        seen |= (blocks[:, None] == blocks[None]) & vision[:, None]
    sliding = mx.array((seen & (back < model.window_size))[None, None])
    return [sliding if layer.layer_type == SLIDING else "causal" for layer in model.layers]


gemma4.language.Gemma4TextModel._make_masks = masks


def random(name, *shape, low=0.0):
    """Values that a float16, in which they are kept, has too."""
    rng = np.random.default_rng(zlib.crc32(name.encode()) + 1)
    return mx.array(rng.uniform(low, 1.0, shape).astype(np.float16).astype(np.float32))


class Qwen:
    """Features and prompts of Qwen2.5-VL, Qwen3-VL and Qwen3.5."""

    def __init__(self, model, config):
        self.model, self.config = model, config
        grids = dict(a=(1, 4, 6), b=(1, 8, 2), v=(3, 2, 4))
        # Videos are one run of tokens, not one for each pair of frames.
        self.whole = config["model_type"] == "qwen2_5_vl"
        if self.whole:
            # With windows of every form.
            grids = dict(a=(1, 6, 10), b=(1, 8, 2), v=(3, 6, 4))
        patch = 3 * 2 * 4 * 4
        self.media, self.inputs, self.features = {}, {}, {}
        for name, grid in grids.items():
            patches = random(name, int(np.prod(grid)), patch, low=-1.0)
            features = self.tower(patches, grid)
            kind = "video" if name == "v" else "image"
            self.media[name] = dict(kind=kind, grid=grid, tokens=features.shape[0])
            self.inputs[name], self.features[name] = patches, features
        self.media["v"]["timestamps"] = [0.2, 1.2, 2.2]
        if self.whole:
            self.media["v"]["seconds_per_patch"] = 0.75

    def tower(self, patches, grid):
        """Features of patches; behind them those that are added behind layers of the language model."""
        features = self.model.vision_tower(patches, mx.array([grid]))
        features, deep = (features, []) if self.whole else features
        return mx.concatenate([features, *deep], axis=-1)

    def timed(self, ids, positions, names):
        """Positions as in transformers, where steps in time are `seconds_per_patch * tokens_per_second` apart."""
        if not self.whole:
            return positions
        positions, at = np.array(positions), 0
        for name in names:
            medium = self.media[name]
            start = ids.index(self.config[f"{medium['kind']}_token_id"], at)
            at = end = start + medium["tokens"]
            if medium["kind"] == "image":
                continue
            run, steps = positions[:, 0, start:end], medium["grid"][0]
            step = medium["seconds_per_patch"] * self.config["vision_config"]["tokens_per_second"]
            last = run.max()
            frames = np.repeat(np.arange(steps), medium["tokens"] // steps)
            run[0] += np.floor(frames * step).astype(run.dtype) - frames
            positions[:, :, end:] += run.max() - last
        return mx.array(positions)

    def tokens(self, name):
        medium, ids = self.media[name], self.config
        start, end = ids["vision_start_token_id"], ids["vision_end_token_id"]
        if medium["kind"] == "image":
            return [start, *[ids["image_token_id"]] * medium["tokens"], end]
        frames = medium["grid"][0]
        if self.whole:
            return [start, *[ids["video_token_id"]] * medium["tokens"], end]
        frame = [start, *[ids["video_token_id"]] * (medium["tokens"] // frames), end]
        return [token for n in range(frames) for token in (20 + n, *frame)]

    def logits(self, ids, names, check=True):
        model, config = self.model, self.config
        tokens, ids = ids, mx.array([ids])
        grids = {
            kind: mx.array([self.media[n]["grid"] for n in names if self.media[n]["kind"] == kind])
            if any(self.media[n]["kind"] == kind for n in names)
            else None
            for kind in ("image", "video")
        }
        embedded = model.language_model.model.embed_tokens(ids)
        positions, deltas = model.language_model.get_rope_index(ids, grids["image"], grids["video"])
        merge = qwen3_vl.Model.merge_input_ids_with_image_features
        features = mx.concatenate([self.features[n] for n in names])
        features, *deep = mx.split(features, features.shape[-1] // embedded.shape[-1], axis=-1)
        embedded, _ = merge(features, embedded, ids, config["image_token_id"], config["video_token_id"])
        places = (ids == config["image_token_id"]) | (ids == config["video_token_id"])
        stacked = dict(visual_pos_masks=places, deepstack_visual_embeds=deep) if deep else {}
        if check and len({self.media[n]["kind"] for n in names}) == 1:
            kind = self.media[names[0]]["kind"]
            pixels = mx.concatenate([self.inputs[n] for n in names])
            pixels = {"pixel_values": pixels} if kind == "image" else {"pixel_values_videos": pixels}
            own = model.get_input_embeddings(ids, **pixels, **{f"{kind}_grid_thw": grids[kind]})
            assert mx.allclose(own.inputs_embeds, embedded, atol=1e-5)
            for found, expected in zip(deep, own.deepstack_visual_embeds if deep else []):
                assert mx.allclose(found, expected, atol=1e-5)
            assert mx.array_equal(own.position_ids, positions)
        positions = self.timed(tokens, positions, names)
        model.language_model._rope_deltas = model.language_model._position_ids = None
        return model.language_model(ids, inputs_embeds=embedded, position_ids=positions, **stacked).logits[0]


class Gemma:
    """Features and prompts of Gemma 4 and its variants without encoders."""

    def __init__(self, model, config):
        self.model, self.config = model, config
        self.unified = "unified" in config["model_type"]
        self.media, self.inputs, self.features = {}, {}, {}
        patch, pool = (48, 1) if self.unified else (12, 9)
        grids = dict(a=(2, 3), b=(4, 1), v=(1, 2)) if self.unified else dict(a=(6, 9), b=(12, 3), v=(3, 6))
        for name, (rows, columns) in grids.items():
            frames = 3 if name == "v" else 1
            patches = random(name, frames, rows * columns, patch)
            places = [[n % columns, n // columns] for n in range(rows * columns)]
            places = mx.broadcast_to(mx.array([places]), (frames, rows * columns, 2))
            if self.unified:
                features = model.get_image_features(patches, places)
            else:
                features = model.encode_image(patches, places)[0]
            kind = "video" if name == "v" else "image"
            tokens = rows * columns // pool
            assert features.shape[0] == tokens * frames
            self.media[name] = dict(kind=kind, grid=(rows, columns), frames=frames, tokens=tokens * frames)
            self.inputs[name], self.features[name] = patches.reshape(-1, patch), features
        if config.get("audio_config"):
            self.sound()

    def sound(self):
        model = self.model
        if self.unified:
            samples = random("s", 7, 20, low=-1.0)
            features = model.get_audio_features(samples[None])
            self.inputs["s"], self.features["s"] = samples, features
            self.media["s"] = dict(kind="audio", tokens=7, samples=20)
            return
        # Chunks of six tokens, the last of them not full.
        valid, frames = 61, 64
        mel = random("s", frames, 128, low=-2.0)
        mel[valid:] = 0.0
        mask = mx.arange(frames)[None] >= valid
        encoded, mask = model.audio_tower(mel[None], mask)
        tokens = -(-valid // 4)
        assert int((~mask).sum()) == tokens
        self.inputs["s"], self.features["s"] = mel, model.embed_audio(encoded)[0, :tokens]
        self.media["s"] = dict(kind="audio", tokens=tokens, valid=valid)

    def tokens(self, name):
        medium, ids = self.media[name], self.config
        if medium["kind"] == "audio":
            return [ids["boa_token_id"], *[ids["audio_token_id"]] * medium["tokens"], ids["eoa_token_id"]]
        token = ids[f"{medium['kind']}_token_id"]
        frames = medium["frames"]
        frame = [ids["boi_token_id"], *[token] * (medium["tokens"] // frames), ids["eoi_token_id"]]
        return [t for n in range(frames) for t in ((20 + n, *frame) if frames > 1 else frame)]

    def logits(self, ids, names, _check=True):
        model, config = self.model, self.config
        types = {config["image_token_id"]: 1, config["video_token_id"]: 2, config["audio_token_id"]: 3}
        types = mx.array([[types.get(token, 0) for token in ids]])
        ids = mx.array([ids])
        # Its own splicing with features that are there already; one call a kind.
        embedded = model.get_input_embeddings(ids)
        h = embedded.inputs_embeds
        for kind in ("image", "video", "audio"):
            features = [self.features[n] for n in names if self.media[n]["kind"] == kind]
            if features:
                mask = mx.broadcast_to((ids == config[f"{kind}_token_id"])[..., None], h.shape)
                h = gemma4.gemma4.masked_scatter(h, mask, mx.concatenate(features))
        out = model.language_model(
            None, inputs_embeds=h, per_layer_inputs=embedded.per_layer_inputs, mm_token_type_ids=types
        )
        return out.logits[0]


def cases(kind):
    """Prompts: numbers are tokens of text, names media. `|` is where a second turn begins."""
    prompts = dict(
        one=[5, 6, "a", 7, 8, 9],
        two=["a", 11, 12, "b", 13],
        video=[3, "v", 14, 15, 16],
        mixed=[4, 5, "b", 6, "v", 7, 8, "a", 9, 10],
        turns=[5, "a", 6, 7, 8, "|", 9, 10, "b", 11, 12, 13],
    )
    if "s" in kind.media:
        prompts["audio"] = [6, "s", 17, 18]
        prompts["all"] = [4, "s", 5, "a", 6, 7, "v", 8, 9]
    for name, prompt in prompts.items():
        ids, names, turns = [], [], []
        for item in prompt:
            if item == "|":
                turns.append(len(ids))
            elif isinstance(item, str):
                ids += kind.tokens(item)
                names.append(item)
            else:
                ids.append(item)
        yield name, ids, names, turns


def make(name):
    module, config, options = CHECKPOINTS[name]
    folder = DATA / name
    folder.mkdir(parents=True, exist_ok=True)
    model = build(module, config)
    config = json.loads(json.dumps(config))
    if "quantize" in options:
        settings = options["quantize"]

        def fits(_path, layer):
            return hasattr(layer, "to_quantized") and layer.weight.shape[-1] % settings["group_size"] == 0

        nn.quantize(model, **settings, class_predicate=fits)
        config["quantization"] = {**settings, "mode": "affine"}
    weights = dict(tree_flatten(model.parameters()))
    layout = options.get("layout", lambda name, value: (name, value))
    weights = joined_experts(dict(layout(*item) for item in weights.items()))
    save_tensors(folder / "model.safetensors", weights, {"format": "mlx"})
    save_json(folder / "config.json", config)
    kind = (Qwen if "qwen" in name else Gemma)(model, config)
    tensors, rows = {}, []
    for medium in kind.media:
        tensors[f"{medium}.input"] = kind.inputs[medium].astype(mx.float16)
        tensors[f"{medium}.features"] = kind.features[medium]
    for case, ids, names, turns in cases(kind):
        if case not in options.get("only", (case,)):
            continue
        logits = kind.logits(ids, names)
        # The features must count, those that are added behind layers on their own too: without them the
        # logits are others.
        kept, width = kind.features, config.get("text_config", config)["hidden_size"]
        wide = any(value.shape[-1] > width for value in kept.values())
        for start in [0, width] if wide else [0]:
            zeroed = lambda value: mx.concatenate([value[:, :start], mx.zeros_like(value[:, start:])], axis=-1)
            kind.features = {n: zeroed(value) for n, value in kept.items()}
            distance = float(mx.abs(kind.logits(ids, names, False) - logits).max() / mx.abs(logits).max())
            assert distance > 0.02, (name, case, distance)
        kind.features = kept
        tensors[f"{case}.logits"] = logits
        rows.append(dict(name=case, tokens=ids, media=names, turns=turns))
    save_tensors(folder / "media.safetensors", tensors)
    described = dict(media=dict(kind.media), cases=rows)
    if options.get("sessions"):
        described["sessions"] = sessions(folder, kind, bool(config.get("audio_config")))
    save_json(folder / "media.json", described, indent=None)
    size = sum(file.stat().st_size for file in folder.glob("*")) // 1024
    print(f"{name}: {size} KB, logits' deviation {float(mx.std(logits)):.2f}")


def main(names):
    for name in names or CHECKPOINTS:
        make(name)


if __name__ == "__main__":
    main(sys.argv[1:])
