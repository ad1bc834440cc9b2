//! Devices: the CPU, and the GPU where MLX was built with one.

use std::fmt;

use mlex_sys as sys;

use crate::ffi::{DeviceHandle, call, new_device};
use crate::{Error, ErrorKind, Result};

/// What computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Device {
    /// The host's processor.
    Cpu,
    /// A GPU by its index: Metal on macOS, CUDA elsewhere.
    Gpu(u32),
}

impl Device {
    /// The device that MLX prefers: the GPU where there is one, otherwise the CPU.
    ///
    /// # Errors
    /// When MLX cannot tell.
    pub fn preferred() -> Result<Self> {
        let gpu = Self::Gpu(0);
        Ok(if gpu.is_available()? { gpu } else { Self::Cpu })
    }

    /// Whether this build of MLX can use it on this machine.
    ///
    /// # Errors
    /// When MLX cannot tell.
    pub fn is_available(self) -> Result<bool> {
        let mut available = false;
        let handle = self.handle()?;
        call!(mlx_device_is_available(&raw mut available, handle.raw()))?;
        Ok(available)
    }

    pub(crate) fn handle(self) -> Result<DeviceHandle> {
        let (kind, index) = match self {
            Self::Cpu => (sys::MLX_CPU, 0),
            Self::Gpu(index) => (sys::MLX_GPU, index),
        };
        let index = i32::try_from(index).map_err(|_| {
            Error::new(ErrorKind::Argument {
                argument: "device index",
                expected: "a small number",
                found: index.to_string(),
            })
        })?;
        new_device(kind, index)
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Gpu(0) => f.write_str("gpu"),
            Self::Gpu(index) => write!(f, "gpu:{index}"),
        }
    }
}

impl std::str::FromStr for Device {
    type Err = Error;

    /// `cpu`, `gpu` or `gpu:1`.
    fn from_str(text: &str) -> Result<Self> {
        match text.split_once(':') {
            None if text == "cpu" => Ok(Self::Cpu),
            None if text == "gpu" => Ok(Self::Gpu(0)),
            Some(("gpu", index)) if index.parse::<u32>().is_ok() => {
                Ok(Self::Gpu(index.parse().unwrap_or_default()))
            }
            _ => Err(Error::new(ErrorKind::Argument {
                argument: "device",
                expected: "cpu, gpu or gpu:N",
                found: format!("{text:?}"),
            })),
        }
    }
}
