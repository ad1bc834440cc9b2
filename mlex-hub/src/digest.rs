//! What the Hub's names for contents say of them.

use sha1::Sha1;
use sha2::{Digest as _, Sha256};

/// How a file's ETag names its content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Algorithm {
    /// Large files: the SHA-256 of the content.
    Sha256,
    /// Files in git itself: the SHA-1 of git's header and the content.
    GitBlob,
    /// A server that names contents in another way.
    Unknown,
}

/// Computes the digest that an ETag names, as the content comes.
pub(crate) struct Hasher {
    algorithm: Algorithm,
    sha1: Sha1,
    sha256: Sha256,
}

impl Hasher {
    /// For a content of `size` bytes that is named `etag`.
    pub(crate) fn new(etag: &str, size: u64) -> Self {
        let is_hex = etag
            .bytes()
            .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        let algorithm = match etag.len() {
            64 if is_hex => Algorithm::Sha256,
            40 if is_hex => Algorithm::GitBlob,
            _ => Algorithm::Unknown,
        };
        Self {
            algorithm,
            sha1: Sha1::new().chain_update(format!("blob {size}\0")),
            sha256: Sha256::new(),
        }
    }

    /// Takes the next bytes.
    pub(crate) fn update(&mut self, bytes: &[u8]) {
        match self.algorithm {
            Algorithm::Sha256 => self.sha256.update(bytes),
            Algorithm::GitBlob => self.sha1.update(bytes),
            Algorithm::Unknown => {}
        }
    }

    /// The algorithm's name and the digest in hexadecimal digits; `None` where the ETag says
    /// nothing of the content.
    pub(crate) fn finish(self) -> Option<(&'static str, String)> {
        match self.algorithm {
            Algorithm::Sha256 => Some(("SHA-256", hex(&self.sha256.finalize()))),
            Algorithm::GitBlob => Some(("git SHA-1", hex(&self.sha1.finalize()))),
            Algorithm::Unknown => None,
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest(etag: &str, content: &[u8]) -> Option<(&'static str, String)> {
        let mut hasher = Hasher::new(etag, content.len() as u64);
        hasher.update(content);
        hasher.finish()
    }

    /// The values are those of `git hash-object` and `sha256sum`.
    #[test]
    fn digests() {
        let git = "ce013625030ba8dba906f756967f9e9ca394464a";
        assert_eq!(digest(git, b"hello\n"), Some(("git SHA-1", git.to_owned())));
        let sha = "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03";
        assert_eq!(digest(sha, b"hello\n"), Some(("SHA-256", sha.to_owned())));
        assert_eq!(digest("0x8DC", b"hello\n"), None);
    }
}
