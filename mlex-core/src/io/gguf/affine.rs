//! Blocks of a scale and an offset per 32 elements, as MLX's affine quantization.
//!
//! MLX packs the elements of a row as one little-endian stream of bits, lowest bits first
//! (mlx/backend/cpu/quantized.cpp). The file's blocks have the low halves of two runs of elements
//! in one byte, so the elements are put in order first.

use half::f16;

use super::ggml_type::GgmlType;
use super::k_quants;

/// Elements per group.
pub(super) const GROUP: usize = 32;

/// The elements of a group and what they mean: `scale * q + bias`.
///
/// All of it is exact in f32, for scales are at most the product of a half and six bits.
pub(super) struct Group {
    pub(super) q: [u8; GROUP],
    pub(super) scale: f32,
    pub(super) bias: f32,
}

/// Packed elements, scales and biases of a tensor.
pub(super) struct Repacked {
    pub(super) weight: Vec<u32>,
    pub(super) scales: Vec<f32>,
    pub(super) biases: Vec<f32>,
}

/// The number of bits and the repacked tensor, or `None` for a type that is not affine in groups
/// of 32.
pub(super) fn repack(ggml_type: GgmlType, bytes: &[u8]) -> Option<(u32, Repacked)> {
    Some(match ggml_type {
        GgmlType::Q4_0 => (4, repack_blocks::<_, 1, 4>(bytes, q4_0)),
        GgmlType::Q4_1 => (4, repack_blocks::<_, 1, 4>(bytes, q4_1)),
        GgmlType::Q5_0 => (5, repack_blocks::<_, 1, 5>(bytes, q5_0)),
        GgmlType::Q5_1 => (5, repack_blocks::<_, 1, 5>(bytes, q5_1)),
        GgmlType::Q8_0 => (8, repack_blocks::<_, 1, 8>(bytes, q8_0)),
        GgmlType::Q4_K => (4, repack_blocks::<_, 8, 4>(bytes, k_quants::q4_k)),
        GgmlType::Q5_K => (5, repack_blocks::<_, 8, 5>(bytes, k_quants::q5_k)),
        _ => return None,
    })
}

fn repack_blocks<const BLOCK: usize, const GROUPS: usize, const BITS: usize>(
    bytes: &[u8],
    read: impl Fn(&[u8; BLOCK]) -> [Group; GROUPS],
) -> Repacked {
    let (blocks, _) = bytes.as_chunks::<BLOCK>();
    let groups = blocks.len() * GROUPS;
    let mut out = Repacked {
        weight: Vec::with_capacity(groups * BITS),
        scales: Vec::with_capacity(groups),
        biases: Vec::with_capacity(groups),
    };
    for Group { q, scale, bias } in blocks.iter().flat_map(read) {
        out.weight.extend_from_slice(&pack::<BITS>(&q));
        out.scales.push(scale);
        out.biases.push(bias);
    }
    out
}

pub(super) fn q4_0([d0, d1, quants @ ..]: &[u8; 18]) -> [Group; 1] {
    let d = half(*d0, *d1);
    [Group {
        q: nibbles(quants),
        scale: d,
        bias: -8.0 * d,
    }]
}

pub(super) fn q4_1([d0, d1, m0, m1, quants @ ..]: &[u8; 20]) -> [Group; 1] {
    [Group {
        q: nibbles(quants),
        scale: half(*d0, *d1),
        bias: half(*m0, *m1),
    }]
}

pub(super) fn q5_0([d0, d1, h0, h1, h2, h3, quants @ ..]: &[u8; 22]) -> [Group; 1] {
    let d = half(*d0, *d1);
    let q = with_fifth_bits(nibbles(quants), [*h0, *h1, *h2, *h3]);
    [Group {
        q,
        scale: d,
        bias: -16.0 * d,
    }]
}

pub(super) fn q5_1([d0, d1, m0, m1, h0, h1, h2, h3, quants @ ..]: &[u8; 24]) -> [Group; 1] {
    let q = with_fifth_bits(nibbles(quants), [*h0, *h1, *h2, *h3]);
    [Group {
        q,
        scale: half(*d0, *d1),
        bias: half(*m0, *m1),
    }]
}

pub(super) fn q8_0([d0, d1, quants @ ..]: &[u8; 34]) -> [Group; 1] {
    let d = half(*d0, *d1);
    // From -128..=127 to 0..=255.
    [Group {
        q: quants.map(|q| q ^ 0x80),
        scale: d,
        bias: -128.0 * d,
    }]
}

pub(super) fn half(low: u8, high: u8) -> f32 {
    f16::from_le_bytes([low, high]).to_f32()
}

/// Elements 0 to 15 are the low halves of the bytes, 16 to 31 the high ones.
fn nibbles(quants: &[u8; 16]) -> [u8; GROUP] {
    std::array::from_fn(|i| {
        if i < 16 {
            quants[i] & 15
        } else {
            quants[i - 16] >> 4
        }
    })
}

/// Adds the elements' fifth bits: bit `i` of a little-endian word belongs to element `i`.
fn with_fifth_bits(mut q: [u8; GROUP], high: [u8; 4]) -> [u8; GROUP] {
    let high = u32::from_le_bytes(high);
    for (i, q) in q.iter_mut().enumerate() {
        *q |= ((high >> i & 1) as u8) << 4;
    }
    q
}

/// 32 elements of `BITS` bits as a little-endian stream of bits.
fn pack<const BITS: usize>(q: &[u8; GROUP]) -> [u32; BITS] {
    let mut stream = [0_u8; GROUP];
    for (eight, bytes) in q.as_chunks().0.iter().zip(stream.chunks_exact_mut(BITS)) {
        bytes.copy_from_slice(&squeeze::<BITS>(*eight)[..BITS]);
    }
    let mut words = [0; BITS];
    for (word, bytes) in words.iter_mut().zip(stream.as_chunks().0) {
        *word = u32::from_le_bytes(*bytes);
    }
    words
}

/// Eight elements in the first `BITS` bytes: neighbours are joined to pairs, fours, and all.
fn squeeze<const BITS: usize>(eight: [u8; 8]) -> [u8; 8] {
    let x = u64::from_le_bytes(eight);
    let x = x & 0x00ff_00ff_00ff_00ff | (x >> 8 & 0x00ff_00ff_00ff_00ff) << BITS;
    let x = x & 0x0000_ffff_0000_ffff | (x >> 16 & 0x0000_ffff_0000_ffff) << (2 * BITS);
    let x = x & 0xffff_ffff | x >> 32 << (4 * BITS);
    x.to_le_bytes()
}
