//! Towers at their real sizes with random weights, and what they see and hear.
//!
//! The sizes are those of the published configs of Qwen3.5-0.8B, Qwen3-VL-4B, Qwen2.5-VL-3B and
//! Gemma 4 E2B.

use std::error::Error;
use std::fs;
use std::io::Write;
use std::path::Path;

use mlex_audio::MelFeatures;
use mlex_core::io::{StoredDtype, TensorSpec, write_safetensors};
use mlex_core::{Array, Dtype};
use mlex_models::ModelFiles;
use mlex_models::towers::Towers;
use mlex_vision::{GemmaInput, QwenInput};
use serde_json::{Value, json};

/// A tower, and one input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tower {
    /// The vision tower of Qwen3.5-0.8B: an image of 1024x1024 pixels, 1024 tokens.
    Qwen3_5,
    /// The vision tower of Qwen3-VL-4B: an image of 512x512 pixels, 256 tokens.
    Qwen3Vl,
    /// The vision tower of Qwen2.5-VL-3B: an image of 504x504 pixels, 324 tokens.
    Qwen2_5Vl,
    /// The vision tower of Gemma 4 E2B: an image of 672x960 pixels, its default of 280 tokens.
    GemmaVision,
    /// The audio tower of Gemma 4 E2B: thirty seconds, 750 tokens.
    GemmaAudio,
}

/// A tensor, and how many rows it is multiplied with.
struct Part {
    name: String,
    shape: Vec<usize>,
    rows: usize,
}

/// The parts of a tower, and the operations between them.
struct Plan {
    config: Value,
    parts: Vec<Part>,
    other_flop: usize,
}

impl Plan {
    fn new(config: Value) -> Self {
        Self {
            config,
            parts: Vec::new(),
            other_flop: 0,
        }
    }

    fn matrix(&mut self, name: String, output: usize, input: usize, rows: usize) {
        self.parts.push(Part {
            name,
            shape: vec![output, input],
            rows,
        });
    }

    /// A matrix and a bias.
    fn linear(&mut self, name: &str, output: usize, input: usize, rows: usize) {
        self.matrix(format!("{name}.weight"), output, input, rows);
        self.other(format!("{name}.bias"), &[output]);
    }

    /// A matrix, and bounds of what it is given and gives.
    fn clipped(&mut self, name: &str, output: usize, input: usize, rows: usize) {
        self.matrix(format!("{name}.linear.weight"), output, input, rows);
        for bound in ["input_min", "input_max", "output_min", "output_max"] {
            self.other(format!("{name}.{bound}"), &[]);
        }
    }

    fn other(&mut self, name: String, shape: &[usize]) {
        self.parts.push(Part {
            name,
            shape: shape.to_vec(),
            rows: 0,
        });
    }
}

impl Tower {
    /// All of them, with their names.
    pub const ALL: [(&'static str, Self); 5] = [
        ("qwen3.5-0.8b-1024x1024", Self::Qwen3_5),
        ("qwen3-vl-4b-512x512", Self::Qwen3Vl),
        ("qwen2.5-vl-3b-504x504", Self::Qwen2_5Vl),
        ("gemma4-e2b-280-tokens", Self::GemmaVision),
        ("gemma4-e2b-30-seconds", Self::GemmaAudio),
    ];

    fn plan(self) -> Plan {
        match self {
            Self::Qwen3_5 => QWEN3_5.plan(),
            Self::Qwen3Vl => QWEN3_VL.plan(),
            Self::Qwen2_5Vl => QWEN2_5_VL.plan(),
            Self::GemmaVision => gemma_vision(),
            Self::GemmaAudio => gemma_audio(),
        }
    }

    /// The operations of its products: two for each multiplication.
    pub fn flop(self) -> u64 {
        let plan = self.plan();
        let products = plan.parts.iter();
        let products = products.map(|part| 2 * part.rows * part.shape.iter().product::<usize>());
        (products.sum::<usize>() + plan.other_flop) as u64
    }

    /// The tower with random weights, through a checkpoint that is there while it is loaded.
    ///
    /// # Errors
    /// When the disk is full, or MLX out of memory.
    pub fn load(self, dtype: Dtype) -> Result<Towers, Box<dyn Error>> {
        let dir = tempfile::tempdir()?;
        let plan = self.plan();
        fs::write(dir.path().join("config.json"), plan.config.to_string())?;
        write(&dir.path().join("model.safetensors"), &plan.parts)?;
        let files = ModelFiles::open(dir.path())?;
        let towers = Towers::load(&files, Some(dtype))?;
        towers.ok_or_else(|| "the checkpoint has no tower".into())
    }

    /// What it is given.
    pub fn input(self) -> Input {
        match self {
            Self::Qwen3_5 => QWEN3_5.input(),
            Self::Qwen3Vl => QWEN3_VL.input(),
            Self::Qwen2_5Vl => QWEN2_5_VL.input(),
            Self::GemmaVision => Input::GemmaImage(GemmaInput {
                patches: values(2520 * 768, 0.0),
                patch_len: 768,
                grid: [42, 60],
                tokens: 280,
            }),
            Self::GemmaAudio => Input::GemmaSound(MelFeatures {
                values: values(2999 * 128, -3.0),
                bins: 128,
                valid: 2999,
                tokens: 750,
            }),
        }
    }
}

/// What a tower is given.
#[derive(Clone, Debug)]
pub enum Input {
    /// An image of a Qwen model.
    Qwen(QwenInput),
    /// An image of Gemma 4.
    GemmaImage(GemmaInput),
    /// A sound of Gemma 4.
    GemmaSound(MelFeatures),
}

impl Input {
    /// Its features, computed.
    ///
    /// # Errors
    /// When MLX is out of memory.
    pub fn run(&self, towers: &Towers) -> mlex_models::Result<Array> {
        let encoded = match self {
            Self::Qwen(input) => towers.qwen_image(input),
            Self::GemmaImage(input) => towers.gemma_image(input),
            Self::GemmaSound(input) => towers.gemma_sound(input),
        };
        Ok(encoded?.features)
    }
}

/// Numbers from `low` to 1.
fn values(count: usize, low: f32) -> Vec<f32> {
    let mut state = 1_u32;
    let next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        low + (1.0 - low) * (state >> 8) as f32 / (1 << 24) as f32
    };
    std::iter::repeat_with(next).take(count).collect()
}

