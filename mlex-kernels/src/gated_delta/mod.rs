//! A gated delta net between its projections: the short convolution, the norms of queries and
//! keys, the gated delta rule, and the gated norm of the output, head by head.
//!
//! Few positions are done one after another, each in one pass over the state. Many are done in
//! chunks of [`CHUNK`], in which the rule is a triangular system ("Parallelizing Linear
//! Transformers with the Delta Rule over Sequence Length"): per chunk and head a few small
//! matrix products and one substitution, while the state stays in the cache of the core.

mod chunks;

use crate::error::{check, check_len, product};
use crate::simd::gated_delta::{Convolve, GatedNorm, Normalize, Step, prefetch};
use crate::simd::rows::Widen;
use crate::simd::{Level, scratch};
use crate::threads::{Rows, Tile, Tiling, parallel_tiles, threads};
use crate::{Element, Floats, Result};

/// Positions of a chunk.
const CHUNK: usize = 32;
/// Up to how many positions they are done one by one.
const STEPS: usize = 4;
/// The epsilon of the norms of queries and keys.
const QK_EPS: f32 = 1e-6;

/// The sizes of a [`gated_delta`]. The channels `C` of the convolution are the queries and the
/// keys of all key heads and the values of all value heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaShape {
    /// Rows of the batch, `B`.
    pub batch: usize,
    /// Positions, `L`.
    pub length: usize,
    /// Heads of queries and keys, `H_k`.
    pub key_heads: usize,
    /// Heads of values, `H_v`; a multiple of the key heads.
    pub value_heads: usize,
    /// Width of a key, `D_k`.
    pub key_dim: usize,
    /// Width of a value, `D_v`.
    pub value_dim: usize,
    /// Positions that the convolution sees, `K`.
    pub kernel: usize,
}

impl DeltaShape {
    /// The channels of the convolution, `C`.
    pub fn channels(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
    }

    fn group(&self) -> usize {
        self.value_heads / self.key_heads
    }

    fn validate(&self) -> Result<()> {
        const WHAT: &str = "gated_delta: shape";
        for size in [
            self.key_heads,
            self.value_heads,
            self.key_dim,
            self.value_dim,
            self.kernel,
        ] {
            check(size > 0, WHAT, "heads and dimensions", size)?;
        }
        check(
            self.value_heads.is_multiple_of(self.key_heads),
            "gated_delta: value heads",
            "a multiple of the key heads",
            self.value_heads,
        )?;
        let keys = product(WHAT, &[2, self.key_heads, self.key_dim])?;
        let values = product(WHAT, &[self.value_heads, self.value_dim])?;
        let channels = keys
            .checked_add(values)
            .ok_or(crate::KernelError::Overflow { what: WHAT })?;
        product(WHAT, &[self.batch, self.length, channels])?;
        product(WHAT, &[self.batch, self.kernel, channels])?;
        product(WHAT, &[self.batch, values, self.key_dim])?;
        Ok(())
    }
}

/// The parameters of a [`gated_delta`].
#[derive(Debug, Clone, Copy)]
pub struct DeltaLayer<'a> {
    /// The convolution, `[K, C]`, the tap of the position itself last.
    pub conv: Floats<'a>,
    /// The logarithm of the decay's rate, `[H_v]`.
    pub a_log: Floats<'a>,
    /// Added to the decay's input, `[H_v]`.
    pub dt_bias: Floats<'a>,
    /// The weight of the output's norm, `[D_v]`.
    pub norm: Floats<'a>,
    /// The epsilon of that norm.
    pub norm_eps: f32,
}

/// Rows in memory: position `t` of batch row `b` starts at `(b * L + t) * stride`.
#[derive(Debug, Clone, Copy)]
pub struct Strided<'a, T> {
    /// All of them.
    pub data: &'a [T],
    /// From one row to the next; not less than a row.
    pub stride: usize,
}

impl<'a, T> Strided<'a, T> {
    fn row(&self, row: usize, width: usize) -> &'a [T] {
        &self.data[row * self.stride..][..width]
    }

    fn validate(&self, what: &'static str, rows: usize, width: usize) -> Result<()> {
        if rows == 0 {
            return Ok(());
        }
        check(self.stride >= width, what, "rows apart", self.stride)?;
        let needed = product(what, &[rows - 1, self.stride])?
            .checked_add(width)
            .ok_or(crate::KernelError::Overflow { what })?;
        check(
            self.data.len() >= needed,
            what,
            "a row for each position",
            self.data.len(),
        )
    }
}

