//! GGUF files as MLX checkpoints: the config their metadata amount to, and their tensors under
//! the names that MLX checkpoints have.
//!
//! Sources: ggml's `docs/gguf.md` for the keys, llama.cpp's `gguf-py` for the tensor names.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use mlex_core::io::{Affine, Decoded, GgmlType, GgufFile, Mxfp4, unpermute_rope_rows};
use mlex_core::{Array, Dtype, QuantizationMode, Quantized};
use mlex_nn::LazyTensor;
use serde_json::{Map, Value, json};

use crate::config::ModelConfig;
use crate::files::{Tensors, dims};
use crate::{Error, Result};

/// How the architectures that are read here differ in their files.
struct Dialect {
    /// `general.architecture`.
    name: &'static str,
    /// The rows of the query and key projections are permuted for interleaved rotation.
    permuted: bool,
    /// The head has a width of its own, not hidden size / heads, where the file names none.
    needs_head_dim: bool,
}

const DIALECTS: &[Dialect] = &[
    Dialect {
        name: "llama",
        permuted: true,
        needs_head_dim: false,
    },
    Dialect {
        name: "qwen2",
        permuted: false,
        needs_head_dim: false,
    },
    Dialect {
        name: "qwen3",
        permuted: false,
        needs_head_dim: true,
    },
];

fn dialect(file: &GgufFile) -> Result<&'static Dialect> {
    let name: &str = file.require("general.architecture")?;
    DIALECTS
        .iter()
        .find(|dialect| dialect.name == name)
        .ok_or_else(|| {
            let known: Vec<_> = DIALECTS.iter().map(|dialect| dialect.name).collect();
            let expected = format!("one of {}", known.join(", "));
            Error::field("general.architecture", expected, format!("{name:?}"))
        })
}

/// The config.json that the metadata amount to.
pub(crate) fn config(file: &GgufFile) -> Result<ModelConfig> {
    let dialect = dialect(file)?;
    let arch = dialect.name;
    let number = |key: &str| -> Result<u64> { Ok(file.require(&format!("{arch}.{key}"))?) };
    let optional = |key: &str| -> Result<Option<u64>> { Ok(file.get(&format!("{arch}.{key}"))?) };
    let real = |key: &str| -> Result<Option<f32>> { Ok(file.get(&format!("{arch}.{key}"))?) };

    let hidden_size = number("embedding_length")?;
    let heads = number("attention.head_count")?;
    let eps = real("attention.layer_norm_rms_epsilon")?
        .ok_or_else(|| Error::missing(format!("{arch}.attention.layer_norm_rms_epsilon")))?;
    let head_dim = match optional("attention.key_length")? {
        Some(head_dim) => Some(head_dim),
        None if dialect.needs_head_dim && heads > 0 => Some(hidden_size / heads),
        None => None,
    };
    let vocab_size = file
        .info("token_embd.weight")
        .and_then(|info| info.shape.first().copied())
        .ok_or_else(|| Error::missing("tensor \"token_embd.weight\""))?;
    let context = optional("context_length")?;
    if let Some(dims) = optional("rope.dimension_count")?
        && heads > 0
        && dims != head_dim.unwrap_or(hidden_size / heads)
    {
        return Err(Error::unsupported(
            format!("{arch}.rope.dimension_count"),
            format!("{dims}, a part of each head,"),
        ));
    }

    let mut config = Map::new();
    let mut put = |key: &str, value: Value| config.insert(key.to_owned(), value);
    put("model_type", json!(arch));
    put("hidden_size", json!(hidden_size));
    put("num_hidden_layers", json!(number("block_count")?));
    put("intermediate_size", json!(number("feed_forward_length")?));
    put("num_attention_heads", json!(heads));
    put(
        "num_key_value_heads",
        json!(optional("attention.head_count_kv")?.unwrap_or(heads)),
    );
    if let Some(head_dim) = head_dim {
        put("head_dim", json!(head_dim));
    }
    put("rms_norm_eps", json!(shortest(eps)));
    put("vocab_size", json!(vocab_size));
    put(
        "rope_theta",
        json!(shortest(real("rope.freq_base")?.unwrap_or(10_000.0))),
    );
    if let Some(context) = context {
        put("max_position_embeddings", json!(context));
    }
    put(
        "tie_word_embeddings",
        json!(file.info("output.weight").is_none()),
    );
    // Llama has biases as a setting; Qwen2 always has its own.
    if dialect.name == "llama" {
        for (tensor, field) in [
            ("blk.0.attn_q.bias", "attention_bias"),
            ("blk.0.ffn_gate.bias", "mlp_bias"),
        ] {
            if file.info(tensor).is_some() {
                put(field, json!(true));
            }
        }
    }
    if let Some(scaling) = rope_scaling(file, arch, context)? {
        put("rope_scaling", scaling);
    }
    let id = |name: &str| file.get::<u64>(&format!("tokenizer.ggml.{name}"));
    if let Some(id) = id("bos_token_id")? {
        put("bos_token_id", json!(id));
    }
    // The ends of a turn and of a message too: a tokenizer's files name only one.
    let mut ends: Vec<u64> = Vec::new();
    for name in ["eos_token_id", "eot_token_id", "eom_token_id"] {
        ends.extend(id(name)?.filter(|id| !ends.contains(id)));
    }
    match ends.as_slice() {
        [] => {}
        [end] => _ = put("eos_token_id", json!(end)),
        ends => _ = put("eos_token_id", json!(ends)),
    }
    if let Some(section) = quantization(file)? {
        put("quantization", section);
    }
    Ok(ModelConfig::new(config))
}

