//! Few rows of activations against rows of weights, straight from the form that they are kept
//! in: bound by reading the weights. Several matrices of the same activations are one job of
//! the pool, because a decode step is a row of such jobs of a few microseconds.

use std::ops::Range;

use half::{bf16, f16};
use smallvec::SmallVec;

use crate::Element;
use crate::simd::elementwise::{Gate, NarrowGated};
use crate::simd::rows::{DenseRows, MAX_ROWS, Narrow, QuantizedRows, Widen};
use crate::simd::scratch::{self, Buffers, Once, as_bytes};
use crate::simd::weights::{Code, Weights};
use crate::simd::{Kind, Level, Vector};
use crate::threads::{Columns, Expectation, Upcoming, parallel_columns, threads};

/// Bytes of weights that one task reads, about.
const TASK: usize = 16 << 10;

/// The most columns of a task.
const MAX_COLUMNS: usize = 256;

/// Rows of weights.
#[derive(Clone, Copy)]
pub(super) enum Operand<'a> {
    F32(&'a [f32]),
    F16(&'a [f16]),
    Bf16(&'a [bf16]),
    Quantized(Weights<'a>),
}

/// A matrix, and a bias for each of its rows or none.
pub(super) struct Side<'a> {
    pub(super) operand: Operand<'a>,
    pub(super) bias: &'a [f32],
}

/// One output: the product of some activations with a matrix, or `gate(first) * second`.
pub(super) struct Part<'a> {
    pub(super) first: Side<'a>,
    pub(super) second: Option<(Side<'a>, Gate)>,
    /// Which of the activations.
    pub(super) x: usize,
    /// Columns of the output.
    pub(super) columns: usize,
}

/// What is made of the activations first.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    /// f32 only.
    Wide,
    /// The sum of each group too.
    Sums { group: usize },
    /// Integers; see [`crate::simd::dot`].
    #[cfg(target_arch = "x86_64")]
    Digits { nibbles: bool, group: usize },
}

impl Form {
    fn of(level: Level, operand: &Operand<'_>) -> Self {
        let Operand::Quantized(w) = operand else {
            return Self::Wide;
        };
        let group = w.group;
        #[cfg(target_arch = "x86_64")]
        if level == Level::Avx512Dot && w.code != Code::Fp8 {
            let nibbles = w.bits == 4;
            return Self::Digits { nibbles, group };
        }
        let _ = (level, Code::Fp8);
        Self::Sums { group }
    }

    /// The values that share a sum.
    fn group(self) -> Option<usize> {
        match self {
            Self::Wide => None,
            Self::Sums { group } => Some(group),
            #[cfg(target_arch = "x86_64")]
            Self::Digits { group, .. } => Some(group),
        }
    }

    /// The same for values that cannot be digits.
    fn without_digits(self) -> Self {
        self.group()
            .map_or(Self::Wide, |group| Self::Sums { group })
    }

    /// A matrix of those whose digits these are.
    #[cfg(target_arch = "x86_64")]
    fn digits_of<'p, 'a>(self, parts: &'p [Part<'a>]) -> Option<&'p Weights<'a>> {
        match (self, parts.first().map(|part| &part.first.operand)) {
            (Self::Digits { .. }, Some(Operand::Quantized(like))) => Some(like),
            _ => None,
        }
    }
}

/// Computes `outputs[i]` as `parts[i]` says. Each of `xs` has at most [`MAX_ROWS`] rows of `k`.
pub(super) fn run<T: Element>(
    level: Level,
    outputs: &mut [&mut [T]],
    xs: &[&[T]],
    k: usize,
    parts: &[Part<'_>],
) {
    assert_eq!(outputs.len(), parts.len());
    let mut done = 0;
    while done < parts.len() {
        // As many as take the activations in one form.
        let form = Form::of(level, &parts[done].first.operand);
        let same = |part: &Part<'_>| {
            let second = part.second.as_ref().map(|(side, _)| side);
            let mut sides = std::iter::once(&part.first).chain(second);
            sides.all(|side| Form::of(level, &side.operand) == form)
        };
        let count = parts[done..].iter().take_while(|part| same(part)).count();
        // A gate and its product that differ in form: see `can_gate`.
        let count = count.max(1);
        let range = done..done + count;
        run_form(
            level,
            &mut outputs[range.clone()],
            xs,
            k,
            &parts[range],
            form,
        );
        done += count;
    }
}

/// Whether two matrices can be the sides of one part.
pub(super) fn can_gate(level: Level, gate: &Operand<'_>, up: &Operand<'_>) -> bool {
    Form::of(level, gate) == Form::of(level, up)
}

