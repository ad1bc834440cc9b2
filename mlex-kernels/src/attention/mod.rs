//! Scaled dot-product attention with grouped heads: `softmax(q k^T * scale + mask) v`.

mod blocked;
mod decode;
mod packed;
mod scores;

use crate::error::{check, check_len, product};
use crate::threads::{Expectation, Rows};
use crate::{Element, Floats, KernelError, Result};

use packed::Vectors;
pub use packed::{FloatType, PackedHeads, PackedRow, pack_rows};

/// The sizes of an attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionShape {
    /// Sequences.
    pub batch: usize,
    /// Heads of queries: a multiple of `kv_heads`. Queries of head `h` see keys of head
    /// `h / (q_heads / kv_heads)`.
    pub q_heads: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Queries of a sequence.
    pub q_len: usize,
    /// Keys and values of a sequence.
    pub kv_len: usize,
    /// Size of a query and a key: a multiple of 16.
    pub head_dim: usize,
    /// Size of a value: a multiple of 16.
    pub value_dim: usize,
}

/// Heads of vectors in memory: elements of a vector lie together, the rest is `strides` apart.
/// So a cache of a larger capacity, or `[batch, length, heads, dim]`, is read in place.
#[derive(Debug, Clone, Copy)]
pub struct Heads<'a, T> {
    /// From the first element on.
    pub data: &'a [T],
    /// Elements from one sequence, head and position to the next.
    pub strides: [usize; 3],
}

impl<'a, T> Heads<'a, T> {
    /// `[batch, heads, length, dim]` without gaps.
    pub fn contiguous(data: &'a [T], heads: usize, length: usize, dim: usize) -> Self {
        Self {
            data,
            strides: [heads * length * dim, length * dim, dim],
        }
    }

    pub(crate) fn check(&self, what: &'static str, sizes: [usize; 3], dim: usize) -> Result<()> {
        let needed = end(&self.strides, &sizes, dim).ok_or(KernelError::Overflow { what })?;
        check(
            self.data.len() >= needed,
            what,
            "all elements in the slice",
            self.data.len(),
        )
    }

    /// From a vector on.
    pub(crate) fn at(&self, batch: usize, head: usize, position: usize) -> &'a [T] {
        let [b, h, p] = self.strides;
        &self.data[batch * b + head * h + position * p..]
    }
}

/// One past the last element of a strided array; `None` if that overflows.
fn end(strides: &[usize], sizes: &[usize], last: usize) -> Option<usize> {
    if sizes.contains(&0) {
        return Some(0);
    }
    strides
        .iter()
        .zip(sizes)
        .try_fold(last, |end, (&stride, &size)| {
            end.checked_add(stride.checked_mul(size - 1)?)
        })
}

/// Which keys a query sees. A query that sees none gets zeros.
#[derive(Debug, Clone, Copy)]
pub enum Mask<'a> {
    /// Every key.
    None,
    /// Query `i` is at position `kv_len - q_len + i` and sees the keys up to there, of which
    /// only the last `window` if there is one.
    Causal {
        /// The number of keys seen, the query's own position included.
        window: Option<usize>,
    },
    /// The keys where it is true.
    Bool {
        /// From the first element on.
        data: &'a [bool],
        /// Elements from one sequence, query head, query and key to the next; 0 repeats.
        strides: [usize; 4],
    },
    /// Every key, with a number added to the score (minus infinity hides it).
    Additive {
        /// From the first element on.
        data: Floats<'a>,
        /// As for `Bool`.
        strides: [usize; 4],
    },
}

/// The order of the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OutputOrder {
    /// `[batch, heads, length, dim]`, as MLX's attention gives it.
    #[default]
    HeadsFirst,
    /// `[batch, length, heads, dim]`, ready for the output projection.
    LengthFirst,
}

/// What an attention does besides its shape.
#[derive(Debug, Clone, Copy)]
pub struct AttentionOptions<'a> {
    /// Factor of the scores.
    pub scale: f32,
    /// Which keys are seen.
    pub mask: Mask<'a>,
    /// For each query head a score that takes part in the softmax without a value.
    pub sinks: Option<&'a [f32]>,
    /// The order of the output.
    pub output: OutputOrder,
}

/// Everything that both forms need; keys and values are `S`.
struct Job<'a, T, S> {
    shape: AttentionShape,
    q: Heads<'a, T>,
    k: S,
    v: S,
    options: AttentionOptions<'a>,
}

/// The most rows (queries times the heads of a group) that are taken one key at a time.
const DECODE_ROWS: usize = 16;

/// Writes `softmax(q k^T * scale + mask) v` to `out`, without gaps in the order of the
/// options. All sums are in f32.
///
/// # Errors
/// When sizes do not fit each other, a slice is too short for its strides, or a head size is
/// not a multiple of 16.
pub fn attention<T: Element>(
    out: &mut [T],
    q: Heads<'_, T>,
    k: Heads<'_, T>,
    v: Heads<'_, T>,
    shape: AttentionShape,
    options: AttentionOptions<'_>,
) -> Result<()> {
    let sizes = [shape.batch, shape.kv_heads, shape.kv_len];
    k.check("attention: k", sizes, shape.head_dim)?;
    v.check("attention: v", sizes, shape.value_dim)?;
    run(
        out,
        Job {
            shape,
            q,
            k,
            v,
            options,
        },
    )
}

