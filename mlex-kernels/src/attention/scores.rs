//! Scores of a block of keys with many queries: the queries of a task side by side, as the panels
//! of a GEMM, whose rows are keys.

#[cfg(target_arch = "x86_64")]
use half::bf16;

use super::Job;
use super::packed::Vectors;
use crate::Element;
use crate::simd::attention::Transpose;
use crate::simd::gemm::Panel;
#[cfg(target_arch = "x86_64")]
use crate::simd::pairs;
use crate::simd::rows::{FillPanel, Source, Widen};
use crate::simd::scratch::{Buffer, as_floats};
#[cfg(target_arch = "x86_64")]
use crate::simd::scratch::{as_brains, as_bytes_mut};
use crate::simd::{Kind, Level, Vector};

/// Queries as panels of `width` columns.
pub(super) enum Queries<'a> {
    /// `[panels, D, width]`
    Wide(&'a [f32]),
    /// Pairs of bfloat16: products are exact, and sums in f32.
    #[cfg(target_arch = "x86_64")]
    Brain(&'a [u8]),
}

/// A block of keys.
pub(super) enum Keys<'a> {
    /// `[D, stride]`
    Wide(&'a [f32], usize),
    /// As they are in memory, and how far apart.
    #[cfg(target_arch = "x86_64")]
    Brain(&'a [bf16], usize),
}

/// Whether scores of these keys are products of pairs.
#[cfg(target_arch = "x86_64")]
fn in_pairs<S: Vectors>(level: Level) -> bool {
    level == Level::Avx512Dot && S::Element::KIND == Kind::Bf16
}

impl<'a> Queries<'a> {
    /// Packs `lanes` queries; `lane` gives the head and the position of each.
    pub(super) fn new<T: Element, S: Vectors>(
        job: &Job<'_, T, S>,
        level: Level,
        batch: usize,
        [lanes, width]: [usize; 2],
        lane: impl Fn(usize) -> (usize, usize),
        memory: &'a mut Buffer,
    ) -> Self {
        let d = job.shape.head_dim;
        let panels = lanes.div_ceil(width);
        let row = |l: usize| {
            let (head, query) = lane(l);
            &job.q.at(batch, head, query)[..d]
        };
        let pieces = |p: usize| (p * width, width.min(lanes - p * width));
        #[cfg(target_arch = "x86_64")]
        if in_pairs::<S>(level) {
            let bytes = pairs::packed_bytes(d, width);
            let memory = memory.brains(panels * bytes / 2 + lanes * d);
            let (packed, rows) = memory.split_at_mut(panels * bytes / 2);
            for (l, to) in rows.chunks_exact_mut(d).enumerate().take(lanes) {
                // Keys in bfloat16 are of queries in bfloat16.
                to.copy_from_slice(as_brains(row(l)));
            }
            let packed = as_bytes_mut(packed);
            for (p, panel) in packed.chunks_exact_mut(bytes).enumerate() {
                let (first, count) = pieces(p);
                pairs::fill_panel(rows, d, first, count, panel);
            }
            return Self::Brain(packed);
        }
        let memory = memory.floats((panels * width + lanes) * d);
        let (packed, rows) = memory.split_at_mut(panels * width * d);
        for (l, to) in rows.chunks_exact_mut(d).enumerate().take(lanes) {
            level.dispatch(Widen { from: row(l), to });
        }
        for (p, panel) in packed.chunks_exact_mut(width * d).enumerate() {
            let (first, count) = pieces(p);
            level.dispatch(FillPanel {
                source: Source::Dense(&*rows),
                k: d,
                first,
                count,
                k0: 0,
                size: d,
                panel,
            });
        }
        Self::Wide(packed)
    }

    /// `scores[i, j] = key_i . query_j` for `count` keys, from key `first` of the block on, and the
    /// queries of a panel. As many as a tile has rows at most.
    pub(super) fn score(
        &self,
        level: Level,
        keys: &Keys<'_>,
        (first, count): (usize, usize),
        d: usize,
        (panel, width): (usize, usize),
        scores: &mut [f32],
    ) {
        match (self, keys) {
            (Self::Wide(panels), Keys::Wide(keys, stride)) => level.dispatch(Panel {
                k: d,
                rows: count,
                a: &keys[first..],
                a_stride: *stride,
                b: &panels[panel * width * d..][..width * d],
                c: scores,
                c_stride: width,
                accumulate: false,
            }),
            #[cfg(target_arch = "x86_64")]
            (Self::Brain(panels), Keys::Brain(keys, stride)) => {
                let bytes = pairs::packed_bytes(d, width);
                let panel = &panels[panel * bytes..][..bytes];
                pairs::multiply_rows(d, count, &keys[first * stride..], *stride, panel, scores);
            }
            #[cfg(target_arch = "x86_64")]
            _ => unreachable!("queries and keys of one job"),
        }
    }
}

impl<'a> Keys<'a> {
    /// `count` keys from position `at` on, for [`Queries`] of the same job.
    pub(super) fn new<S: Vectors>(
        keys: &'a S,
        level: Level,
        at: [usize; 3],
        [count, d]: [usize; 2],
        memory: &'a mut Buffer,
        transposed: &'a mut [f32],
    ) -> Self {
        #[cfg(target_arch = "x86_64")]
        if in_pairs::<S>(level) {
            let (keys, stride) = keys.block(level, at, count, d, memory);
            return Self::Brain(as_brains(keys), stride);
        }
        let (from, from_stride) = floats(keys, level, at, [count, d], memory);
        let stride = transposed.len() / d;
        level.dispatch(Transpose {
            from,
            from_stride,
            rows: count,
            columns: d,
            to: transposed,
            to_stride: stride,
        });
        Self::Wide(transposed, stride)
    }
}

/// `count` vectors from position `at` on in f32, and how far apart they are.
pub(super) fn floats<'a, S: Vectors>(
    vectors: &'a S,
    level: Level,
    at: [usize; 3],
    [count, dim]: [usize; 2],
    memory: &'a mut Buffer,
) -> (&'a [f32], usize) {
    if S::Element::KIND == Kind::F32 {
        let (vectors, stride) = vectors.block(level, at, count, dim, memory);
        return (as_floats(vectors), stride);
    }
    let [batch, head, first] = at;
    let wide = &mut memory.floats(count * dim)[..count * dim];
    for (i, to) in wide.chunks_exact_mut(dim).enumerate() {
        vectors.widen(level, [batch, head, first + i], to);
    }
    (wide, dim)
}
