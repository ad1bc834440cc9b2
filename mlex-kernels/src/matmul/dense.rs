//! Dense matrix products.

use super::engine::F32Engine;
#[cfg(target_arch = "x86_64")]
use super::engine::{Bf16Engine, Brain};
use super::quantized::rows_of;
use super::{Block, Precision, few, few_columns, is_few, many};
use crate::error::{check_len, product};
#[cfg(target_arch = "x86_64")]
use crate::simd::Kind;
use crate::simd::rows::{DenseRows, Source, Widen};
use crate::simd::{Level, Vector, scratch};
use crate::threads::{RowBlock, parallel_blocks};
use crate::{Element, Floats, Result};

/// The weights of a dense layer: `n` rows of `k` values, and `n` biases or none.
#[derive(Debug, Clone, Copy)]
pub struct Linear<'a> {
    weight: Floats<'a>,
    bias: Option<Floats<'a>>,
    n: usize,
    k: usize,
}

impl<'a> Linear<'a> {
    /// A view of `n` rows of `k` weights.
    ///
    /// # Errors
    /// When a slice has another length.
    pub fn new(
        n: usize,
        k: usize,
        weight: impl Into<Floats<'a>>,
        bias: Option<Floats<'a>>,
    ) -> Result<Self> {
        let weight = weight.into();
        check_len(
            "linear: weight",
            product("linear: weight", &[n, k])?,
            weight.len(),
        )?;
        if let Some(bias) = &bias {
            check_len("linear: bias", n, bias.len())?;
        }
        Ok(Self { weight, bias, n, k })
    }
}

/// `y[m, n] = sum_k x[m, k] * weight[n, k] + bias[n]`, summed in f32.
///
/// `x` holds rows of `k`, `y` as many rows of `n`; their type need not be the weights'.
///
/// # Errors
/// When `x` or `y` is not whole rows.
pub fn linear<T: Element>(
    y: &mut [T],
    x: &[T],
    w: &Linear<'_>,
    precision: Precision,
) -> Result<()> {
    let rows = rows_of("linear: x", x.len(), w.k, y.len(), w.n)?;
    if y.is_empty() {
        return Ok(());
    }
    let bias = w.bias.as_ref().map(Floats::widened);
    let bias = bias.as_deref().unwrap_or(&[]);
    if w.k == 0 {
        for row in y.chunks_exact_mut(w.n) {
            for (i, y) in row.iter_mut().enumerate() {
                *y = T::from_f32(bias.get(i).copied().unwrap_or(0.0));
            }
        }
        return Ok(());
    }
    let block = Block {
        rows: 0..rows,
        expert: 0,
    };
    let level = Level::current();
    #[cfg(target_arch = "x86_64")]
    if let Floats::Bf16(weight) = w.weight
        && level == Level::Avx512Dot
        && (precision == Precision::Bf16 || T::KIND == Kind::Bf16)
        && !is_few(&block)
    {
        let engine = Bf16Engine::new(w.k, |_| Brain::Dense(weight));
        many(level, &engine, x, y, w.k, w.n, bias, &[block]);
        return Ok(());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = precision;
    match w.weight {
        Floats::F32(weight) => run(level, y, x, weight, w, bias, block),
        Floats::F16(weight) => run(level, y, x, weight, w, bias, block),
        Floats::Bf16(weight) => run(level, y, x, weight, w, bias, block),
    }
    Ok(())
}

fn run<T: Element, W: Vector>(
    level: Level,
    y: &mut [T],
    x: &[T],
    weight: &[W],
    shape: &Linear<'_>,
    bias: &[f32],
    block: Block,
) {
    let (n, k) = (shape.n, shape.k);
    if !is_few(&block) {
        let engine = F32Engine::new(level, k, |_: usize| Source::Dense(weight));
        many(level, &engine, x, y, k, n, bias, &[block]);
        return;
    }
    let tile_columns = few_columns(k * size_of::<W>(), n);
    let row_block = RowBlock {
        rows: block.rows,
        tile_columns,
    };
    scratch::with(0, |[wide, ..]| {
        let wide = &mut wide.floats(x.len())[..x.len()];
        level.dispatch(Widen { from: x, to: wide });
        let wide = &*wide;
        parallel_blocks(y, n, &[row_block], |tile| {
            few(level, tile, bias, |rows, first, count, out, stride| {
                let x = &wide[rows.start * k..rows.end * k];
                let rows = rows.len();
                level.dispatch(DenseRows {
                    w: weight,
                    x,
                    k,
                    rows,
                    first,
                    count,
                    out,
                    stride,
                });
            });
        });
    });
}
