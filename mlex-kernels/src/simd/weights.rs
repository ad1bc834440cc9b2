//! How quantized weights are stored, and plain loops that take them apart. The loops are
//! `inline(always)`, so that they are compiled for the vectors of whatever calls them.

use half::f16;

use super::{MAX_LANES, Simd};

/// The rows of one matrix; lengths are what [`crate::quantized`] has checked.
#[derive(Clone, Copy)]
pub(crate) struct Weights<'a> {
    /// The codes of all rows.
    pub(crate) packed: &'a [u8],
    /// Bits of a code.
    pub(crate) bits: usize,
    /// What a code stands for.
    pub(crate) code: Code,
    /// Values per scale, a power of two.
    pub(crate) group: usize,
    /// Values per row.
    pub(crate) k: usize,
    /// The bytes of the scales.
    pub(crate) scales: &'a [u8],
    /// Their type.
    pub(crate) scale_type: ScaleType,
    /// The bytes of the biases, of the same type; none for floating-point codes.
    pub(crate) biases: Option<&'a [u8]>,
}

/// What a code stands for, before scale and bias.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Code {
    /// An unsigned integer.
    Integer,
    /// FP4 with 2 exponent bits.
    Fp4,
    /// FP8 with 4 exponent bits.
    Fp8,
}

/// The number format of scales.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ScaleType {
    /// Single precision.
    F32,
    /// Half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// Powers of two.
    E8m0,
    /// FP8 with 4 exponent bits.
    E4m3,
}

impl ScaleType {
    /// Bytes of one scale.
    pub(crate) fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::E8m0 | Self::E4m3 => 1,
        }
    }

    /// Numbers `first ..` in f32.
    #[inline(always)]
    fn widen<S: Simd>(self, s: S, bytes: &[u8], first: usize, to: &mut [f32]) {
        let bytes = &bytes[first * self.size()..][..to.len() * self.size()];
        match self {
            Self::F32 => {
                for (from, to) in bytes.chunks_exact(4).zip(to) {
                    *to = f32::from_le_bytes([from[0], from[1], from[2], from[3]]);
                }
            }
            Self::Bf16 => {
                for (from, to) in bytes.chunks_exact(2).zip(to) {
                    *to = f32::from_bits(u32::from(u16::from_le_bytes([from[0], from[1]])) << 16);
                }
            }
            Self::F16 => {
                let mut i = 0;
                while i < to.len() {
                    let n = (to.len() - i).min(S::LANES);
                    let mut halves = [0u16; MAX_LANES];
                    for (half, from) in halves.iter_mut().zip(bytes[2 * i..].chunks_exact(2)) {
                        *half = u16::from_le_bytes([from[0], from[1]]);
                    }
                    let mut wide = [0.0; MAX_LANES];
                    // SAFETY: both arrays have `LANES` elements.
                    unsafe { s.store(wide.as_mut_ptr(), s.load_f16(halves.as_ptr())) };
                    to[i..i + n].copy_from_slice(&wide[..n]);
                    i += n;
                }
            }
            Self::E8m0 => {
                for (&from, to) in bytes.iter().zip(to) {
                    // 0 stands for 2^-127, which is a subnormal; 255 for infinity, as in MLX.
                    let bits = if from == 0 {
                        0x0040_0000
                    } else {
                        u32::from(from) << 23
                    };
                    *to = f32::from_bits(bits);
                }
            }
            Self::E4m3 => {
                for (&from, to) in bytes.iter().zip(to) {
                    *to = f16::from_bits(fp8_as_f16(from)).to_f32_const() * 256.0;
                }
            }
        }
    }
}

/// `2 * value + 12` of each FP4 code.
pub(crate) const FP4_CODES: [u8; 16] = [12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0];

/// An FP8 number, times 2^-8, as the bits of an f16. All codes are finite, as in MLX.
#[inline(always)]
fn fp8_as_f16(code: u8) -> u16 {
    (u16::from(code & 0x80) << 8) | (u16::from(code & 0x7f) << 7)
}

