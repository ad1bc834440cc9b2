//! Streams: the queue of a device that operations run on, one current stream per thread.

use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;

use crate::ffi::{self, StreamHandle, call};
use crate::{Device, Result};

thread_local! {
    static CURRENT: RefCell<Option<Stream>> = const { RefCell::new(None) };
}

/// A queue of a device. Operations are put on the current stream of the calling thread.
///
/// MLX ties a stream to the thread that made it, so it stays there (it is not `Send`). An
/// [`Array`](crate::Array) built on it can be sent once it is computed.
#[derive(Clone)]
pub struct Stream {
    handle: Rc<StreamHandle>,
    device: Device,
}

impl Stream {
    /// A new stream on `device`.
    ///
    /// # Errors
    /// When the device is not there.
    pub fn new(device: Device) -> Result<Self> {
        let handle = ffi::new_stream(&device.handle()?)?;
        Ok(Self {
            handle: Rc::new(handle),
            device,
        })
    }

    /// The stream that operations of this thread are put on: at first MLX's default stream
    /// of the [preferred device](Device::preferred).
    ///
    /// # Errors
    /// When MLX has no device.
    pub fn current() -> Result<Self> {
        if let Some(stream) = CURRENT.with_borrow(Clone::clone) {
            return Ok(stream);
        }
        let stream = Self::default_of(Device::preferred()?)?;
        CURRENT.set(Some(stream.clone()));
        Ok(stream)
    }

    /// MLX's default stream of `device` on this thread.
    ///
    /// # Errors
    /// When the device is not there.
    pub fn default_of(device: Device) -> Result<Self> {
        let mut handle = StreamHandle::empty();
        let device_handle = device.handle()?;
        call!(mlx_get_default_stream(
            handle.as_mut_ptr(),
            device_handle.raw()
        ))?;
        Ok(Self {
            handle: Rc::new(handle),
            device,
        })
    }

    /// Makes it the current stream of this thread.
    pub fn set_current(&self) {
        CURRENT.set(Some(self.clone()));
    }

    /// Runs `function` with this as the current stream, then puts the former one back.
    pub fn scope<T>(&self, function: impl FnOnce() -> T) -> T {
        struct Restore(Option<Stream>);
        impl Drop for Restore {
            fn drop(&mut self) {
                CURRENT.set(self.0.take());
            }
        }
        let _restore = Restore(CURRENT.replace(Some(self.clone())));
        function()
    }

    /// The device it belongs to.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Waits until everything on it is done.
    ///
    /// # Errors
    /// What MLX met while it ran.
    pub fn synchronize(&self) -> Result<()> {
        call!(mlx_synchronize(self.handle.raw()))?;
        ffi::check_failures()
    }

    pub(crate) fn raw(&self) -> mlex_sys::mlx_stream {
        self.handle.raw()
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream")
            .field("device", &self.device)
            .finish_non_exhaustive()
    }
}
