//! What each tensor of a model becomes, decided before anything is read.

use std::collections::BTreeMap;

use mlex_core::io::TensorSpec;
use mlex_core::{Dtype, Quantized};
use mlex_nn::{LazyTensor, QuantizationConfig, Taken};

use super::ConvertOptions;
use super::choose::Chooser;
use super::job::{Change, Job, Source};
use crate::{Error, ModelInfo, Result, Tensors};

/// Tensors that belong together and are written one after the other.
pub(super) struct Unit {
    /// The tensors that are written.
    pub(super) specs: Vec<TensorSpec>,
    /// How they are made.
    pub(super) job: Job,
}

impl Unit {
    /// The bytes that are written.
    pub(super) fn bytes(&self) -> Result<u64> {
        let sizes = self.specs.iter().map(TensorSpec::byte_len);
        Ok(sizes.sum::<mlex_core::Result<u64>>()?)
    }

    /// Whether what comes after it is aligned when it is.
    fn keeps_alignment(&self) -> bool {
        self.specs
            .iter()
            .all(|spec| spec.byte_len().is_ok_and(|bytes| bytes % 8 == 0))
    }
}

/// A model as it will be written.
pub(super) struct Plan {
    /// In the order of the files.
    pub(super) units: Vec<Unit>,
    /// How its layers are quantized, where some are.
    pub(super) quantization: Option<QuantizationConfig>,
    /// Weights, each counted once however it is packed.
    pub(super) parameters: u64,
}

/// The tensors of a layer that may be quantized.
struct Layer {
    path: String,
    weight: LazyTensor,
    scales: Option<LazyTensor>,
    biases: Option<LazyTensor>,
    /// How it is quantized, where there are scales.
    layout: Option<Quantized>,
}

impl Layer {
    fn columns(&self) -> i32 {
        match (&self.scales, self.layout) {
            (Some(scales), Some(layout)) => {
                scales.shape.last().copied().unwrap_or_default() * layout.group_size
            }
            _ => self.weight.shape.last().copied().unwrap_or_default(),
        }
    }

    /// The shape of the dense weight.
    fn shape(&self) -> Vec<i32> {
        with_columns(&self.weight.shape, self.columns())
    }

    /// The type that the dense weight has where none is asked for.
    fn dtype(&self) -> Dtype {
        match &self.scales {
            Some(scales) if scales.dtype.is_float() => scales.dtype,
            Some(_) => Dtype::Bfloat16,
            // MLX quantizes no f64.
            None if self.weight.dtype == Dtype::Float64 => Dtype::Float32,
            None => self.weight.dtype,
        }
    }
}

/// Decides what becomes of everything that a model takes.
///
/// # Errors
/// When the options do not fit the model.
pub(super) fn plan(
    taken: Taken,
    info: &ModelInfo,
    default: Option<Quantized>,
    options: &ConvertOptions,
) -> Result<Plan> {
    let mut tensors = taken.tensors;
    let chooser = match &options.quantize {
        Some(quantize) => Some(Chooser::new(
            quantize,
            &info.model_type,
            usize::try_from(info.num_layers).unwrap_or_default(),
            taken.layers.keys().map(String::as_str),
        )?),
        None => None,
    };
    let mut planner = Planner {
        options,
        units: Vec::new(),
        layouts: BTreeMap::new(),
        parameters: 0,
    };
    let mut quantized = 0;
    for (path, layout) in taken.layers {
        let Some(layer) = take_layer(&mut tensors, path, layout) else {
            continue;
        };
        let dense = layer.layout.is_none() || options.dequantize;
        let wanted = match &chooser {
            Some(chooser) if dense && layer.weight.shape.len() > 1 => {
                chooser.choose(&layer.path, layer.columns())?
            }
            _ => None,
        };
        quantized += usize::from(wanted.is_some());
        planner.layer(layer, wanted);
    }
    if let Some(chooser) = &chooser {
        chooser.finish()?;
        if quantized == 0 {
            let expected = "dense layers whose columns the group size divides";
            return Err(Error::field("quantize", expected, "none"));
        }
    }
    for (name, tensor) in tensors {
        planner.parameters += elements(&tensor.shape);
        let dtype = planner.kept_dtype(&name, tensor.dtype);
        planner.keep(vec![(name, tensor, dtype)]);
    }
    Ok(planner.finish(default))
}

struct Planner<'a> {
    options: &'a ConvertOptions,
    units: Vec<Unit>,
    /// Of the layers that will be quantized, by path.
    layouts: BTreeMap<String, Quantized>,
    parameters: u64,
}

