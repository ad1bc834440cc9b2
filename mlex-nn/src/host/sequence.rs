//! Several operations of the kernels in one node of MLX's graph.

use std::cell::RefCell;
use std::sync::Arc;

use mlex_core::{Array, Dtype, HostBuffer, HostOp, HostOutput, HostView, HostViewMut, host_op};

use smallvec::SmallVec;

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

    /// Tells the kernels that this step follows the job that they do next, so that threads
    /// without work read its weights ahead. `false` for a step that has none.
    fn expect(&self) -> bool {
        false
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
    /// Nodes that have to run before, which are inputs for that alone.
    after: Vec<Marker>,
}

/// What a [`Sequence`] has computed, or been given. Another sequence would take it for one of
/// its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Value(usize);

/// A shape; of up to four dimensions without memory of its own.
pub(crate) type Shape = SmallVec<[i32; 4]>;

struct Slot {
    shape: Shape,
    dtype: Dtype,
    origin: Origin,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Origin {
    /// An input of the node.
    Input(usize),
    /// Made by a step.
    Made,
    /// Made by a step in the memory of an input.
    InPlace(usize),
}

struct Recorded {
    step: Box<dyn Step>,
    inputs: SmallVec<[usize; 6]>,
    outputs: SmallVec<[usize; 4]>,
}

impl std::fmt::Debug for Sequence {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let steps: Vec<&str> = self.steps.iter().map(|step| step.step.name()).collect();
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
        self.steps.push(Recorded {
            step: Box::new(step),
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
        // The last step that uses each value.
        let mut last_use = vec![0; self.slots.len()];
        for (index, step) in self.steps.iter().enumerate() {
            for &slot in step.inputs.iter().chain(&step.outputs) {
                last_use[slot] = index;
            }
        }
        let op = Node {
            contiguous: self.contiguous,
            slots: self.slots,
            steps: self.steps,
            outputs: outputs.iter().map(|value| value.0).collect(),
            specs,
            last_use,
        };
        let inputs: Vec<&Array> = self.inputs.iter().collect();
        Ok(host_op(&Arc::new(op), &inputs)?)
    }
}

/// A finished sequence.
struct Node {
    contiguous: Vec<bool>,
    slots: Vec<Slot>,
    steps: Vec<Recorded>,
    /// The slots of the node's outputs.
    outputs: Vec<usize>,
    specs: Vec<HostOutput>,
    last_use: Vec<usize>,
}

/// Where a value is while the node runs.
#[derive(Default)]
enum Held<'a> {
    #[default]
    Nothing,
    Input(HostView<'a>),
    Buffer(HostBuffer),
    Output(HostViewMut<'a>),
}

impl Held<'_> {
    fn view(&self) -> HostView<'_> {
        match self {
            Self::Input(view) => *view,
            Self::Buffer(buffer) => buffer.view(),
            Self::Output(view) => view.as_view(),
            // Steps are recorded after those whose outputs they use.
            Self::Nothing => unreachable!("a value is used before it is made"),
        }
    }

    fn view_mut(&mut self) -> HostViewMut<'_> {
        match self {
            Self::Buffer(buffer) => buffer.view_mut(),
            Self::Output(view) => view.reborrow(),
            // `run` makes one of those of every output.
            Self::Nothing | Self::Input(_) => unreachable!("a step writes to an input"),
        }
    }
}

thread_local! {
    /// Buffers of steps that are done with them.
    static SPARE: RefCell<Vec<HostBuffer>> = const { RefCell::new(Vec::new()) };
}

impl Node {
    /// Lets threads that wait after step `index` read the weights that the next product needs,
    /// and says which step that is. After the last one it is the first: there will be a next
    /// token.
    fn announce_after(&self, index: usize) -> usize {
        let few = |recorded: &Recorded| {
            let shape = recorded.inputs.first().map(|&x| &self.slots[x].shape[..]);
            let (_, rows) = shape.and_then(<[i32]>::split_last)?;
            let rows = rows.iter().product();
            (0..=FEW_ROWS).contains(&rows).then_some(())
        };
        let steps = self.steps.iter().enumerate();
        let mut later = steps.skip(index + 1);
        let next = later.find(|(_, recorded)| few(recorded).is_some() && recorded.step.expect());
        if next.is_none() {
            self.steps
                .iter()
                .find(|recorded| few(recorded).is_some() && recorded.step.expect());
        }
        next.map_or(usize::MAX, |(index, _)| index)
    }
}

/// The most rows of activations with which a product waits for its weights.
const FEW_ROWS: i32 = 4;

impl HostOp for Node {
    fn name(&self) -> &'static str {
        match &self.steps[..] {
            [step] => step.step.name(),
            _ => "sequence",
        }
    }

    fn outputs(&self, _inputs: &[&Array]) -> mlex_core::Result<Vec<HostOutput>> {
        Ok(self.specs.clone())
    }

    fn contiguous(&self, index: usize) -> bool {
        self.contiguous[index]
    }

    fn run(
        &self,
        inputs: &[HostView<'_>],
        outputs: &mut [HostViewMut<'_>],
    ) -> mlex_core::Result<()> {
        let mut held: Vec<Held<'_>> = self
            .slots
            .iter()
            .map(|slot| match slot.origin {
                Origin::Input(index) => Held::Input(inputs[index]),
                _ => Held::Nothing,
            })
            .collect();
        for (&slot, output) in self.outputs.iter().zip(outputs) {
            held[slot] = Held::Output(output.reborrow());
        }
        let mut spare = SPARE.take();
        let mut announced = 0;
        let result = self
            .steps
            .iter()
            .enumerate()
            .try_for_each(|(index, recorded)| {
                if index == announced {
                    announced = self.announce_after(index);
                }
                let mut targets: SmallVec<[Held<'_>; 4]> = SmallVec::new();
                for &slot in &recorded.outputs {
                    let mut target = std::mem::take(&mut held[slot]);
                    if matches!(target, Held::Nothing) {
                        let mut buffer = spare.pop().unwrap_or_default();
                        let Slot { shape, dtype, .. } = &self.slots[slot];
                        buffer.resize(shape, *dtype)?;
                        target = Held::Buffer(buffer);
                    }
                    targets.push(target);
                }
                {
                    let views: SmallVec<[HostView<'_>; 6]> = recorded
                        .inputs
                        .iter()
                        .map(|&slot| held[slot].view())
                        .collect();
                    let mut targets: SmallVec<[HostViewMut<'_>; 4]> =
                        targets.iter_mut().map(Held::view_mut).collect();
                    recorded.step.run(&views, &mut targets)?;
                }
                for (&slot, target) in recorded.outputs.iter().zip(targets) {
                    held[slot] = target;
                }
                for &slot in recorded.inputs.iter().chain(&recorded.outputs) {
                    if self.last_use[slot] == index
                        && let Held::Buffer(_) = held[slot]
                        && let Held::Buffer(buffer) = std::mem::take(&mut held[slot])
                    {
                        spare.push(buffer);
                    }
                }
                Ok(())
            });
        SPARE.set(spare);
        result
    }
}
