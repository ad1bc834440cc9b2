//! Which model some files are.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use mlex_core::io::Checkpoint;
use sha2::{Digest, Sha256};

use crate::Result;
use crate::error::ResultExt;

/// How many pieces of a file are read, evenly spread, and how long each is.
const PIECES: u64 = 256;
const PIECE: u64 = 4096;

/// A hash of the model at `path`, a directory or a GGUF file: of config.json and of each file of
/// weights its size, its beginning and end and pieces between them. Weights of gigabytes are not
/// read as a whole for it; other weights differ in all of these pieces.
///
/// # Errors
/// When a file cannot be read.
pub(crate) fn fingerprint(path: &Path) -> Result<String> {
    let mut hash = Sha256::new();
    for file in files(path)? {
        let name = file.file_name().unwrap_or_default();
        if path.is_dir() {
            hash.update(name.as_encoded_bytes());
            hash.update([0]);
        }
        add(&mut hash, &file).with_path(&file)?;
    }
    Ok(hex(&hash.finalize()))
}

/// Lower-case hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The files that make a model what it is, in order.
fn files(path: &Path) -> Result<Vec<PathBuf>> {
    if !path.is_dir() {
        return Ok(vec![path.to_path_buf()]);
    }
    let weights = Checkpoint::open(path)?;
    let weights = weights.files().iter().map(|file| file.path().to_path_buf());
    Ok([path.join("config.json")]
        .into_iter()
        .chain(weights)
        .collect())
}

fn add(hash: &mut Sha256, path: &Path) -> std::io::Result<()> {
    let mut file = File::open(path)?;
    let size = file.metadata()?.len();
    hash.update(size.to_le_bytes());
    let mut buffer = Vec::new();
    if size <= PIECES * PIECE {
        file.read_to_end(&mut buffer)?;
        hash.update(&buffer);
        return Ok(());
    }
    for piece in 0..PIECES {
        // In 128 bits: a file may be large.
        let at = u128::from(size - PIECE) * u128::from(piece) / u128::from(PIECES - 1);
        file.seek(SeekFrom::Start(at as u64))?;
        buffer.clear();
        file.by_ref().take(PIECE).read_to_end(&mut buffer)?;
        hash.update(&buffer);
    }
    Ok(())
}
