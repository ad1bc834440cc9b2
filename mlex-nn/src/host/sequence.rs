//! Several operations of the kernels in one node of MLX's graph.

use std::sync::Arc;

use mlex_core::{Array, Dtype, HostOutput, HostView, HostViewMut};
use mlex_kernels::Expectation;
use smallvec::SmallVec;

use super::attend::AttendStep;
use super::node::{Place, Program};
use super::{applies, on_cpu};
use crate::cache::memory::Marker;
use crate::{Error, Result};

/// One operation of a [`Sequence`].
pub(crate) trait Step: Send + Sync + 'static {
    /// The name, for errors.
    fn name(&self) -> &'static str;

    /// Computes the outputs; each starts with any content, or as the input that it is in place
    /// of, whose own view is empty then.
    fn run(
        &self,
        inputs: &[HostView<'_>],
        outputs: &mut [HostViewMut<'_>],
    ) -> mlex_core::Result<()>;

    /// The weights that it reads, for threads without work to read ahead. None for a step that
    /// has none.
    fn expectation(&self) -> Option<Expectation> {
        None
    }
}

/// Operations on the CPU, recorded to become one node of the graph.
///
/// A node costs some microseconds, several times what a norm takes, and the memory of its
/// outputs. So the layers of a model are recorded one after the other, and what they compute on
/// the way stays in memory that is used again and again. Layers that can be recorded have a
/// `record` method, which says `None` where there is no kernel for what they do; the caller
/// then drops the sequence and uses their `forward` methods.
///
/// ```
/// use std::collections::BTreeMap;
///
/// use mlex_core::{Array, Device, Stream};
/// use mlex_nn::{LazyTensor, QuantizationConfig, RmsNorm, Sequence, Weights};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let weight = LazyTensor::ready(Array::from_slice(&[2.0f32; 4], &[4])?);
/// let tensors = BTreeMap::from([("weight".to_owned(), weight)]);
/// let weights = Weights::new(tensors, QuantizationConfig::default());
/// let norm = RmsNorm::load(&weights, 4, 0.0)?;
/// Stream::new(Device::Cpu)?.scope(|| {
///     let x = Array::from_slice(&[3.0f32, -3.0, 3.0, 3.0], &[1, 4])?;
///     let Some((mut sequence, value)) = Sequence::start(&x)? else {
///         return Ok(());
///     };
///     if let Some(normed) = norm.record(&mut sequence, value)? {
///         let y = sequence.finish(&[normed])?;
///         assert_eq!(y[0].as_slice::<f32>()?, [2.0, -2.0, 2.0, 2.0]);
///     }
///     Ok(())
/// })
/// # }
/// ```
#[derive(Default)]
pub struct Sequence {
    inputs: Vec<Array>,
    contiguous: Vec<bool>,
    slots: Vec<Slot>,
    steps: Vec<Recorded>,
    places: Vec<Place>,
    /// Nodes that have to run before, which are inputs for that alone.
    after: Vec<Marker>,
}

/// What a [`Sequence`] has computed, or been given. Another sequence would take it for one of
/// its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Value(usize);

/// A shape; of up to four dimensions without memory of its own.
pub(crate) type Shape = SmallVec<[i32; 4]>;

pub(super) struct Slot {
    pub(super) shape: Shape,
    pub(super) dtype: Dtype,
    pub(super) origin: Origin,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Origin {
    /// An input of the node.
    Input(usize),
    /// Made by a step.
    Made,
    /// Made by a step in the memory of an input.
    InPlace(usize),
}

/// What a step does.
pub(super) enum Work {
    Step(Box<dyn Step>),
    /// At the place of this number.
    Attend(Box<AttendStep>, usize),
}

impl Work {
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Step(step) => step.name(),
            Self::Attend(step, _) => step.name(),
        }
    }
}

pub(super) struct Recorded {
    pub(super) work: Work,
    pub(super) inputs: SmallVec<[usize; 6]>,
    pub(super) outputs: SmallVec<[usize; 4]>,
}

impl std::fmt::Debug for Sequence {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let steps: Vec<&str> = self.steps.iter().map(|step| step.work.name()).collect();
        f.debug_struct("Sequence").field("steps", &steps).finish()
    }
}

impl Sequence {
    /// A sequence on `x`; none where the kernels do not compute (another device, a dtype that
    /// they do not have, switched off).
    ///
    /// # Errors
    /// When there is no current stream.
    pub fn start(x: &Array) -> Result<Option<(Self, Value)>> {
        if !applies(x)? {
            return Ok(None);
        }
        let mut sequence = Self::sized();
        let value = sequence.input(x);
        Ok(Some((sequence, value)))
    }

    /// What `record` makes of `x`, as a node of its own; none where there is no kernel for it.
    pub(crate) fn single(
        x: &Array,
        record: impl FnOnce(&mut Self, Value) -> Result<Option<Value>>,
    ) -> Result<Option<Array>> {
        let Some((mut sequence, value)) = Self::start(x)? else {
            return Ok(None);
        };
        match record(&mut sequence, value)? {
            Some(y) => Ok(sequence.finish(&[y])?.pop()),
            None => Ok(None),
        }
    }

    /// With room for some layers, so that recording them moves nothing.
    fn sized() -> Self {
        Self {
            slots: Vec::with_capacity(512),
            steps: Vec::with_capacity(256),
            ..Self::default()
        }
    }

    /// A sequence on token ids `[.., L]`; none as in [`start`](Self::start).
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn start_with_ids(ids: &Array) -> Result<Option<(Self, Value)>> {
        if !on_cpu()? {
            return Ok(None);
        }
        let mut sequence = Self::sized();
        let value = sequence.input(ids);
        Ok(Some((sequence, value)))
    }