impl Weights<'_> {
    /// Bytes of the codes of a row.
    pub(crate) fn row_bytes(&self) -> usize {
        self.k * self.bits / 8
    }

    /// Groups of a row.
    pub(crate) fn groups(&self) -> usize {
        self.k / self.group
    }

    /// Whether `rows` rows are there.
    pub(crate) fn holds(&self, rows: usize) -> bool {
        let scales = rows * self.groups() * self.scale_type.size();
        self.packed.len() >= rows * self.row_bytes()
            && self.scales.len() >= scales
            && self.biases.is_none_or(|biases| biases.len() >= scales)
    }

    /// The largest code, as [`Weights::unpack`] writes it.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn largest_code(&self) -> usize {
        if self.code == Code::Fp4 {
            24
        } else {
            (1 << self.bits) - 1
        }
    }

    /// Scales and biases of groups `first ..`, counted over all rows, in terms of what
    /// [`Weights::unpack`] writes.
    #[inline(always)]
    pub(crate) fn factors<S: Simd>(
        &self,
        s: S,
        first: usize,
        scales: &mut [f32],
        biases: &mut [f32],
    ) {
        self.scale_type.widen(s, self.scales, first, scales);
        match (self.code, self.biases) {
            (Code::Integer, Some(from)) => self.scale_type.widen(s, from, first, biases),
            (Code::Integer, None) => biases.fill(0.0),
            (Code::Fp4, _) => {
                for (scale, bias) in scales.iter_mut().zip(biases) {
                    (*scale, *bias) = (0.5 * *scale, -6.0 * *scale);
                }
            }
            (Code::Fp8, _) => {
                scales.iter_mut().for_each(|scale| *scale *= 256.0);
                biases.fill(0.0);
            }
        }
    }

    /// Writes the codes of a piece of a row as bytes: integers as they are, FP4 as
    /// `2 * value + 12`. `packed` holds exactly the codes of `to`, a multiple of 16.
    #[inline(always)]
    pub(crate) fn unpack(&self, packed: &[u8], to: &mut [u8]) {
        match (self.bits, self.code) {
            (8, _) => to.copy_from_slice(packed),
            (4, Code::Fp4) => {
                for (&byte, to) in packed.iter().zip(to.chunks_exact_mut(2)) {
                    to[0] = FP4_CODES[usize::from(byte & 15)];
                    to[1] = FP4_CODES[usize::from(byte >> 4)];
                }
            }
            (4, _) => {
                for (&byte, to) in packed.iter().zip(to.chunks_exact_mut(2)) {
                    to[0] = byte & 15;
                    to[1] = byte >> 4;
                }
            }
            (2, _) => {
                for (&byte, to) in packed.iter().zip(to.chunks_exact_mut(4)) {
                    to[0] = byte & 3;
                    to[1] = (byte >> 2) & 3;
                    to[2] = (byte >> 4) & 3;
                    to[3] = byte >> 6;
                }
            }
            (3, _) => unpack_eights::<3>(packed, to),
            (5, _) => unpack_eights::<5>(packed, to),
            (6, _) => unpack_eights::<6>(packed, to),
            (bits, _) => unreachable!("{bits} bits"),
        }
    }

    /// Writes FP8 codes as f16 numbers, times 2^-8.
    #[inline(always)]
    pub(crate) fn unpack_fp8(packed: &[u8], to: &mut [u16]) {
        for (&code, to) in packed.iter().zip(to) {
            *to = fp8_as_f16(code);
        }
    }
}

/// Eight codes are `BITS` bytes, the first in the lowest bits.
#[inline(always)]
fn unpack_eights<const BITS: usize>(packed: &[u8], to: &mut [u8]) {
    for (bytes, to) in packed.chunks_exact(BITS).zip(to.chunks_exact_mut(8)) {
        let mut word = [0; 8];
        word[..BITS].copy_from_slice(bytes);
        let word = u64::from_le_bytes(word);
        for (i, to) in to.iter_mut().enumerate() {
            *to = (word >> (BITS * i)) as u8 & ((1 << BITS) - 1);
        }
    }
}
