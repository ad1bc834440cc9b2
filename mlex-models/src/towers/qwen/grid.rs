//! Where the patches of a frame are, and in which order the blocks have them.

use mlex_vision::QwenInput;

use super::config::Config;
use crate::{Error, Result};

/// How many patches there are in each direction.
#[derive(Clone, Copy, Debug)]
pub(super) struct Grid {
    pub(super) t: i32,
    pub(super) h: i32,
    pub(super) w: i32,
    pub(super) merge: i32,
}

impl Grid {
    pub(super) fn new(input: &QwenInput, config: &Config) -> Result<Self> {
        let merge = config.spatial_merge_size;
        let found = format!("{:?}", input.grid);
        let wrong = |expected: &str| Error::field("grid of patches", expected, found.clone());
        let side = |side: usize| {
            let side = i32::try_from(side).ok().filter(|side| *side > 0);
            side.filter(|side| *side < 1 << 20)
        };
        let [Some(t), Some(h), Some(w)] = input.grid.map(side) else {
            return Err(wrong("sides from 1 to 2^20"));
        };
        if h % merge != 0 || w % merge != 0 {
            return Err(wrong(&format!("height and width in multiples of {merge}")));
        }
        let count = i64::from(t) * i64::from(h) * i64::from(w);
        if input.patches.len() as i64 != count.saturating_mul(i64::from(config.patch_len())) {
            return Err(wrong("as many as there are patches"));
        }
        Ok(Self { t, h, w, merge })
    }

    /// The frame by tokens: how many rows and columns of them there are.
    fn tokens(&self) -> [i32; 2] {
        [self.h / self.merge, self.w / self.merge]
    }

    /// The patches of the squares that become one token, from each row and column of tokens on.
    fn squares(&self, tokens: &[[i32; 2]]) -> Vec<[i32; 2]> {
        let merge = self.merge;
        let square = |&[row, column]: &[i32; 2]| {
            (0..merge * merge).map(move |n| [row * merge + n / merge, column * merge + n % merge])
        };
        tokens.iter().flat_map(square).collect()
    }
}

/// In which order the blocks have a frame's tokens, each a square of patches.
#[derive(Debug)]
pub(super) struct Order {
    /// Row and column of each patch.
    pub(super) places: Vec<[i32; 2]>,
    /// Where the tokens come from, by their numbers row by row; none where that is their order.
    pub(super) tokens: Option<Vec<i32>>,
    /// The windows, those of one size together; one over everything without windows.
    pub(super) windows: Vec<Windows>,
}

/// Windows of the same size, one behind the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Windows {
    pub(super) count: i32,
    /// Patches of each.
    pub(super) patches: i32,
}

impl Windows {
    /// One over a whole frame.
    pub(super) fn whole(grid: &Grid) -> Self {
        Self {
            count: 1,
            patches: grid.h * grid.w,
        }
    }
}

impl Order {
    /// Of a frame, in windows whose side has so many tokens. Those at the right and at the bottom
    /// are cut off by the frame.
    pub(super) fn new(grid: &Grid, side: Option<i32>) -> Self {
        let [rows, columns] = grid.tokens();
        let Some(side) = side else {
            let tokens: Vec<_> = area([0, rows], [0, columns]).collect();
            return Self {
                places: grid.squares(&tokens),
                tokens: None,
                windows: vec![Windows::whole(grid)],
            };
        };
        let (mut tokens, mut windows) = (Vec::new(), Vec::new());
        // Whole windows, then those that are cut off in one direction, then in both.
        for down in spans(rows, side) {
            for across in spans(columns, side) {
                let [height, width] = [&down, &across].map(|span| span.length);
                let starts = down.starts.iter();
                let starts = starts.flat_map(|row| across.starts.iter().map(move |x| [*row, *x]));
                for [row, column] in starts {
                    tokens.extend(area([row, row + height], [column, column + width]));
                }
                windows.push(Windows {
                    count: (down.starts.len() * across.starts.len()) as i32,
                    patches: height * width * grid.merge * grid.merge,
                });
            }
        }
        let number = |&[row, column]: &[i32; 2]| row * columns + column;
        Self {
            places: grid.squares(&tokens),
            tokens: Some(tokens.iter().map(number).collect()),
            windows,
        }
    }

    /// Where each token of the frame is in this order; none where it is their own.
    pub(super) fn back(&self) -> Option<Vec<i32>> {
        let tokens = self.tokens.as_ref()?;
        let mut back = vec![0; tokens.len()];
        for (at, &token) in tokens.iter().enumerate() {
            // Each number comes once.
            back[token as usize] = at as i32;
        }
        Some(back)
    }
}

/// Row and column of the tokens of an area.
fn area([top, bottom]: [i32; 2], [left, right]: [i32; 2]) -> impl Iterator<Item = [i32; 2]> {
    (top..bottom).flat_map(move |row| (left..right).map(move |column| [row, column]))
}

/// Parts of one length of a side.
struct Spans {
    length: i32,
    starts: Vec<i32>,
}

/// A side of `count` tokens in parts of `length`, the last of which may be shorter.
fn spans(count: i32, length: i32) -> Vec<Spans> {
    let whole = count / length;
    let parts = [
        Spans {
            length,
            starts: (0..whole).map(|part| part * length).collect(),
        },
        Spans {
            length: count % length,
            starts: vec![whole * length],
        },
    ];
    let parts = parts.into_iter();
    let some = |part: &Spans| part.length > 0 && !part.starts.is_empty();
    parts.filter(some).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_are_cut_off_by_the_frame() {
        // 3 rows and 5 columns of tokens in windows of 2, by hand.
        let grid = Grid {
            t: 1,
            h: 6,
            w: 10,
            merge: 2,
        };
        let order = Order::new(&grid, Some(2));
        let expected = [
            0, 1, 5, 6, 2, 3, 7, 8, // whole ones
            4, 9, // the right edge
            10, 11, 12, 13, // the bottom
            14,
        ];
        assert_eq!(order.tokens.as_deref(), Some(&expected[..]));
        let windows = [(2, 16), (1, 8), (2, 8), (1, 4)];
        let windows = windows.map(|(count, patches)| Windows { count, patches });
        assert_eq!(order.windows, windows);
        let back = order.back().unwrap();
        for (token, &at) in back.iter().enumerate() {
            assert_eq!(expected[at as usize], token as i32);
        }
        assert_eq!(order.places[8 * 4..8 * 4 + 2], [[0, 8], [0, 9]]);
        // A window that is larger than the frame.
        let order = Order::new(&grid, Some(7));
        assert_eq!(order.windows.len(), 1);
        assert_eq!(order.windows[0].patches, 60);
    }
}
