//! Parses the header of a GGUF file: metadata and where the tensors lie.
//!
//! The format (ggml's docs/gguf.md), all numbers little-endian: the magic `GGUF`, a `u32`
//! version, `u64` counts of tensors and of metadata pairs, the pairs, the tensors' names, shapes,
//! types and offsets, padding to the alignment, the data. Every count is checked against the bytes
//! that are left before memory is asked for.

use std::collections::BTreeMap;
use std::ops::Range;

use super::super::json::quoted;
use super::ggml_type::GgmlType;
use super::value::{GgufArray, GgufMetadata, GgufValue};
use crate::error::ResultExt;
use crate::{Error, Result};

const MAGIC: [u8; 4] = *b"GGUF";
const DEFAULT_ALIGNMENT: u64 = 32;
const MAX_DIMENSIONS: u32 = 4;
/// Arrays of arrays may be this deep; ggml itself refuses all but flat ones.
const MAX_ARRAY_DEPTH: usize = 4;
/// The least bytes of a metadata pair: an empty key, a type, a value of one byte.
const MIN_PAIR_BYTES: usize = 8 + 4 + 1;
/// The least bytes of a tensor's entry: an empty name, no dimension, a type, an offset.
const MIN_TENSOR_BYTES: usize = 8 + 4 + 4 + 8;

/// A checked header.
#[derive(Debug)]
pub(super) struct Header {
    pub(super) version: u32,
    pub(super) metadata: GgufMetadata,
    pub(super) tensors: BTreeMap<String, GgufTensorInfo>,
}

/// What the header says about a tensor, checked against the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GgufTensorInfo {
    /// The element type.
    pub ggml_type: GgmlType,
    /// The shape, outermost dimension first (the file has the innermost first).
    pub shape: Vec<usize>,
    /// Where the bytes lie in the file; for a type that is not known, only where they begin.
    pub range: Range<usize>,
}

impl Header {
    pub(super) fn parse(file: &[u8]) -> Result<Self> {
        let mut cursor = Cursor { file, at: 0 };
        let magic: [u8; 4] = cursor.take("magic")?;
        if magic != MAGIC {
            let found = quoted(&String::from_utf8_lossy(&magic));
            return Err(Error::format("magic", "\"GGUF\"", found));
        }
        let version = cursor.u32("version")?;
        match version {
            2 | 3 => {}
            1 => {
                return Err(Error::format(
                    "version",
                    "2 or 3",
                    "1 (convert the model again)",
                ));
            }
            _ if matches!(version.swap_bytes(), 1..=3) => {
                return Err(Error::format("byte order", "little-endian", "big-endian"));
            }
            _ => return Err(Error::format("version", "2 or 3", version.to_string())),
        }
        let tensor_count = cursor.u64("tensor count")?;
        let pair_count = cursor.u64("metadata count")?;
        let pair_count = cursor.fitting("metadata count", pair_count, MIN_PAIR_BYTES)?;
        let metadata = read_metadata(&mut cursor, pair_count)?;
        let tensor_count = cursor.fitting("tensor count", tensor_count, MIN_TENSOR_BYTES)?;
        let alignment = alignment(&metadata)?;

        let mut entries = Vec::with_capacity(tensor_count);
        for number in 0..tensor_count {
            entries.push(TensorEntry::read(&mut cursor, number)?);
        }
        let tensors = place_tensors(entries, cursor.at, alignment, file.len())?;
        Ok(Self {
            version,
            metadata,
            tensors,
        })
    }
}

fn read_metadata(cursor: &mut Cursor<'_>, count: usize) -> Result<GgufMetadata> {
    let mut metadata = BTreeMap::new();
    for number in 0..count {
        let key = cursor.string(&format!("metadata key {number}"))?;
        let field = format!("metadata {}", quoted(key));
        let value_type = cursor.u32(&field)?;
        let value = cursor.value(&field, value_type)?;
        if metadata.insert(key.to_owned(), value).is_some() {
            return Err(Error::format(field, "one value", "two"));
        }
    }
    Ok(GgufMetadata(metadata))
}