fn run_form<T: Element>(
    level: Level,
    outputs: &mut [&mut [T]],
    xs: &[&[T]],
    k: usize,
    parts: &[Part<'_>],
    form: Form,
) {
    let mut arrays: SmallVec<[Columns<'_, T>; 4]> = outputs
        .iter_mut()
        .zip(parts)
        .map(|(data, part)| Columns {
            rows: xs[part.x].len() / k,
            columns: part.columns,
            tile_columns: task_columns(part, k),
            data,
        })
        .collect();
    // The rows of all activations, one after another.
    let starts: SmallVec<[usize; 4]> = xs
        .iter()
        .scan(0, |next, x| {
            let start = *next;
            *next += x.len() / k;
            Some(start)
        })
        .collect();
    let rows: usize = xs.iter().map(|x| x.len() / k).sum();
    // Two digits hold a bfloat16 with 7 bits to spare for smaller neighbours.
    let digits = if T::KIND == Kind::Bf16 { 2 } else { 3 };
    let once = Once::new();
    let fill = |buffers: &mut Buffers| {
        let wide = &mut buffers[0].floats(rows * k)[..rows * k];
        for (from, start) in xs.iter().zip(&starts) {
            let to = &mut wide[start * k..][..from.len()];
            level.dispatch(Widen { from, to });
        }
        Prepared::fill(rows * k, form, digits, parts, buffers)
    };
    parallel_columns(&mut arrays, |mut tile| {
        once.with(fill, |buffers, whole| {
            let form = if whole { form } else { form.without_digits() };
            let x = Prepared::filled([rows, k], form, digits, parts, buffers);
            let part = &parts[tile.plane];
            let rows = starts[part.x]..starts[part.x] + tile.rows;
            let (first, count) = (tile.column, tile.columns);
            let product = |side: &Side<'_>, out: &mut [f32]| {
                x.product(level, &side.operand, rows.clone(), first, count, out);
            };
            let bias = |side: &Side<'_>| match side.bias {
                [] => 0..0,
                _ => first..first + count,
            };
            scratch::with(1, |[sums, more, ..]| {
                let sums = sums.floats(MAX_ROWS * count);
                product(&part.first, sums);
                let first_bias = &part.first.bias[bias(&part.first)];
                let rows = sums.chunks_exact(count).enumerate().take(tile.rows);
                let Some((second, function)) = &part.second else {
                    for (i, from) in rows {
                        level.dispatch(Narrow {
                            from,
                            bias: first_bias,
                            to: tile.row_mut(i),
                        });
                    }
                    return;
                };
                let more = more.floats(MAX_ROWS * count);
                product(second, more);
                for ((i, gate), up) in rows.zip(more.chunks_exact(count)) {
                    level.dispatch(NarrowGated {
                        gate,
                        up,
                        biases: [first_bias, &second.bias[bias(second)]],
                        function: *function,
                        to: tile.row_mut(i),
                    });
                }
            });
        });
    });
}

/// What [`run`] reads with these parts.
pub(super) fn expectation(k: usize, parts: &[Part<'_>]) -> Expectation {
    let upcoming = parts.iter().map(|part| {
        let columns = task_columns(part, k);
        let second = part.second.as_ref().map(|(side, _)| side);
        let sides = std::iter::once(&part.first).chain(second);
        let arrays = sides.flat_map(|side| self::arrays(&side.operand, k));
        Upcoming {
            tasks: part.columns.div_ceil(columns),
            arrays: arrays
                .map(|(bytes, row)| (bytes.as_ptr().addr(), columns * row))
                .collect(),
        }
    });
    Expectation(upcoming.collect())
}

/// The arrays of a matrix, and the bytes of a row of each.
fn arrays<'a>(operand: &Operand<'a>, k: usize) -> impl Iterator<Item = (&'a [u8], usize)> {
    let [codes, scales, biases] = match operand {
        Operand::F32(w) => [Some((as_bytes(w), 4 * k)), None, None],
        Operand::F16(w) => [Some((as_bytes(w), 2 * k)), None, None],
        Operand::Bf16(w) => [Some((as_bytes(w), 2 * k)), None, None],
        Operand::Quantized(w) => {
            let factors = w.groups() * w.scale_type.size();
            let biases = w.biases.map(|biases| (biases, factors));
            [
                Some((w.packed, w.row_bytes())),
                Some((w.scales, factors)),
                biases,
            ]
        }
    };
    [codes, scales, biases].into_iter().flatten()
}

