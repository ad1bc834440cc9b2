//! Quantizing weights, bit for bit as MLX's CPU backend does: `Quantize` of its
//! `backend/cpu/quantized.cpp` for affine, `fp_quantize` of its `ops.cpp`, which rounds every step
//! to the type of the weights, for the floating-point modes.

use std::sync::{Mutex, PoisonError};

use crate::error::{check, check_len};
use crate::threads::parallel_for;
use crate::{Element, Mode, Result};

/// Groups that one task takes.
const TASK: usize = 512;

/// The positive numbers of FP4 (e2m1), by their codes.
const FP4: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// Where the scales of groups go.
#[derive(Debug)]
pub enum ScalesMut<'a, T> {
    /// Factors and summands, of the affine mode.
    Affine {
        /// One factor per group.
        scales: &'a mut [T],
        /// One summand per group.
        biases: &'a mut [T],
    },
    /// One byte per group, of the other modes.
    Bytes(&'a mut [u8]),
}

/// Quantizes `values`, whole groups one after another: their codes become a stream of bits in
/// `packed`, the first code in the lowest bits, `values.len() * bits / 32` words. The same bits
/// as `mx.quantize` gives on a CPU.
///
/// # Errors
/// When the mode has no such bits or group size, or a slice has another length or type.
pub fn quantize<T: Element>(
    mode: Mode,
    values: &[T],
    packed: &mut [u32],
    scales: ScalesMut<'_, T>,
) -> Result<()> {
    if let Mode::Affine { bits, group_size } = mode {
        let known = matches!(bits, 2 | 3 | 4 | 5 | 6 | 8);
        check(known, "quantize: bits", "2, 3, 4, 5, 6 or 8", bits)?;
        let known = matches!(group_size, 32 | 64 | 128);
        check(known, "quantize: group size", "32, 64 or 128", group_size)?;
    }
    let group = mode.group_size();
    check(
        values.len().is_multiple_of(group),
        "quantize: values",
        "whole groups",
        values.len(),
    )?;
    let groups = values.len() / group;
    // Groups are whole words in every mode.
    let words = group * mode.bits() / 32;
    check_len("quantize: packed", groups * words, packed.len())?;
    let bits = mode.bits() as u32;
    match (mode, scales) {
        (Mode::Affine { .. }, ScalesMut::Affine { scales, biases }) => {
            check_len("quantize: scales", groups, scales.len())?;
            check_len("quantize: biases", groups, biases.len())?;
            let pieces = pieces(values, group, packed, words, scales)
                .zip(biases.chunks_mut(TASK))
                .map(|((values, packed, scales), biases)| (values, packed, scales, biases));
            each(pieces, |(values, packed, scales, biases)| {
                let outputs = scales.iter_mut().zip(biases.iter_mut());
                let groups = values
                    .chunks_exact(group)
                    .zip(packed.chunks_exact_mut(words));
                for ((values, packed), (scale, bias)) in groups.zip(outputs) {
                    (*scale, *bias) = affine(values, bits, packed);
                }
            });
        }
        (Mode::Mxfp4 | Mode::Mxfp8 | Mode::Nvfp4, ScalesMut::Bytes(scales)) => {
            check_len("quantize: scales", groups, scales.len())?;
            let pieces = pieces(values, group, packed, words, scales);
            each(pieces, |(values, packed, scales)| {
                let groups = values
                    .chunks_exact(group)
                    .zip(packed.chunks_exact_mut(words));
                for ((values, packed), scale) in groups.zip(scales.iter_mut()) {
                    *scale = floating(mode, values, packed);
                }
            });
        }
        _ => check(false, "quantize: scales", "those of the mode", "others")?,
    }
    Ok(())
}

/// What tasks work on: values, words and scales of some groups each.
fn pieces<'a, T, S>(
    values: &'a [T],
    group: usize,
    packed: &'a mut [u32],
    words: usize,
    scales: &'a mut [S],
) -> impl Iterator<Item = (&'a [T], &'a mut [u32], &'a mut [S])> {
    values
        .chunks(TASK * group)
        .zip(packed.chunks_mut(TASK * words))
        .zip(scales.chunks_mut(TASK))
        .map(|((values, packed), scales)| (values, packed, scales))
}