fn alignment(metadata: &GgufMetadata) -> Result<u64> {
    let key = "general.alignment";
    let alignment = metadata
        .get::<u32>(key)?
        .map_or(DEFAULT_ALIGNMENT, u64::from);
    if alignment.is_power_of_two() {
        Ok(alignment)
    } else {
        Err(Error::format(
            format!("metadata {key:?}"),
            "a power of two",
            alignment.to_string(),
        ))
    }
}

/// A tensor as the file lists it.
struct TensorEntry<'a> {
    name: &'a str,
    shape: Vec<u64>,
    ggml_type: GgmlType,
    offset: u64,
}

impl<'a> TensorEntry<'a> {
    fn read(cursor: &mut Cursor<'a>, number: usize) -> Result<Self> {
        let name = cursor.string(&format!("name of tensor {number}"))?;
        let read = |cursor: &mut Cursor<'a>| {
            let dimensions = cursor.u32("dimension count")?;
            if dimensions > MAX_DIMENSIONS {
                let expected = format!("at most {MAX_DIMENSIONS}");
                return Err(Error::format(
                    "dimension count",
                    expected,
                    dimensions.to_string(),
                ));
            }
            let mut shape = Vec::with_capacity(dimensions as usize);
            for _ in 0..dimensions {
                shape.push(cursor.u64("shape")?);
            }
            shape.reverse();
            let ggml_type = GgmlType::from_number(cursor.u32("type")?);
            let offset = cursor.u64("offset")?;
            Ok(Self {
                name,
                shape,
                ggml_type,
                offset,
            })
        };
        read(cursor).with_tensor(name)
    }

    /// How many bytes the tensor has; `None` for a type that is not known.
    fn byte_len(&self) -> Result<Option<u64>> {
        let Some(block) = self.ggml_type.block() else {
            return Ok(None);
        };
        let row = self.shape.last().copied().unwrap_or(1);
        let elements = block.elements as u64;
        if row % elements != 0 {
            let expected = format!("rows of a multiple of {elements} for {}", self.ggml_type);
            return Err(Error::format(
                "shape",
                expected,
                format!("{:?}", self.shape),
            ));
        }
        let outer = &self.shape[..self.shape.len().saturating_sub(1)];
        let bytes = outer
            .iter()
            .try_fold(row / elements, |blocks, &n| blocks.checked_mul(n))
            .and_then(|blocks| blocks.checked_mul(block.bytes as u64));
        bytes.map(Some).ok_or_else(|| {
            Error::format("shape", "less than 2^64 bytes", format!("{:?}", self.shape))
        })
    }
}

/// Checks where the tensors lie: aligned, within the file, none over another.
fn place_tensors(
    entries: Vec<TensorEntry<'_>>,
    header_end: usize,
    alignment: u64,
    file_len: usize,
) -> Result<BTreeMap<String, GgufTensorInfo>> {
    // The alignment is at most 2^31 and a file's length below 2^63.
    let data_start = (header_end as u64).next_multiple_of(alignment);
    let file_len = file_len as u64;
    let mut tensors = BTreeMap::new();
    for entry in &entries {
        let info = place_tensor(entry, data_start, alignment, file_len).with_tensor(entry.name)?;
        if tensors.insert(entry.name.to_owned(), info).is_some() {
            return Err(Error::format("name", "one tensor", "two").with_tensor(entry.name));
        }
    }

    let mut in_order: Vec<_> = tensors
        .iter()
        .filter(|(_, info)| !info.range.is_empty())
        .collect();
    in_order.sort_unstable_by_key(|(_, info)| info.range.start);
    for pair in in_order.windows(2) {
        let [(before, first), (name, second)] = pair else {
            continue;
        };
        if second.range.start < first.range.end {
            let expected = format!("bytes after those of {}", quoted(before));
            let found = format!("{} bytes of them", first.range.end - second.range.start);
            return Err(Error::format("offset", expected, found).with_tensor(name.as_str()));
        }
    }
    Ok(tensors)
}

