//! Rotary position embeddings.

use std::borrow::Cow;
use std::cell::RefCell;
use std::rc::Rc;

use smallvec::SmallVec;

use crate::attention::Heads;
use crate::error::{check, check_len, product};
use crate::simd::elementwise::Rotate;
use crate::simd::{Kernel, Level, Simd};
use crate::threads::parallel_chunks;
use crate::{Element, Result};

/// The angle per position of each pair.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Frequencies<'a> {
    /// `base^(-2 i / dims)`, rounded as MLX does.
    Base(f32),
    /// One for each pair. (MLX's `freqs` are the reciprocals of these.)
    Inverse(&'a [f32]),
}

/// How positions turn the pairs of a head.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RopeOptions<'a> {
    /// The first elements of a head that are turned; even.
    pub dims: usize,
    /// Pairs are neighbours (`true`), or `dims / 2` apart.
    pub traditional: bool,
    /// The angle per position.
    pub frequencies: Frequencies<'a>,
    /// Factor of the positions.
    pub scale: f32,
    /// The position of the first vector: one for all sequences, or one for each.
    pub offsets: &'a [i32],
}

/// Cosines and sines of some positions, `[length, dims / 2]` each.
struct Table {
    inverse: Vec<f32>,
    scale: f32,
    offset: i32,
    length: usize,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

thread_local! {
    // All layers of a step ask for the same positions.
    static LAST: RefCell<Option<Rc<Table>>> = const { RefCell::new(None) };
}

fn table(inverse: &[f32], scale: f32, offset: i32, length: usize) -> Rc<Table> {
    let last = LAST.take().filter(|t| {
        t.inverse == inverse && t.scale == scale && t.offset == offset && t.length == length
    });
    let table = last.unwrap_or_else(|| {
        let half = inverse.len();
        let mut both = vec![(0.0f32, 0.0f32); length * half];
        parallel_chunks(&mut both, 2048, |first, both| {
            for (i, both) in both.iter_mut().enumerate() {
                let (position, pair) = ((first + i) / half, (first + i) % half);
                // The angle is rounded to f32 as MLX does it; its sine is then exact.
                let position = (position as f32 + offset as f32) * scale;
                let (sin, cos) = f64::from(position * inverse[pair]).sin_cos();
                *both = (cos as f32, sin as f32);
            }
        });
        let (cos, sin) = both.into_iter().unzip();
        Rc::new(Table {
            inverse: inverse.to_vec(),
            scale,
            offset,
            length,
            cos,
            sin,
        })
    });
    LAST.set(Some(Rc::clone(&table)));
    table
}

/// Elements that one task takes at least.
const TASK: usize = 8192;

/// Angles by which vectors are turned.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Turns<'a> {
    /// The cosines, `[length, parts, pairs]`.
    pub cos: &'a [f32],
    /// The sines, `[length, parts, pairs]`.
    pub sin: &'a [f32],
    /// Parts of one length, of which a vector consists.
    pub parts: usize,
    /// How many pairs of a part are turned: its element `i` with element `i + pairs`.
    pub pairs: usize,
}

/// Turns the vectors `x`, `[batch, heads, length, dim]` by any strides, by angles that are known;
/// `out` has that shape without gaps. Elements of a part behind its pairs stay.
///
/// # Errors
/// When `dim` is not so many parts, there are more pairs than half of one, a slice is too short,
/// or `out` or a table has another length.
pub fn rotate<T: Element>(
    out: &mut [T],
    x: Heads<'_, T>,
    [batch, heads, length, dim]: [usize; 4],
    turns: Turns<'_>,
) -> Result<()> {
    let (parts, pairs) = (turns.parts, turns.pairs);
    check(
        parts > 0 && dim.is_multiple_of(parts),
        "rotate: parts",
        "a divisor of dim",
        parts,
    )?;
    check(
        pairs <= dim / parts / 2,
        "rotate: pairs",
        "at most half of a part",
        pairs,
    )?;
    x.check("rotate: x", [batch, heads, length], dim)?;
    let size = product("rotate: out", &[batch, heads, length, dim])?;
    check_len("rotate: out", size, out.len())?;
    let size = product("rotate: turns", &[length, parts, pairs])?;
    check_len("rotate: cos", size, turns.cos.len())?;
    check_len("rotate: sin", size, turns.sin.len())?;
    if !out.is_empty() {
        turn(out, x, [heads, length, dim], false, &[turns]);
    }
    Ok(())
}

