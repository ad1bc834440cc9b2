//! Models from the Hugging Face Hub.
//!
//! [`Hub::pull`] brings the files that a model needs into the Hub's shared cache, where Python's
//! `huggingface_hub` finds them and the other way round, and says where they are. It knows
//! nothing of MLX and can be used alone.
//!
//! ```no_run
//! # fn main() -> mlex_hub::Result<()> {
//! let settings = mlex_hub::Settings::from_vars(|name| std::env::var(name).ok())?;
//! let hub = mlex_hub::Hub::new(settings)?;
//! let model = "mlx-community/Qwen3-0.6B-4bit".parse()?;
//! let pulled = hub.pull(&model, mlex_hub::MAIN, &|progress| {
//!     println!("{} of {} bytes", progress.done, progress.total);
//! })?;
//! println!("{}", pulled.path.display());
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

mod api;
mod digest;
mod download;
mod error;
mod http;
mod layout;
mod model_id;
mod progress;
mod pull;
mod retry;
mod select;
mod settings;

pub use error::{Error, ErrorKind, Result};
pub use model_id::ModelId;
pub use progress::Progress;
pub use pull::{Hub, MAIN, Pulled};
pub use settings::Settings;
