"""The small NemotronH checkpoints of make_model_golden.py: each kind of layer and switch in at least one."""

import mlx.core as mx

BASE = dict(
    model_type="nemotron_h",
    architectures=["NemotronHForCausalLM"],
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=5,
    max_position_embeddings=512,
    num_attention_heads=4,
    num_key_value_heads=2,
    attention_bias=False,
    mamba_num_heads=4,
    mamba_head_dim=12,
    mamba_proj_bias=False,
    ssm_state_size=16,
    conv_kernel=4,
    n_groups=1,
    mlp_bias=False,
    layer_norm_epsilon=1e-5,
    use_bias=False,
    use_conv_bias=True,
    hybrid_override_pattern="M-M*-",
    tie_word_embeddings=False,
    bos_token_id=1,
    eos_token_id=2,
)
EXPERTS = dict(
    hybrid_override_pattern="ME*EM-",
    num_hidden_layers=6,
    n_groups=2,
    head_dim=16,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_group=4,
    topk_group=2,
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    moe_intermediate_size=24,
    n_shared_experts=1,
    moe_shared_expert_intermediate_size=40,
)
LATENT = dict(
    hybrid_override_pattern=None,
    layers_block_type=["mamba", "moe", "attention", "mlp", "mamba", "moe"],
    n_group=1,
    topk_group=1,
    num_experts_per_tok=3,
    norm_topk_prob=False,
    n_shared_experts=None,
    moe_latent_size=16,
    attention_bias=True,
    mlp_bias=True,
    mamba_proj_bias=True,
    use_conv_bias=False,
    time_step_limit=[0.05, 0.6],
    conv_kernel=3,
)
WIDE = dict(
    hidden_size=64,
    intermediate_size=64,
    mamba_head_dim=16,
    moe_intermediate_size=32,
    moe_shared_expert_intermediate_size=64,
)


def published(weights):
    """The names and shapes of the weights as they are first published, for transformers."""
    out = {}
    for name, value in weights.items():
        if name.endswith("conv1d.weight"):
            value = value.moveaxis(2, 1)
        if ".switch_mlp." not in name:
            out[name] = value
            continue
        projection = "up_proj" if ".fc1." in name else "down_proj"
        place = name.split(".switch_mlp.")[0]
        for i in range(value.shape[0]):
            out[f"{place}.experts.{i}.{projection}.weight"] = value[i]
    return out


MTP = {"mtp.layers.0.norm.weight": (32,), "mtp.layers.0.mixer.up_proj.weight": (48, 32)}

CHECKPOINTS = {
    "nemotron_h-dense": (BASE, {}),
    "nemotron_h-bf16": (BASE, dict(dtype=mx.bfloat16)),
    "nemotron_h-experts": ({**BASE, **EXPERTS}, {}),
    "nemotron_h-hf": ({**BASE, **EXPERTS}, dict(rename=published, extra=MTP)),
    "nemotron_h-latent": ({**BASE, **EXPERTS, **LATENT}, {}),
    "nemotron_h-4bit": ({**BASE, **EXPERTS, **WIDE}, dict(quantize=dict(group_size=32, bits=4))),
    "nemotron_h-dense-4bit": (
        {**BASE, **WIDE, "num_hidden_layers": 4, "hybrid_override_pattern": list("M*-M")},
        dict(dtype=mx.bfloat16, quantize=dict(group_size=32, bits=4)),
    ),
}
