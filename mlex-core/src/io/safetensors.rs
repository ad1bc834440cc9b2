//! Reads one safetensors file.
//!
//! The format: eight bytes with the length of the header (little-endian), the header (a JSON
//! object), the data. The header maps every tensor's name to its dtype, its shape and the range
//! of its bytes in the data; the ranges cover the data without gaps. `__metadata__` maps strings
//! to strings.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::path::Path;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};

use super::StoredDtype;
use super::json::{UniqueStrings, given_twice, one_line, quoted};
use crate::error::ResultExt;
use crate::ffi::mapped_file::MappedFile;
use crate::{Error, ErrorKind, Result};

/// Bytes of the number in front of the header.
pub(super) const LENGTH_BYTES: usize = 8;
/// The largest header that is read or written, as other readers have it.
pub(super) const MAX_HEADER_BYTES: usize = 100_000_000;
/// The header's key that is no tensor.
pub(super) const METADATA_KEY: &str = "__metadata__";

/// A safetensors file: the header is read and checked, the data stay in the file.
#[derive(Debug)]
pub struct SafetensorsFile {
    file: MappedFile,
    tensors: BTreeMap<String, TensorInfo>,
    metadata: BTreeMap<String, String>,
}

/// What the header says about a tensor, checked against the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// The element type.
    pub dtype: StoredDtype,
    /// The shape, outermost dimension first; empty for a scalar.
    pub shape: Vec<usize>,
    /// Where the bytes lie in the file: row-major, little-endian, aligned to nothing.
    pub range: Range<usize>,
}

impl SafetensorsFile {
    /// Maps the file and reads its header.
    ///
    /// # Errors
    /// Fails where the file cannot be read, and with [`ErrorKind::Format`] where the header does
    /// not describe exactly this file: a header that is longer than the file, JSON that is none,
    /// a name given twice, an unknown dtype, ranges that overlap, leave a gap or leave the file,
    /// or a shape and dtype that need another number of bytes.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let file = MappedFile::open(path)?;
        let Header { tensors, metadata } = Header::parse(file.bytes()).with_path(path)?;
        Ok(Self {
            file,
            tensors,
            metadata,
        })
    }

    /// Where the file was found.
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// The names of the tensors, sorted.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The tensor's dtype, shape and place, if it is in the file.
    pub fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(name)
    }

    /// The tensor's bytes: row-major, little-endian, borrowed from the mapped file, not aligned.
    ///
    /// # Errors
    /// Fails with [`ErrorKind::MissingTensor`].
    pub fn bytes(&self, name: &str) -> Result<&[u8]> {
        let info = self.info(name).ok_or_else(|| {
            Error::new(ErrorKind::MissingTensor)
                .with_tensor(name)
                .with_path(self.path())
        })?;
        // `Header::parse` has checked every range against the file.
        Ok(&self.file.bytes()[info.range.clone()])
    }

    /// Tells the system that the tensor's bytes have been copied and need no memory any more.
    pub fn release(&self, name: &str) {
        if let Some(info) = self.info(name) {
            self.file.release(info.range.clone());
        }
    }

    /// The header's `__metadata__`.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }
}

/// A checked header.
struct Header {
    tensors: BTreeMap<String, TensorInfo>,
    metadata: BTreeMap<String, String>,
}

impl Header {
    fn parse(file: &[u8]) -> Result<Self> {
        let (length, rest) = file.split_first_chunk::<LENGTH_BYTES>().ok_or_else(|| {
            Error::format("file", "at least 8 bytes", format!("{} bytes", file.len()))
        })?;
        let length = u64::from_le_bytes(*length);
        if length > MAX_HEADER_BYTES as u64 {
            let expected = format!("at most {MAX_HEADER_BYTES} bytes");
            return Err(Error::format("header length", expected, length.to_string()));
        }
        // At most 100 MB, so it fits.
        let Some((header, data)) = rest.split_at_checked(length as usize) else {
            let expected = format!("at most the {} bytes that follow", rest.len());
            return Err(Error::format("header length", expected, length.to_string()));
        };
        let header = std::str::from_utf8(header)
            .map_err(|error| Error::format("header", "UTF-8", error.to_string()))?;
        let RawHeader { tensors, metadata } = serde_json::from_str(header).map_err(|error| {
            Error::format("header", "a JSON object of tensors", one_line(&error))
        })?;

        let data_start = file.len() - data.len();
        let tensors = tensors
            .into_iter()
            .map(|(name, raw)| {
                let info = raw
                    .check(data.len(), data_start)
                    .with_tensor(name.as_str())?;
                Ok((name, info))
            })
            .collect::<Result<BTreeMap<_, _>>>()?;
        check_cover(&tensors, data_start..file.len())?;
        Ok(Self { tensors, metadata })
    }
}

