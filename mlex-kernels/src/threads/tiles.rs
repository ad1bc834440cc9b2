//! Arrays cut into parts, one task of the pool each.
#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, Ordering};

use smallvec::SmallVec;

use super::parallel_for;

/// How an array of `[planes, rows, columns]` is cut into tiles, one task each.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tiling {
    /// Number of planes.
    pub(crate) planes: usize,
    /// Rows of a plane.
    pub(crate) rows: usize,
    /// Columns of a plane.
    pub(crate) columns: usize,
    /// Rows of a tile; the last may have fewer.
    pub(crate) tile_rows: usize,
    /// Columns of a tile; the last may have fewer.
    pub(crate) tile_columns: usize,
}

/// One tile of an array that is being written by several threads.
pub(crate) struct Tile<'a, T> {
    /// The number of the plane, block or array that it lies in.
    pub(crate) plane: usize,
    /// Its first row there; 0 in blocks and arrays, which are not cut into rows.
    pub(crate) row: usize,
    /// Its first column there.
    pub(crate) column: usize,
    /// Its number of rows.
    pub(crate) rows: usize,
    /// Its number of columns.
    pub(crate) columns: usize,
    start: *mut T,
    stride: usize,
    data: PhantomData<&'a mut [T]>,
}

impl<T> Tile<'_, T> {
    /// Row `row` of the tile.
    pub(crate) fn row_mut(&mut self, row: usize) -> &mut [T] {
        assert!(row < self.rows);
        // SAFETY: the row lies inside of the array (whose length was checked, and
        // `row < rows`), and inside of this tile, which no other task has.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(row * self.stride), self.columns) }
    }
}

struct SendPtr<T>(*mut T);

// SAFETY: the pointer is only used to make tiles that do not overlap, of a `T: Send`.
unsafe impl<T: Send> Sync for SendPtr<T> {}

impl<T> SendPtr<T> {
    fn get(&self) -> *mut T {
        self.0
    }
}