/// What a [`gated_delta`] computes on.
#[derive(Debug, Clone, Copy)]
pub struct DeltaInputs<'a, T> {
    /// Queries, keys and values before the convolution, rows of `C`.
    pub qkv: Strided<'a, T>,
    /// The gate of the output, rows of `H_v * D_v`.
    pub gate: Strided<'a, T>,
    /// The logit of the step size, rows of `H_v`.
    pub beta: Strided<'a, T>,
    /// The input of the decay, rows of `H_v`.
    pub decay: Strided<'a, T>,
    /// The last inputs of the convolution before these, `[B, K - 1, C]`; zero if empty.
    pub before: &'a [T],
    /// How many of the positions of each batch row are padding, at its start; none if empty.
    pub padding: &'a [usize],
}

impl<T: Element> DeltaInputs<'_, T> {
    fn validate(&self, shape: &DeltaShape) -> Result<()> {
        let rows = shape.batch * shape.length;
        let (channels, heads) = (shape.channels(), shape.value_heads);
        self.qkv.validate("gated_delta: qkv", rows, channels)?;
        let values = heads * shape.value_dim;
        self.gate.validate("gated_delta: gate", rows, values)?;
        self.beta.validate("gated_delta: beta", rows, heads)?;
        self.decay.validate("gated_delta: decay", rows, heads)?;
        if !self.before.is_empty() {
            let before = shape.batch * (shape.kernel - 1) * channels;
            check_len("gated_delta: before", before, self.before.len())?;
        }
        if !self.padding.is_empty() {
            check_len("gated_delta: padding", shape.batch, self.padding.len())?;
        }
        Ok(())
    }

    /// Positions of padding in a batch row.
    fn start(&self, batch: usize, shape: &DeltaShape) -> usize {
        let padding = self.padding.get(batch).copied().unwrap_or(0);
        padding.min(shape.length)
    }

    /// `width` channels from `channel` on at a position, which may lie before the first one;
    /// `None` where they are 0.
    fn channels(
        &self,
        shape: &DeltaShape,
        batch: usize,
        position: isize,
        channel: usize,
        width: usize,
    ) -> Option<&[T]> {
        let channels = shape.channels();
        if let Ok(position) = usize::try_from(position) {
            if position < self.start(batch, shape) {
                return None;
            }
            let row = self.qkv.row(batch * shape.length + position, channels);
            return Some(&row[channel..channel + width]);
        }
        if self.before.is_empty() {
            return None;
        }
        let kept = shape.kernel - 1;
        let row = batch * kept + kept.checked_add_signed(position)?;
        Some(&self.before[row * channels + channel..][..width])
    }
}

/// What the next call needs of the inputs of the convolution: the last `K - 1` of them, into
/// `out` `[B, K - 1, C]`.
///
/// # Errors
/// When a slice has another length than `shape` says.
pub fn gated_delta_tail<T: Element>(
    out: &mut [T],
    inputs: &DeltaInputs<'_, T>,
    shape: &DeltaShape,
) -> Result<()> {
    shape.validate()?;
    inputs.validate(shape)?;
    let (kept, channels) = (shape.kernel - 1, shape.channels());
    check_len(
        "gated_delta: tail",
        shape.batch * kept * channels,
        out.len(),
    )?;
    for (index, out) in out.chunks_exact_mut(channels).enumerate() {
        let (batch, row) = (index / kept, index % kept);
        let position = (shape.length + row) as isize - kept as isize;
        match inputs.channels(shape, batch, position, 0, channels) {
            Some(from) => out.copy_from_slice(from),
            None => out.fill(T::from_f32(0.0)),
        }
    }
    Ok(())
}