/// Turns the vectors `x`, `[batch, heads, length, dim]` by any strides, by their positions;
/// `out` has that shape without gaps.
///
/// # Errors
/// When `dims` is odd or larger than `dim`, a slice is too short, `out` has another length, or
/// there are not one offset, or one for each sequence.
pub fn rope<T: Element>(
    out: &mut [T],
    x: Heads<'_, T>,
    [batch, heads, length, dim]: [usize; 4],
    options: RopeOptions<'_>,
) -> Result<()> {
    let RopeOptions {
        dims,
        traditional,
        frequencies,
        scale,
        offsets,
    } = options;
    check(
        dims.is_multiple_of(2) && dims <= dim,
        "rope: dims",
        "an even number up to dim",
        dims,
    )?;
    let known = offsets.len() == 1 || offsets.len() == batch;
    check(
        known,
        "rope: offsets",
        "one, or one for each sequence",
        offsets.len(),
    )?;
    x.check("rope: x", [batch, heads, length], dim)?;
    check_len(
        "rope: out",
        product("rope: out", &[batch, heads, length, dim])?,
        out.len(),
    )?;
    let half = dims / 2;
    let inverse: Cow<'_, [f32]> = match frequencies {
        Frequencies::Base(base) => {
            let step = base.ln() / half as f32;
            (0..half).map(|i| (-(i as f32) * step).exp()).collect()
        }
        Frequencies::Inverse(inverse) => {
            check_len("rope: frequencies", half, inverse.len())?;
            Cow::Borrowed(inverse)
        }
    };
    if out.is_empty() {
        return Ok(());
    }
    let tables: SmallVec<[Rc<Table>; 4]> = offsets
        .iter()
        .map(|&offset| table(&inverse, scale, offset, length))
        .collect();
    let turns = tables.iter().map(|table| Turns {
        cos: &table.cos,
        sin: &table.sin,
        parts: 1,
        pairs: half,
    });
    let turns: SmallVec<[Turns<'_>; 4]> = turns.collect();
    turn(out, x, [heads, length, dim], traditional, &turns);
    Ok(())
}

/// Turns all vectors: `turns` are those of all sequences, or of each, of as many parts and pairs.
fn turn<T: Element>(
    out: &mut [T],
    x: Heads<'_, T>,
    sizes: [usize; 3],
    neighbours: bool,
    turns: &[Turns<'_>],
) {
    let level = Level::current();
    let dim = sizes[2];
    parallel_chunks(out, TASK.div_ceil(dim) * dim, |first, out| {
        level.dispatch(Turn {
            x,
            sizes,
            first: first / dim,
            out,
            turns,
            neighbours,
        });
    });
}

/// Vectors from the `first` on, each turned by its position.
struct Turn<'a, T> {
    x: Heads<'a, T>,
    /// Heads, positions, and the size of a vector.
    sizes: [usize; 3],
    first: usize,
    out: &'a mut [T],
    /// For all sequences or for each.
    turns: &'a [Turns<'a>],
    neighbours: bool,
}

impl<T: Element> Kernel for Turn<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let [heads, length, dim] = self.sizes;
        for (i, out) in self.out.chunks_exact_mut(dim).enumerate() {
            let row = self.first + i;
            let (b, h, l) = (row / (heads * length), row / length % heads, row % length);
            let turns = self.turns[if self.turns.len() == 1 { 0 } else { b }];
            let (x, part) = (&self.x.at(b, h, l)[..dim], dim / turns.parts);
            let parts = x.chunks_exact(part).zip(out.chunks_exact_mut(part));
            for (p, (x, out)) in parts.enumerate() {
                let table = (l * turns.parts + p) * turns.pairs;
                let turn = Rotate {
                    x,
                    out,
                    cos: &turns.cos[table..table + turns.pairs],
                    sin: &turns.sin[table..table + turns.pairs],
                    neighbours: self.neighbours,
                };
                turn.run(s);
            }
        }
    }
}
