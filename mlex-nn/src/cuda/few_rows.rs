//! Few rows times quantized weights, by our kernels: one weight, those of queries, keys and values
//! together, or a gate and what it gates. A decode step is bound by how many nodes the host makes.

use mlex_core::{Array, Dtype, GpuLaunch, QuantizationMode, QuantizedWeight};
use mlex_kernels::gpu::{CudaSource, QUANTIZED_ROWS, QUANTIZED_ROWS_GATED, QUANTIZED_ROWS_THREE};

use super::is_half;
use crate::activation::Activation;
use crate::host::Weight;
use crate::linear::Stored;
use crate::{Result, gpu};

/// Up to how many rows our kernel multiplies: the tensor cores take so many at once.
const FEW_ROWS: usize = 8;
/// How large a weight is, in numbers, that our kernel is worth it for: with one row, and with
/// more. A call of a kernel that is not MLX's takes the host some microseconds more, which a
/// smaller weight does not give back; MLX's takes a multiple of its time for more rows.
const LARGE: [i64; 2] = [1 << 23, 1 << 20];
/// The same of several weights that are one node in place of several.
const LARGE_TOGETHER: i64 = 1 << 20;

/// A weight that the kernels have the layout of.
struct Packed<'a> {
    weight: &'a Array,
    scales: &'a Array,
    biases: &'a Array,
    outputs: i32,
    group_size: i32,
}

impl<'a> Packed<'a> {
    fn of(weight: &'a QuantizedWeight, columns: i32) -> Option<Self> {
        let layout = weight.layout;
        let &[outputs, words] = weight.weight.shape() else {
            return None;
        };
        let applies = layout.mode == QuantizationMode::Affine
            && layout.bits == 4
            && i64::from(words) * 8 == i64::from(columns)
            && columns % layout.group_size == 0;
        let biases = weight.biases.as_ref().filter(|_| applies)?;
        Some(Self {
            weight: &weight.weight,
            scales: &weight.scales,
            biases,
            outputs,
            group_size: layout.group_size,
        })
    }

    /// Those of layers without a bias.
    fn of_layer(layer: Weight<'a>, columns: i32) -> Option<Self> {
        match (&layer.matrix.stored, layer.bias) {
            (Stored::Quantized { weight, .. }, None) => Self::of(weight, columns),
            _ => None,
        }
    }

    /// Whether one kernel can have both.
    fn is_like(&self, other: &Self) -> bool {
        self.group_size == other.group_size
            && self.scales.dtype() == other.scales.dtype()
            && self.biases.dtype() == other.biases.dtype()
    }

    fn arrays(&self) -> [&'a Array; 3] {
        [self.weight, self.scales, self.biases]
    }

    fn blocks(&self) -> i32 {
        self.outputs.saturating_add(15) / 16
    }

    /// Calls a kernel for `blocks` of 16 rows.
    fn call(
        &self,
        kernel: &CudaSource,
        inputs: &[&Array],
        outputs: &[(&[i32], Dtype)],
        blocks: i32,
    ) -> Result<Option<Vec<Array>>> {
        let dtype = inputs[0].dtype();
        // Warps that share the rows of a block: with few rows in all there are few blocks.
        let warps = match blocks {
            512.. => 4,
            97.. => 8,
            _ => 16,
        };
        let launch = GpuLaunch {
            outputs,
            grid: [32, warps, blocks],
            group: [32, warps, 1],
            numbers: &[("GROUP", self.group_size), ("WARPS", warps)],
            flags: &[("HALF", dtype == Dtype::Float16)],
            // MLX knows a compiled kernel by its constants, so they name the types of all inputs.
            types: &[
                ("T", dtype),
                ("SCALES", self.scales.dtype()),
                ("BIASES", self.biases.dtype()),
            ],
        };
        gpu::call_cuda(kernel, inputs, &launch)
    }
}

/// `[.., K]` with another last dimension.
fn shape_of(x: &Array, outputs: i32) -> Vec<i32> {
    let mut shape = x.shape().to_vec();
    if let Some(last) = shape.last_mut() {
        *last = outputs;
    }
    shape
}

