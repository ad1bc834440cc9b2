//! Four-bit blocks whose elements point into a table of uneven steps.

use super::affine::half;
use super::k_quants::SUPER;

/// ggml's `kvalues_iq4nl`.
const VALUES: [f32; 16] = [
    -127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0,
    89.0, 113.0,
];

/// IQ4_NL: `d`, then 32 elements, the low halves of the bytes first.
pub(super) fn iq4_nl([d0, d1, quants @ ..]: &[u8; 18], out: &mut [f32; 32]) {
    fill(half(*d0, *d1), quants, out);
}

/// IQ4_XS: `d`, the high bits of eight six-bit scales less 32 (two each, lowest first), their low
/// bits (four each), and 16 bytes of elements per scale.
pub(super) fn iq4_xs([d0, d1, h0, h1, rest @ ..]: &[u8; 136], out: &mut [f32; SUPER]) {
    let d = half(*d0, *d1);
    let high = u16::from_le_bytes([*h0, *h1]);
    let (low, quants) = rest.split_at(4);
    let groups = quants.chunks_exact(16).zip(out.chunks_exact_mut(32));
    for (group, (quants, out)) in groups.enumerate() {
        let low = low[group / 2] >> (group % 2 * 4) & 15;
        let top = (high >> (group * 2) & 3) as u8;
        fill(d * (f32::from(low | top << 4) - 32.0), quants, out);
    }
}

fn fill(scale: f32, quants: &[u8], out: &mut [f32]) {
    let (first, second) = out.split_at_mut(quants.len());
    for ((q, first), second) in quants.iter().zip(first).zip(second) {
        *first = scale * VALUES[usize::from(q & 15)];
        *second = scale * VALUES[usize::from(q >> 4)];
    }
}
