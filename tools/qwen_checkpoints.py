"""Small checkpoints of the Qwen families with experts or gated delta layers, for make_model_golden.py.

An entry is (config, options), as there. Tensors are stored as mlx-lm saves them, or as Hugging Face publishes
them: conv1d [C, 1, K], norms as w where the model uses 1 + w, one tensor per expert (or gate and up of all
experts in one), tensors of the MTP head and of the vision tower, and their prefixes.
"""

import mlx.core as mx
import numpy as np

BASE = dict(
    hidden_size=32,
    num_hidden_layers=3,
    intermediate_size=36,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    rms_norm_eps=1e-6,
    vocab_size=64,
    max_position_embeddings=512,
    tie_word_embeddings=False,
)
EXPERTS = dict(
    num_experts=6,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    norm_topk_prob=True,
)
DELTA = dict(
    linear_num_value_heads=4,
    linear_num_key_heads=2,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    linear_conv_kernel_dim=4,
    full_attention_interval=2,
)
ROPE = dict(
    rope_type="default",
    rope_theta=10000000.0,
    partial_rotary_factor=0.25,
    mrope_interleaved=True,
    mrope_section=[1, 1, 0],
)
# Rows that 32 divides, for packed weights (the router has groups of 64).
WIDE = dict(hidden_size=64, intermediate_size=64, moe_intermediate_size=32, shared_expert_intermediate_size=32)
Q4 = dict(group_size=32, bits=4)

QWEN3_MOE = {
    **BASE,
    **EXPERTS,
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "rope_theta": 1000000.0,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "attention_bias": False,
    "hidden_act": "silu",
}
QWEN3_NEXT = {
    **BASE,
    **EXPERTS,
    **DELTA,
    "model_type": "qwen3_next",
    "architectures": ["Qwen3NextForCausalLM"],
    "rope_theta": 10000000.0,
    "partial_rotary_factor": 0.5,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "shared_expert_intermediate_size": 20,
}
TEXT = {**BASE, **DELTA, "model_type": "qwen3_5_text", "rope_parameters": ROPE, "attention_bias": False}
TEXT_MOE = {
    **TEXT,
    **EXPERTS,
    "model_type": "qwen3_5_moe_text",
    "shared_expert_intermediate_size": 20,
}
QWEN3_VL = dict(
    model_type="qwen3_vl",
    architectures=["Qwen3VLForConditionalGeneration"],
    image_token_id=60,
    text_config={
        **BASE,
        "model_type": "qwen3_vl_text",
        "tie_word_embeddings": True,
        "rope_theta": 5000000.0,
        "rope_scaling": dict(rope_type="default", mrope_interleaved=True, mrope_section=[3, 3, 2]),
    },
    vision_config=dict(depth=1, hidden_size=8, deepstack_visual_indexes=[0]),
    tie_word_embeddings=True,
)
QWEN3_VL_MOE = {
    **QWEN3_VL,
    "model_type": "qwen3_vl_moe",
    "architectures": ["Qwen3VLMoeForConditionalGeneration"],
    "text_config": {
        **QWEN3_VL["text_config"],
        **EXPERTS,
        "hidden_size": 64,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "model_type": "qwen3_vl_moe_text",
        "num_hidden_layers": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "tie_word_embeddings": False,
    },
    "tie_word_embeddings": False,
}


def multimodal(text, **more):
    """The config of the model that has `text` for its language model."""
    moe = "moe" in text["model_type"]
    return {
        "model_type": "qwen3_5_moe" if moe else "qwen3_5",
        "architectures": ["Qwen3_5MoeForConditionalGeneration" if moe else "Qwen3_5ForConditionalGeneration"],
        "image_token_id": 60,
        "text_config": {**text, **more},
        "vision_config": {"depth": 1, "hidden_size": 8},
        "tie_word_embeddings": {**text, **more}["tie_word_embeddings"],
    }