/// An f32 as JSON prints it shortest: 1e-5, not the digits of its double.
fn shortest(value: f32) -> f64 {
    value.to_string().parse().unwrap_or(f64::from(value))
}

fn rope_scaling(file: &GgufFile, arch: &str, context: Option<u64>) -> Result<Option<Value>> {
    // Llama 3.1 files carry one factor per frequency instead of the settings. "longrope" takes
    // such factors; without a stretch of the context its magnitude is 1.
    if file.info("rope_freqs.weight").is_some() {
        let Decoded::Plain {
            dtype: Dtype::Float32,
            bytes,
            ..
        } = file.tensor("rope_freqs.weight")?.decode()?
        else {
            return Err(Error::field(
                "rope_freqs.weight",
                "f32 numbers",
                "another type",
            ));
        };
        let factors: Vec<f32> = bytes
            .chunks_exact(4)
            .map(|bytes| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
            .collect();
        let context = context.ok_or_else(|| Error::missing(format!("{arch}.context_length")))?;
        return Ok(Some(json!({
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "original_max_position_embeddings": context,
        })));
    }
    let Some(kind) = file.get::<&str>(&format!("{arch}.rope.scaling.type"))? else {
        return Ok(None);
    };
    let factor: Option<f32> = file.get(&format!("{arch}.rope.scaling.factor"))?;
    let original: Option<u64> =
        file.get(&format!("{arch}.rope.scaling.original_context_length"))?;
    match kind {
        "none" => Ok(None),
        "linear" | "yarn" => {
            let mut section = Map::new();
            section.insert("rope_type".to_owned(), json!(kind));
            if let Some(factor) = factor {
                section.insert("factor".to_owned(), json!(shortest(factor)));
            }
            if let Some(original) = original {
                section.insert(
                    "original_max_position_embeddings".to_owned(),
                    json!(original),
                );
            }
            Ok(Some(Value::Object(section)))
        }
        other => Err(Error::unsupported(
            format!("{arch}.rope.scaling.type"),
            other,
        )),
    }
}

/// MLX's layout of a tensor's blocks, with the same values; none for what becomes f32.
fn layout(ggml_type: GgmlType) -> Option<Quantized> {
    let bits = match ggml_type {
        GgmlType::Q4_0 | GgmlType::Q4_1 | GgmlType::Q4_K => 4,
        GgmlType::Q5_0 | GgmlType::Q5_1 | GgmlType::Q5_K => 5,
        GgmlType::Q8_0 => 8,
        GgmlType::MXFP4 => {
            return Some(Quantized {
                bits: 4,
                group_size: 32,
                mode: QuantizationMode::Mxfp4,
            });
        }
        _ => return None,
    };
    Some(Quantized {
        bits,
        group_size: 32,
        mode: QuantizationMode::Affine,
    })
}

/// The `quantization` section: the layout that most tensors have, others under their paths.
fn quantization(file: &GgufFile) -> Result<Option<Value>> {
    let mut layers: BTreeMap<String, Quantized> = BTreeMap::new();
    let mut counts: Vec<(Quantized, usize)> = Vec::new();
    for name in file.names() {
        let (Some(info), Some(path)) = (file.info(name), mlx_name(name)?) else {
            continue;
        };
        let (Some(layout), Some(module)) = (layout(info.ggml_type), path.strip_suffix(".weight"))
        else {
            continue;
        };
        layers.insert(module.to_owned(), layout);
        match counts.iter_mut().find(|(known, _)| *known == layout) {
            Some((_, count)) => *count += 1,
            None => counts.push((layout, 1)),
        }
    }
    let Some((default, _)) = counts.into_iter().max_by_key(|(_, count)| *count) else {
        return Ok(None);
    };
    let settings = |layout: Quantized| -> Map<String, Value> {
        let mut settings = Map::new();
        settings.insert("group_size".to_owned(), json!(layout.group_size));
        settings.insert("bits".to_owned(), json!(layout.bits));
        settings.insert("mode".to_owned(), json!(layout.mode.name()));
        settings
    };
    let mut section = settings(default);
    for (module, layout) in layers {
        if layout != default {
            section.insert(module, Value::Object(settings(layout)));
        }
    }
    Ok(Some(Value::Object(section)))
}

/// The name of a tensor in MLX checkpoints; none for one that they do not have.
fn mlx_name(name: &str) -> Result<Option<String>> {
    let (module, suffix) = name.rsplit_once('.').unwrap_or((name, ""));
    let path = match module {
        "token_embd" => "model.embed_tokens".to_owned(),
        "output_norm" => "model.norm".to_owned(),
        "output" => "lm_head".to_owned(),
        "rope_freqs" => return Ok(None),
        _ => {
            let block = module
                .strip_prefix("blk.")
                .and_then(|rest| rest.split_once('.'));
            let (Some((layer, part)), true) = (block, matches!(suffix, "weight" | "bias")) else {
                return Err(unknown_tensor(name));
            };
            let part = match part {
                "attn_q" => "self_attn.q_proj",
                "attn_k" => "self_attn.k_proj",
                "attn_v" => "self_attn.v_proj",
                "attn_output" => "self_attn.o_proj",
                "attn_q_norm" => "self_attn.q_norm",
                "attn_k_norm" => "self_attn.k_norm",
                "attn_norm" => "input_layernorm",
                "ffn_norm" => "post_attention_layernorm",
                "ffn_gate" => "mlp.gate_proj",
                "ffn_up" => "mlp.up_proj",
                "ffn_down" => "mlp.down_proj",
                // Precomputed frequencies of old files.
                "attn_rot_embd" => return Ok(None),
                _ => return Err(unknown_tensor(name)),
            };
            format!("model.layers.{layer}.{part}")
        }
    };
    Ok(Some(format!("{path}.{suffix}")))
}

fn unknown_tensor(name: &str) -> Error {
    Error::field(
        "tensor name",
        "one of a Llama-shaped model",
        format!("{name:?}"),
    )
}

/// The tensors by their names in MLX checkpoints, decoded when they are read.
pub(crate) fn tensors(file: &Rc<GgufFile>) -> Result<Tensors> {
    let dialect = dialect(file)?;
    let mut tensors = Tensors::new();
    let names: Vec<String> = file.names().map(str::to_owned).collect();
    for name in names {
        let (Some(info), Some(path)) = (file.info(&name), mlx_name(&name)?) else {
            continue;
        };
        let head_dim = if dialect.permuted {
            permuted_head_dim(file, &name)?
        } else {
            None
        };
        let shape = dims(&name, &info.shape)?;
        let source = Rc::new(Source {
            file: Rc::clone(file),
            name: name.clone(),
            head_dim,
            decoded: RefCell::default(),
        });
        let Some(layout) = layout(info.ggml_type) else {
            let dtype = match info.ggml_type {
                GgmlType::F16 => Dtype::Float16,
                GgmlType::BF16 => Dtype::Bfloat16,
                GgmlType::F64 => Dtype::Float64,
                GgmlType::I8 => Dtype::Int8,
                GgmlType::I16 => Dtype::Int16,
                GgmlType::I32 => Dtype::Int32,
                GgmlType::I64 => Dtype::Int64,
                _ => Dtype::Float32,
            };
            tensors.insert(path, source.part(Part::Weight, shape, dtype));
            continue;
        };
        let Some(module) = path.strip_suffix(".weight") else {
            return Err(Error::field(
                format!("type of {name:?}"),
                "a float",
                "quantized",
            ));
        };
        let columns = shape.last().copied().unwrap_or_default();
        let with_columns = |columns: i32| {
            let mut shape = shape.clone();
            if let Some(last) = shape.last_mut() {
                *last = columns;
            }
            shape
        };
        let packed = with_columns(columns / 32 * layout.bits);
        let groups = with_columns(columns / layout.group_size);
        let mut put = |suffix: &str, part, shape, dtype| {
            tensors.insert(
                format!("{module}.{suffix}"),
                source.part(part, shape, dtype),
            );
        };
        put("weight", Part::Weight, packed, Dtype::Uint32);
        if layout.mode == QuantizationMode::Affine {
            put("scales", Part::Scales, groups.clone(), Dtype::Float32);
            put("biases", Part::Biases, groups, Dtype::Float32);
        } else {
            put("scales", Part::Scales, groups, Dtype::Uint8);
        }
    }
    Ok(tensors)
}

/// The head width by which the rows of a query or key projection are permuted.
fn permuted_head_dim(file: &GgufFile, name: &str) -> Result<Option<usize>> {
    let count = if name.contains(".attn_q.") {
        "attention.head_count"
    } else if name.contains(".attn_k.") {
        "attention.head_count_kv"
    } else {
        return Ok(None);
    };
    let heads: u64 = match file.get(&format!("llama.{count}"))? {
        Some(heads) => heads,
        None => file.require("llama.attention.head_count")?,
    };
    let rows = file
        .info(name)
        .and_then(|info| info.shape.first().copied())
        .unwrap_or_default();
    let heads = usize::try_from(heads).unwrap_or(usize::MAX);
    if heads == 0 || !rows.is_multiple_of(heads) {
        let expected = format!("a divisor of the {rows} rows of {name:?}");
        return Err(Error::field(
            format!("llama.{count}"),
            expected,
            heads.to_string(),
        ));
    }
    Ok(Some(rows / heads))
}

/// Which array of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Part {
    Weight,
    Scales,
    Biases,
}

