//! Operations of the graph that a Rust function computes on the CPU.
//!
//! To MLX a host operation is one more lazy node: it runs on the stream's own thread, after
//! what its inputs depend on and before what depends on it.

use std::sync::Arc;

use crate::{Array, Dtype, Element, Error, ErrorKind, Result, ffi};

/// An operation that Rust computes.
///
/// It is shared between the nodes made from it, and lives as long as the last of them. It must
/// not use arrays or other parts of MLX while it runs; that it is `Sync` keeps arrays out of it.
pub trait HostOp: Send + Sync + 'static {
    /// The name, for errors and MLX's graph.
    fn name(&self) -> &'static str;

    /// What the outputs are, given the inputs. Checks here become errors when the node is made.
    ///
    /// # Errors
    /// When the inputs are not what the operation takes.
    fn outputs(&self, inputs: &[&Array]) -> Result<Vec<HostOutput>>;

    /// Whether input `index` shall be in row-major order without gaps; one that is not is copied
    /// first. Otherwise its [strides](HostView::strides) say where the elements are.
    fn contiguous(&self, _index: usize) -> bool {
        true
    }

    /// Computes the outputs, on the stream's thread.
    ///
    /// # Errors
    /// What the operation met; the evaluation returns it. So it does with a panic.
    fn run(&self, inputs: &[HostView<'_>], outputs: &mut [HostViewMut<'_>]) -> Result<()>;
}

/// What an output of a [`HostOp`] is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostOutput {
    /// Its shape.
    pub shape: Vec<i32>,
    /// Its element type.
    pub dtype: Dtype,
    /// The input whose content it starts with, of the same shape and dtype: in the same memory
    /// where nothing else refers to that input, otherwise in a copy. The input's own view is
    /// empty then.
    pub in_place: Option<usize>,
}

impl HostOutput {
    /// An output whose content the operation writes as a whole.
    pub fn new(shape: impl Into<Vec<i32>>, dtype: Dtype) -> Self {
        Self {
            shape: shape.into(),
            dtype,
            in_place: None,
        }
    }

    /// An output that starts as input `index`, whose shape and dtype it has.
    pub fn in_place(index: usize, input: &Array) -> Self {
        Self {
            shape: input.shape().to_vec(),
            dtype: input.dtype(),
            in_place: Some(index),
        }
    }
}

/// An input while its operation runs.
#[derive(Clone, Copy, Debug)]
pub struct HostView<'a> {
    pub(crate) bytes: &'a [u8],
    pub(crate) shape: &'a [i32],
    pub(crate) strides: &'a [i64],
    pub(crate) dtype: Dtype,
}

impl<'a> HostView<'a> {
    /// The shape.
    pub fn shape(&self) -> &'a [i32] {
        self.shape
    }

    /// How many elements lie between neighbours along each dimension; not negative.
    pub fn strides(&self) -> &'a [i64] {
        self.strides
    }

    /// The element type.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// The elements: in row-major order for a contiguous input, otherwise everything from the
    /// first element to the last that the strides reach.
    ///
    /// # Errors
    /// When `T` is not the element type.
    pub fn as_slice<T: Element>(&self) -> Result<&'a [T]> {
        check(self.dtype, T::DTYPE)?;
        Ok(ffi::host_slice(self.bytes))
    }

    /// The bytes of [`as_slice`](Self::as_slice).
    pub fn as_bytes(&self) -> &'a [u8] {
        self.bytes
    }
}

/// An output while its operation runs; always in row-major order without gaps.
#[derive(Debug)]
pub struct HostViewMut<'a> {
    pub(crate) bytes: &'a mut [u8],
    pub(crate) shape: &'a [i32],
    pub(crate) strides: &'a [i64],
    pub(crate) dtype: Dtype,
}

impl HostViewMut<'_> {
    /// The shape.
    pub fn shape(&self) -> &[i32] {
        self.shape
    }

    /// The element type.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// The elements. Their content is undefined until it is written, unless the output is
    /// [in place](HostOutput::in_place).
    ///
    /// # Errors
    /// When `T` is not the element type.
    pub fn as_mut_slice<T: Element>(&mut self) -> Result<&mut [T]> {
        check(self.dtype, T::DTYPE)?;
        Ok(ffi::host_slice_mut(self.bytes))
    }

    /// The bytes of the elements.
    pub fn as_mut_bytes(&mut self) -> &mut [u8] {
        self.bytes
    }

    /// What has been written, to be read.
    pub fn as_view(&self) -> HostView<'_> {
        HostView {
            bytes: self.bytes,
            shape: self.shape,
            strides: self.strides,
            dtype: self.dtype,
        }
    }

    /// The same view for a shorter time.
    pub fn reborrow(&mut self) -> HostViewMut<'_> {
        HostViewMut {
            bytes: self.bytes,
            shape: self.shape,
            strides: self.strides,
            dtype: self.dtype,
        }
    }
}