/// Writes bfloat16 tensors of random numbers, of a size that keeps activations in bounds.
fn write(path: &Path, parts: &[Part]) -> Result<(), Box<dyn Error>> {
    let tensors = parts.iter().map(|part| TensorSpec {
        name: part.name.clone(),
        dtype: StoredDtype::BF16,
        shape: part.shape.clone(),
    });
    let random = values(1 << 16, -1.0);
    write_safetensors(path, tensors, &Default::default(), |spec, sink| {
        let columns = spec.shape.iter().skip(1).product::<usize>().max(1);
        let (least, largest) = (spec.name.ends_with("_min"), spec.name.ends_with("_max"));
        let number = |x: f32| match spec.shape.len() {
            // Bounds, and the weights of norms.
            0 if least => -20.0,
            0 if largest => 20.0,
            1 => 1.0 + 0.1 * x,
            _ => x * (3.0 / columns as f32).sqrt(),
        };
        let bytes = random.iter().flat_map(|&x| {
            let [_, _, low, high] = number(x).to_le_bytes();
            [low, high]
        });
        let bytes: Vec<u8> = bytes.collect();
        let mut left = spec.shape.iter().product::<usize>() * 2;
        while left > 0 {
            let count = left.min(bytes.len());
            sink.write_all(&bytes[..count])?;
            left -= count;
        }
        Ok(())
    })?;
    Ok(())
}

/// A vision tower of Qwen.
struct Qwen {
    model_type: &'static str,
    depth: usize,
    hidden: usize,
    inner: usize,
    heads: usize,
    /// Of the language model.
    width: usize,
    /// The side of a patch.
    patch: usize,
    /// Blocks whose outputs become features too.
    deepstack: &'static [usize],
    /// The side of the image in patches.
    side: usize,
}

/// <https://huggingface.co/Qwen/Qwen3.5-0.8B/blob/main/config.json>
const QWEN3_5: Qwen = Qwen {
    model_type: "qwen3_5",
    depth: 12,
    hidden: 768,
    inner: 3072,
    heads: 12,
    width: 1024,
    patch: 16,
    deepstack: &[],
    side: 64,
};

/// <https://huggingface.co/Qwen/Qwen3-VL-4B-Instruct/blob/main/config.json>
const QWEN3_VL: Qwen = Qwen {
    model_type: "qwen3_vl",
    depth: 24,
    hidden: 1024,
    inner: 4096,
    heads: 16,
    width: 2560,
    patch: 16,
    deepstack: &[5, 11, 17],
    side: 32,
};

/// <https://huggingface.co/Qwen/Qwen2.5-VL-3B-Instruct/blob/main/config.json>
const QWEN2_5_VL: Qwen = Qwen {
    model_type: "qwen2_5_vl",
    depth: 32,
    hidden: 1280,
    inner: 3420,
    heads: 16,
    width: 2048,
    patch: 14,
    deepstack: &[],
    side: 36,
};

