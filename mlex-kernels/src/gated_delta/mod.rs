//! A gated delta net between its projections: the short convolution, the norms of queries and
//! keys, the gated delta rule, and the gated norm of the output, head by head.
//!
//! Few positions are done one after another, each in one pass over the state. Many are done in
//! chunks of [`CHUNK`], in which the rule is a triangular system ("Parallelizing Linear
//! Transformers with the Delta Rule over Sequence Length"): per chunk and head a few small
//! matrix products and one substitution, while the state stays in the cache of the core.

mod chunks;

use crate::conv::{Channels, ConvInputs, ConvLayer, ConvShape, Convolution, Strided};
use crate::error::{check, check_len, product};
use crate::panels::cut;
use crate::simd::gated_delta::{GatedNorm, Normalize, Step};
use crate::simd::{Level, scratch};
use crate::threads::{Rows, Tile, Tiling, parallel_tiles, threads};
use crate::{Element, Floats, Result, causal_conv_tail};

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

    fn conv(&self) -> ConvShape {
        ConvShape {
            batch: self.batch,
            length: self.length,
            channels: self.channels(),
            kernel: self.kernel,
        }
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

impl<'a, T: Element> DeltaInputs<'a, T> {
    fn conv(&self) -> ConvInputs<'a, T> {
        ConvInputs {
            x: self.qkv,
            before: self.before,
            padding: self.padding,
        }
    }

    fn validate(&self, shape: &DeltaShape) -> Result<()> {
        let rows = shape.batch * shape.length;
        let heads = shape.value_heads;
        let values = heads * shape.value_dim;
        self.qkv
            .validate("gated_delta: qkv", rows, shape.channels())?;
        self.gate.validate("gated_delta: gate", rows, values)?;
        self.beta.validate("gated_delta: beta", rows, heads)?;
        self.decay.validate("gated_delta: decay", rows, heads)?;
        self.conv().validate(&shape.conv())
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
    let kept = shape.batch * (shape.kernel - 1) * shape.channels();
    check_len("gated_delta: tail", kept, out.len())?;
    causal_conv_tail(out, &inputs.conv(), &shape.conv())
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
        ..
    } = shape;
    let columns = value_heads * value_dim;
    check_len("gated_delta: out", batch * length * columns, out.len())?;
    let states = batch * value_heads * value_dim * key_dim;
    check_len("gated_delta: state", states, state.len())?;
    let conv = ConvLayer {
        taps: layer.conv,
        bias: None,
        activate: true,
        residual: false,
    };
    conv.validate(&shape.conv())?;
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
    let level = Level::current();
    let job = Job {
        level,
        conv: Convolution {
            level,
            inputs: inputs.conv(),
            layer: conv,
            shape: shape.conv(),
        },
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
        let start = job.conv.inputs.start(tile.plane, &job.conv.shape);
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
    conv: Convolution<'a, T>,
    inputs: &'a DeltaInputs<'a, T>,
    layer: &'a DeltaLayer<'a>,
    norm: &'a [f32],
    shape: &'a DeltaShape,
    /// One per batch row and value head.
    states: Rows<'a, f32>,
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
        let taps_len = self.conv.taps_len(widest);
        let mut memory = buffer.floats(taps_len + (shape.kernel + 4) * widest);
        let mut cut = |count: usize| cut(&mut memory, count);
        let (taps, window) = (cut(taps_len), cut(shape.kernel * widest));
        let [q, k, v, y] = [cut(widest), cut(widest), cut(widest), cut(widest)];
        let (query_scale, key_scale) = self.scales();
        for head in first..first + count {
            let state = self.states.take(batch * shape.value_heads + head);
            for position in start..shape.length {
                let span = [position, 1];
                if head == first || shape.length - start > 1 {
                    self.conv.taps(query, taps);
                    self.conv.run(query, batch, span, taps, window, q);
                    self.normalize(&mut q[..query.padded], query_scale);
                    self.conv.taps(key, taps);
                    self.conv.run(key, batch, span, taps, window, k);
                    self.normalize(&mut k[..key.padded], key_scale);
                }
                let value = self.value(head, padded);
                self.conv.taps(value, taps);
                self.conv.run(value, batch, span, taps, window, v);
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
