//! Rows of a table by their numbers, and the number of the largest element.

use crate::error::{check, check_len, product};
use crate::simd::Level;
use crate::simd::elementwise::Largest;
use crate::simd::rows::{DequantizeRow, Narrow, Widen};
use crate::simd::scratch;
use crate::threads::{Rows, parallel_for};
use crate::{Element, Floats, Projection, Result};

/// Elements that one task takes at least.
const TASK: usize = 8192;

/// `out[i] = table[ids[i]]`, dequantized and rounded once: an embedding. Biases of the table are
/// not used.
///
/// # Errors
/// When an id is not a row of the table, `out` is not a row for each, or the table has several
/// experts.
pub fn take_rows<T: Element>(out: &mut [T], ids: &[usize], table: &Projection<'_>) -> Result<()> {
    let (n, k) = (table.n(), table.k());
    check_len(
        "take_rows: out",
        product("take_rows", &[ids.len(), k])?,
        out.len(),
    )?;
    if let Some(id) = ids.iter().find(|&&id| id >= n) {
        check(false, "take_rows: ids", "a row of the table", id)?;
    }
    if let Projection::Quantized(w, _) = table {
        check(
            w.experts() == 1,
            "take_rows: table",
            "one expert",
            w.experts(),
        )?;
    }
    if out.is_empty() {
        return Ok(());
    }
    let level = Level::current();
    let rows = Rows::new(out, k);
    let per_task = TASK.div_ceil(k);
    parallel_for(ids.len().div_ceil(per_task), |task| {
        scratch::with(1, |[wide, ..]| {
            let wide = &mut wide.floats(k)[..k];
            let first = task * per_task;
            let ids = &ids[first..(first + per_task).min(ids.len())];
            for (i, &id) in ids.iter().enumerate() {
                let to = rows.take(first + i);
                match table {
                    Projection::Dense(w) => match w.weight() {
                        Floats::F32(w) => level.dispatch(Widen {
                            from: &w[id * k..(id + 1) * k],
                            to: wide,
                        }),
                        Floats::F16(w) => level.dispatch(Widen {
                            from: &w[id * k..(id + 1) * k],
                            to: wide,
                        }),
                        Floats::Bf16(w) => level.dispatch(Widen {
                            from: &w[id * k..(id + 1) * k],
                            to: wide,
                        }),
                    },
                    Projection::Quantized(w, _) => level.dispatch(DequantizeRow {
                        w: &w.weights(0),
                        row: id,
                        to: wide,
                    }),
                }
                level.dispatch(Narrow {
                    from: wide,
                    bias: &[],
                    to,
                });
            }
        });
    });
    Ok(())
}

/// The place of the largest element, of several the first; 0 if there is none that is a number.
pub fn argmax<T: Element>(x: &[T]) -> usize {
    let level = Level::current();
    let tasks = x.len().div_ceil(TASK);
    let mut largest = vec![f32::NEG_INFINITY; tasks];
    let parts = Rows::new(&mut largest, 1);
    parallel_for(tasks, |task| {
        let part = &x[task * TASK..((task + 1) * TASK).min(x.len())];
        parts.take(task)[0] = level.dispatch(Largest { x: part });
    });
    let mut best = 0;
    for (task, value) in largest.iter().enumerate() {
        if *value > largest[best] {
            best = task;
        }
    }
    let Some(&value) = largest.get(best) else {
        return 0;
    };
    let start = best * TASK;
    // In a later task if all are minus infinity and the first ones no numbers.
    let place = x[start..].iter().position(|x| x.to_f32() == value);
    place.map_or(0, |place| start + place)
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;

    #[test]
    fn argmax_is_the_first_of_the_largest() {
        assert_eq!(argmax::<f32>(&[]), 0);
        assert_eq!(argmax(&[f32::NAN, f32::NAN]), 0);
        assert_eq!(argmax(&[f32::NEG_INFINITY; 3]), 0);
        assert_eq!(argmax(&[1.0, f32::NAN, 3.0, 3.0, 2.0]), 2);
        let mut x = vec![-2.0f32; 50_001];
        for (place, value) in [(50_000, -1.0), (40_000, 0.5), (8192, 0.5), (8191, 0.25)] {
            x[place] = value;
            let half: Vec<bf16> = x.iter().map(|&x| bf16::from_f32(x)).collect();
            let expected = if place == 8191 { 8192 } else { place };
            assert_eq!(argmax(&x), expected);
            assert_eq!(argmax(&half), expected);
        }
    }
}
