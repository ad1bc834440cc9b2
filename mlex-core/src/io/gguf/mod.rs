//! Reads GGUF files of llama.cpp, versions 2 and 3, little-endian.

mod affine;
mod blocks;
mod ggml_type;
mod header;
mod iq4;
mod k_quants;
mod mxfp4;
mod rope_rows;
mod tensor;
mod value;

use std::path::Path;

use header::Header;

pub use ggml_type::{BlockSize, GgmlType};
pub use header::GgufTensorInfo;
pub use rope_rows::unpermute_rope_rows;
pub use tensor::{Affine, Decoded, GgufTensor, Mxfp4};
pub use value::{FromGguf, GgufArray, GgufMetadata, GgufValue};

use crate::error::ResultExt;
use crate::ffi::mapped_file::MappedFile;
use crate::{Error, ErrorKind, Result};

/// A GGUF file: the header is read and checked, the tensors stay in the file.
#[derive(Debug)]
pub struct GgufFile {
    file: MappedFile,
    header: Header,
}

impl GgufFile {
    /// Maps the file and reads its header.
    ///
    /// # Errors
    /// Fails where the file cannot be read, and with [`ErrorKind::Format`] where it is no
    /// little-endian GGUF of version 2 or 3 or lies about itself: counts or lengths beyond its
    /// end, a name or key given twice, text that is not UTF-8, a shape that is no whole number of
    /// blocks, tensors that overlap or leave the file. A tensor of an unknown type fails when it
    /// is decoded.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let file = MappedFile::open(path)?;
        let header = Header::parse(file.bytes()).with_path(path)?;
        Ok(Self { file, header })
    }

    /// Where the file was found.
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// The version of the format.
    pub fn version(&self) -> u32 {
        self.header.version
    }

    /// The metadata.
    pub fn metadata(&self) -> &GgufMetadata {
        &self.header.metadata
    }

    /// The metadata value of that key as a `T`, if there is one: a number, `&str`, `bool`,
    /// `&[String]`, `Vec<u32>` and so on (see [`FromGguf`]).
    ///
    /// # Errors
    /// Fails where it has another type, or does not fit.
    pub fn get<'a, T: FromGguf<'a>>(&'a self, key: &str) -> Result<Option<T>> {
        self.metadata().get(key).with_path(self.path())
    }

    /// The metadata value of that key as a `T`.
    ///
    /// # Errors
    /// Fails where there is none, and where [`get`](Self::get) fails.
    pub fn require<'a, T: FromGguf<'a>>(&'a self, key: &str) -> Result<T> {
        self.metadata().require(key).with_path(self.path())
    }

    /// The names of the tensors, sorted.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.header.tensors.keys().map(String::as_str)
    }

    /// The tensor's type, shape and place, if it is in the file.
    pub fn info(&self, name: &str) -> Option<&GgufTensorInfo> {
        self.header.tensors.get(name)
    }

    /// The tensor.
    ///
    /// # Errors
    /// Fails with [`ErrorKind::MissingTensor`], and with [`ErrorKind::Format`] for a type that is
    /// not known.
    pub fn tensor(&self, name: &str) -> Result<GgufTensor<'_>> {
        let Some((name, info)) = self.header.tensors.get_key_value(name) else {
            let error = Error::new(ErrorKind::MissingTensor);
            return Err(error.with_tensor(name).with_path(self.path()));
        };
        if let GgmlType::Unknown(number) = info.ggml_type {
            let error = Error::format("type", "a known ggml type", number.to_string());
            return Err(error.with_tensor(name).with_path(self.path()));
        }
        // `Header::parse` has checked every range against the file.
        let bytes = &self.file.bytes()[info.range.clone()];
        Ok(GgufTensor {
            name,
            info,
            bytes,
            path: self.path(),
        })
    }

    /// Tells the system that the tensor's bytes have been copied and need no memory any more.
    pub fn release(&self, name: &str) {
        if let Some(info) = self.info(name) {
            self.file.release(info.range.clone());
        }
    }
}

#[cfg(test)]
mod tests;
