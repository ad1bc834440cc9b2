//! The fields of NemotronH's config.json.

use mlex_nn::Mamba2Config;
use serde::Deserialize;

use crate::config::{ModelConfig, check, check_layers, check_positive, check_size, head_dim};
use crate::{Error, Result};

/// The fields as mlx-lm names them; those without a default there have none here.
#[derive(Debug, Deserialize)]
pub(super) struct Config {
    pub(super) model_type: String,
    pub(super) vocab_size: i32,
    pub(super) hidden_size: i32,
    pub(super) intermediate_size: i32,
    pub(super) max_position_embeddings: i32,
    pub(super) num_attention_heads: i32,
    pub(super) num_key_value_heads: i32,
    pub(super) attention_bias: bool,
    mamba_num_heads: i32,
    mamba_head_dim: i32,
    mamba_proj_bias: bool,
    ssm_state_size: i32,
    conv_kernel: i32,
    n_groups: i32,
    pub(super) mlp_bias: bool,
    pub(super) layer_norm_epsilon: f32,
    use_conv_bias: bool,
    hybrid_override_pattern: Option<Pattern>,
    layers_block_type: Option<Pattern>,
    layer_types: Option<Pattern>,
    head_dim: Option<i32>,
    time_step_limit: Option<(f32, f32)>,
    moe_intermediate_size: Option<i32>,
    moe_shared_expert_intermediate_size: Option<i32>,
    moe_latent_size: Option<i32>,
    n_group: Option<i32>,
    n_routed_experts: Option<i32>,
    n_shared_experts: Option<i32>,
    topk_group: Option<i32>,
    num_experts_per_tok: Option<i32>,
    norm_topk_prob: Option<bool>,
    routed_scaling_factor: Option<f32>,
}

/// The kinds of the layers: a text with a letter for each, or a list.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Pattern {
    Letters(String),
    Names(Vec<String>),
}

/// What stands in a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Mamba,
    Attention,
    Mlp,
    Experts,
}

/// How tokens get to experts, and the sizes of these.
#[derive(Clone, Copy, Debug)]
pub(super) struct ExpertsConfig {
    pub(super) count: i32,
    pub(super) active: i32,
    pub(super) intermediate_size: i32,
    /// The width that experts compute in, where it is not the model's.
    pub(super) latent_size: Option<i32>,
    /// The width inside of an expert that every token goes to.
    pub(super) shared_size: Option<i32>,
    /// Experts are in so many groups, of which `active_groups` are looked at.
    pub(super) groups: i32,
    pub(super) active_groups: i32,
    pub(super) normalize: bool,
    pub(super) scale: f32,
}

impl Config {
    pub(super) fn new(config: &ModelConfig) -> Result<Self> {
        let config: Self = config.parse()?;
        check_size("vocab_size", config.vocab_size)?;
        check_size("hidden_size", config.hidden_size)?;
        check_size("intermediate_size", config.intermediate_size)?;
        check_size("num_attention_heads", config.num_attention_heads)?;
        let heads = 1..=config.num_attention_heads;
        check("num_key_value_heads", config.num_key_value_heads, heads)?;
        check_positive("layer_norm_epsilon", config.layer_norm_epsilon)?;
        let head_dim = config.head_dim()?;
        check_size("head_dim", head_dim)?;
        check_size(
            "num_attention_heads * head_dim",
            config.num_attention_heads.saturating_mul(head_dim),
        )?;
        for (name, value) in [
            ("mamba_num_heads", config.mamba_num_heads),
            ("mamba_head_dim", config.mamba_head_dim),
            ("ssm_state_size", config.ssm_state_size),
            ("n_groups", config.n_groups),
        ] {
            check_size(name, value)?;
        }
        let inner = config.mamba_num_heads.saturating_mul(config.mamba_head_dim);
        check_size("mamba_num_heads * mamba_head_dim", inner)?;
        let shared = config.n_groups.saturating_mul(config.ssm_state_size);
        check_size("n_groups * ssm_state_size", shared)?;
        Ok(config)
    }

