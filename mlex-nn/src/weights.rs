//! The weights of a checkpoint by name, each made into an array when a layer asks for it.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt::{self, Display};
use std::rc::Rc;

use mlex_core::{Array, Dtype, Quantized};

use crate::error::{Misshapen, Mistyped, WeightErrors};
use crate::quant::QuantizationConfig;
use crate::{Error, ErrorKind, Result};

/// A tensor that is read when it is needed.
pub struct LazyTensor {
    /// Its shape.
    pub shape: Vec<i32>,
    /// Its dtype, as it will be loaded.
    pub dtype: Dtype,
    /// Reads it.
    pub load: Box<dyn FnOnce() -> mlex_core::Result<Array>>,
}

impl LazyTensor {
    /// A tensor that is an array already.
    pub fn ready(array: Array) -> Self {
        Self {
            shape: array.shape().to_vec(),
            dtype: array.dtype(),
            load: Box::new(move || Ok(array)),
        }
    }

    /// The tensor becomes what `change` makes of it when it is read.
    pub(crate) fn change(
        &mut self,
        change: impl FnOnce(Array) -> mlex_core::Result<Array> + 'static,
    ) {
        let read = std::mem::replace(&mut self.load, Box::new(|| Array::scalar(0)));
        self.load = Box::new(move || {
            let array = change(read()?)?;
            // At once, so that what was read is gone before the next tensor comes.
            array.eval()?;
            Ok(array)
        });
    }
}

impl fmt::Debug for LazyTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LazyTensor({:?}, {})", self.shape, self.dtype)
    }
}

/// What a model takes of a checkpoint, none of it read: see [`Weights::recording`].
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct Taken {
    /// The tensors by the names that the model has for them.
    pub tensors: BTreeMap<String, LazyTensor>,
    /// The layers whose weight may be quantized, by path, and the layout where it is.
    pub layers: BTreeMap<String, Option<Quantized>>,
    /// The names of tensors that the model has [discarded](Weights::discard).
    pub discarded: Vec<String>,
}

/// Called with the bytes of each tensor that has been read.
pub type OnLoad = Box<dyn FnMut(usize)>;

/// A place in the tree of a checkpoint's weights: layers build themselves from it.
///
/// What is missing, misshapen or mistyped is noted, not returned at once: building goes on with a
/// placeholder that is never computed, and [`finish`](Self::finish) gives one error that
/// lists everything.
#[derive(Clone)]
pub struct Weights {
    state: Rc<RefCell<State>>,
    prefix: String,
}

struct State {
    tensors: BTreeMap<String, LazyTensor>,
    errors: WeightErrors,
    quantization: QuantizationConfig,
    dtype: Option<Dtype>,
    on_load: Option<OnLoad>,
    /// What was taken, where nothing shall be read.
    record: Option<Taken>,
}

impl Weights {
    /// The root of a checkpoint's tensors.
    pub fn new(tensors: BTreeMap<String, LazyTensor>, quantization: QuantizationConfig) -> Self {
        let state = State {
            tensors,
            errors: WeightErrors::default(),
            quantization,
            dtype: None,
            on_load: None,
            record: None,
        };
        Self {
            state: Rc::new(RefCell::new(state)),
            prefix: String::new(),
        }
    }

    /// Floating-point tensors become `dtype` when they are read.
    #[must_use]
    pub fn with_dtype(self, dtype: Option<Dtype>) -> Self {
        self.state.borrow_mut().dtype = dtype;
        self
    }

    /// What floating-point tensors become when they are read, if not what they are.
    pub(crate) fn wanted_dtype(&self) -> Option<Dtype> {
        self.state.borrow().dtype
    }

    /// `on_load` is called with the bytes of each tensor that has been read.
    #[must_use]
    pub fn with_progress(self, on_load: OnLoad) -> Self {
        self.state.borrow_mut().on_load = Some(on_load);
        self
    }

    /// No tensor is read: a model built of these has placeholders, zeros that take no memory,
    /// and says what it is and what it takes ([`taken`](Self::taken)).
    #[must_use]
    pub fn recording(self) -> Self {
        self.state.borrow_mut().record = Some(Taken::default());
        self
    }

