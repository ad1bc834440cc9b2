//! Attention with every form of mask; sliding windows by way of the cache.

use mlex_core::{Array, AttentionMask};
use mlex_nn::attention::attention;
use mlex_nn::{KvCache, Result};

use crate::cases::Case;
use crate::one;

pub(crate) fn run(case: &Case) -> Option<Result<Vec<Array>>> {
    if case.op != "attention" {
        return None;
    }
    let (q, k, v) = (case.named("q")?, case.named("k")?, case.named("v")?);
    let scale = case.params.float("scale");
    let sinks = case.named("sinks");
    let mask = match case.params.text("mask") {
        "none" => AttentionMask::None,
        "causal" => AttentionMask::Causal,
        "array" => AttentionMask::Array(case.named("mask")?),
        "sliding" => return one(sliding(q, k, v, scale, case.params.int("window"))),
        _ => return None,
    };
    one(attention(q, k, v, scale, mask, sinks))
}

/// The queries are those of the last positions: the keys before them are in the cache already.
fn sliding(q: &Array, k: &Array, v: &Array, scale: f32, window: i32) -> Result<Array> {
    let (queries, keys) = (q.dim(2)?, k.dim(2)?);
    let before = keys - queries;
    let part = |x: &Array, start, stop| x.slice_axis(2, start, stop);
    let mut cache = KvCache::with_window(window)?;
    if before > 0 {
        cache.update(&part(k, 0, before)?, &part(v, 0, before)?)?;
    }
    let mask = cache.mask(queries)?;
    let (k, v) = cache.update(&part(k, before, keys)?, &part(v, before, keys)?)?;
    attention(q, &k, &v, scale, mask.as_attention(), None)
}