/// A gated delta net from the projections of its input to what its output projection takes:
/// `out` `[B, L, H_v * D_v]`, and `state` `[B, H_v, D_v, D_k]` goes on by `L` positions. Padding
/// leaves the state as it is and gives 0.
///
/// Everything is computed in f32; see the source of the module for how.
///
/// # Errors
/// When a slice has another length than `shape` says.
pub fn gated_delta<T: Element>(
    out: &mut [T],
    state: &mut [f32],
    inputs: &DeltaInputs<'_, T>,
    layer: &DeltaLayer<'_>,
    shape: &DeltaShape,
) -> Result<()> {
    shape.validate()?;
    inputs.validate(shape)?;
    let &DeltaShape {
        batch,
        length,
        key_heads,
        value_heads,
        key_dim,
        value_dim,
        kernel,
    } = shape;
    let columns = value_heads * value_dim;
    check_len("gated_delta: out", batch * length * columns, out.len())?;
    let states = batch * value_heads * value_dim * key_dim;
    check_len("gated_delta: state", states, state.len())?;
    let taps = product("gated_delta: conv", &[shape.channels(), kernel])?;
    check_len("gated_delta: conv", taps, layer.conv.len())?;
    check_len("gated_delta: a_log", value_heads, layer.a_log.len())?;
    check_len("gated_delta: dt_bias", value_heads, layer.dt_bias.len())?;
    check_len("gated_delta: norm", value_dim, layer.norm.len())?;
    let norm = layer.norm.widened();
    // Value heads that share keys are done together, unless that leaves threads idle.
    let together = if batch * key_heads >= threads() {
        shape.group()
    } else {
        1
    };
    let job = Job {
        level: Level::current(),
        inputs,
        layer,
        norm: &norm,
        shape,
        states: Rows::new(state, value_dim * key_dim),
    };
    let tiling = Tiling {
        planes: batch,
        rows: length,
        columns,
        tile_rows: length.max(1),
        tile_columns: together * value_dim,
    };
    parallel_tiles(out, tiling, |mut tile| {
        let start = inputs.start(tile.plane, shape);
        for position in 0..start {
            tile.row_mut(position).fill(T::from_f32(0.0));
        }
        scratch::with(1, |[buffer, ..]| {
            if length - start <= STEPS {
                job.steps(buffer, &mut tile, start);
            } else {
                job.chunks(buffer, &mut tile, start);
            }
        });
    });
    Ok(())
}

struct Job<'a, T> {
    level: Level,
    inputs: &'a DeltaInputs<'a, T>,
    layer: &'a DeltaLayer<'a>,
    norm: &'a [f32],
    shape: &'a DeltaShape,
    /// One per batch row and value head.
    states: Rows<'a, f32>,
}

/// A head's channels of the convolution.
#[derive(Clone, Copy)]
struct Channels {
    first: usize,
    /// How many there are, and with those that make them whole vectors.
    count: usize,
    padded: usize,
}