# Norms that are used as 1 + w in Hugging Face's models.
SHIFTED = (
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "model.norm.weight",
    "q_norm.weight",
    "k_norm.weight",
)


def delta_parameter(name, rng, shape):
    """A random A_log, the logarithm of a decay rate; None for other tensors."""
    if not name.endswith("A_log"):
        return None
    return np.log(rng.uniform(0.02, 4.0, shape))


def published(weights, config):
    """The names and shapes of the weights as Hugging Face publishes them, from mlx-lm's."""
    kind = config["model_type"]
    out = {}
    for original, value in weights.items():
        name = original
        if kind != "qwen3_moe" and name.endswith(SHIFTED):
            value = value - 1.0
        if name.endswith("conv1d.weight"):
            value = value.moveaxis(2, 1)
        if name.startswith("language_model."):
            name = name.removeprefix("language_model.")
            if "text_config" in config and not name.startswith("lm_head"):
                name = name.replace("model.", "model.language_model.", 1)
        if ".switch_mlp." not in name:
            out[name] = value
        elif kind in ("qwen3_moe", "qwen3_next"):
            for expert in range(value.shape[0]):
                out[name.replace("switch_mlp", f"experts.{expert}")] = value[expert]
        elif "down_proj" in name:
            out[name.replace("switch_mlp.down_proj.weight", "experts.down_proj")] = value
        elif "gate_proj" in name:
            both = mx.concatenate([value, weights[original.replace("gate_proj", "up_proj")]], -2)
            out[name.replace("switch_mlp.gate_proj.weight", "experts.gate_up_proj")] = both
    return out


def smallest_route_gap(model, prompts):
    """How far the router's logits of the last expert chosen and the first one not are apart, at least."""
    gaps = [float("inf")]
    blocks = [layer.mlp for layer in model.layers if hasattr(layer, "mlp")]
    routers = [(block, block.gate) for block in blocks if hasattr(block, "switch_mlp")]

    def observed(block, gate):
        def route(x):
            logits = gate(x)
            ordered = mx.sort(logits.astype(mx.float32), axis=-1)
            gaps.append(float((ordered[..., -block.top_k] - ordered[..., -block.top_k - 1]).min()))
            return logits

        return route

    for block, gate in routers:
        block.gate = observed(block, gate)
    for prompt in prompts:
        mx.eval(model(mx.array(prompt)[None]))
    for block, gate in routers:
        block.gate = gate
    return min(gaps)


MTP = {"mtp.fc.weight": (32, 64), "mtp.layers.0.input_layernorm.weight": (32,)}
# A whole one, of TEXT's sizes: `make_mtp_golden.py` computes with it.
WHOLE_MTP = {
    "mtp.fc.weight": (32, 64),
    "mtp.layers.0.input_layernorm.weight": (32,),
    "mtp.layers.0.post_attention_layernorm.weight": (32,),
    "mtp.layers.0.self_attn.q_proj.weight": (128, 32),
    "mtp.layers.0.self_attn.k_proj.weight": (32, 32),
    "mtp.layers.0.self_attn.v_proj.weight": (32, 32),
    "mtp.layers.0.self_attn.o_proj.weight": (32, 64),
    "mtp.layers.0.self_attn.q_norm.weight": (16,),
    "mtp.layers.0.self_attn.k_norm.weight": (16,),
    "mtp.layers.0.mlp.gate_proj.weight": (36, 32),
    "mtp.layers.0.mlp.up_proj.weight": (36, 32),
    "mtp.layers.0.mlp.down_proj.weight": (32, 36),
    "mtp.norm.weight": (32,),
    "mtp.pre_fc_norm_embedding.weight": (32,),
    "mtp.pre_fc_norm_hidden.weight": (32,),
}
TOWER = {"model.visual.patch_embed.proj.weight": (8, 3, 2, 4, 4), "model.visual.merger.norm.weight": (8,)}
TOWER_OF_MLX = {"vision_tower.patch_embed.proj.weight": (8, 2, 4, 4, 3), "vision_tower.blocks.0.norm1.weight": (8,)}

