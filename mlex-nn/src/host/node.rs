//! A finished sequence: what one node of MLX's graph does.

use std::cell::RefCell;
use std::sync::Arc;

use mlex_core::{Array, HostBuffer, HostOp, HostOutput, HostView, HostViewMut, host_op};
use mlex_kernels::Expectation;
use smallvec::SmallVec;

use super::sequence::{Origin, Recorded, Slot, Work};
use crate::Result;
use crate::cache::memory::Target;

/// Where the keys and values of a layer are: what differs between two runs of a program.
pub(crate) struct Place {
    /// The position of the first new token: of all sequences, or of each.
    pub(super) offsets: SmallVec<[i32; 2]>,
    pub(super) target: Target,
    /// How many positions, the last ones, the queries may see, new ones included.
    pub(super) seen: usize,
}

/// The steps of a node.
pub(super) struct Program {
    pub(super) slots: Vec<Slot>,
    pub(super) steps: Vec<Recorded>,
    /// The slots of the node's outputs.
    outputs: Vec<usize>,
    specs: Vec<HostOutput>,
    /// The last step that uses each value.
    last_use: Vec<usize>,
    /// What is announced before a step.
    announced: Vec<(usize, Announced)>,
}

enum Announced {
    Weights(Box<Expectation>),
    /// The keys and values of the attention that this step is.
    Keys(usize),
}

/// The most rows of activations with which a product waits for its weights.
const FEW_ROWS: i32 = 4;

impl Program {
    pub(super) fn new(
        slots: Vec<Slot>,
        steps: Vec<Recorded>,
        outputs: Vec<usize>,
        specs: Vec<HostOutput>,
    ) -> Self {
        let mut last_use = vec![0; slots.len()];
        for (index, step) in steps.iter().enumerate() {
            for &slot in step.inputs.iter().chain(&step.outputs) {
                last_use[slot] = index;
            }
        }
        let announced = announced(&slots, &steps);
        Self {
            slots,
            steps,
            outputs,
            specs,
            last_use,
            announced,
        }
    }

    /// A node that runs it: its outputs, not computed yet.
    pub(super) fn node(
        self: &Arc<Self>,
        inputs: &[&Array],
        contiguous: Vec<bool>,
        places: Vec<Place>,
    ) -> Result<Vec<Array>> {
        let node = Node {
            program: Arc::clone(self),
            contiguous,
            places,
        };
        Ok(host_op(&Arc::new(node), inputs)?)
    }
}

/// What each step that waits for memory lets idle threads read: that of the next such step.
fn announced(slots: &[Slot], steps: &[Recorded]) -> Vec<(usize, Announced)> {
    let few = |recorded: &Recorded| {
        let shape = recorded.inputs.first().map(|&x| &slots[x].shape[..]);
        let rows = shape.and_then(<[i32]>::split_last);
        rows.is_some_and(|(_, rows)| (0..=FEW_ROWS).contains(&rows.iter().product()))
    };
    let waits = steps.iter().enumerate().filter(|(_, step)| few(step));
    let expected = waits.filter_map(|(index, step)| match &step.work {
        Work::Step(step) => Some((index, Announced::Weights(Box::new(step.expectation()?)))),
        Work::Attend(..) => Some((index, Announced::Keys(index))),
    });
    let expected: Vec<_> = expected.collect();
    let at: Vec<usize> = expected.iter().map(|(index, _)| *index).collect();
    // The first is announced by nobody, or by what is before it.
    let next = expected.into_iter().skip(1).map(|(_, next)| next);
    at.into_iter().zip(next).collect()
}

/// A program with the memory of one run.
struct Node {
    program: Arc<Program>,
    contiguous: Vec<bool>,
    places: Vec<Place>,
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
    fn announce(&self, next: &Announced) {
        match next {
            Announced::Weights(expectation) => expectation.announce(),
            Announced::Keys(index) => {
                if let Work::Attend(step, place) = &self.program.steps[*index].work {
                    step.announce(&self.places[*place]);
                }
            }
        }
    }
}

impl HostOp for Node {
    fn name(&self) -> &'static str {
        match &self.program.steps[..] {
            [step] => step.work.name(),
            _ => "sequence",
        }
    }

    fn outputs(&self, _inputs: &[&Array]) -> mlex_core::Result<Vec<HostOutput>> {
        Ok(self.program.specs.clone())
    }

    fn contiguous(&self, index: usize) -> bool {
        self.contiguous[index]
    }

    fn run(
        &self,
        inputs: &[HostView<'_>],
        outputs: &mut [HostViewMut<'_>],
    ) -> mlex_core::Result<()> {
        let program = &*self.program;
        let mut held: Vec<Held<'_>> = program
            .slots
            .iter()
            .map(|slot| match slot.origin {
                // A run may follow fewer nodes than the one that was recorded.
                Origin::Input(index) => inputs
                    .get(index)
                    .map_or(Held::Nothing, |input| Held::Input(*input)),
                _ => Held::Nothing,
            })
            .collect();
        for (&slot, output) in program.outputs.iter().zip(outputs) {
            held[slot] = Held::Output(output.reborrow());
        }
        let mut spare = SPARE.take();
        let mut announced = program.announced.iter().peekable();
        let result = program
            .steps
            .iter()
            .enumerate()
            .try_for_each(|(index, recorded)| {
                if let Some((_, next)) = announced.next_if(|(at, _)| *at == index) {
                    self.announce(next);
                }
                let mut targets: SmallVec<[Held<'_>; 4]> = SmallVec::new();
                for &slot in &recorded.outputs {
                    let mut target = std::mem::take(&mut held[slot]);
                    if matches!(target, Held::Nothing) {
                        let mut buffer = spare.pop().unwrap_or_default();
                        let Slot { shape, dtype, .. } = &program.slots[slot];
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
                    match &recorded.work {
                        Work::Step(step) => step.run(&views, &mut targets)?,
                        Work::Attend(step, place) => {
                            step.run(&self.places[*place], &views, &mut targets)?
                        }
                    }
                }
                for (&slot, target) in recorded.outputs.iter().zip(targets) {
                    held[slot] = target;
                }
                for &slot in recorded.inputs.iter().chain(&recorded.outputs) {
                    if program.last_use[slot] == index
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
