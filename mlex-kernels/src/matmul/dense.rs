//! Dense matrix products.

use super::engine::F32Engine;
#[cfg(target_arch = "x86_64")]
use super::engine::{Bf16Engine, Brain};
use super::few::{self, Operand, Part, Side};
use super::quantized::rows_of;
use super::{Block, Finish, Precision, is_few, many};
use crate::error::{check_len, product};
#[cfg(target_arch = "x86_64")]
use crate::simd::Kind;
use crate::simd::rows::Source;
use crate::simd::{Level, Vector};
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

    /// Number of outputs.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Number of inputs.
    pub fn k(&self) -> usize {
        self.k
    }

    pub(super) fn operand(&self) -> Operand<'a> {
        match self.weight {
            Floats::F32(w) => Operand::F32(w),
            Floats::F16(w) => Operand::F16(w),
            Floats::Bf16(w) => Operand::Bf16(w),
        }
    }

    pub(crate) fn weight(&self) -> Floats<'a> {
        self.weight
    }

    pub(super) fn bias(&self) -> Option<Floats<'a>> {
        self.bias
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
    run(y, x, w, precision, bias.as_deref().unwrap_or(&[]), rows);
    Ok(())
}

/// The product of `rows` rows, whose lengths were checked; adds `bias` unless it is empty.
pub(super) fn run<T: Element>(
    y: &mut [T],
    x: &[T],
    w: &Linear<'_>,
    precision: Precision,
    bias: &[f32],
    rows: usize,
) {
    if w.k == 0 {
        for row in y.chunks_exact_mut(w.n) {
            for (i, y) in row.iter_mut().enumerate() {
                *y = T::from_f32(bias.get(i).copied().unwrap_or(0.0));
            }
        }
        return;
    }
    let block = Block {
        rows: 0..rows,
        expert: 0,
    };
    let level = Level::current();
    if is_few(&block) {
        let operand = w.operand();
        let part = Part {
            first: Side { operand, bias },
            second: None,
            x: 0,
            columns: w.n,
        };
        few::run(level, &mut [y], &[x], w.k, &[part]);
        return;
    }
    #[cfg(target_arch = "x86_64")]
    if let Floats::Bf16(weight) = w.weight
        && level == Level::Avx512Dot
        && (precision == Precision::Bf16 || T::KIND == Kind::Bf16)
    {
        let engine = Bf16Engine::new(w.k, |_| Brain::Dense(weight));
        many(
            level,
            &engine,
            x,
            y,
            w.k,
            w.n,
            &Finish::plain(bias),
            &[block],
        );
        return;
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = precision;
    match w.weight {
        Floats::F32(weight) => run_many(level, y, x, weight, w, bias, block),
        Floats::F16(weight) => run_many(level, y, x, weight, w, bias, block),
        Floats::Bf16(weight) => run_many(level, y, x, weight, w, bias, block),
    }
}

fn run_many<T: Element, W: Vector>(
    level: Level,
    y: &mut [T],
    x: &[T],
    weight: &[W],
    shape: &Linear<'_>,
    bias: &[f32],
    block: Block,
) {
    let engine = F32Engine::new(level, shape.k, |_: usize| Source::Dense(weight));
    many(
        level,
        &engine,
        x,
        y,
        shape.k,
        shape.n,
        &Finish::plain(bias),
        &[block],
    );
}