/// Checks that the tensors cover the data, each byte once.
fn check_cover(tensors: &BTreeMap<String, TensorInfo>, data: Range<usize>) -> Result<()> {
    let mut in_order: Vec<_> = tensors.iter().collect();
    in_order.sort_unstable_by_key(|(_, info)| (info.range.start, info.range.end));
    let mut covered = data.start;
    for (name, info) in in_order {
        if info.range.start != covered {
            let place = |at: usize| format!("{}", at - data.start);
            let error = Error::format("data_offsets[0]", place(covered), place(info.range.start));
            return Err(error.with_tensor(name));
        }
        covered = info.range.end;
    }
    if covered == data.end {
        Ok(())
    } else {
        let bytes = |end: usize| format!("{} bytes", end - data.start);
        Err(Error::format("data", bytes(covered), bytes(data.end)))
    }
}

/// The header as the JSON has it.
struct RawHeader {
    tensors: BTreeMap<String, RawTensor>,
    metadata: BTreeMap<String, String>,
}

/// A tensor's entry in the header.
#[derive(Deserialize)]
struct RawTensor {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

impl RawTensor {
    /// Checks one entry by itself; `data_start` is where the data begin in the file.
    fn check(self, data_len: usize, data_start: usize) -> Result<TensorInfo> {
        let dtype = StoredDtype::from_name(&self.dtype).ok_or_else(|| {
            let known: Vec<_> = StoredDtype::ALL.iter().map(|dtype| dtype.name()).collect();
            Error::format(
                "dtype",
                format!("one of {}", known.join(", ")),
                quoted(&self.dtype),
            )
        })?;
        let (start, end) = self.data_offsets;
        if start > end || end > data_len as u64 {
            let expected = format!("a range within the {data_len} bytes of data");
            return Err(Error::format(
                "data_offsets",
                expected,
                format!("[{start}, {end}]"),
            ));
        }
        let needed = self
            .shape
            .iter()
            .try_fold(dtype.size_in_bytes() as u64, |bytes, &n| {
                bytes.checked_mul(n)
            });
        if needed != Some(end - start) {
            let needed = needed.map_or("more than 2^64".to_owned(), |bytes| bytes.to_string());
            let expected = format!("{needed} bytes for {dtype} {:?}", self.shape);
            return Err(Error::format(
                "data_offsets",
                expected,
                format!("{} bytes", end - start),
            ));
        }
        // A dimension is larger than the address space only where another one is 0.
        let shape = self
            .shape
            .iter()
            .map(|&n| usize::try_from(n))
            .collect::<Result<_, _>>();
        let shape = shape.map_err(|_| {
            Error::format(
                "shape",
                "dimensions of this machine",
                format!("{:?}", self.shape),
            )
        })?;
        // Both ends are within the data, whose length is a `usize`.
        Ok(TensorInfo {
            dtype,
            shape,
            range: data_start + start as usize..data_start + end as usize,
        })
    }
}

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(HeaderVisitor)
    }
}

/// Reads the header's object; a map type would keep the last of two entries and say nothing.
struct HeaderVisitor;

impl<'de> Visitor<'de> for HeaderVisitor {
    type Value = RawHeader;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<RawHeader, A::Error> {
        let mut tensors = BTreeMap::new();
        let mut metadata = None;
        while let Some(name) = entries.next_key::<String>()? {
            let fresh = if name == METADATA_KEY {
                // MLX's own writer has null where there is none.
                let strings = entries.next_value::<Option<UniqueStrings>>()?;
                metadata
                    .replace(strings.map(|strings| strings.0).unwrap_or_default())
                    .is_none()
            } else {
                let raw: RawTensor = entries
                    .next_value()
                    .map_err(|error| A::Error::custom(format!("{}: {error}", quoted(&name))))?;
                tensors.insert(name.clone(), raw).is_none()
            };
            if !fresh {
                return Err(A::Error::custom(given_twice(&name)));
            }
        }
        Ok(RawHeader {
            tensors,
            metadata: metadata.unwrap_or_default(),
        })
    }
}

#[cfg(test)]
mod tests;