    /// The width of a head of attention.
    pub(super) fn head_dim(&self) -> Result<i32> {
        match self.head_dim {
            Some(head_dim) => Ok(head_dim),
            None => head_dim(self.hidden_size, self.num_attention_heads),
        }
    }

    pub(super) fn mamba(&self) -> Mamba2Config {
        Mamba2Config {
            hidden_size: self.hidden_size,
            num_heads: self.mamba_num_heads,
            head_dim: self.mamba_head_dim,
            state_size: self.ssm_state_size,
            num_groups: self.n_groups,
            conv_kernel: self.conv_kernel,
            proj_bias: self.mamba_proj_bias,
            conv_bias: self.use_conv_bias,
            time_step_limit: self.time_step_limit.unwrap_or((0.0, f32::INFINITY)),
            norm_eps: self.layer_norm_epsilon,
        }
    }

    /// The kinds of the layers, in order: under the name that old configs have, or under one of
    /// the new ones.
    pub(super) fn kinds(&self) -> Result<Vec<Kind>> {
        let (field, pattern) = [
            ("hybrid_override_pattern", &self.hybrid_override_pattern),
            ("layers_block_type", &self.layers_block_type),
            ("layer_types", &self.layer_types),
        ]
        .into_iter()
        .find_map(|(field, pattern)| Some((field, pattern.as_ref()?)))
        .ok_or_else(|| Error::missing("field hybrid_override_pattern"))?;
        let names: Vec<String> = match pattern {
            Pattern::Letters(letters) => letters.chars().map(String::from).collect(),
            Pattern::Names(names) => names.clone(),
        };
        let count = i32::try_from(names.len()).unwrap_or(i32::MAX);
        check_layers(&format!("length of {field}"), count)?;
        let kind = |name: &String| match name.as_str() {
            "M" | "mamba" | "linear_attention" => Ok(Kind::Mamba),
            "*" | "attention" | "full_attention" => Ok(Kind::Attention),
            "-" | "mlp" => Ok(Kind::Mlp),
            "E" | "moe" => Ok(Kind::Experts),
            other => Err(Error::unsupported(field, format!("{other:?}"))),
        };
        names.iter().map(kind).collect()
    }

    /// The experts, which a layer of the pattern needs.
    pub(super) fn experts(&self) -> Result<ExpertsConfig> {
        let need = |name: &str, value: Option<i32>| {
            let value = value.ok_or_else(|| Error::missing(format!("field {name}")))?;
            check_size(name, value).map(|()| value)
        };
        let count = need("n_routed_experts", self.n_routed_experts)?;
        let active = need("num_experts_per_tok", self.num_experts_per_tok)?;
        check("num_experts_per_tok", active, 1..=count)?;
        let groups = self.n_group.unwrap_or(1);
        check("n_group", groups, 1..=count)?;
        let active_groups = self.topk_group.unwrap_or(groups);
        check("topk_group", active_groups, 1..=groups)?;
        if groups > 1 && (count % groups != 0 || count / groups < 2) {
            let expected = format!("a divisor of the {count} experts, with two of them in a group");
            return Err(Error::field("n_group", expected, groups.to_string()));
        }
        let shared = self.moe_shared_expert_intermediate_size;
        let shared_size = match self.n_shared_experts {
            Some(_) => Some(need("moe_shared_expert_intermediate_size", shared)?),
            None => None,
        };
        if let Some(size) = self.moe_latent_size {
            check_size("moe_latent_size", size)?;
        }
        let scale = self.routed_scaling_factor.unwrap_or(1.0);
        check_positive("routed_scaling_factor", scale)?;
        Ok(ExpertsConfig {
            count,
            active,
            intermediate_size: need("moe_intermediate_size", self.moe_intermediate_size)?,
            latent_size: self.moe_latent_size,
            shared_size,
            groups,
            active_groups,
            normalize: self.norm_topk_prob.unwrap_or(false),
            scale,
        })
    }
}