    /// Another array that steps use.
    pub fn input(&mut self, array: &Array) -> Value {
        self.input_with(array, true)
    }

    /// As [`input`](Self::input); one that need not be contiguous is given to steps as it lies.
    pub(crate) fn input_with(&mut self, array: &Array, contiguous: bool) -> Value {
        let origin = Origin::Input(self.inputs.len());
        self.inputs.push(array.clone());
        self.contiguous.push(contiguous);
        self.slot(Shape::from_slice(array.shape()), array.dtype(), origin)
    }

    /// Makes the node run after another one.
    pub(crate) fn after(&mut self, marker: &Marker) {
        if !self.after.iter().any(|known| known.is(marker)) {
            self.after.push(marker.clone());
            self.input_with(&marker.array, false);
        }
    }

    fn slot(&mut self, shape: Shape, dtype: Dtype, origin: Origin) -> Value {
        self.slots.push(Slot {
            shape,
            dtype,
            origin,
        });
        Value(self.slots.len() - 1)
    }

    /// An output of the next step, like a value.
    pub(crate) fn output_like(&mut self, value: Value) -> Value {
        let Slot { shape, dtype, .. } = &self.slots[value.0];
        self.slot(shape.clone(), *dtype, Origin::Made)
    }

    /// The shape of a value.
    pub fn shape(&self, value: Value) -> &[i32] {
        &self.slots[value.0].shape
    }

    /// The element type of a value.
    pub fn dtype(&self, value: Value) -> Dtype {
        self.slots[value.0].dtype
    }

    /// An output of the next step.
    pub(crate) fn output(&mut self, shape: &[i32], dtype: Dtype) -> Value {
        self.slot(Shape::from_slice(shape), dtype, Origin::Made)
    }

    /// An output of the next step, in the memory of an input where nothing else refers to it.
    /// It has to be one that the sequence finishes with.
    pub(crate) fn output_in_place(&mut self, input: Value) -> Value {
        let Slot { shape, dtype, .. } = &self.slots[input.0];
        let (shape, dtype) = (shape.clone(), *dtype);
        let origin = match self.slots[input.0].origin {
            Origin::Input(index) => Origin::InPlace(index),
            other => other,
        };
        self.slot(shape, dtype, origin)
    }

    /// Refuses outputs that the node could not write.
    fn check(&self, outputs: &[Value]) -> Result<()> {
        let mut named = vec![false; self.slots.len()];
        for value in outputs {
            let slot = self.slots.get(value.0);
            let made = slot.is_some_and(|slot| !matches!(slot.origin, Origin::Input(_)));
            if !made || std::mem::replace(&mut named[value.0], true) {
                let expected = "values that its steps have made, each once";
                let found = format!("{value:?}");
                return Err(Error::setting("outputs of a sequence", expected, found));
            }
        }
        Ok(())
    }

    /// Adds a step.
    pub(crate) fn step(&mut self, step: impl Step, inputs: &[Value], outputs: &[Value]) {
        self.work(Work::Step(Box::new(step)), inputs, outputs);
    }

    /// Adds a step that attends to what is at a place.
    pub(super) fn attend(
        &mut self,
        step: AttendStep,
        place: Place,
        inputs: &[Value],
        output: Value,
    ) {
        let work = Work::Attend(Box::new(step), self.places.len());
        self.places.push(place);
        self.work(work, inputs, &[output]);
    }

    fn work(&mut self, work: Work, inputs: &[Value], outputs: &[Value]) {
        self.steps.push(Recorded {
            work,
            inputs: inputs.iter().map(|value| value.0).collect(),
            outputs: outputs.iter().map(|value| value.0).collect(),
        });
    }

    /// The node: arrays of some of the values that steps have made, not computed yet.
    ///
    /// # Errors
    /// When a value was not made by a step or is named twice, or when the current stream is not
    /// one of the CPU.
    pub fn finish(self, outputs: &[Value]) -> Result<Vec<Array>> {
        Ok(self.finish_program(outputs)?.0)
    }

    /// The same, and the program that it runs.
    pub(super) fn finish_program(self, outputs: &[Value]) -> Result<(Vec<Array>, Arc<Program>)> {
        self.check(outputs)?;
        let specs = outputs.iter().map(|value| {
            let Slot {
                shape,
                dtype,
                origin,
            } = &self.slots[value.0];
            HostOutput {
                shape: shape.to_vec(),
                dtype: *dtype,
                in_place: match origin {
                    Origin::InPlace(index) => Some(*index),
                    _ => None,
                },
            }
        });
        let specs = specs.collect();
        let outputs = outputs.iter().map(|value| value.0).collect();
        let program = Arc::new(Program::new(self.slots, self.steps, outputs, specs));
        let inputs: Vec<&Array> = self.inputs.iter().collect();
        let arrays = program.node(&inputs, self.contiguous, self.places)?;
        Ok((arrays, program))
    }

    /// The shape and type of what it was started with, where it has no other input than that and
    /// nodes that have to run before.
    pub(super) fn only_input(&self) -> Option<(&[i32], Dtype)> {
        let slot = self.slots.first()?;
        let only = self.inputs.len() == 1 + self.after.len() && slot.origin == Origin::Input(0);
        only.then_some((&slot.shape[..], slot.dtype))
    }

    /// How many places steps attend to.
    pub(super) fn places(&self) -> usize {
        self.places.len()
    }
}
