//! Raw bindings to Apple MLX through its C interface, mlx-c.
//!
//! The build script builds MLX and mlx-c from source (or links an installed MLX) and generates
//! these declarations from mlx-c's headers; names and meanings are mlx-c's own. `mlex-core` is the
//! safe layer above this crate.
//!
//! Before the first call that can fail, install an error handler with [`mlx_set_error_handler`]:
//! mlx-c's default one ends the process.

#![allow(unsafe_code)]

#[allow(
    missing_docs,
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals,
    unreachable_pub,
    clippy::all
)]
mod bindings {
    include!(concat!(env!("OUT_DIR"), "/bindings.rs"));
}

pub use bindings::*;