fn place_tensor(
    entry: &TensorEntry<'_>,
    data_start: u64,
    alignment: u64,
    file_len: u64,
) -> Result<GgufTensorInfo> {
    if !entry.offset.is_multiple_of(alignment) {
        let expected = format!("a multiple of {alignment}");
        return Err(Error::format("offset", expected, entry.offset.to_string()));
    }
    let byte_len = entry.byte_len()?.unwrap_or(0);
    let start = data_start.checked_add(entry.offset);
    let end = start.and_then(|start| start.checked_add(byte_len));
    let (Some(start), Some(end)) = (start, end.filter(|&end| end <= file_len)) else {
        let left = file_len.saturating_sub(data_start);
        let expected = format!("a range within the {left} bytes of data");
        let found = format!("{byte_len} bytes at {}", entry.offset);
        return Err(Error::format("offset", expected, found));
    };
    // A dimension is larger than the address space only where another one is 0.
    let shape = entry
        .shape
        .iter()
        .map(|&n| usize::try_from(n))
        .collect::<Result<_, _>>();
    let shape = shape.map_err(|_| {
        Error::format(
            "shape",
            "dimensions of this machine",
            format!("{:?}", entry.shape),
        )
    })?;
    // Both are within the file, whose length is a `usize`.
    let range = start as usize..end as usize;
    Ok(GgufTensorInfo {
        ggml_type: entry.ggml_type,
        shape,
        range,
    })
}