impl Planner<'_> {
    fn layer(&mut self, layer: Layer, wanted: Option<Quantized>) {
        let (shape, dtype) = (layer.shape(), self.options.dtype.unwrap_or(layer.dtype()));
        self.parameters += elements(&shape);
        if let Some(layout) = wanted.or(layer.layout.filter(|_| !self.options.dequantize)) {
            self.layouts.insert(layer.path.clone(), layout);
        }
        let unpack = layer.layout.is_some() && self.options.dequantize;
        let name = |part: &str| format!("{}.{part}", layer.path);
        if wanted.is_none() && !unpack {
            let names = ["weight", "scales", "biases"].map(name);
            let parts = [Some(layer.weight), layer.scales, layer.biases];
            let parts = names.into_iter().zip(parts).filter_map(|(name, tensor)| {
                let tensor = tensor?;
                let dtype = self.kept_dtype(&name, tensor.dtype);
                Some((name, tensor, dtype))
            });
            self.keep(parts.collect());
            return;
        }
        let mut specs = Vec::new();
        let mut spec = |part: &str, shape: &[i32], dtype: Dtype| {
            specs.push(tensor_spec(name(part), shape, dtype));
        };
        match wanted {
            None => spec("weight", &shape, dtype),
            Some(layout) => {
                let columns = shape.last().copied().unwrap_or_default();
                // Groups are whole words, so nothing is cut.
                let words = i64::from(columns) * i64::from(layout.bits) / 32;
                spec("weight", &with_columns(&shape, words as i32), Dtype::Uint32);
                let groups = with_columns(&shape, columns / layout.group_size);
                if layout.mode.has_biases() {
                    spec("scales", &groups, dtype);
                    spec("biases", &groups, dtype);
                } else {
                    spec("scales", &groups, Dtype::Uint8);
                }
            }
        }
        let source = match (layer.layout, layer.scales) {
            (Some(layout), Some(scales)) => Source::Packed {
                weight: layer.weight,
                scales,
                biases: layer.biases,
                layout,
            },
            _ => Source::Dense(layer.weight),
        };
        let change = Change {
            source,
            dtype,
            layout: wanted,
        };
        self.units.push(Unit {
            specs,
            job: Job::Change(change),
        });
    }

    /// The type in which a tensor is kept.
    fn kept_dtype(&self, name: &str, dtype: Dtype) -> Dtype {
        match self.options.dtype {
            Some(wanted) if dtype.is_float() && !is_kept_wide(name) => wanted,
            _ => dtype,
        }
    }

    fn keep(&mut self, parts: Vec<(String, LazyTensor, Dtype)>) {
        let (specs, parts) = parts
            .into_iter()
            .map(|(name, tensor, dtype)| (tensor_spec(name, &tensor.shape, dtype), (tensor, dtype)))
            .unzip();
        self.units.push(Unit {
            specs,
            job: Job::Keep(parts),
        });
    }

    fn finish(mut self, default: Option<Quantized>) -> Plan {
        // In the order of names, but last what would leave the others unaligned.
        let first = |unit: &Unit| unit.specs.first().map(|spec| spec.name.clone());
        self.units
            .sort_by_cached_key(|unit| (!unit.keeps_alignment(), first(unit)));
        let default = self
            .options
            .quantize
            .as_ref()
            .map(|quantize| quantize.layout())
            .or(default.filter(|default| self.layouts.values().any(|layout| layout == default)))
            .or_else(|| self.layouts.values().next().copied());
        let quantization =
            default
                .filter(|_| !self.layouts.is_empty())
                .map(|default| QuantizationConfig {
                    default: Some(default),
                    layers: self
                        .layouts
                        .into_iter()
                        .filter(|(_, layout)| *layout != default)
                        .map(|(path, layout)| (path, Some(layout)))
                        .collect(),
                });
        Plan {
            units: self.units,
            quantization,
            parameters: self.parameters,
        }
    }
}

/// Takes what belongs to a layer's weight out of `tensors`.
fn take_layer(tensors: &mut Tensors, path: String, layout: Option<Quantized>) -> Option<Layer> {
    let weight = tensors.remove(&format!("{path}.weight"))?;
    let mut part = |part: &str| {
        let name = format!("{path}.{part}");
        layout.and_then(|_| tensors.remove(&name))
    };
    Some(Layer {
        scales: part("scales"),
        biases: part("biases"),
        path,
        weight,
        layout,
    })
}

/// Tensors that mlx-lm leaves in the type that they have: a half type is too coarse for them.
fn is_kept_wide(name: &str) -> bool {
    name.ends_with("A_log") || name.contains("e_score_correction_bias")
}

fn tensor_spec(name: String, shape: &[i32], dtype: Dtype) -> TensorSpec {
    TensorSpec {
        name,
        dtype: dtype.into(),
        shape: shape.iter().map(|&dim| dim as usize).collect(),
    }
}

fn with_columns(shape: &[i32], columns: i32) -> Vec<i32> {
    let mut shape = shape.to_vec();
    if let Some(last) = shape.last_mut() {
        *last = columns;
    }
    shape
}

fn elements(shape: &[i32]) -> u64 {
    shape
        .iter()
        .map(|&dim| u64::from(dim.unsigned_abs()))
        .product()
}
