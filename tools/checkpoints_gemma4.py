"""The small Gemma4 checkpoints of make_model_golden.py: each switch of the text models in at least one.

Not in mlx-lm 0.31.3: the names `gemma4_unified`, `gemma4_unified_text` and `gemma4_text`'s own projections
of layers that share keys and values. Its `gemma4` and `gemma4_text` compute the former (`SAME`), and the
latter are written to the file after it has been read (`unread`); later versions and mlx-vlm drop them.
"""

import mlx.core as mx

from quantized_checkpoints import affine, layers

SLIDING, FULL = "sliding_attention", "full_attention"

ROPE = {
    FULL: dict(rope_type="proportional", rope_theta=1000000.0, partial_rotary_factor=0.25),
    SLIDING: dict(rope_type="default", rope_theta=10000.0),
}
TEXT = dict(
    model_type="gemma4_text",
    hidden_size=32,
    num_hidden_layers=4,
    intermediate_size=36,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    global_head_dim=32,
    hidden_activation="gelu_pytorch_tanh",
    rms_norm_eps=1e-6,
    vocab_size=130,
    vocab_size_per_layer_input=130,
    hidden_size_per_layer_input=0,
    num_kv_shared_layers=0,
    sliding_window=8,
    max_position_embeddings=512,
    attention_k_eq_v=False,
    use_double_wide_mlp=False,
    enable_moe_block=False,
    final_logit_softcapping=30.0,
    rope_parameters=ROPE,
    layer_types=[SLIDING, SLIDING, FULL, SLIDING],
    tie_word_embeddings=True,
    bos_token_id=2,
    eos_token_id=1,
    pad_token_id=0,
)
# As the 2B and 4B models: embeddings per layer, the last layers on the keys and values of earlier ones.
SMALL = dict(
    num_hidden_layers=6,
    num_key_value_heads=1,
    hidden_size_per_layer_input=16,
    num_kv_shared_layers=3,
    use_double_wide_mlp=True,
    layer_types=[SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL],
)
# As the 31B and 12B models: keys are values in full layers, which have fewer heads of them.
LARGE = dict(attention_k_eq_v=True, num_global_key_value_heads=1)
# As the 26B model.
EXPERTS = dict(enable_moe_block=True, num_experts=6, top_k_experts=2, moe_intermediate_size=24)
WIDE = dict(hidden_size=64, intermediate_size=64, head_dim=32, global_head_dim=64)


def text(**changes):
    return {**TEXT, **changes}


def whole(model_type="gemma4", **changes):
    """The config of a model with towers, whose text part is `text(**changes)`."""
    kind = "gemma4_unified" if model_type == "gemma4_unified" else "gemma4"
    inner = text(**{"model_type": f"{kind}_text", **changes})
    return dict(
        model_type=model_type,
        architectures=["Gemma4ForConditionalGeneration"],
        text_config=inner,
        vision_config=dict(model_type=f"{kind}_vision", hidden_size=32),
        audio_config=None,
        vocab_size=inner["vocab_size"],
        image_token_id=120,
        eos_token_id=[1, 106],
        tie_word_embeddings=True,
    )


def published(weights, _config):
    """The names and shapes of the weights as they are first published, for transformers."""
    out = {}
    for name, value in weights.items():
        name = name.replace("language_model.model.", "model.language_model.")
        if ".switch_glu.up_proj." in name:
            continue
        if ".switch_glu.gate_proj." in name:
            up = weights[name.replace("model.language_model.", "language_model.model.").replace("gate_proj", "up_proj")]
            name, value = name.replace("switch_glu.gate_proj.weight", "gate_up_proj"), mx.concatenate([value, up], axis=1)
        name = name.replace("switch_glu.down_proj.weight", "down_proj")
        out[name] = value
    return out


GROUP_32 = dict(group_size=32, bits=4)
# In the order of a mixed conversion: sensitive layers with more bits, one left alone.
MIXED = layers(
    {
        "model.embed_tokens": affine(8, 32),
        "layers.1.mlp.down_proj": affine(6, 64),
        "layers.2.self_attn.v_proj": False,
    }
)
TOWERS = {
    "model.vision_tower.patch_embedder.input_proj.weight": (32, 12),
    "model.embed_vision.embedding_projection.weight": (32, 32),
    "model.language_model.layers.0.self_attn.rotary_emb.inv_freq": (8,),
    "model.language_model.layers.1.mlp.up_proj.input_max": (1,),
}
SHARED = {
    f"model.layers.{layer}.self_attn.{name}": shape
    for layer, dim in ((3, 16), (4, 16), (5, 32))
    for name, shape in (("k_proj.weight", (dim, 32)), ("v_proj.weight", (dim, 32)), ("k_norm.weight", (dim,)))
}

# Without these the tied head would give the last token again, and attention, which is not scaled, look at one key.
GAINS = {
    "post_attention_layernorm.weight": 8.0,
    "post_feedforward_layernorm.weight": 8.0,
    "post_per_layer_input_norm.weight": 8.0,
    "q_norm.weight": 0.5,
    "k_norm.weight": 0.5,
}

CHECKPOINTS = {
    "gemma4-text": (text(tie_word_embeddings=False), {}),
    "gemma4-small": (text(**SMALL, final_logit_softcapping=8.0), dict(unread=SHARED)),
    "gemma4-small-4bit": (
        whole(**{**SMALL, **WIDE, "hidden_size_per_layer_input": 32}),
        dict(quantize=GROUP_32, extra={"vision_tower.patch_embedder.input_proj.weight": (32, 12)}),
    ),
    "gemma4-small-bf16": (whole(**SMALL), dict(dtype=mx.bfloat16)),
    "gemma4-large": (whole(**LARGE, final_logit_softcapping=None), dict(layout=published, extra=TOWERS)),
    "gemma4-large-4bit": (whole(**LARGE, **WIDE), dict(dtype=mx.bfloat16, quantize=GROUP_32)),
    "gemma4-mixed-bits": (whole(**WIDE, **EXPERTS), dict(quantize=GROUP_32, predicate=MIXED)),
    "gemma4-experts": (whole(**LARGE, **EXPERTS), dict(layout=published)),
    "gemma4-experts-4bit": (
        whole(**{**LARGE, **WIDE, **EXPERTS, "moe_intermediate_size": 32}),
        dict(quantize=GROUP_32),
    ),
    "gemma4-unified": (
        whole("gemma4_unified", **LARGE, layer_types=None, sliding_window_pattern=3),
        dict(
            unread={"vision_embedder.patch_dense.weight": (32, 48), "embed_audio.embedding_projection.weight": (32, 40)},
        ),
    ),
    "gemma4-unified-text": (
        text(model_type="gemma4_unified_text", **LARGE),
        dict(unread={"lm_head.weight": (130, 32)}),
    ),
    # Everything that has a default, with heads of 256 and 512.
    "gemma4-config-minimal": (
        dict(
            model_type="gemma4_text",
            hidden_size=16,
            num_hidden_layers=3,
            intermediate_size=16,
            num_attention_heads=1,
            vocab_size=64,
            vocab_size_per_layer_input=64,
            hidden_size_per_layer_input=8,
            num_kv_shared_layers=1,
            sliding_window_pattern=2,
            sliding_window=8,
        ),
        {},
    ),
}
CHECKPOINTS = {name: (config, {"gains": GAINS, **options}) for name, (config, options) in CHECKPOINTS.items()}

# The same models under names that mlx-lm does not know.
SAME = {"gemma4_unified": "gemma4", "gemma4_unified_text": "gemma4_text"}
