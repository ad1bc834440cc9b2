//! Keys and values in few bits.
//!
//! A vector is packed into a row of words: its codes, scales and biases, which are those of MLX's
//! affine quantization. So a cache of packed vectors is one of other vectors, uint32, to all that
//! moves them.

use mlex_core::{Array, Dtype, QuantizationMode, Quantized, QuantizedWeight};
use mlex_kernels::{FloatType, PackedRow};

use crate::{Error, Result};

/// When keys and values are packed, and into what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvQuantization {
    /// Bits of a number: 2, 3, 4, 5, 6 or 8.
    pub bits: i32,
    /// Numbers that share a scale and a bias: 32, 64 or 128.
    pub group_size: i32,
    /// From how many tokens on. Until then they are as the model makes them.
    pub start: i32,
}

impl KvQuantization {
    fn layout(bits: i32, group_size: i32) -> Quantized {
        Quantized {
            bits,
            group_size,
            mode: QuantizationMode::Affine,
        }
    }

    /// Refuses what there is no form for.
    pub(super) fn check(&self) -> Result<()> {
        if self.start < 0 {
            let found = self.start;
            return Err(Error::setting(
                "quantized_kv_start",
                "no negative number",
                found,
            ));
        }
        Ok(Self::layout(self.bits, self.group_size).check()?)
    }
}

/// The form of packed keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvPacking {
    /// Bits of a number.
    pub bits: i32,
    /// Numbers that share a scale and a bias.
    pub group_size: i32,
    /// The width of a key and of a value.
    pub dims: [i32; 2],
    /// The type of scales and biases, and of what is unpacked.
    pub dtype: Dtype,
}

impl KvPacking {
    /// The form of keys and values of these widths.
    ///
    /// # Errors
    /// When they are not whole groups, or of another type than f32, f16 and bf16.
    pub(super) fn new(bits: i32, group_size: i32, dims: [i32; 2], dtype: Dtype) -> Result<Self> {
        let packing = Self {
            bits,
            group_size,
            dims,
            dtype,
        };
        packing.check()?;
        Ok(packing)
    }

    /// Refuses a form that there is none of.
    pub(super) fn check(&self) -> Result<()> {
        KvQuantization::layout(self.bits, self.group_size).check()?;
        for dim in self.dims {
            if dim <= 0 || dim % self.group_size != 0 {
                let expected = format!("a divisor of the width {dim} of keys and values");
                let found = self.group_size;
                return Err(Error::setting("kv_group_size", expected, found));
            }
            self.row(dim)?;
        }
        Ok(())
    }

    /// The form of a vector of width `dim`.
    pub(crate) fn row(&self, dim: i32) -> Result<PackedRow> {
        let scales = match self.dtype {
            Dtype::Float32 => FloatType::F32,
            Dtype::Float16 => FloatType::F16,
            Dtype::Bfloat16 => FloatType::Bf16,
            other => {
                let expected = "float32, float16 or bfloat16";
                return Err(Error::setting("type of keys", expected, other));
            }
        };
        let size = |n: i32| usize::try_from(n).unwrap_or(0);
        let row = PackedRow::new(size(dim), size(self.bits), size(self.group_size), scales);
        row.map_err(|error| Error::setting("kv_bits", "a form of packed vectors", error))
    }

    /// Words of a packed key (`index` 0) or value.
    pub(super) fn words(&self, index: usize) -> Result<i32> {
        Ok(self.row(self.dims[index])?.words() as i32)
    }

    /// `[.., D]` packed to uint32 `[.., words]`.
    pub(super) fn pack(&self, array: &Array) -> Result<Array> {
        let layout = KvQuantization::layout(self.bits, self.group_size);
        let packed = QuantizedWeight::quantize(array, layout)?;
        let QuantizedWeight {
            weight,
            scales,
            biases,
            ..
        } = packed;
        let factors: Vec<Array> = [Some(scales), biases].into_iter().flatten().collect();
        let factors = Array::concatenate(&factors, -1)?.view(Dtype::Uint32)?;
        Ok(Array::concatenate(&[weight, factors], -1)?)
    }

    /// uint32 `[.., words]` of keys (`index` 0) or values unpacked to `[.., D]`.
    pub(super) fn unpack(&self, array: &Array, index: usize) -> Result<Array> {
        let codes = self.dims[index] * self.bits / 32;
        let words = self.words(index)?;
        let factors = array.slice_axis(-1, codes, words)?.view(self.dtype)?;
        let groups = self.dims[index] / self.group_size;
        let packed = QuantizedWeight {
            weight: array.slice_axis(-1, 0, codes)?,
            scales: factors.slice_axis(-1, 0, groups)?,
            biases: Some(factors.slice_axis(-1, groups, 2 * groups)?),
            layout: KvQuantization::layout(self.bits, self.group_size),
        };
        Ok(packed.dequantize(Some(self.dtype))?)
    }
}