/// A tensor of the file, which several arrays come from; decoded once.
struct Source {
    file: Rc<GgufFile>,
    name: String,
    head_dim: Option<usize>,
    /// The arrays that were decoded and not asked for yet.
    decoded: RefCell<BTreeMap<Part, Array>>,
}

impl Source {
    fn part(self: &Rc<Self>, part: Part, shape: Vec<i32>, dtype: Dtype) -> LazyTensor {
        let source = Rc::clone(self);
        LazyTensor {
            shape,
            dtype,
            load: Box::new(move || source.take(part)),
        }
    }

    fn take(&self, part: Part) -> mlex_core::Result<Array> {
        if let Some(array) = self.decoded.borrow_mut().remove(&part) {
            return Ok(array);
        }
        let with_place =
            |error: mlex_core::Error| error.with_tensor(&self.name).with_path(self.file.path());
        let mut arrays = self.decode().map_err(with_place)?;
        self.file.release(&self.name);
        let array = arrays.remove(&part).ok_or_else(|| {
            with_place(mlex_core::Error::new(mlex_core::ErrorKind::MissingTensor))
        })?;
        *self.decoded.borrow_mut() = arrays;
        Ok(array)
    }

    fn decode(&self) -> mlex_core::Result<BTreeMap<Part, Array>> {
        let tensor = self.file.tensor(&self.name)?;
        match tensor.decode()? {
            Decoded::Plain {
                dtype,
                shape,
                bytes,
            } => {
                let mut bytes = bytes;
                if let Some(head_dim) = self.head_dim {
                    unpermute_rope_rows(bytes.to_mut(), rows(&shape), head_dim)?;
                }
                let array = Array::from_bytes(&bytes, &to_i32(&shape), dtype)?;
                Ok(BTreeMap::from([(Part::Weight, array)]))
            }
            Decoded::Affine(affine) => self.affine(affine),
            Decoded::Mxfp4(mxfp4) => self.mxfp4(mxfp4),
            _ => Err(mlex_core::Error::format(
                "tensor type",
                "a known one",
                "another",
            )),
        }
    }