impl Qwen {
    /// Patches of a token.
    const SQUARE: usize = 4;
    /// Blocks of Qwen2.5-VL whose patches see all others.
    const FULL: [usize; 4] = [7, 15, 23, 31];
    /// Patches of a window of Qwen2.5-VL: 112 pixels wide.
    const WINDOW: usize = 64;

    fn has_windows(&self) -> bool {
        self.model_type == "qwen2_5_vl"
    }

    /// Values of a patch: of two frames and three colours.
    fn patch_len(&self) -> usize {
        2 * 3 * self.patch * self.patch
    }

    fn input(&self) -> Input {
        let patches = self.side * self.side;
        Input::Qwen(QwenInput {
            patches: values(patches * self.patch_len(), -1.0),
            patch_len: self.patch_len(),
            grid: [1, self.side, self.side],
            tokens: patches / Self::SQUARE,
        })
    }

    fn config(&self) -> Value {
        let mut vision = json!({
            "depth": self.depth,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_heads": self.heads,
            "out_hidden_size": self.width,
            "patch_size": self.patch,
        });
        if self.has_windows() {
            vision["window_size"] = 112.into();
            vision["fullatt_block_indexes"] = Self::FULL.to_vec().into();
        } else {
            vision["num_position_embeddings"] = 2304.into();
            vision["deepstack_visual_indexes"] = self.deepstack.into();
        }
        json!({"model_type": self.model_type, "vision_config": vision})
    }

    fn plan(&self) -> Plan {
        let (hidden, inner, patches) = (self.hidden, self.inner, self.side * self.side);
        let mut plan = Plan::new(self.config());
        let (patch, tower) = (self.patch, "vision_tower");
        plan.parts.push(Part {
            name: format!("{tower}.patch_embed.proj.weight"),
            shape: vec![hidden, 2, patch, patch, 3],
            rows: patches,
        });
        if !self.has_windows() {
            plan.other(format!("{tower}.patch_embed.proj.bias"), &[hidden]);
            plan.other(format!("{tower}.pos_embed.weight"), &[2304, hidden]);
        }
        for n in 0..self.depth {
            let block = format!("{tower}.blocks.{n}");
            self.norm(&mut plan, format!("{block}.norm1"), hidden);
            self.norm(&mut plan, format!("{block}.norm2"), hidden);
            let attention = [
                ("attn.qkv", 3 * hidden, hidden),
                ("attn.proj", hidden, hidden),
            ];
            let mlp: &[_] = match self.has_windows() {
                true => &[
                    ("mlp.gate_proj", inner, hidden),
                    ("mlp.up_proj", inner, hidden),
                    ("mlp.down_proj", hidden, inner),
                ],
                false => &[
                    ("mlp.linear_fc1", inner, hidden),
                    ("mlp.linear_fc2", hidden, inner),
                ],
            };
            for &(name, output, input) in attention.iter().chain(mlp) {
                plan.linear(&format!("{block}.{name}"), output, input, patches);
            }
            plan.other_flop += 4 * self.pairs(n) * hidden;
        }
        let [norm, fc1, fc2] = match self.has_windows() {
            true => ["ln_q", "mlp.0", "mlp.2"],
            false => ["norm", "linear_fc1", "linear_fc2"],
        };
        let (tokens, wide) = (patches / Self::SQUARE, Self::SQUARE * hidden);
        let deep = (0..self.deepstack.len()).map(|n| (format!("deepstack_merger_list.{n}"), wide));
        for (merger, normed) in deep.chain([("merger".to_owned(), hidden)]) {
            let merger = format!("{tower}.{merger}");
            self.norm(&mut plan, format!("{merger}.{norm}"), normed);
            plan.linear(&format!("{merger}.{fc1}"), wide, wide, tokens);
            plan.linear(&format!("{merger}.{fc2}"), self.width, wide, tokens);
        }
        plan
    }

    fn norm(&self, plan: &mut Plan, name: String, width: usize) {
        plan.other(format!("{name}.weight"), &[width]);
        if !self.has_windows() {
            plan.other(format!("{name}.bias"), &[width]);
        }
    }

    /// Pairs of patches that see each other in a block.
    fn pairs(&self, block: usize) -> usize {
        let patches = self.side * self.side;
        if !self.has_windows() || Self::FULL.contains(&block) {
            return patches * patches;
        }
        // Along one side: whole windows, and what is left.
        let side = Self::WINDOW.isqrt();
        let rest = self.side % side;
        let along = self.side / side * side * side + rest * rest;
        along * along
    }
}

