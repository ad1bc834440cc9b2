//! Norms, rotary embedding, attention.

use mlex_core::{Array, AttentionMask, Result, Rope};

use crate::cases::Case;
use crate::one;

pub(crate) fn run(case: &Case) -> Option<Result<Vec<Array>>> {
    let params = &case.params;
    let (x, rest) = case.inputs.split_first()?;
    let rope = |base, freqs| Rope {
        dims: params.int("dims"),
        traditional: params.bool("traditional"),
        base,
        scale: params.float("scale"),
        freqs,
    };
    one(match case.op.as_str() {
        "rms_norm" => x.rms_norm(rest.first(), params.float("eps")),
        "layer_norm" => x.layer_norm(rest.first(), rest.get(1), params.float("eps")),
        "rope" => x.rope(rope(params.float("base"), None), params.int("offset")),
        "rope_freqs" => x.rope(rope(0.0, rest.first()), params.int("offset")),
        "rope_offsets" => x.rope_at(rope(params.float("base"), None), &rest[0]),
        "scaled_dot_product_attention" => {
            let [keys, values, rest @ ..] = rest else {
                return None;
            };
            let (mask, rest) = match params.text("mask") {
                "none" => (AttentionMask::None, rest),
                "causal" => (AttentionMask::Causal, rest),
                _ => (AttentionMask::Array(&rest[0]), &rest[1..]),
            };
            let sinks = rest.first().filter(|_| params.bool("sinks"));
            x.attention(keys, values, params.float("scale"), mask, sinks)
        }
        _ => return None,
    })
}
