//! Keys and values in arrays of MLX's graph, which grow in steps.

use mlex_core::{Array, Dtype};

use super::kv::{STEP, rounded};
use crate::{Result, cuda};

/// Keys and values `[B, H_kv, capacity, D]`.
#[derive(Clone, Debug)]
pub(super) struct Buffers {
    pub(super) keys: Array,
    pub(super) values: Array,
    /// How many positions of the buffers are in use, the last of them the newest.
    pub(super) used: i32,
}

impl Buffers {
    /// Empty buffers for at least `new` positions, like `keys` and `values`.
    pub(super) fn new(keys: &Array, values: &Array, new: i32) -> Result<Self> {
        Self::empty(
            [keys.dim(0)?, keys.dim(1)?, new],
            [keys.dim(3)?, values.dim(3)?],
            [keys.dtype(), values.dtype()],
        )
    }

    /// Empty buffers `[batch, heads, at least new, dim]` for keys and for values.
    fn empty([batch, heads, new]: [i32; 3], dims: [i32; 2], dtypes: [Dtype; 2]) -> Result<Self> {
        let capacity = cuda::capacity(rounded(new))?;
        let zeros =
            |index: usize| Array::zeros(&[batch, heads, capacity, dims[index]], dtypes[index]);
        Ok(Self {
            keys: zeros(0)?,
            values: zeros(1)?,
            used: 0,
        })
    }

    /// The same with room for `new` positions; where they must grow, only the first `sinks` and
    /// the last positions are carried along, `keep` together. Buffers that a long chunk has made
    /// larger than a window needs are given up for smaller ones.
    pub(super) fn with_room(&self, sinks: i32, keep: i32, new: i32) -> Result<Self> {
        let capacity = self.keys.dim(2)?;
        let slid = self.used > keep;
        // A window that has begun to let go of positions would be full again at once.
        let spare = if slid { STEP } else { 0 };
        let needed = rounded(keep + new + spare);
        let fits = self.used + new <= capacity;
        if fits && !(slid && capacity > needed + STEP) {
            return Ok(self.clone());
        }
        // More than is seen, so that some of the last tokens can still be taken back.
        let held = if fits {
            self.used.min(keep + STEP / 2)
        } else {
            keep
        };
        let empty = Self::new(&self.keys, &self.values, keep + new + spare)?;
        let moved = |from: &Array, to: &Array| -> Result<Array> {
            let sinks = sinks.min(held);
            let last = from.slice_axis(2, self.used - (held - sinks), self.used)?;
            let kept = if sinks > 0 {
                Array::concatenate(&[from.slice_axis(2, 0, sinks)?, last], 2)?
            } else {
                last
            };
            Ok(to.slice_update_axis(&kept, 2, 0, held)?)
        };
        Ok(Self {
            keys: moved(&self.keys, &empty.keys)?,
            values: moved(&self.values, &empty.values)?,
            used: held,
        })
    }
}