    fn affine(&self, mut affine: Affine) -> mlex_core::Result<BTreeMap<Part, Array>> {
        if let Some(head_dim) = self.head_dim {
            let rows = rows(&affine.shape);
            unpermute_rope_rows(&mut affine.weight, rows, head_dim)?;
            unpermute_rope_rows(&mut affine.scales, rows, head_dim)?;
            unpermute_rope_rows(&mut affine.biases, rows, head_dim)?;
        }
        let groups = to_i32(&affine.scales_shape());
        Ok(BTreeMap::from([
            (
                Part::Weight,
                Array::from_slice(&affine.weight, &to_i32(&affine.weight_shape()))?,
            ),
            (Part::Scales, Array::from_slice(&affine.scales, &groups)?),
            (Part::Biases, Array::from_slice(&affine.biases, &groups)?),
        ]))
    }

    fn mxfp4(&self, mut mxfp4: Mxfp4) -> mlex_core::Result<BTreeMap<Part, Array>> {
        if let Some(head_dim) = self.head_dim {
            let rows = rows(&mxfp4.shape);
            unpermute_rope_rows(&mut mxfp4.weight, rows, head_dim)?;
            unpermute_rope_rows(&mut mxfp4.scales, rows, head_dim)?;
        }
        let groups = to_i32(&mxfp4.scales_shape());
        Ok(BTreeMap::from([
            (
                Part::Weight,
                Array::from_slice(&mxfp4.weight, &to_i32(&mxfp4.weight_shape()))?,
            ),
            (Part::Scales, Array::from_slice(&mxfp4.scales, &groups)?),
        ]))
    }
}

/// All dimensions but the last; the only one of a vector counts as rows of one element.
fn rows(shape: &[usize]) -> usize {
    match shape {
        [rows] => *rows,
        [rows @ .., _columns] => rows.iter().product(),
        [] => 1,
    }
}

/// The shape of a decoded tensor; its sizes were checked when the file was opened.
fn to_i32(shape: &[usize]) -> Vec<i32> {
    shape
        .iter()
        .map(|&dim| i32::try_from(dim).unwrap_or(i32::MAX))
        .collect()
}
