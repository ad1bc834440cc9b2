//! One block of any readable type as f32.

use half::{bf16, f16};

use super::affine::{self, GROUP, Group};
use super::ggml_type::GgmlType;
use super::k_quants::{self, SUPER};
use super::{iq4, mxfp4};

/// The most elements of a block.
pub(super) const MAX_ELEMENTS: usize = SUPER;

/// Writes the elements of one block; the slices have the block's bytes and elements.
pub(super) type Dequantize = fn(&[u8], &mut [f32]);

/// The function for a type, if it can be read as f32.
pub(super) fn dequantizer(ggml_type: GgmlType) -> Option<Dequantize> {
    Some(match ggml_type {
        GgmlType::F32 => |block, out| with(block, out, |&b, [x]| *x = f32::from_le_bytes(b)),
        GgmlType::F16 => {
            |block, out| with(block, out, |&b, [x]| *x = f16::from_le_bytes(b).to_f32())
        }
        GgmlType::BF16 => {
            |block, out| with(block, out, |&b, [x]| *x = bf16::from_le_bytes(b).to_f32())
        }
        GgmlType::Q4_0 => |block, out| grouped(block, out, affine::q4_0),
        GgmlType::Q4_1 => |block, out| grouped(block, out, affine::q4_1),
        GgmlType::Q5_0 => |block, out| grouped(block, out, affine::q5_0),
        GgmlType::Q5_1 => |block, out| grouped(block, out, affine::q5_1),
        GgmlType::Q8_0 => |block, out| grouped(block, out, affine::q8_0),
        GgmlType::Q4_K => |block, out| grouped(block, out, k_quants::q4_k),
        GgmlType::Q5_K => |block, out| grouped(block, out, k_quants::q5_k),
        GgmlType::Q2_K => |block, out| with(block, out, k_quants::q2_k),
        GgmlType::Q3_K => |block, out| with(block, out, k_quants::q3_k),
        GgmlType::Q6_K => |block, out| with(block, out, k_quants::q6_k),
        GgmlType::Q8_K => |block, out| with(block, out, k_quants::q8_k),
        GgmlType::IQ4_NL => |block, out| with(block, out, iq4::iq4_nl),
        GgmlType::IQ4_XS => |block, out| with(block, out, iq4::iq4_xs),
        GgmlType::MXFP4 => |block, out| with(block, out, mxfp4::dequantize),
        _ => return None,
    })
}

/// Calls `f` with the block and its elements as arrays of their sizes. Slices of other sizes would
/// be a mistake in the table of types; their elements stay as they are.
fn with<const BYTES: usize, const ELEMENTS: usize>(
    block: &[u8],
    out: &mut [f32],
    f: impl Fn(&[u8; BYTES], &mut [f32; ELEMENTS]),
) {
    match (block.as_array(), out.as_mut_array()) {
        (Some(block), Some(out)) => f(block, out),
        _ => debug_assert!(
            false,
            "a block of {} bytes and {} elements",
            block.len(),
            out.len()
        ),
    }
}

/// As [`with`], for blocks that are groups of 32.
fn grouped<const BYTES: usize, const GROUPS: usize>(
    block: &[u8],
    out: &mut [f32],
    read: impl Fn(&[u8; BYTES]) -> [Group; GROUPS],
) {
    let Some(block) = block.as_array() else {
        debug_assert!(false, "a block of {} bytes", block.len());
        return;
    };
    for (Group { q, scale, bias }, out) in read(block).iter().zip(out.chunks_exact_mut(GROUP)) {
        for (out, &q) in out.iter_mut().zip(q) {
            *out = scale * f32::from(q) + bias;
        }
    }
}