    /// What was taken since [`recording`](Self::recording), which begins anew.
    pub fn taken(&self) -> Taken {
        let mut state = self.state.borrow_mut();
        state
            .record
            .as_mut()
            .map(std::mem::take)
            .unwrap_or_default()
    }

    /// The place `name` below this one.
    #[must_use]
    pub fn pp(&self, name: impl Display) -> Self {
        Self {
            state: Rc::clone(&self.state),
            prefix: self.path(name),
        }
    }

    /// The full path of `name` below this place.
    pub fn path(&self, name: impl Display) -> String {
        if self.prefix.is_empty() {
            name.to_string()
        } else {
            format!("{}.{name}", self.prefix)
        }
    }

    /// The path of this place.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// Whether the checkpoint has the tensor `name` here, not taken yet.
    pub fn contains(&self, name: &str) -> bool {
        self.state.borrow().tensors.contains_key(&self.path(name))
    }

    /// The shape of the tensor `name`, while it is not taken.
    pub fn shape(&self, name: &str) -> Option<Vec<i32>> {
        self.state
            .borrow()
            .tensors
            .get(&self.path(name))
            .map(|tensor| tensor.shape.clone())
    }

    /// The tensor `name`, which must have `shape`.
    ///
    /// # Errors
    /// When it cannot be read. A missing or misshapen one is noted for
    /// [`finish`](Self::finish).
    pub fn get(&self, name: &str, shape: &[i32]) -> Result<Array> {
        self.take(name, shape, |_| None)
    }

    /// As [`get`](Self::get), a tensor of any floating-point dtype.
    ///
    /// # Errors
    /// As [`get`](Self::get). One of another dtype is noted for [`finish`](Self::finish).
    pub fn get_float(&self, name: &str, shape: &[i32]) -> Result<Array> {
        self.take(name, shape, |found| {
            (!found.is_float()).then(|| "a floating-point type".to_owned())
        })
    }

    /// As [`get`](Self::get), a tensor of that dtype.
    ///
    /// # Errors
    /// As [`get`](Self::get). One of another dtype is noted for [`finish`](Self::finish).
    pub fn get_dtype(&self, name: &str, shape: &[i32], dtype: Dtype) -> Result<Array> {
        self.take(name, shape, |found| {
            (found != dtype).then(|| dtype.to_string())
        })
    }

    /// Takes a tensor out. `refuse` says what is expected in place of a dtype.
    fn take(
        &self,
        name: &str,
        shape: &[i32],
        refuse: impl Fn(Dtype) -> Option<String>,
    ) -> Result<Array> {
        let path = self.path(name);
        let mut state = self.state.borrow_mut();
        let Some(tensor) = state.tensors.remove(&path) else {
            state.errors.missing.push(path);
            return placeholder(shape, Dtype::Float32);
        };
        if tensor.shape != shape {
            state.errors.misshapen.push(Misshapen {
                name: path,
                expected: shape.to_vec(),
                found: tensor.shape,
            });
            return placeholder(shape, Dtype::Float32);
        }
        if let Some(expected) = refuse(tensor.dtype) {
            state.errors.mistyped.push(Mistyped {
                name: path,
                expected,
                found: tensor.dtype,
            });
            return placeholder(shape, Dtype::Float32);
        }
        let wanted = state.dtype;
        if let Some(record) = &mut state.record {
            let dtype = wanted.filter(|_| tensor.dtype.is_float());
            let stand_in = placeholder(shape, dtype.unwrap_or(tensor.dtype));
            record.tensors.insert(path, tensor);
            return stand_in;
        }
        let mut array = (tensor.load)().map_err(|error| error.with_tensor(&path))?;
        if let Some(dtype) = state.dtype
            && array.dtype().is_float()
            && array.dtype() != dtype
        {
            array = array.as_type(dtype)?;
            // At once, so that the tensor as it was read is gone before the next one comes.
            array.eval()?;
        }
        if let Some(on_load) = &mut state.on_load {
            on_load(array.nbytes());
        }
        Ok(array)
    }

