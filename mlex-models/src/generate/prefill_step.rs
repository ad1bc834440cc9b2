//! How a prompt is divided.

use mlex_core::{Device, Stream};

use crate::Result;

/// On a CPU longer pieces are not faster, and take more memory.
const ON_CPU: usize = 512;
/// A GPU is busy with so many; mlx-lm has the same number.
const ON_GPU: usize = 2048;
/// Where MLX has no fused attention for a layer, the scores of a piece are `step * context` numbers
/// per head: of the longest piece at a context of 16384.
const MOST_SCORES: usize = ON_GPU * 16384;

/// How many prompt tokens are given to a model at once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum PrefillStep {
    /// By the device: 512 on a CPU. On a GPU 2048, beyond a context of 16384 tokens so many fewer as
    /// keep attention's scores from growing, down to 512.
    #[default]
    ByDevice,
    /// So many, at least one.
    Tokens(usize),
}

impl From<usize> for PrefillStep {
    fn from(tokens: usize) -> Self {
        Self::Tokens(tokens)
    }
}

impl PrefillStep {
    /// How many tokens come next after `context` of them.
    ///
    /// # Errors
    /// When MLX cannot tell the current device.
    pub(super) fn after(self, context: usize) -> Result<usize> {
        Ok(match self {
            Self::Tokens(tokens) => tokens.max(1),
            Self::ByDevice => by_device(Stream::current()?.device(), context),
        })
    }
}

fn by_device(device: Device, context: usize) -> usize {
    if device == Device::Cpu {
        return ON_CPU;
    }
    (MOST_SCORES / context.max(1)).clamp(ON_CPU, ON_GPU)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_longer_on_a_gpu_while_the_context_is_short() {
        let gpu = |context| by_device(Device::Gpu(0), context);
        assert_eq!(by_device(Device::Cpu, 0), 512);
        assert_eq!(by_device(Device::Cpu, 1 << 20), 512);
        assert_eq!([gpu(0), gpu(16384)], [2048, 2048]);
        assert_eq!([gpu(32768), gpu(65536), gpu(1 << 20)], [1024, 512, 512]);
    }

    #[test]
    fn what_is_asked_for_is_given() -> Result<()> {
        assert_eq!(PrefillStep::from(3).after(1 << 20)?, 3);
        assert_eq!(PrefillStep::Tokens(0).after(0)?, 1);
        Ok(())
    }
}