/// Columns of a task.
fn task_columns(part: &Part<'_>, k: usize) -> usize {
    let bytes = |side: &Side<'_>| match &side.operand {
        Operand::F32(_) => 4 * k,
        Operand::F16(_) | Operand::Bf16(_) => 2 * k,
        Operand::Quantized(w) => w.row_bytes() + w.groups() * w.scale_type.size() * 2,
    };
    let second = part.second.as_ref().map_or(0, |(side, _)| bytes(side));
    let by_size = (TASK / (bytes(&part.first) + second).max(1)).max(8);
    let by_threads = part.columns.div_ceil(8 * threads());
    by_size
        .min(by_threads)
        .next_multiple_of(8)
        .clamp(8, MAX_COLUMNS)
}

/// Rows of activations as the products read them.
struct Prepared<'a> {
    wide: &'a [f32],
    k: usize,
    groups: usize,
    sums: &'a [f32],
    #[cfg(target_arch = "x86_64")]
    digits: Option<crate::simd::dot::Activations<'a>>,
}

impl<'a> Prepared<'a> {
    /// Makes what a form needs of the first `length` floats of the first buffer. `false` where
    /// that cannot be digits, since a number is not finite: f32 products pass those on.
    fn fill(
        length: usize,
        form: Form,
        count: usize,
        parts: &[Part<'_>],
        [wide, first, second, third]: &mut Buffers,
    ) -> bool {
        let wide = &wide.floats(length)[..length];
        #[cfg(target_arch = "x86_64")]
        if let Some(like) = form.digits_of(parts) {
            use crate::simd::dot::Activations;
            if Activations::fill(wide, like, count, [&mut *first, second, third]) {
                return true;
            }
        }
        let _ = (second, third, parts, count);
        if let Some(group) = form.group() {
            let sums = first.floats(length / group);
            for (sum, x) in sums.iter_mut().zip(wide.chunks_exact(group)) {
                *sum = x.iter().sum();
            }
        }
        matches!(form, Form::Wide | Form::Sums { .. })
    }

    /// What [`fill`](Self::fill) has made of rows of `k`.
    fn filled(
        [rows, k]: [usize; 2],
        form: Form,
        count: usize,
        parts: &[Part<'_>],
        [wide, first, second, third]: &'a mut Buffers,
    ) -> Self {
        let mut prepared = Self {
            wide: &wide.floats(rows * k)[..rows * k],
            k,
            groups: form.group().map_or(0, |group| k / group),
            sums: &[],
            #[cfg(target_arch = "x86_64")]
            digits: None,
        };
        #[cfg(target_arch = "x86_64")]
        if let Some(like) = form.digits_of(parts) {
            use crate::simd::dot::Activations;
            let buffers = [first, second, third];
            prepared.digits = Some(Activations::filled(rows, like, count, buffers));
            return prepared;
        }
        let _ = (second, third, parts, count);
        let count = rows * prepared.groups;
        prepared.sums = &first.floats(count)[..count];
        prepared
    }

    /// `out[m, i] = x[rows.start + m] . w[first + i]`
    fn product(
        &self,
        level: Level,
        operand: &Operand<'_>,
        rows: Range<usize>,
        first: usize,
        count: usize,
        out: &mut [f32],
    ) {
        match operand {
            Operand::F32(w) => self.dense(level, w, rows, first, count, out),
            Operand::F16(w) => self.dense(level, w, rows, first, count, out),
            Operand::Bf16(w) => self.dense(level, w, rows, first, count, out),
            Operand::Quantized(w) => {
                #[cfg(target_arch = "x86_64")]
                if let Some(digits) = &self.digits {
                    crate::simd::dot::matvec(w, &digits.rows(rows), first, count, out, count);
                    return;
                }
                level.dispatch(QuantizedRows {
                    w,
                    x: &self.wide[rows.start * self.k..],
                    sums: &self.sums[rows.start * self.groups..],
                    rows: rows.len(),
                    first,
                    count,
                    out,
                    stride: count,
                });
            }
        }
    }

    fn dense<W: Vector>(
        &self,
        level: Level,
        w: &[W],
        rows: Range<usize>,
        first: usize,
        count: usize,
        out: &mut [f32],
    ) {
        let k = self.k;
        level.dispatch(DenseRows {
            w,
            x: &self.wide[rows.start * k..rows.end * k],
            k,
            rows: rows.len(),
            first,
            count,
            out,
            stride: count,
        });
    }
}