/// Elements that a host operation reads each time it runs without having them as an input: a
/// weight. They are computed once, and kept as long as this.
///
/// An input of the graph costs something in each evaluation; a model has hundreds of weights.
pub struct HostConstant(ffi::Pinned);

impl HostConstant {
    /// The elements of `array`, computed now.
    ///
    /// # Errors
    /// When the evaluation fails.
    #[track_caller]
    pub fn new(array: &Array) -> Result<Self> {
        Ok(Self(ffi::Pinned::new(array)?))
    }

    /// Asks the system to keep the elements in huge pages, which makes what reads all of a large
    /// array again and again up to a tenth faster. It is done in the background, on Linux since
    /// 6.1, if huge pages are free.
    pub fn prefer_huge_pages(&self) {
        self.0.prefer_huge_pages();
    }

    /// The elements, in row-major order.
    pub fn view(&self) -> HostView<'_> {
        self.0.view()
    }

    /// The shape.
    pub fn shape(&self) -> &[i32] {
        self.view().shape
    }

    /// The element type.
    pub fn dtype(&self) -> Dtype {
        self.view().dtype
    }
}

impl std::fmt::Debug for HostConstant {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let view = self.view();
        write!(f, "HostConstant({:?}, {})", view.shape, view.dtype)
    }
}

/// Memory for what a host operation computes on the way to its outputs.
#[derive(Debug, Default)]
pub struct HostBuffer {
    memory: ffi::Words,
    shape: Vec<i32>,
    strides: Vec<i64>,
    dtype: Option<Dtype>,
}

impl HostBuffer {
    /// Makes it an array of `shape` and `dtype`, of undefined content.
    ///
    /// # Errors
    /// When the elements cannot be counted.
    pub fn resize(&mut self, shape: &[i32], dtype: Dtype) -> Result<()> {
        let bytes = byte_size(shape, dtype)?;
        let words = bytes.div_ceil(size_of::<u128>());
        if self.memory.len() < words {
            // What is in it is not needed any more.
            self.memory = ffi::Words::default();
            self.memory = ffi::Words::new(words);
        }
        if dtype == Dtype::Bool {
            // The only type that not every bit pattern is a value of.
            self.memory.as_bytes_mut()[..bytes].fill(0);
        }
        self.shape.clear();
        self.shape.extend_from_slice(shape);
        row_major(shape, &mut self.strides);
        self.dtype = Some(dtype);
        Ok(())
    }

    fn parts(&self) -> (usize, Dtype) {
        let dtype = self.dtype.unwrap_or(Dtype::Uint8);
        // As `resize` has counted them.
        let count = match self.dtype {
            Some(_) => self.shape.iter().map(|&dim| dim as usize).product(),
            None => 0,
        };
        (count * dtype.size_in_bytes(), dtype)
    }

    /// What is in it.
    pub fn view(&self) -> HostView<'_> {
        let (bytes, dtype) = self.parts();
        HostView {
            bytes: &self.memory.as_bytes()[..bytes],
            shape: &self.shape,
            strides: &self.strides,
            dtype,
        }
    }

    /// What is in it, to be written.
    pub fn view_mut(&mut self) -> HostViewMut<'_> {
        let (bytes, dtype) = self.parts();
        HostViewMut {
            bytes: &mut self.memory.as_bytes_mut()[..bytes],
            shape: &self.shape,
            strides: &self.strides,
            dtype,
        }
    }
}

/// The strides of an array without gaps.
pub(crate) fn row_major(shape: &[i32], strides: &mut Vec<i64>) {
    strides.clear();
    strides.resize(shape.len(), 1);
    for axis in (1..shape.len()).rev() {
        // Too many only where there are no elements, whose places do not matter.
        strides[axis - 1] = strides[axis].saturating_mul(i64::from(shape[axis]));
    }
}

/// The bytes of an array.
fn byte_size(shape: &[i32], dtype: Dtype) -> Result<usize> {
    let count = shape.iter().try_fold(dtype.size_in_bytes(), |bytes, &dim| {
        bytes.checked_mul(usize::try_from(dim).ok()?)
    });
    count
        .filter(|&bytes| isize::try_from(bytes).is_ok())
        .ok_or_else(|| {
            Error::new(ErrorKind::Argument {
                argument: "shape",
                expected: "dimensions whose product can be counted",
                found: format!("{shape:?}"),
            })
        })
}

fn check(found: Dtype, expected: Dtype) -> Result<()> {
    if found == expected {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Dtype { expected, found }))
}

/// Puts `op` into the graph: its outputs for `inputs`, not computed yet.
///
/// # Errors
/// When the operation refuses the inputs, an output in place does not fit its input, or the
/// current stream is not one of the CPU.
#[track_caller]
pub fn host_op(op: &Arc<impl HostOp>, inputs: &[&Array]) -> Result<Vec<Array>> {
    let outputs = op.outputs(inputs)?;
    let contiguous: Vec<bool> = (0..inputs.len())
        .map(|index| op.contiguous(index))
        .collect();
    let shared: Arc<dyn HostOp> = op.clone();
    ffi::host_op(shared, inputs, &contiguous, &outputs)
}