impl<T: Element> Job<'_, T> {
    fn query(&self, key_head: usize) -> Channels {
        let count = self.shape.key_dim;
        Channels {
            first: key_head * count,
            count,
            padded: count.next_multiple_of(16),
        }
    }

    fn key(&self, key_head: usize) -> Channels {
        let query = self.query(key_head);
        Channels {
            first: query.first + self.shape.key_heads * query.count,
            ..query
        }
    }

    fn value(&self, head: usize, padded: usize) -> Channels {
        let count = self.shape.value_dim;
        Channels {
            first: 2 * self.shape.key_heads * self.shape.key_dim + head * count,
            count,
            padded,
        }
    }

    /// The taps of some channels, `[K, padded]`, 0 where there are no channels.
    fn taps(&self, channels: Channels, taps: &mut [f32]) {
        let (kernel, all) = (self.shape.kernel, self.shape.channels());
        for (j, taps) in taps
            .chunks_exact_mut(channels.padded)
            .enumerate()
            .take(kernel)
        {
            let (to, rest) = taps.split_at_mut(channels.count);
            rest.fill(0.0);
            let first = j * all + channels.first;
            match self.layer.conv.slice(first..first + channels.count) {
                Floats::F32(from) => to.copy_from_slice(from),
                Floats::F16(from) => self.level.dispatch(Widen { from, to }),
                Floats::Bf16(from) => self.level.dispatch(Widen { from, to }),
            }
        }
    }

    /// Brings near what the `rows` positions from `first` on take of some channels.
    fn prefetch(&self, channels: Channels, batch: usize, [first, rows]: [usize; 2]) {
        let end = self.shape.length.min(first + rows);
        for position in first..end {
            let row = batch * self.shape.length + position;
            let row = self.inputs.qkv.row(row, self.shape.channels());
            prefetch(&row[channels.first..channels.first + channels.count]);
        }
    }

    /// Some channels of `rows` positions from `first` on, convolved and activated:
    /// `[rows, padded]`. `window` has room for `K - 1` rows more.
    fn convolve(
        &self,
        channels: Channels,
        batch: usize,
        [first, rows]: [usize; 2],
        taps: &[f32],
        window: &mut [f32],
        out: &mut [f32],
    ) {
        let (kernel, dim) = (self.shape.kernel, channels.padded);
        let needed = rows + kernel - 1;
        for (index, row) in window.chunks_exact_mut(dim).enumerate().take(needed) {
            let position = (first + index) as isize - (kernel as isize - 1);
            let (to, rest) = row.split_at_mut(channels.count);
            rest.fill(0.0);
            let Channels { first, count, .. } = channels;
            match self
                .inputs
                .channels(self.shape, batch, position, first, count)
            {
                Some(from) => self.level.dispatch(Widen { from, to }),
                None => to.fill(0.0),
            }
        }
        self.level.dispatch(Convolve {
            window,
            taps,
            out,
            rows,
            kernel,
            dim,
        });
    }

    /// Divides rows by their length, times `scale`.
    fn normalize(&self, rows: &mut [f32], scale: f32) {
        let count = self.shape.key_dim;
        self.level.dispatch(Normalize {
            rows,
            dim: count.next_multiple_of(16),
            count,
            scale,
            eps: QK_EPS,
        });
    }

    /// What queries and keys are multiplied by when their mean square is 1.
    fn scales(&self) -> (f32, f32) {
        let scale = (self.shape.key_dim as f32).powf(-0.5);
        (scale * scale, scale)
    }

    /// The decay and the step size of a head at a position.
    fn gates(&self, batch: usize, position: usize, head: usize) -> (f32, f32) {
        let row = batch * self.shape.length + position;
        let at = |rows: &Strided<'_, T>| rows.data[row * rows.stride + head].to_f32();
        let x = at(&self.inputs.decay) + self.layer.dt_bias.get(head);
        let softplus = x.max(0.0) + (-x.abs()).exp().ln_1p();
        let decay = (-self.layer.a_log.get(head).exp() * softplus).exp();
        (decay, 1.0 / (1.0 + (-at(&self.inputs.beta)).exp()))
    }

    /// The output of a head at a position, normalized and gated.
    fn finish(&self, y: &[f32], batch: usize, position: usize, head: usize, out: &mut [T]) {
        let dim = self.shape.value_dim;
        let row = batch * self.shape.length + position;
        let gate = self.inputs.gate.row(row, self.shape.value_heads * dim);
        self.level.dispatch(GatedNorm {
            x: y,
            weight: self.norm,
            gate: &gate[head * dim..(head + 1) * dim],
            eps: self.layer.norm_eps,
            out,
        });
    }

    /// The positions from `start` on, one by one.
    fn steps(&self, buffer: &mut scratch::Buffer, tile: &mut Tile<'_, T>, start: usize) {
        let shape = self.shape;
        let (batch, dim) = (tile.plane, shape.value_dim);
        let (first, count) = (tile.column / dim, tile.columns / dim);
        let key_head = first / shape.group();
        let (query, key) = (self.query(key_head), self.key(key_head));
        let padded = dim.next_multiple_of(16);
        let widest = query.padded.max(padded);
        let mut memory = buffer.floats(2 * shape.kernel * widest + 4 * widest);
        let mut cut = |count: usize| cut(&mut memory, count);
        let (taps, window) = (cut(shape.kernel * widest), cut(shape.kernel * widest));
        let [q, k, v, y] = [cut(widest), cut(widest), cut(widest), cut(widest)];
        let (query_scale, key_scale) = self.scales();
        for head in first..first + count {
            let state = self.states.take(batch * shape.value_heads + head);
            for position in start..shape.length {
                let span = [position, 1];
                if head == first || shape.length - start > 1 {
                    self.taps(query, taps);
                    self.convolve(query, batch, span, taps, window, q);
                    self.normalize(&mut q[..query.padded], query_scale);
                    self.taps(key, taps);
                    self.convolve(key, batch, span, taps, window, k);
                    self.normalize(&mut k[..key.padded], key_scale);
                }
                let value = self.value(head, padded);
                self.taps(value, taps);
                self.convolve(value, batch, span, taps, window, v);
                let (decay, beta) = self.gates(batch, position, head);
                self.level.dispatch(Step {
                    state,
                    query: &q[..query.count],
                    key: &k[..key.count],
                    value: &v[..dim],
                    decay,
                    beta,
                    out: &mut y[..dim],
                });
                let out = &mut tile.row_mut(position)[(head - first) * dim..][..dim];
                self.finish(&y[..dim], batch, position, head, out);
            }
        }
    }
}

/// The first `count` floats of what is left.
fn cut<'a>(memory: &mut &'a mut [f32], count: usize) -> &'a mut [f32] {
    let (first, rest) = std::mem::take(memory).split_at_mut(count);
    *memory = rest;
    first
}