CHECKPOINTS = {
    "qwen3_moe-f32": ({**QWEN3_MOE, "mlp_only_layers": [1]}, {}),
    "qwen3_moe-sparse-step": (
        {
            **QWEN3_MOE,
            "decoder_sparse_step": 2,
            "norm_topk_prob": False,
            "num_experts_per_tok": 3,
            "tie_word_embeddings": True,
        },
        {},
    ),
    "qwen3_moe-hf": ({**QWEN3_MOE, "num_hidden_layers": 2}, dict(layout=published)),
    "qwen3_moe-4bit": ({**QWEN3_MOE, **WIDE, "num_hidden_layers": 2}, dict(quantize=Q4)),
    # Quantized: dense experts are for f32 alone on MLX's CPU.
    "qwen3_moe-4bit-bf16": (
        {**QWEN3_MOE, **WIDE, "num_hidden_layers": 2, "mlp_only_layers": [0]},
        dict(dtype=mx.bfloat16, quantize=Q4),
    ),
    "qwen3_next-f32": ({**QWEN3_NEXT, "mlp_only_layers": [1]}, {}),
    "qwen3_next-hf": (
        {**QWEN3_NEXT, "num_hidden_layers": 2, "linear_num_value_heads": 2, "linear_value_head_dim": 24},
        dict(layout=published, extra=MTP),
    ),
    "qwen3_next-4bit": ({**QWEN3_NEXT, **WIDE, "norm_topk_prob": False}, dict(quantize=Q4)),
    "qwen3_5-f32": (
        multimodal(TEXT, num_hidden_layers=4, full_attention_interval=4, intermediate_size=20),
        dict(extra=TOWER_OF_MLX),
    ),
    "qwen3_5-bf16": (multimodal(TEXT), dict(dtype=mx.bfloat16)),
    "qwen3_5-hf": (multimodal(TEXT, tie_word_embeddings=True), dict(layout=published, extra=MTP | TOWER)),
    "qwen3_5-4bit": (multimodal(TEXT, **WIDE, tie_word_embeddings=True), dict(quantize=Q4)),
    "qwen3_5-text": (
        {**TEXT, "architectures": ["Qwen3_5ForCausalLM"], "num_hidden_layers": 2, "linear_num_value_heads": 6},
        dict(layout=published, extra=MTP),
    ),
    "qwen3_5-mtp": (multimodal(TEXT, num_hidden_layers=2), dict(layout=published, extra=WHOLE_MTP)),
    "qwen3_5_moe-f32": (multimodal(TEXT_MOE, num_hidden_layers=2), {}),
    "qwen3_5_moe-hf": (multimodal(TEXT_MOE, num_hidden_layers=2), dict(layout=published, extra=MTP | TOWER)),
    "qwen3_5_moe-4bit": (multimodal(TEXT_MOE, **WIDE), dict(quantize=Q4)),
    "qwen3_5_moe-text": (
        {**TEXT_MOE, "architectures": ["Qwen3_5MoeForCausalLM"], "num_hidden_layers": 2, "num_experts_per_tok": 4},
        dict(layout=published, extra=MTP),
    ),
    "qwen3_vl-text": (QWEN3_VL, dict(extra=TOWER_OF_MLX)),
    "qwen3_vl_moe-text-4bit": (QWEN3_VL_MOE, dict(quantize=Q4)),
}
# The language model of a larger one has the weights that it would have alone.
CHECKPOINTS = {
    name: (config, {"prefix": "language_model.", **options}) for name, (config, options) in CHECKPOINTS.items()
}

# The text models under their own names are what mlx-lm knows by the names of the whole ones.
SAME = {"qwen3_5_text": "qwen3_5", "qwen3_5_moe_text": "qwen3_5_moe"}