/// The number of rows and columns of `x`, where it has few rows of a type that the kernels have.
fn few_rows(x: &Array) -> Result<Option<(usize, i32)>> {
    let columns = x.dim(-1)?;
    let rows = x.size() / columns.max(1) as usize;
    let applies = is_half(x.dtype()) && (1..=FEW_ROWS).contains(&rows);
    Ok(applies.then_some((rows, columns)))
}

/// `x` `[.., K]` times `weight` `[N, K]`, transposed, where the kernel applies: `[.., N]`.
pub(super) fn product(x: &Array, weight: &QuantizedWeight) -> Result<Option<Array>> {
    let Some((rows, columns)) = few_rows(x)? else {
        return Ok(None);
    };
    let Some(packed) = Packed::of(weight, columns) else {
        return Ok(None);
    };
    if i64::from(packed.outputs) * i64::from(columns) < LARGE[usize::from(rows > 1)] {
        return Ok(None);
    }
    let shape = shape_of(x, packed.outputs);
    let [w, scales, biases] = packed.arrays();
    let (inputs, outputs) = ([x, w, scales, biases], [(&*shape, x.dtype())]);
    let outputs = packed.call(&QUANTIZED_ROWS, &inputs, &outputs, packed.blocks())?;
    Ok(outputs.and_then(|mut outputs| outputs.pop()))
}

/// `x` `[.., K]` times each of three weights, where one kernel has them all.
///
/// # Errors
/// When the shapes do not fit.
pub(crate) fn linear_three(x: &Array, layers: [Weight<'_>; 3]) -> Result<Option<[Array; 3]>> {
    if !gpu::is_cuda()? {
        return Ok(None);
    }
    let Some((_, columns)) = few_rows(x)? else {
        return Ok(None);
    };
    let [Some(q), Some(k), Some(v)] = layers.map(|layer| Packed::of_layer(layer, columns)) else {
        return Ok(None);
    };
    let all = [&q, &k, &v];
    let outputs = all.map(|packed| packed.outputs);
    let together: i64 = outputs.iter().map(|&outputs| i64::from(outputs)).sum();
    if !q.is_like(&k) || !q.is_like(&v) || together * i64::from(columns) < LARGE_TOGETHER {
        return Ok(None);
    }
    let shapes = outputs.map(|outputs| shape_of(x, outputs));
    let outputs = shapes.each_ref().map(|shape| (&**shape, x.dtype()));
    let blocks = all.iter().map(|packed| packed.blocks()).sum();
    let mut inputs = vec![x];
    inputs.extend(all.iter().flat_map(|packed| packed.arrays()));
    let outputs = q.call(&QUANTIZED_ROWS_THREE, &inputs, &outputs, blocks)?;
    Ok(outputs.and_then(|outputs| outputs.try_into().ok()))
}

/// `activation(gate(x)) * up(x)` for `x` `[.., K]`, where the kernel applies.
///
/// # Errors
/// When the shapes do not fit.
pub(crate) fn gated_linear(
    x: &Array,
    activation: Activation,
    gate: Weight<'_>,
    up: Weight<'_>,
) -> Result<Option<Array>> {
    if activation != Activation::Silu || !gpu::is_cuda()? {
        return Ok(None);
    }
    let Some((_, columns)) = few_rows(x)? else {
        return Ok(None);
    };
    let [Some(gate), Some(up)] = [gate, up].map(|layer| Packed::of_layer(layer, columns)) else {
        return Ok(None);
    };
    let together = 2 * i64::from(gate.outputs) * i64::from(columns);
    if !gate.is_like(&up) || gate.outputs != up.outputs || together < LARGE_TOGETHER {
        return Ok(None);
    }
    let shape = shape_of(x, gate.outputs);
    let outputs = [(&*shape, x.dtype())];
    let mut inputs = vec![x];
    inputs.extend(gate.arrays());
    inputs.extend(up.arrays());
    let outputs = gate.call(&QUANTIZED_ROWS_GATED, &inputs, &outputs, gate.blocks())?;
    Ok(outputs.and_then(|mut outputs| outputs.pop()))
}
