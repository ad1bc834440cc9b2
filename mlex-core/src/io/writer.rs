//! Writes a safetensors file, tensor by tensor.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

use serde_json::{Map, Value, json};

use super::StoredDtype;
use super::safetensors::{LENGTH_BYTES, MAX_HEADER_BYTES, METADATA_KEY};
use crate::error::ResultExt;
use crate::{Error, ErrorKind, Result};

/// A tensor to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// The name, not `__metadata__`.
    pub name: String,
    /// The element type.
    pub dtype: StoredDtype,
    /// The shape, outermost dimension first.
    pub shape: Vec<usize>,
}

impl TensorSpec {
    /// How many bytes the tensor has.
    ///
    /// # Errors
    /// When the shape has more than 2^64.
    pub fn byte_len(&self) -> Result<u64> {
        self.shape
            .iter()
            .try_fold(self.dtype.size_in_bytes() as u64, |bytes, &n| {
                bytes.checked_mul(n as u64)
            })
            .ok_or_else(|| {
                let found = format!("{} {:?}", self.dtype, self.shape);
                Error::format("shape", "less than 2^64 bytes", found).with_tensor(&self.name)
            })
    }
}

/// Where the bytes of one tensor go, row-major and little-endian, in pieces of any size.
#[derive(Debug)]
pub struct TensorSink<'a> {
    out: &'a mut BufWriter<File>,
    written: u64,
    expected: u64,
}

impl Write for TensorSink<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.len() as u64 > self.expected - self.written {
            let message = format!("more than the tensor's {} bytes", self.expected);
            return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
        }
        let count = self.out.write(bytes)?;
        self.written += count as u64;
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        // The file is flushed once, at its end.
        Ok(())
    }
}

/// Writes a safetensors file, its tensors in the order of the format's own library: larger
/// element types first, so that every tensor is aligned, then by name. The same tensors and
/// metadata give the same file.
///
/// Otherwise as [`write_safetensors_in_order`].
///
/// # Errors
/// As [`write_safetensors_in_order`].
pub fn write_safetensors(
    path: impl AsRef<Path>,
    tensors: impl IntoIterator<Item = TensorSpec>,
    metadata: &BTreeMap<String, String>,
    write_tensor: impl FnMut(&TensorSpec, &mut TensorSink<'_>) -> Result<()>,
) -> Result<()> {
    let mut tensors: Vec<_> = tensors.into_iter().collect();
    tensors.sort_by(|a, b| {
        let size = |spec: &TensorSpec| spec.dtype.size_in_bytes();
        size(b).cmp(&size(a)).then_with(|| a.name.cmp(&b.name))
    });
    write_safetensors_in_order(path, &tensors, metadata, write_tensor)
}

/// Writes a safetensors file, its tensors in the order given. A tensor is aligned when those
/// before it take a multiple of its element's size.
///
/// The header is written first. Then `write_tensor` is called once for every tensor, in the order
/// of the file, and writes that tensor's bytes, so that one tensor at a time is in memory.
///
/// The file appears under its name when all of it is on disk; until then, and on an error, what
/// was there before is untouched. Files that are mapped stay valid.
///
/// # Errors
/// Fails where a name is given twice or is `__metadata__`, where the header would be larger than
/// readers take, where `write_tensor` fails or writes another number of bytes than the shape has,
/// and where the system refuses.
pub fn write_safetensors_in_order(
    path: impl AsRef<Path>,
    tensors: &[TensorSpec],
    metadata: &BTreeMap<String, String>,
    mut write_tensor: impl FnMut(&TensorSpec, &mut TensorSink<'_>) -> Result<()>,
) -> Result<()> {
    let path = path.as_ref();
    let header = header(tensors, metadata).with_path(path)?;

    let folder = match path.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    };
    let temporary = temporary_file(folder).with_path(path)?;
    let (file, temporary) = temporary.into_parts();
    let mut out = BufWriter::with_capacity(1 << 20, file);
    out.write_all(&header).with_path(path)?;
    for spec in tensors {
        let expected = spec.byte_len().with_path(path)?;
        let mut sink = TensorSink {
            out: &mut out,
            written: 0,
            expected,
        };
        write_tensor(spec, &mut sink)
            .with_tensor(&spec.name)
            .with_path(path)?;
        if sink.written != expected {
            let found = sink.written;
            let error = Error::new(ErrorKind::Length {
                what: "bytes written",
                expected,
                found,
            });
            return Err(error.with_tensor(&spec.name).with_path(path));
        }
    }
    let file = out
        .into_inner()
        .map_err(io::IntoInnerError::into_error)
        .with_path(path)?;
    file.sync_all().with_path(path)?;
    temporary
        .persist(path)
        .map_err(|error| error.error)
        .with_path(path)?;
    sync_folder(folder).with_path(folder)
}

/// The length and the header, padded with spaces to a multiple of eight bytes.
fn header(tensors: &[TensorSpec], metadata: &BTreeMap<String, String>) -> Result<Vec<u8>> {
    let mut entries = Map::new();
    if !metadata.is_empty() {
        entries.insert(METADATA_KEY.to_owned(), json!(metadata));
    }
    let mut end = 0_u64;
    for spec in tensors {
        let start = end;
        end = spec.byte_len()?.checked_add(start).ok_or_else(|| {
            Error::format("data", "less than 2^64 bytes", "more").with_tensor(&spec.name)
        })?;
        let entry: Value = json!({
            "dtype": spec.dtype.name(),
            "shape": spec.shape,
            "data_offsets": [start, end],
        });
        if spec.name == METADATA_KEY || entries.insert(spec.name.clone(), entry).is_some() {
            let error = Error::format("name", "names that differ", "a name that is taken");
            return Err(error.with_tensor(&spec.name));
        }
    }
    let mut header = vec![0; LENGTH_BYTES];
    serde_json::to_writer(&mut header, &entries).map_err(io::Error::from)?;
    header.resize(header.len().next_multiple_of(8), b' ');
    let length = header.len() - LENGTH_BYTES;
    if length > MAX_HEADER_BYTES {
        let expected = format!("at most {MAX_HEADER_BYTES} bytes");
        return Err(Error::format("header length", expected, length.to_string()));
    }
    header[..LENGTH_BYTES].copy_from_slice(&(length as u64).to_le_bytes());
    Ok(header)
}

/// A new file in `folder`, removed unless it is renamed, with the access that any new file has.
fn temporary_file(folder: &Path) -> io::Result<tempfile::NamedTempFile> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(".").suffix(".safetensors.part");
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        builder.permissions(std::fs::Permissions::from_mode(0o666));
    }
    builder.tempfile_in(folder)
}

/// Makes the rename itself durable, where folders can be synced.
fn sync_folder(folder: &Path) -> io::Result<()> {
    #[cfg(unix)]
    File::open(folder)?.sync_all()?;
    #[cfg(not(unix))]
    let _ = folder;
    Ok(())
}

#[cfg(test)]
mod tests;
