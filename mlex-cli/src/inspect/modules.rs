//! The tensors of a model, grouped by the layers they belong to and how these are stored.

use std::collections::BTreeMap;
use std::fmt;

use mlex_core::{Dtype, Quantized};
use mlex_nn::{LazyTensor, Taken};

/// How a layer's weight is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Layout {
    /// One number after the other.
    Dense(Dtype),
    /// Packed in groups with scales.
    Quantized(Quantized),
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Dense(dtype) => write!(f, "{dtype}"),
            Self::Quantized(layout) => write!(f, "{layout}"),
        }
    }
}

/// Layers of one kind that are stored alike.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Group {
    /// Their common path, with `*` for numbers: `model.layers.*.mlp.up_proj`.
    pub(super) kind: String,
    pub(super) layout: Layout,
    pub(super) count: u64,
    /// Weights, each as one number however it is packed.
    pub(super) parameters: u64,
    /// Bytes when loaded, scales and biases of the groups included.
    pub(super) bytes: u64,
}

/// The groups of what a model takes, ordered by their paths.
pub(super) fn groups(taken: &Taken) -> Vec<Group> {
    let tensors = &taken.tensors;
    let mut groups: BTreeMap<String, Vec<Group>> = BTreeMap::new();
    for (name, tensor) in tensors {
        let (module, part) = name.rsplit_once('.').unwrap_or((name, ""));
        let packed = taken.layers.get(module).copied().flatten();
        let (path, layout, parameters) = match (part, packed) {
            // Counted with the weight that they scale.
            ("scales" | "biases", Some(_)) => continue,
            ("weight", Some(layout)) => {
                let parameters =
                    elements(tensor) * 32 / u64::from(layout.bits.unsigned_abs().max(1));
                (module, Layout::Quantized(layout), parameters)
            }
            ("weight", None) => (module, Layout::Dense(tensor.dtype), elements(tensor)),
            _ => (name.as_str(), Layout::Dense(tensor.dtype), elements(tensor)),
        };
        let mut size = bytes(tensor);
        if let Layout::Quantized(_) = layout {
            let parts = ["scales", "biases"].map(|part| tensors.get(&format!("{module}.{part}")));
            size += parts.into_iter().flatten().map(bytes).sum::<u64>();
        }
        let kind = kind(path);
        let same_kind = groups.entry(kind.clone()).or_default();
        match same_kind.iter_mut().find(|group| group.layout == layout) {
            Some(group) => {
                group.count += 1;
                group.parameters += parameters;
                group.bytes += size;
            }
            None => same_kind.push(Group {
                kind,
                layout,
                count: 1,
                parameters,
                bytes: size,
            }),
        }
    }
    groups.into_values().flatten().collect()
}

fn elements(tensor: &LazyTensor) -> u64 {
    tensor
        .shape
        .iter()
        .map(|&dim| u64::from(dim.unsigned_abs()))
        .product()
}

fn bytes(tensor: &LazyTensor) -> u64 {
    elements(tensor) * tensor.dtype.size_in_bytes() as u64
}

/// A path with `*` for its numbers.
fn kind(path: &str) -> String {
    let part = |part| {
        if str::parse::<u32>(part).is_ok() {
            "*"
        } else {
            part
        }
    };
    path.split('.').map(part).collect::<Vec<_>>().join(".")
}

#[cfg(test)]
mod tests {
    use super::*;
    use mlex_core::{Array, QuantizationMode};

    fn tensor(shape: &[i32], dtype: Dtype) -> LazyTensor {
        LazyTensor::ready(Array::zeros(shape, dtype).unwrap())
    }

    #[test]
    fn packed_weights_count_as_what_they_stand_for() {
        // 64 columns of 4 bits are 8 words, in 2 groups of 32.
        let layout = Quantized {
            bits: 4,
            group_size: 32,
            mode: QuantizationMode::Affine,
        };
        let mut taken = Taken::default();
        let tensors = &mut taken.tensors;
        for layer in ["a.0.q", "a.1.q"] {
            taken.layers.insert(layer.to_owned(), Some(layout));
            tensors.insert(format!("{layer}.weight"), tensor(&[16, 8], Dtype::Uint32));
            tensors.insert(format!("{layer}.scales"), tensor(&[16, 2], Dtype::Float16));
            tensors.insert(format!("{layer}.biases"), tensor(&[16, 2], Dtype::Float16));
        }
        tensors.insert("a.0.q.bias".to_owned(), tensor(&[16], Dtype::Float16));
        tensors.insert("a.2.q.weight".to_owned(), tensor(&[16, 64], Dtype::Float16));
        taken.layers.insert("a.2.q".to_owned(), None);
        let groups = groups(&taken);
        let group = |kind: &str, layout, count, parameters, bytes| Group {
            kind: kind.to_owned(),
            layout,
            count,
            parameters,
            bytes,
        };
        let f16 = Layout::Dense(Dtype::Float16);
        // Bytes of a packed layer: 16 * 8 words of 4, and twice 16 * 2 numbers of 2.
        assert_eq!(
            groups,
            [
                group(
                    "a.*.q",
                    Layout::Quantized(layout),
                    2,
                    2 * 1024,
                    2 * (512 + 128)
                ),
                group("a.*.q", f16, 1, 1024, 2048),
                group("a.*.q.bias", f16, 1, 16, 32),
            ]
        );
        assert_eq!(groups[0].layout.to_string(), "4-bit affine, group 32");
    }
}