    /// The tensor `name` where the checkpoint has it.
    ///
    /// # Errors
    /// As [`get`](Self::get).
    pub fn get_optional(&self, name: &str, shape: &[i32]) -> Result<Option<Array>> {
        if self.contains(name) {
            self.get(name, shape).map(Some)
        } else {
            Ok(None)
        }
    }

    /// How the layer here is quantized: the config's layout where there are `.scales`.
    ///
    /// # Errors
    /// When there are scales but the config has no layout for them.
    pub fn quantized(&self) -> Result<Option<Quantized>> {
        let packed = self.contains("scales");
        let mut state = self.state.borrow_mut();
        let layout = state.quantization.layout(&self.prefix).filter(|_| packed);
        if packed && layout.is_none() {
            let error = Error::setting("quantization", "a layout for the layer's scales", "none");
            return Err(error.with_layer(&self.prefix));
        }
        if let Some(record) = &mut state.record {
            record.layers.insert(self.prefix.clone(), layout);
        }
        Ok(layout)
    }

    /// Drops the tensors whose full path `matches` says are of no use.
    pub fn discard(&self, matches: impl Fn(&str) -> bool) {
        let State {
            tensors, record, ..
        } = &mut *self.state.borrow_mut();
        tensors.retain(|path, _| {
            let keep = !matches(path);
            if let Some(record) = record.as_mut().filter(|_| !keep) {
                record.discarded.push(path.clone());
            }
            keep
        });
    }

    /// Whether there is a tensor, not taken yet, of which `matches` holds: its full path and
    /// its shape.
    pub fn any(&self, matches: impl Fn(&str, &[i32]) -> bool) -> bool {
        let state = self.state.borrow();
        let mut tensors = state.tensors.iter();
        tensors.any(|(path, tensor)| matches(path, &tensor.shape))
    }

    /// Tensors whose full path `matches` go through `change` when they are read: another order of
    /// rows, as the layer uses it. Shape and dtype stay. It is a matter of the layer alone: a
    /// [record](Self::recording) has the tensors as they are.
    pub fn transform(
        &self,
        matches: impl Fn(&str) -> bool,
        change: impl Fn(Array) -> mlex_core::Result<Array> + 'static,
    ) {
        let State {
            tensors, record, ..
        } = &mut *self.state.borrow_mut();
        if record.is_some() {
            return;
        }
        let change = Rc::new(change);
        for (_, tensor) in tensors.iter_mut().filter(|(path, _)| matches(path)) {
            let change = Rc::clone(&change);
            tensor.change(move |array| change(array));
        }
    }

    /// Calls `function` with the tensors that are not taken yet.
    pub(crate) fn with_tensors(&self, function: impl FnOnce(&mut BTreeMap<String, LazyTensor>)) {
        function(&mut self.state.borrow_mut().tensors);
    }

    /// Whether the arrays are those of the checkpoint: no tensor that was asked for was missing or
    /// wrong so far, and they are read.
    pub(crate) fn is_complete(&self) -> bool {
        let state = self.state.borrow();
        state.errors.is_empty() && state.record.is_none()
    }

    /// Ends the building of a model.
    ///
    /// # Errors
    /// A [`Weights`](ErrorKind::Weights) error that lists every tensor that was missing, is
    /// left over or has another shape or dtype.
    pub fn finish(&self) -> Result<()> {
        let mut state = self.state.borrow_mut();
        let unexpected = state.tensors.keys().cloned().collect();
        let mut errors = std::mem::take(&mut state.errors);
        errors.unexpected = unexpected;
        if errors.is_empty() {
            Ok(())
        } else {
            Err(Error::new(ErrorKind::Weights(errors)))
        }
    }
}

impl fmt::Debug for Weights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Weights")
            .field("prefix", &self.prefix)
            .finish_non_exhaustive()
    }
}

/// Stands for a tensor that is not there; a lazy node that takes no memory.
fn placeholder(shape: &[i32], dtype: Dtype) -> Result<Array> {
    Ok(Array::zeros(shape, dtype)?)
}