/// Runs `task` on every piece, in the pool.
fn each<P: Send>(pieces: impl Iterator<Item = P>, task: impl Fn(&mut P) + Sync) {
    // Each is locked once, by the task that works on it.
    let pieces: Vec<Mutex<P>> = pieces.map(Mutex::new).collect();
    parallel_for(pieces.len(), |index| {
        task(&mut pieces[index].lock().unwrap_or_else(PoisonError::into_inner));
    });
}

/// Writes codes of `bits` bits one behind the other.
fn pack(codes: impl Iterator<Item = u32>, bits: u32, packed: &mut [u32]) {
    let (mut pending, mut count) = (0u64, 0);
    let mut words = packed.iter_mut();
    for code in codes {
        pending |= u64::from(code) << count;
        count += bits;
        if count >= 32 {
            if let Some(word) = words.next() {
                // The lower half.
                *word = pending as u32;
            }
            pending >>= 32;
            count -= 32;
        }
    }
}

/// One group of the affine mode: its scale and its bias.
fn affine<T: Element>(values: &[T], bits: u32, packed: &mut [u32]) -> (T, T) {
    let last_code = ((1u32 << bits) - 1) as f32;
    let (mut low, mut high) = (f32::INFINITY, f32::NEG_INFINITY);
    for value in values {
        let value = value.to_f32();
        high = if high < value { value } else { high };
        low = if value < low { value } else { low };
    }
    let from_low = low.abs() > high.abs();
    let step = (high - low) / last_code;
    let step = if step < 1e-7 { 1e-7 } else { step };
    let mut scale = if from_low { step } else { -step };
    // The edge that is farther from zero is kept exactly, and so is zero.
    let edge = if from_low { low } else { high };
    let code = (edge / scale).round_ties_even();
    let mut bias = 0.0;
    if code != 0.0 {
        scale = edge / code;
        bias = edge;
    }
    let codes = values.iter().map(|value| {
        let code = ((value.to_f32() - bias) / scale).round_ties_even();
        let code = if code < 0.0 { 0.0 } else { code };
        (if last_code < code { last_code } else { code }) as u32
    });
    pack(codes, bits, packed);
    (T::from_f32(scale), T::from_f32(bias))
}

/// One group of a floating-point mode: its scale as it is stored.
fn floating<T: Element>(mode: Mode, values: &[T], packed: &mut [u32]) -> u8 {
    let largest = values
        .iter()
        .map(|value| value.to_f32().abs())
        .fold(0.0, f32::max);
    let (stored, divisor) = match mode {
        Mode::Nvfp4 => {
            let scale = to_e4m3(rounded::<T>(largest / 6.0));
            (scale, from_e4m3(scale))
        }
        Mode::Mxfp8 => power_of_two::<T>(largest / 448.0),
        _ => power_of_two::<T>(largest / 6.0),
    };
    let scaled = values
        .iter()
        .map(|value| rounded::<T>(value.to_f32() / divisor));
    match mode {
        Mode::Mxfp8 => pack(scaled.map(|value| u32::from(to_e4m3(value))), 8, packed),
        // Its distances are those of f32.
        Mode::Nvfp4 => pack(scaled.map(to_e2m1::<f32>), 4, packed),
        _ => pack(scaled.map(to_e2m1::<T>), 4, packed),
    }
    stored
}

/// `value` in the type `T`.
fn rounded<T: Element>(value: f32) -> f32 {
    T::from_f32(value).to_f32()
}

/// The power of two nearest to a scale by its logarithm, as it is stored and as a number.
fn power_of_two<T: Element>(scale: f32) -> (u8, f32) {
    let scale = rounded::<T>(scale);
    let exponent = if scale == 0.0 {
        0.0
    } else {
        rounded::<T>(scale.log2()).round_ties_even()
    };
    // Below the range of a byte it wraps, as on the x86 machines that MLX runs on.
    let stored = rounded::<T>(exponent + 127.0) as i32 as u8;
    (stored, rounded::<T>(2f32.powf(exponent)))
}

