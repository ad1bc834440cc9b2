//! A file mapped into memory for reading.
#![allow(unsafe_code)]

use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use crate::error::ResultExt;
use crate::{Error, Result};

/// A whole regular file, mapped read-only.
///
/// The mapping shows the file as it is, not as it was when it was opened. A file that another
/// process writes to or truncates meanwhile is outside of what this type promises: readers may
/// see the new bytes, and reading past a truncated end kills the process (`SIGBUS`). Replacing
/// a file by renaming another one over it is harmless, for the mapping keeps the old one.
#[derive(Debug)]
pub(crate) struct MappedFile {
    /// `None` for an empty file, which cannot be mapped.
    map: Option<Mmap>,
    path: PathBuf,
}

impl MappedFile {
    /// Maps the file at `path`.
    ///
    /// Fails where there is no such file, where it may not be read, and where it is a folder, a
    /// pipe or a device.
    pub(crate) fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        // Looked at before it is opened: opening a pipe would wait for its writer.
        let metadata = std::fs::metadata(path).with_path(path)?;
        if !metadata.is_file() {
            let found = if metadata.is_dir() {
                "a folder"
            } else {
                "a special file"
            };
            return Err(Error::format("file", "a regular file", found).with_path(path));
        }
        let file = File::open(path).with_path(path)?;
        let map = if metadata.len() == 0 {
            None
        } else {
            // SAFETY: the mapping is read-only and is unmapped when `Mmap` is dropped, and every
            // slice given out borrows from it. What is left is that the bytes behind a `&[u8]`
            // change when somebody writes to the file: the contract of this type excludes that,
            // as that of every reader of mapped files must.
            Some(unsafe { Mmap::map(&file) }.with_path(path)?)
        };
        Ok(Self {
            map,
            path: path.to_path_buf(),
        })
    }

    /// The content of the file.
    pub(crate) fn bytes(&self) -> &[u8] {
        self.map.as_deref().unwrap_or_default()
    }

    /// Where the file was found.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Gives the memory of the pages that `range` touches back to the system, so that what has
    /// been copied out no longer counts as this process's memory. Reading those bytes again
    /// reads the file again. A range outside of the file does nothing, nor does the call where
    /// the system has no such advice.
    pub(crate) fn release(&self, range: Range<usize>) {
        #[cfg(unix)]
        if let Some(map) = &self.map
            && range.start < range.end
            && range.end <= map.len()
        {
            // SAFETY: `DontNeed` throws away content that was written to a private mapping. This
            // one is shared and read-only, so a page that is dropped comes back from the file
            // with the same bytes, also for slices that still point to it.
            let released = unsafe {
                map.unchecked_advise_range(
                    memmap2::UncheckedAdvice::DontNeed,
                    range.start,
                    range.len(),
                )
            };
            if let Err(error) = released {
                tracing::debug!(path = %self.path.display(), %error, "pages were not released");
            }
        }
        #[cfg(not(unix))]
        let _ = range;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn gives_the_bytes_before_and_after_a_release() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let content: Vec<u8> = (0..100_000_u32).map(|i| (i % 251) as u8).collect();
        file.write_all(&content).unwrap();
        let mapped = MappedFile::open(file.path()).unwrap();
        assert_eq!(mapped.bytes(), content);
        mapped.release(5000..90_000);
        mapped.release(99_999..100_000);
        mapped.release(0..100_001);
        mapped.release(7..7);
        assert_eq!(mapped.bytes(), content);
    }

    #[test]
    fn an_empty_file_has_no_bytes() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mapped = MappedFile::open(file.path()).unwrap();
        assert_eq!(mapped.bytes(), b"");
        mapped.release(0..1);
    }

    #[test]
    fn missing_files_and_folders_are_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let error = MappedFile::open(folder.path()).unwrap_err();
        assert!(
            error
                .to_string()
                .ends_with("file: expected a regular file, found a folder")
        );
        let missing = folder.path().join("missing.gguf");
        let error = MappedFile::open(&missing).unwrap_err();
        assert_eq!(error.path(), Some(missing.as_path()));
        assert!(matches!(error.kind(), crate::ErrorKind::Io(_)));
    }
}
