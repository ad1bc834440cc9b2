//! Chains of element-wise operations that a GPU does in one kernel: MLX writes it from the graph.

use std::cell::RefCell;

use mlex_core::{Array, Compiled, Device, Stream};

use crate::activation::Activation;
use crate::{Result, host};

/// A function of one or two arrays of the same shape.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Chain {
    /// `activation(x)`.
    Alone(Activation),
    /// `activation(gate) * up`.
    Gated(Activation),
    /// `cap * tanh(x / cap)`.
    Softcap(f32),
}

impl Chain {
    /// The chain by MLX's operations.
    pub(crate) fn apply(self, inputs: &[Array]) -> mlex_core::Result<Array> {
        match (self, inputs) {
            (Self::Alone(activation), [x]) => activation.of(x),
            (Self::Gated(activation), [gate, up]) => activation.of(gate)?.multiply(up),
            (Self::Softcap(cap), [x]) => x.divide(cap)?.tanh()?.multiply(cap),
            // `call` is given as many as there are.
            _ => unreachable!("{self:?} of {} arrays", inputs.len()),
        }
    }
}

thread_local! {
    /// The chains that this thread has used.
    static KNOWN: RefCell<Vec<(Chain, Compiled)>> = const { RefCell::new(Vec::new()) };
}

/// The chain, as one kernel on a GPU, unless kernels are switched off or the arrays are of several
/// shapes or types.
pub(crate) fn call(chain: Chain, inputs: &[Array]) -> Result<Array> {
    let first = &inputs[0];
    let alike = |x: &Array| x.shape() == first.shape() && x.dtype() == first.dtype();
    let on_gpu = Stream::current()?.device() != Device::Cpu;
    if on_gpu && host::enabled() && inputs.iter().all(alike) && first.size() > 0 {
        return compiled(chain, inputs);
    }
    Ok(chain.apply(inputs)?)
}

fn compiled(chain: Chain, inputs: &[Array]) -> Result<Array> {
    KNOWN.with_borrow_mut(|known| {
        let index = match known.iter().position(|(one, _)| *one == chain) {
            Some(index) => index,
            None => {
                let function = move |inputs: &[Array]| Ok(vec![chain.apply(inputs)?]);
                known.push((chain, Compiled::new(function, true)?));
                known.len() - 1
            }
        };
        let mut outputs = known[index].1.call(inputs)?;
        // The function has one.
        Ok(outputs.swap_remove(0))
    })
}

#[cfg(test)]
mod tests {
    use mlex_core::Dtype;

    use super::*;

    /// What MLX replays is what the operations give, for other shapes than the first too.
    #[test]
    fn a_compiled_chain_is_its_operations() -> Result<()> {
        check(Device::Cpu, |_| 0.0)
    }

    /// The same on a GPU, where there is one: its kernel rounds to a half type once, at the end.
    #[test]
    fn a_compiled_chain_is_near_its_operations_on_the_preferred_device() -> Result<()> {
        let tolerance = |dtype| match dtype {
            Dtype::Float32 => 2e-6,
            _ => 2.5e-2,
        };
        check(Device::preferred()?, tolerance)
    }

    /// Compares all chains on `device`, where numbers may be off by a part of their size.
    fn check(device: Device, tolerance: impl Fn(Dtype) -> f32) -> Result<()> {
        let chains = [
            Chain::Alone(Activation::GeluTanh),
            Chain::Gated(Activation::Silu),
            Chain::Gated(Activation::Gelu),
            Chain::Gated(Activation::GeluTanh),
            Chain::Gated(Activation::Sigmoid),
            Chain::Softcap(30.0),
            Chain::Softcap(7.5),
        ];
        Stream::default_of(device)?.scope(|| {
            for shape in [&[2, 3][..], &[1, 7, 5]] {
                for chain in chains {
                    for dtype in [Dtype::Float32, Dtype::Bfloat16] {
                        let count: i32 = shape.iter().product();
                        let row = |factor: f32| -> Result<Array> {
                            let values: Vec<f32> =
                                (0..count).map(|i| (i as f32 - 9.0) * factor).collect();
                            Ok(Array::from_slice(&values, shape)?.as_type(dtype)?)
                        };
                        let (x, y) = (row(0.7)?, row(-0.3)?);
                        let both = [x.clone(), y.clone()];
                        let inputs = match chain {
                            Chain::Gated(_) => &both[..],
                            _ => &both[..1],
                        };
                        let expected = chain.apply(inputs)?;
                        let found = compiled(chain, inputs)?;
                        let floats = |x: &Array| x.as_type(Dtype::Float32)?.to_vec::<f32>();
                        assert_eq!(found.dtype(), dtype);
                        let tolerance = tolerance(dtype);
                        for (a, b) in floats(&found)?.iter().zip(floats(&expected)?) {
                            assert!(
                                (a - b).abs() <= tolerance * b.abs().max(1.0),
                                "{chain:?} in {dtype}: {a} where {b} is expected"
                            );
                        }
                    }
                }
            }
            Ok(())
        })
    }
}