/// The code of the nearest FP4 (e2m1) number, the smaller one of two that are as near, their
/// distances being rounded to the type `D`.
fn to_e2m1<D: Element>(value: f32) -> u32 {
    let magnitude = value.abs();
    let (mut best, mut least) = (0, rounded::<D>(magnitude));
    for (code, number) in (0..).zip(FP4).skip(1) {
        let distance = rounded::<D>((magnitude - number).abs());
        if distance < least {
            (best, least) = (code, distance);
        }
    }
    // There is no negative zero.
    if best != 0 && value.is_sign_negative() {
        best | 8
    } else {
        best
    }
}

/// The nearest FP8 (e4m3) number, ties to even, at most 448.
fn to_e4m3(value: f32) -> u8 {
    const SUBNORMAL: u32 = 141 << 23;
    let bits = value.to_bits() & 0x7fff_ffff;
    let sign = ((value.to_bits() >> 24) & 0x80) as u8;
    let magnitude = if bits >= 543 << 21 {
        0x7e
    } else if bits < 121 << 23 {
        // Adding a number with the right last bit rounds.
        let sum = f32::from_bits(bits) + f32::from_bits(SUBNORMAL);
        (sum.to_bits() - SUBNORMAL) as u8
    } else {
        let odd = (bits >> 20) & 1;
        // The exponent's bias goes from 127 to 7.
        ((bits - (120 << 23) + 0x7_ffff + odd) >> 20) as u8
    };
    magnitude | sign
}

/// The value of an FP8 (e4m3) number that is none of the NaNs.
fn from_e4m3(code: u8) -> f32 {
    let magnitude = half::f16::from_bits(u16::from(code & 0x7f) << 7).to_f32() * 256.0;
    if code & 0x80 == 0 {
        magnitude
    } else {
        -magnitude
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each code is nearest to the number that it stands for (OCP's table of e4m3).
    #[test]
    fn eight_bit_floats_lead_back() {
        for code in (0..=0xff).filter(|code| code & 0x7f != 0x7f) {
            assert_eq!(to_e4m3(from_e4m3(code)), code);
        }
        assert_eq!(from_e4m3(0x7e), 448.0);
        assert_eq!(from_e4m3(0x01), 2f32.powi(-9));
        assert_eq!(to_e4m3(1e9), 0x7e);
        // 17 and 18 are between 16 (0x58) and 18 (0x59): ties to even.
        assert_eq!(
            (to_e4m3(17.0), to_e4m3(17.1), to_e4m3(19.0)),
            (0x58, 0x59, 0x5a)
        );
    }

    #[test]
    fn four_bit_floats_are_the_nearest() {
        for (value, code) in [
            (0.0, 0),
            (-0.2, 0),
            (-0.25, 0),
            (-0.26, 9),
            (0.75, 1),
            (1.1, 2),
            (2.5, 4),
            (-5.1, 15),
            (100.0, 7),
            (f32::NAN, 0),
        ] {
            assert_eq!(to_e2m1::<f32>(value), code, "{value}");
        }
    }

    #[test]
    fn slices_of_other_lengths_are_refused() {
        let mode = Mode::Affine {
            bits: 4,
            group_size: 32,
        };
        let refused = |mode: Mode, values: usize, words: usize, groups: usize| {
            let (mut scales, mut biases) = (vec![0.0f32; groups], vec![0.0; groups]);
            let scales = ScalesMut::Affine {
                scales: &mut scales,
                biases: &mut biases,
            };
            let error = quantize(mode, &vec![0.0; values], &mut vec![0; words], scales);
            error.unwrap_err().to_string()
        };
        assert_eq!(
            refused(mode, 65, 8, 2),
            "quantize: values: expected whole groups, found 65"
        );
        assert_eq!(
            refused(mode, 64, 7, 2),
            "quantize: packed: expected 8 elements, found 7"
        );
        assert_eq!(
            refused(mode, 64, 8, 3),
            "quantize: scales: expected 2 elements, found 3"
        );
        assert_eq!(
            refused(Mode::Mxfp4, 64, 8, 2),
            "quantize: scales: expected those of the mode, found others"
        );
        let seven = Mode::Affine {
            bits: 7,
            group_size: 32,
        };
        assert_eq!(
            refused(seven, 64, 14, 2),
            "quantize: bits: expected 2, 3, 4, 5, 6 or 8, found 7"
        );
    }
}