/// <https://huggingface.co/google/gemma-4-E2B-it/blob/main/config.json>
fn gemma(section: &str, config: Value) -> Plan {
    let mut whole = json!({
        "model_type": "gemma4",
        "text_config": {"hidden_size": 1536},
    });
    whole[section] = config;
    Plan::new(whole)
}

fn gemma_vision() -> Plan {
    let (depth, hidden, inner, head_dim) = (16, 768, 3072, 64);
    let (patches, tokens) = (2520, 280);
    // The defaults are these sizes; that there are bounds is not.
    let mut plan = gemma("vision_config", json!({"use_clipped_linears": true}));
    let embedder = "vision_tower.patch_embedder";
    plan.matrix(
        format!("{embedder}.input_proj.weight"),
        hidden,
        768,
        patches,
    );
    plan.other(
        format!("{embedder}.position_embedding_table"),
        &[2, 10_240, hidden],
    );
    for n in 0..depth {
        let layer = format!("vision_tower.encoder.layers.{n}");
        for (name, output, input) in [
            ("self_attn.q_proj", hidden, hidden),
            ("self_attn.k_proj", hidden, hidden),
            ("self_attn.v_proj", hidden, hidden),
            ("self_attn.o_proj", hidden, hidden),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ] {
            plan.clipped(&format!("{layer}.{name}"), output, input, patches);
        }
        for name in ["q_norm", "k_norm"] {
            plan.other(format!("{layer}.self_attn.{name}.weight"), &[head_dim]);
        }
        for name in [
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ] {
            plan.other(format!("{layer}.{name}.weight"), &[hidden]);
        }
        plan.other_flop += 4 * patches * patches * hidden;
    }
    let projection = "embed_vision.embedding_projection.weight".to_owned();
    plan.matrix(projection, 1536, hidden, tokens);
    plan
}

fn gemma_audio() -> Plan {
    let (depth, hidden, tokens) = (12, 1024, 750);
    // The defaults are these sizes.
    let mut plan = gemma("audio_config", json!({}));
    let input = "audio_tower.subsample_conv_projection";
    for (layer, channels, out, places) in
        [("layer0", 1, 128, 1500 * 64), ("layer1", 128, 32, 750 * 32)]
    {
        plan.parts.push(Part {
            name: format!("{input}.{layer}.conv.weight"),
            shape: vec![out, 3, 3, channels],
            rows: places,
        });
        plan.other(format!("{input}.{layer}.norm.weight"), &[out]);
    }
    let name = format!("{input}.input_proj_linear.weight");
    plan.matrix(name, hidden, 1024, tokens);
    for n in 0..depth {
        let layer = format!("audio_tower.layers.{n}");
        for (name, output, input) in [
            ("feed_forward1.ffw_layer_1", 4 * hidden, hidden),
            ("feed_forward1.ffw_layer_2", hidden, 4 * hidden),
            ("feed_forward2.ffw_layer_1", 4 * hidden, hidden),
            ("feed_forward2.ffw_layer_2", hidden, 4 * hidden),
            ("self_attn.q_proj", hidden, hidden),
            ("self_attn.k_proj", hidden, hidden),
            ("self_attn.v_proj", hidden, hidden),
            ("self_attn.post", hidden, hidden),
            ("lconv1d.linear_start", 2 * hidden, hidden),
            ("lconv1d.linear_end", hidden, hidden),
        ] {
            plan.clipped(&format!("{layer}.{name}"), output, input, tokens);
        }
        // Of 13 distances; chunks of 12 queries over 24 keys.
        let relative = format!("{layer}.self_attn.relative_k_proj.weight");
        plan.matrix(relative, hidden, hidden, 13);
        plan.other_flop += 2 * tokens * (2 * 24 + 13) * hidden;
        plan.other(format!("{layer}.self_attn.per_dim_scale"), &[hidden / 8]);
        plan.other(
            format!("{layer}.lconv1d.depthwise_conv1d.weight"),
            &[hidden, 5, 1],
        );
        for name in [
            "feed_forward1.pre_layer_norm",
            "feed_forward1.post_layer_norm",
            "feed_forward2.pre_layer_norm",
            "feed_forward2.post_layer_norm",
            "lconv1d.pre_layer_norm",
            "lconv1d.conv_norm",
            "norm_pre_attn",
            "norm_post_attn",
            "norm_out",
        ] {
            plan.other(format!("{layer}.{name}.weight"), &[hidden]);
        }
    }
    plan.matrix(
        "audio_tower.output_proj.weight".to_owned(),
        1536,
        hidden,
        tokens,
    );
    plan.other("audio_tower.output_proj.bias".to_owned(), &[1536]);
    let projection = "embed_audio.embedding_projection.weight".to_owned();
    plan.matrix(projection, 1536, 1536, tokens);
    plan
}