/// Runs `task` once for every tile of `data`, on the pool.
///
/// # Panics
/// When `data` is not as long as the tiling says, or a task panics.
pub(crate) fn parallel_tiles<T: Send>(
    data: &mut [T],
    tiling: Tiling,
    task: impl Fn(Tile<'_, T>) + Sync,
) {
    let Tiling {
        planes,
        rows,
        columns,
        tile_rows,
        tile_columns,
    } = tiling;
    assert!(tile_rows > 0 && tile_columns > 0);
    let length = planes
        .checked_mul(rows)
        .and_then(|n| n.checked_mul(columns));
    assert_eq!(length, Some(data.len()));
    if data.is_empty() {
        return;
    }
    let down = rows.div_ceil(tile_rows);
    let across = columns.div_ceil(tile_columns);
    let start = SendPtr(data.as_mut_ptr());
    parallel_for(planes * down * across, |index| {
        // Columns vary slowest inside a plane: neighbours in time share a panel of weights.
        let (plane, rest) = (index / (down * across), index % (down * across));
        let (row, column) = (rest % down * tile_rows, rest / down * tile_columns);
        let offset = (plane * rows + row) * columns + column;
        task(Tile {
            plane,
            row,
            column,
            rows: tile_rows.min(rows - row),
            columns: tile_columns.min(columns - column),
            // SAFETY: `row < rows` and `column < columns`, so the offset is inside of `data`.
            start: unsafe { start.get().add(offset) },
            stride: columns,
            data: PhantomData,
        });
    });
}

/// Rows of a two-dimensional array that are cut into tiles of some columns.
#[derive(Debug, Clone)]
pub(crate) struct RowBlock {
    /// The rows, none of them in another block.
    pub(crate) rows: std::ops::Range<usize>,
    /// Columns of a tile; the last may have fewer.
    pub(crate) tile_columns: usize,
}

/// Runs `task(block, tile)` once for every tile of the blocks of `data`, on the pool. The
/// tile's `plane` is the block's number.
///
/// # Panics
/// When the blocks do not ascend or leave `data`, or a task panics.
pub(crate) fn parallel_blocks<T: Send>(
    data: &mut [T],
    columns: usize,
    blocks: &[RowBlock],
    task: impl Fn(Tile<'_, T>) + Sync,
) {
    let mut end = 0;
    let mut firsts = Vec::with_capacity(blocks.len());
    let mut tasks = 0;
    for block in blocks {
        assert!(block.rows.start >= end && block.rows.end >= block.rows.start);
        assert!(block.tile_columns > 0);
        end = block.rows.end;
        firsts.push(tasks);
        tasks += if block.rows.is_empty() {
            0
        } else {
            columns.div_ceil(block.tile_columns)
        };
    }
    assert!(
        end.checked_mul(columns)
            .is_some_and(|length| length <= data.len())
    );
    let start = SendPtr(data.as_mut_ptr());
    parallel_for(tasks, |index| {
        let number = firsts.partition_point(|&first| first <= index) - 1;
        let block = &blocks[number];
        let column = (index - firsts[number]) * block.tile_columns;
        task(Tile {
            plane: number,
            row: 0,
            column,
            rows: block.rows.len(),
            columns: block.tile_columns.min(columns - column),
            // SAFETY: the row and the column are inside of `data`, and no other tile has them.
            start: unsafe { start.get().add(block.rows.start * columns + column) },
            stride: columns,
            data: PhantomData,
        });
    });
}

/// One of several arrays, cut into tiles of some columns of all rows.
pub(crate) struct Columns<'a, T> {
    /// The rows, one after another.
    pub(crate) data: &'a mut [T],
    /// Number of rows.
    pub(crate) rows: usize,
    /// Columns of a row.
    pub(crate) columns: usize,
    /// Columns of a tile; the last may have fewer.
    pub(crate) tile_columns: usize,
}

/// Runs `task` once for every tile of the arrays, on the pool. The tile's `plane` is the
/// number of its array.
///
/// # Panics
/// When an array is not as long as its rows and columns say, or a task panics.
pub(crate) fn parallel_columns<T: Send>(
    arrays: &mut [Columns<'_, T>],
    task: impl Fn(Tile<'_, T>) + Sync,
) {
    struct Part<T> {
        start: SendPtr<T>,
        rows: usize,
        columns: usize,
        tile_columns: usize,
        first: usize,
    }
    let mut tasks = 0;
    let parts: SmallVec<[Part<T>; 4]> = arrays
        .iter_mut()
        .map(|array| {
            assert!(array.tile_columns > 0);
            let length = array.rows.checked_mul(array.columns);
            assert_eq!(length, Some(array.data.len()));
            let first = tasks;
            if array.rows > 0 {
                tasks += array.columns.div_ceil(array.tile_columns);
            }
            Part {
                start: SendPtr(array.data.as_mut_ptr()),
                rows: array.rows,
                columns: array.columns,
                tile_columns: array.tile_columns,
                first,
            }
        })
        .collect();
    parallel_for(tasks, |index| {
        let plane = parts.partition_point(|part| part.first <= index) - 1;
        let part = &parts[plane];
        let column = (index - part.first) * part.tile_columns;
        task(Tile {
            plane,
            row: 0,
            column,
            rows: part.rows,
            columns: part.tile_columns.min(part.columns - column),
            // SAFETY: the column is inside of the array's rows, and no other tile has it.
            start: unsafe { part.start.get().add(column) },
            stride: part.columns,
            data: PhantomData,
        });
    });
}

/// The rows of an array that tasks write, each taken by one task.
pub(crate) struct Rows<'a, T> {
    start: SendPtr<T>,
    length: usize,
    taken: SmallVec<[AtomicBool; 16]>,
    data: PhantomData<&'a mut [T]>,
}

// SAFETY: rows are handed out once each, as slices of a `T: Send`.
unsafe impl<T: Send> Sync for Rows<'_, T> {}

impl<'a, T> Rows<'a, T> {
    /// Cuts `data` into rows of `length`.
    pub(crate) fn new(data: &'a mut [T], length: usize) -> Self {
        let count = data.len().checked_div(length).unwrap_or(0);
        Self {
            start: SendPtr(data.as_mut_ptr()),
            length,
            taken: (0..count).map(|_| AtomicBool::new(false)).collect(),
            data: PhantomData,
        }
    }

    /// Row `index`.
    ///
    /// # Panics
    /// When there is no such row, or it was taken before.
    #[allow(clippy::mut_from_ref, reason = "each row is handed out once")]
    pub(crate) fn take(&self, index: usize) -> &'a mut [T] {
        assert!(
            !self.taken[index].swap(true, Ordering::Relaxed),
            "row {index} was taken"
        );
        // SAFETY: the row is inside of the array, and nobody else has it.
        unsafe {
            std::slice::from_raw_parts_mut(self.start.get().add(index * self.length), self.length)
        }
    }
}

/// Cuts `data` into chunks of `chunk` elements (the last may be shorter) and runs
/// `task(first element, chunk)` for each on the pool.
pub(crate) fn parallel_chunks<T: Send>(
    data: &mut [T],
    chunk: usize,
    task: impl Fn(usize, &mut [T]) + Sync,
) {
    let array = Columns {
        rows: 1,
        columns: data.len(),
        tile_columns: chunk.max(1),
        data,
    };
    parallel_columns(&mut [array], |mut tile| task(tile.column, tile.row_mut(0)));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_cover_the_array_without_overlap() {
        let tiling = Tiling {
            planes: 3,
            rows: 5,
            columns: 7,
            tile_rows: 2,
            tile_columns: 3,
        };
        let mut data = vec![0u32; 3 * 5 * 7];
        parallel_tiles(&mut data, tiling, |mut tile| {
            for row in 0..tile.rows {
                let first = (tile.plane * 5 + tile.row + row) * 7 + tile.column;
                for (i, value) in tile.row_mut(row).iter_mut().enumerate() {
                    *value += (first + i) as u32 + 1;
                }
            }
        });
        assert!(data.iter().enumerate().all(|(i, &v)| v == i as u32 + 1));
    }

    #[test]
    fn chunks_cover_the_slice() {
        let mut data = vec![0usize; 1001];
        parallel_chunks(&mut data, 10, |first, chunk| {
            for (i, value) in chunk.iter_mut().enumerate() {
                *value += first + i;
            }
        });
        assert!(data.iter().enumerate().all(|(i, &v)| v == i));
        parallel_chunks(&mut [0u8; 0], 10, |_, _| unreachable!());
    }

    #[test]
    fn columns_of_several_arrays_are_covered() {
        let mut arrays = [vec![0u32; 2 * 7], vec![0u32; 0], vec![0u32; 2 * 3]];
        let sizes = [7, 0, 3];
        let mut columns: Vec<_> = arrays
            .iter_mut()
            .zip(sizes)
            .map(|(data, columns)| Columns {
                data,
                rows: 2,
                columns,
                tile_columns: 2,
            })
            .collect();
        parallel_columns(&mut columns, |mut tile| {
            for row in 0..tile.rows {
                let first = row * sizes[tile.plane] + tile.column;
                for (i, value) in tile.row_mut(row).iter_mut().enumerate() {
                    *value += (first + i) as u32 + 1;
                }
            }
        });
        for array in arrays {
            assert!(array.iter().enumerate().all(|(i, &v)| v == i as u32 + 1));
        }
    }
}