/// What [`attention`] of one query reads, for `[batch, kv_heads, kv_len]` keys and values. It
/// depends on the number of threads.
pub fn expect_attention<T: Element>(
    keys_and_values: [Heads<'_, T>; 2],
    sizes: [usize; 3],
) -> Expectation {
    decode::expectation(keys_and_values, sizes)
}

/// [`attention`] over packed keys and values. They are unpacked a block at a time, so that packed
/// ones are what is read from memory.
///
/// # Errors
/// As [`attention`], and when the form of the vectors is not their size.
pub fn attention_packed<T: Element>(
    out: &mut [T],
    q: Heads<'_, T>,
    k: PackedHeads<'_>,
    v: PackedHeads<'_>,
    shape: AttentionShape,
    options: AttentionOptions<'_>,
) -> Result<()> {
    let sizes = [shape.batch, shape.kv_heads, shape.kv_len];
    k.words.check("attention: k", sizes, k.row.words())?;
    v.words.check("attention: v", sizes, v.row.words())?;
    check_len(
        "attention: size of a packed key",
        shape.head_dim,
        k.row.dim(),
    )?;
    check_len(
        "attention: size of a packed value",
        shape.value_dim,
        v.row.dim(),
    )?;
    run(
        out,
        Job {
            shape,
            q,
            k,
            v,
            options,
        },
    )
}

/// Checks what is left to check, and computes.
fn run<T: Element, S: Vectors>(out: &mut [T], job: Job<'_, T, S>) -> Result<()> {
    let Job {
        shape, q, options, ..
    } = job;
    let AttentionShape {
        batch,
        q_heads,
        kv_heads,
        q_len,
        kv_len,
        head_dim,
        value_dim,
    } = shape;
    let grouped = kv_heads > 0 && q_heads.is_multiple_of(kv_heads);
    check(
        grouped,
        "attention: q_heads",
        "a multiple of kv_heads",
        q_heads,
    )?;
    for dim in [head_dim, value_dim] {
        let fits = dim > 0 && dim.is_multiple_of(16) && dim <= 1024;
        check(
            fits,
            "attention: head size",
            "a multiple of 16 up to 1024",
            dim,
        )?;
    }
    // Positions are compared in f32.
    let limit = 1 << 24;
    check(
        q_len < limit && kv_len < limit,
        "attention: length",
        "below 2^24",
        q_len.max(kv_len),
    )?;
    q.check("attention: q", [batch, q_heads, q_len], head_dim)?;
    let size = product("attention: out", &[batch, q_heads, q_len, value_dim])?;
    check_len("attention: out", size, out.len())?;
    if let Some(sinks) = options.sinks {
        check_len("attention: sinks", q_heads, sinks.len())?;
    }
    let masked = match options.mask {
        Mask::Bool { data, strides } => Some((data.len(), strides)),
        Mask::Additive { data, strides } => Some((data.len(), strides)),
        Mask::None | Mask::Causal { .. } => None,
    };
    if let Some((length, strides)) = masked {
        let needed =
            end(&strides, &[batch, q_heads, q_len, kv_len], 1).ok_or(KernelError::Overflow {
                what: "attention: mask",
            })?;
        check(
            length >= needed,
            "attention: mask",
            "all elements in the slice",
            length,
        )?;
    }
    if out.is_empty() {
        return Ok(());
    }
    if kv_len == 0 {
        out.fill(T::from_f32(0.0));
        return Ok(());
    }
    let rows = Rows::new(out, value_dim);
    if q_heads / kv_heads * q_len <= DECODE_ROWS {
        decode::run(&job, &rows);
    } else {
        blocked::run(&job, &rows);
    }
    Ok(())
}

impl<T, S> Job<'_, T, S> {
    /// The number of the output row of a query.
    fn output_row(&self, batch: usize, head: usize, query: usize) -> usize {
        let AttentionShape { q_heads, q_len, .. } = self.shape;
        match self.options.output {
            OutputOrder::HeadsFirst => (batch * q_heads + head) * q_len + query,
            OutputOrder::LengthFirst => (batch * q_len + query) * q_heads + head,
        }
    }

    /// Query heads that share a head of keys.
    fn group(&self) -> usize {
        self.shape.q_heads / self.shape.kv_heads
    }

    /// The keys `first .. end` that a causal query sees; all of them for other masks.
    fn visible(&self, query: usize) -> (usize, usize) {
        let AttentionShape { q_len, kv_len, .. } = self.shape;
        match self.options.mask {
            Mask::Causal { window } => {
                let end = (kv_len + query + 1).saturating_sub(q_len).min(kv_len);
                (window.map_or(0, |window| end.saturating_sub(window)), end)
            }
            _ => (0, kv_len),
        }
    }

    /// What the mask adds to a score.
    fn bias(&self, batch: usize, head: usize, query: usize, key: usize) -> f32 {
        let index = |s: [usize; 4]| batch * s[0] + head * s[1] + query * s[2] + key * s[3];
        match self.options.mask {
            Mask::None | Mask::Causal { .. } => 0.0,
            Mask::Bool { data, strides } if data[index(strides)] => 0.0,
            Mask::Bool { .. } => f32::NEG_INFINITY,
            Mask::Additive { data, strides } => data.get(index(strides)),
        }
    }

    fn has_bias(&self) -> bool {
        matches!(self.options.mask, Mask::Bool { .. } | Mask::Additive { .. })
    }
}
