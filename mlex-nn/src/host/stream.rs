//! The small steps between layers: sums, factors, gates and parts of rows.

use mlex_core::{Array, HostView, HostViewMut};

use super::sequence::{Sequence, Shape, Step, Value};
use super::{activation, by_dtype, columns, is_kernel_float, kernel_error, size};
use crate::{Activation, Result};

/// See [`clip`](crate::clip).
pub(crate) fn clip(x: &Array, bounds: [f32; 2]) -> Result<Option<Array>> {
    Sequence::single(x, |sequence, x| Ok(sequence.clip(x, bounds)))
}

impl Sequence {
    /// `factor * x`; none where there is no kernel for the dtype.
    pub fn scale(&mut self, x: Value, factor: f32) -> Option<Value> {
        self.elementwise(Elementwise::Scale(factor), &[x])
    }

    /// `min(max(x, least), largest)`; none as for [`scale`](Self::scale).
    pub fn clip(&mut self, x: Value, [least, largest]: [f32; 2]) -> Option<Value> {
        self.elementwise(Elementwise::Clip([least, largest]), &[x])
    }

    /// `factor * (x + y)`; none where the shapes or dtypes differ, or as [`scale`](Self::scale).
    pub fn add(&mut self, x: Value, y: Value, factor: f32) -> Option<Value> {
        self.elementwise(Elementwise::Add(factor), &[x, y])
    }

    /// `max(x, 0)^2`; none as for [`scale`](Self::scale).
    pub fn relu2(&mut self, x: Value) -> Option<Value> {
        self.elementwise(Elementwise::Relu2, &[x])
    }

    /// `activation(x)`; none as for [`scale`](Self::scale).
    pub fn activate(&mut self, activation: Activation, x: Value) -> Option<Value> {
        let step = Elementwise::Activated(activation::kernel(activation));
        self.elementwise(step, &[x])
    }

    /// `activation(gate) * up`; none as for [`add`](Self::add).
    pub fn gate(&mut self, activation: Activation, gate: Value, up: Value) -> Option<Value> {
        let step = Elementwise::Gated(activation::kernel(activation));
        self.elementwise(step, &[gate, up])
    }

    /// `x + sigmoid(gate) * y` for `gate` `[.., 1]`; none as for [`add`](Self::add).
    pub(crate) fn add_gated(&mut self, x: Value, y: Value, gate: Value) -> Option<Value> {
        let (_, rows) = self.shape(x).split_last()?;
        let (&one, gates) = self.shape(gate).split_last()?;
        if one != 1 || gates != rows || !self.alike(&[x, y]) || self.dtype(gate) != self.dtype(x) {
            return None;
        }
        let output = self.output_like(x);
        self.step(Elementwise::AddGated, &[x, y, gate], &[output]);
        Some(output)
    }

    /// Columns `first..first + width` of each row of `period` elements of `x` `[.., N]`, the
    /// period being a divisor of `N`: `[.., N / period * width]`. None as for
    /// [`scale`](Self::scale), or where there are no such columns.
    pub fn columns(&mut self, x: Value, period: i32, first: i32, width: i32) -> Option<Value> {
        let last = *self.shape(x).last()?;
        let inside = first >= 0 && width > 0 && width <= period.checked_sub(first)?;
        if !self.alike(&[x]) || !inside || last % period != 0 {
            return None;
        }
        let mut shape = Shape::from_slice(self.shape(x));
        *shape.last_mut()? = last / period * width;
        let output = self.output(&shape, self.dtype(x));
        let step = Elementwise::Columns {
            period: size(period),
            first: size(first),
            width: size(width),
        };
        self.step(step, &[x], &[output]);
        Some(output)
    }

    fn elementwise(&mut self, step: Elementwise, inputs: &[Value]) -> Option<Value> {
        if !self.alike(inputs) {
            return None;
        }
        let output = self.output_like(inputs[0]);
        self.step(step, inputs, &[output]);
        Some(output)
    }

    /// Whether values are of one shape and of one dtype, which the kernels know.
    fn alike(&self, values: &[Value]) -> bool {
        let (shape, dtype) = (self.shape(values[0]), self.dtype(values[0]));
        is_kernel_float(dtype)
            && values
                .iter()
                .all(|&value| self.shape(value) == shape && self.dtype(value) == dtype)
    }
}

enum Elementwise {
    Scale(f32),
    Clip([f32; 2]),
    Add(f32),
    AddGated,
    Relu2,
    Activated(mlex_kernels::Activation),
    Gated(mlex_kernels::Activation),
    Columns {
        period: usize,
        first: usize,
        width: usize,
    },
}

impl Step for Elementwise {
    fn name(&self) -> &'static str {
        match self {
            Self::Scale(_) => "scale",
            Self::Clip(_) => "clip",
            Self::Add(_) => "add",
            Self::AddGated => "add_gated",
            Self::Relu2 => "relu2",
            Self::Activated(_) => "activated",
            Self::Gated(_) => "gated",
            Self::Columns { .. } => "columns",
        }
    }

    fn run(
        &self,
        inputs: &[HostView<'_>],
        outputs: &mut [HostViewMut<'_>],
    ) -> mlex_core::Result<()> {
        by_dtype!(inputs[0].dtype(), T => {
            let out = outputs[0].as_mut_slice::<T>()?;
            let input = |index: usize| inputs[index].as_slice::<T>();
            let x = input(0)?;
            match *self {
                Self::Scale(factor) => mlex_kernels::scale(out, x, factor),
                Self::Clip(bounds) => mlex_kernels::clip(out, x, bounds),
                Self::Add(factor) => mlex_kernels::add(out, x, input(1)?, factor),
                Self::AddGated => {
                    mlex_kernels::add_gated(out, x, input(1)?, input(2)?, columns(&inputs[0]))
                }
                Self::Relu2 => mlex_kernels::relu2(out, x),
                Self::Activated(function) => mlex_kernels::activate(out, x, function),
                Self::Gated(function) => mlex_kernels::gated(out, x, input(1)?, function),
                Self::Columns {
                    period,
                    first,
                    width,
                } => mlex_kernels::take_columns(out, x, period, first, width),
            }
        })
        .map_err(kernel_error(self.name()))
    }
}
