//! MXFP4 blocks as MLX has them: 4-bit floats and the exponent of 32 of them.

use crate::io::stored_dtype::f8_e8m0_to_f32;

/// Bytes of a block: the exponent, then 32 elements.
const BLOCK: usize = 17;

/// The 4-bit floats of the OCP MX formats (E2M1).
const FP4: [f32; 16] = [
    0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0,
];

/// Elements 0 to 15 are the low halves of the bytes, 16 to 31 the high ones; MLX has eight
/// consecutive elements in a word, the first one lowest.
pub(super) fn repack(bytes: &[u8]) -> (Vec<u32>, Vec<u8>) {
    let (blocks, _) = bytes.as_chunks::<BLOCK>();
    let mut weight = Vec::with_capacity(blocks.len() * 4);
    let mut scales = Vec::with_capacity(blocks.len());
    for [exponent, quants @ ..] in blocks {
        scales.push(*exponent);
        for shift in [0, 4] {
            for eight in quants.as_chunks::<8>().0 {
                let word = eight
                    .iter()
                    .rev()
                    .fold(0, |word, q| word << 4 | u32::from(q >> shift & 15));
                weight.push(word);
            }
        }
    }
    (weight, scales)
}

/// One block as f32.
pub(super) fn dequantize([exponent, quants @ ..]: &[u8; BLOCK], out: &mut [f32; 32]) {
    let scale = f8_e8m0_to_f32(*exponent);
    let (low, high) = out.split_at_mut(quants.len());
    for ((q, low), high) in quants.iter().zip(low).zip(high) {
        *low = scale * FP4[usize::from(q & 15)];
        *high = scale * FP4[usize::from(q >> 4)];
    }
}
