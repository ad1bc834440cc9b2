//! Blocks of 256 elements with a scale for every 16 or 32 of them.
//!
//! The layouts are those of ggml's `block_q2_K` to `block_q8_K`. Q4_K and Q5_K are groups of 32
//! with a scale and an offset; the others become f32.

use super::affine::{GROUP, Group, half};

/// Elements of a block.
pub(super) const SUPER: usize = 256;

/// Q4_K: `d`, `dmin`, packed scales and offsets, 128 bytes of elements.
pub(super) fn q4_k([d0, d1, m0, m1, rest @ ..]: &[u8; 144]) -> [Group; 8] {
    let (packed, quants) = rest.split_at(12);
    let scales = [half(*d0, *d1), half(*m0, *m1)];
    groups(scales, packed, |group, i| pair_nibble(quants, group, i))
}

/// Q5_K: as Q4_K, with 32 bytes of fifth bits in front of the elements. Bit `g` of byte `i` belongs
/// to element `i` of group `g`.
pub(super) fn q5_k([d0, d1, m0, m1, rest @ ..]: &[u8; 176]) -> [Group; 8] {
    let (packed, rest) = rest.split_at(12);
    let (high, quants) = rest.split_at(32);
    let scales = [half(*d0, *d1), half(*m0, *m1)];
    groups(scales, packed, |group, i| {
        pair_nibble(quants, group, i) | (high[i] >> group & 1) << 4
    })
}

/// Groups `2p` and `2p + 1` are the low and the high halves of bytes `32p` to `32p + 31`.
fn pair_nibble(quants: &[u8], group: usize, i: usize) -> u8 {
    quants[group / 2 * 32 + i] >> (group % 2 * 4) & 15
}

/// Eight groups: `d * scale * q - dmin * offset`, with scales and offsets of six bits.
fn groups([d, dmin]: [f32; 2], packed: &[u8], q: impl Fn(usize, usize) -> u8) -> [Group; 8] {
    std::array::from_fn(|group| {
        let (scale, offset) = scale_and_offset(packed, group);
        Group {
            q: std::array::from_fn::<_, GROUP, _>(|i| q(group, i)),
            scale: d * f32::from(scale),
            bias: -(dmin * f32::from(offset)),
        }
    })
}

/// Six-bit numbers in twelve bytes: those of the first four groups are the low bits of bytes 0 to
/// 3 (scales) and 4 to 7 (offsets); the others have their low four bits in bytes 8 to 11 and the
/// high two on top of the first ones.
fn scale_and_offset(packed: &[u8], group: usize) -> (u8, u8) {
    if group < 4 {
        (packed[group] & 63, packed[group + 4] & 63)
    } else {
        let low = packed[group + 4];
        let scale = low & 15 | packed[group - 4] >> 6 << 4;
        let offset = low >> 4 | packed[group] >> 6 << 4;
        (scale, offset)
    }
}

/// Element `i` of two-bit numbers that lie in bytes by halves of 128: the first 32 elements are
/// the lowest bits of 32 bytes, the next 32 the next bits of the same bytes.
fn two_bits(quants: &[u8], i: usize) -> u8 {
    quants[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3
}

/// Q2_K: a byte for each 16 elements (scale low, offset high), elements, `d`, `dmin`.
pub(super) fn q2_k(block: &[u8; 84], out: &mut [f32; SUPER]) {
    let [body @ .., d0, d1, m0, m1] = block;
    let (scales, quants) = body.split_at(16);
    let (d, dmin) = (half(*d0, *d1), half(*m0, *m1));
    for (i, out) in out.iter_mut().enumerate() {
        let scale = scales[i / 16];
        let q = two_bits(quants, i);
        *out = d * f32::from(scale & 15) * f32::from(q) - dmin * f32::from(scale >> 4);
    }
}

/// Q3_K: 32 bytes of third bits, elements, six-bit scales less 32, `d`. Bit `i / 32` of byte
/// `i % 32` belongs to element `i`; where it is 0, four is taken off.
pub(super) fn q3_k(block: &[u8; 110], out: &mut [f32; SUPER]) {
    let [body @ .., d0, d1] = block;
    let (high, rest) = body.split_at(32);
    let (quants, packed) = rest.split_at(64);
    let d = half(*d0, *d1);
    let scales: [f32; 16] = std::array::from_fn(|group| {
        let low = packed[group % 8] >> (group / 8 * 4) & 15;
        let top = packed[8 + group % 4] >> (group / 4 * 2) & 3;
        d * (f32::from(low | top << 4) - 32.0)
    });
    for (i, out) in out.iter_mut().enumerate() {
        let offset = if high[i % 32] >> (i / 32) & 1 == 0 {
            4.0
        } else {
            0.0
        };
        *out = scales[i / 16] * (f32::from(two_bits(quants, i)) - offset);
    }
}

/// Q6_K: 128 bytes of low bits, 64 of high ones, a signed scale for each 16 elements, `d`. In each
/// half of 128 elements, the first 64 are the low halves of 64 bytes and the others the high ones.
pub(super) fn q6_k(block: &[u8; 210], out: &mut [f32; SUPER]) {
    let [body @ .., d0, d1] = block;
    let (low, rest) = body.split_at(128);
    let (high, scales) = rest.split_at(64);
    let d = half(*d0, *d1);
    for (i, out) in out.iter_mut().enumerate() {
        let nibble = low[i / 128 * 64 + i % 64] >> (i % 128 / 64 * 4) & 15;
        let q = nibble | two_bits(high, i) << 4;
        let scale = d * f32::from(scales[i / 16].cast_signed());
        *out = scale * (f32::from(q) - 32.0);
    }
}

/// Q8_K: `d` as f32, signed elements, sums that only a matmul needs.
pub(super) fn q8_k([d0, d1, d2, d3, rest @ ..]: &[u8; 292], out: &mut [f32; SUPER]) {
    let d = f32::from_le_bytes([*d0, *d1, *d2, *d3]);
    for (out, q) in out.iter_mut().zip(rest) {
        *out = d * f32::from(q.cast_signed());
    }
}