/// The bytes of the file and a place in them.
struct Cursor<'a> {
    file: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn remaining(&self) -> usize {
        self.file.len() - self.at
    }

    /// The next `count` bytes.
    fn bytes(&mut self, field: &str, count: usize) -> Result<&'a [u8]> {
        let bytes = self.file[self.at..].get(..count).ok_or_else(|| {
            let expected = format!("{count} bytes at {}", self.at);
            Error::format(
                field,
                expected,
                format!("the end of the file after {}", self.remaining()),
            )
        })?;
        self.at += count;
        Ok(bytes)
    }

    fn take<const N: usize>(&mut self, field: &str) -> Result<[u8; N]> {
        let mut taken = [0; N];
        taken.copy_from_slice(self.bytes(field, N)?);
        Ok(taken)
    }

    fn u32(&mut self, field: &str) -> Result<u32> {
        Ok(u32::from_le_bytes(self.take(field)?))
    }

    fn u64(&mut self, field: &str) -> Result<u64> {
        Ok(u64::from_le_bytes(self.take(field)?))
    }

    /// `count`, if that many things of at least `min_bytes` each can follow.
    fn fitting(&self, field: &str, count: u64, min_bytes: usize) -> Result<usize> {
        let most = self.remaining() / min_bytes;
        match usize::try_from(count) {
            Ok(count) if count <= most => Ok(count),
            _ => {
                let expected = format!("at most {most} in {} bytes", self.remaining());
                Err(Error::format(field, expected, count.to_string()))
            }
        }
    }

    fn string(&mut self, field: &str) -> Result<&'a str> {
        let length = self.u64(field)?;
        let length = self.fitting(field, length, 1)?;
        let bytes = self.bytes(field, length)?;
        std::str::from_utf8(bytes).map_err(|error| Error::format(field, "UTF-8", error.to_string()))
    }

    fn bool(&mut self, field: &str) -> Result<bool> {
        match self.take(field)? {
            [0] => Ok(false),
            [1] => Ok(true),
            [other] => Err(Error::format(field, "a bool of 0 or 1", other.to_string())),
        }
    }

    fn value(&mut self, field: &str, value_type: u32) -> Result<GgufValue> {
        Ok(match value_type {
            0 => GgufValue::U8(u8::from_le_bytes(self.take(field)?)),
            1 => GgufValue::I8(i8::from_le_bytes(self.take(field)?)),
            2 => GgufValue::U16(u16::from_le_bytes(self.take(field)?)),
            3 => GgufValue::I16(i16::from_le_bytes(self.take(field)?)),
            4 => GgufValue::U32(u32::from_le_bytes(self.take(field)?)),
            5 => GgufValue::I32(i32::from_le_bytes(self.take(field)?)),
            6 => GgufValue::F32(f32::from_le_bytes(self.take(field)?)),
            7 => GgufValue::Bool(self.bool(field)?),
            8 => GgufValue::String(self.string(field)?.to_owned()),
            9 => GgufValue::Array(self.array(field, 1)?),
            10 => GgufValue::U64(u64::from_le_bytes(self.take(field)?)),
            11 => GgufValue::I64(i64::from_le_bytes(self.take(field)?)),
            12 => GgufValue::F64(f64::from_le_bytes(self.take(field)?)),
            other => return Err(unknown_value_type(field, other)),
        })
    }

    fn array(&mut self, field: &str, depth: usize) -> Result<GgufArray> {
        if depth > MAX_ARRAY_DEPTH {
            let expected = format!("arrays at most {MAX_ARRAY_DEPTH} deep");
            return Err(Error::format(field, expected, "deeper ones"));
        }
        let element_type = self.u32(field)?;
        let count = self.u64(field)?;
        Ok(match element_type {
            0 => GgufArray::U8(self.numbers(field, count, u8::from_le_bytes)?),
            1 => GgufArray::I8(self.numbers(field, count, i8::from_le_bytes)?),
            2 => GgufArray::U16(self.numbers(field, count, u16::from_le_bytes)?),
            3 => GgufArray::I16(self.numbers(field, count, i16::from_le_bytes)?),
            4 => GgufArray::U32(self.numbers(field, count, u32::from_le_bytes)?),
            5 => GgufArray::I32(self.numbers(field, count, i32::from_le_bytes)?),
            6 => GgufArray::F32(self.numbers(field, count, f32::from_le_bytes)?),
            7 => GgufArray::Bool(self.elements(field, count, 1, Self::bool)?),
            8 => GgufArray::String(self.elements(field, count, 8, |cursor, field| {
                cursor.string(field).map(str::to_owned)
            })?),
            9 => GgufArray::Array(self.elements(field, count, 12, |cursor, field| {
                cursor.array(field, depth + 1)
            })?),
            10 => GgufArray::U64(self.numbers(field, count, u64::from_le_bytes)?),
            11 => GgufArray::I64(self.numbers(field, count, i64::from_le_bytes)?),
            12 => GgufArray::F64(self.numbers(field, count, f64::from_le_bytes)?),
            other => return Err(unknown_value_type(field, other)),
        })
    }

    fn numbers<const N: usize, T>(
        &mut self,
        field: &str,
        count: u64,
        from_bytes: fn([u8; N]) -> T,
    ) -> Result<Vec<T>> {
        let count = self.fitting(field, count, N)?;
        let (chunks, _) = self.bytes(field, count * N)?.as_chunks::<N>();
        Ok(chunks.iter().map(|&chunk| from_bytes(chunk)).collect())
    }

    fn elements<T>(
        &mut self,
        field: &str,
        count: u64,
        min_bytes: usize,
        mut read: impl FnMut(&mut Self, &str) -> Result<T>,
    ) -> Result<Vec<T>> {
        let count = self.fitting(field, count, min_bytes)?;
        let mut elements = Vec::with_capacity(count);
        for _ in 0..count {
            elements.push(read(self, field)?);
        }
        Ok(elements)
    }
}

fn unknown_value_type(field: &str, number: u32) -> Error {
    Error::format(field, "a value type from 0 to 12", number.to_string())
}
