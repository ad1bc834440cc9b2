//! One content of the Hub, brought into the cache.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::api::Remote;
use crate::digest::Hasher;
use crate::http::{Answer, Http, Subject};
use crate::progress::Meter;
use crate::retry::Patience;
use crate::{Error, ErrorKind, Result};

const CHUNK: usize = 1 << 18;

/// What is fetched, and where to.
pub(crate) struct Download<'a> {
    pub(crate) http: &'a Http,
    /// The address of the file.
    pub(crate) url: String,
    pub(crate) commit: &'a str,
    /// The file, as messages name it.
    pub(crate) file: &'a str,
    pub(crate) remote: &'a Remote,
    /// Where its content will be.
    pub(crate) blob: PathBuf,
    pub(crate) meter: &'a Meter<'a>,
    /// Set when another download has failed, and this one need not go on.
    pub(crate) stop: &'a AtomicBool,
    pub(crate) retry_delay: Duration,
}

/// A file that is being written, and what is in it so far.
struct Partial {
    path: PathBuf,
    file: File,
    len: u64,
    hasher: Hasher,
}

impl Download<'_> {
    /// Fetches the content, taking up where an earlier try has ended. It appears in its place
    /// when it is whole and its digest is right.
    ///
    /// # Errors
    /// When the Hub or the system fails; what has been fetched is kept then, unless it is wrong.
    pub(crate) fn run(&self) -> Result<()> {
        let mut beside = self.blob.clone().into_os_string();
        beside.push(".incomplete");
        let mut partial = self.open(beside.into())?;
        let resumed = partial.len > 0;
        self.fill(&mut partial)?;
        if let Err(error) = self.verify(&mut partial) {
            if !resumed {
                return Err(error);
            }
            // The beginning may have been another program's. Once more, from the start.
            self.meter.take_back(partial.len);
            partial = self.open(partial.path)?;
            self.fill(&mut partial)?;
            self.verify(&mut partial)?;
        }
        let io = |error| Error::io(&self.blob, error);
        partial.file.sync_data().map_err(io)?;
        fs::rename(&partial.path, &self.blob).map_err(io)
    }

    /// Opens what an earlier try has left, and reads it.
    fn open(&self, path: PathBuf) -> Result<Partial> {
        let io = |error| Error::io(&path, error);
        let mut options = OpenOptions::new();
        let file = options.read(true).append(true).create(true).open(&path);
        let mut file = file.map_err(io)?;
        let size = self.remote.size;
        let mut have = file.metadata().map_err(io)?.len();
        if have > size {
            file.set_len(0).map_err(io)?;
            have = 0;
        }
        let (mut len, mut hasher) = (0, Hasher::new(&self.remote.etag, size));
        let mut chunk = vec![0; CHUNK];
        while len < have && !self.stop.load(Ordering::Relaxed) {
            let count = file.read(&mut chunk).map_err(io)?;
            if count == 0 {
                break;
            }
            hasher.update(&chunk[..count]);
            len += count as u64;
        }
        self.meter.add(len);
        Ok(Partial {
            path,
            file,
            len,
            hasher,
        })
    }

    /// Fetches what is not there yet, again and again while that brings something.
    fn fill(&self, partial: &mut Partial) -> Result<()> {
        let mut patience = Patience::new(self.retry_delay, self.stop);
        while partial.len < self.remote.size {
            let before = partial.len;
            let Err(error) = self.append(partial) else {
                continue;
            };
            if partial.len > before {
                patience.renew();
            }
            if !patience.again(&error) {
                return Err(self.interrupted(error, partial.len));
            }
            tracing::warn!("{}: {error}; trying again", self.file);
        }
        Ok(())
    }

    /// One request for the rest.
    fn append(&self, partial: &mut Partial) -> Result<()> {
        let subject = Subject::File(self.commit, self.file);
        let answer = self.http.get(&self.url, partial.len, subject)?;
        if partial.len > 0 {
            if !answer.is_partial() {
                self.restart(partial)?;
            } else if !starts_at(&answer, partial.len) {
                let found = answer.header("content-range").unwrap_or("none").to_owned();
                return Err(answer.unexpected("the range that was asked for", found));
            }
        }
        let host = answer.url.clone();
        let broken = |cause: String| {
            Error::new(ErrorKind::Unreachable {
                host: crate::http::host(&host).to_owned(),
                cause,
            })
        };
        let mut body = answer.reader();
        let mut chunk = vec![0; CHUNK];
        loop {
            if self.stop.load(Ordering::Relaxed) {
                return Err(broken("stopped".to_owned()));
            }
            let count = match body.read(&mut chunk) {
                Ok(0) if partial.len < self.remote.size => {
                    return Err(broken("the connection was closed".to_owned()));
                }
                Ok(0) => return Ok(()),
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(broken(error.to_string())),
            };
            let bytes = &chunk[..count];
            if partial.len + count as u64 > self.remote.size {
                discard(partial);
                return Err(Error::new(ErrorKind::TooLong {
                    file: self.file.to_owned(),
                    expected: self.remote.size,
                }));
            }
            partial
                .file
                .write_all(bytes)
                .map_err(|error| self.not_written(&partial.path, error))?;
            partial.hasher.update(bytes);
            partial.len += count as u64;
            self.meter.add(count as u64);
        }
    }

    /// The server sends all of it, whatever was asked for.
    fn restart(&self, partial: &mut Partial) -> Result<()> {
        let emptied = partial.file.set_len(0);
        emptied.map_err(|error| Error::io(&partial.path, error))?;
        self.meter.take_back(partial.len);
        partial.len = 0;
        partial.hasher = Hasher::new(&self.remote.etag, self.remote.size);
        Ok(())
    }

    fn verify(&self, partial: &mut Partial) -> Result<()> {
        let fresh = Hasher::new(&self.remote.etag, self.remote.size);
        let hasher = std::mem::replace(&mut partial.hasher, fresh);
        match hasher.finish() {
            Some((algorithm, found)) if found != self.remote.etag => {
                discard(partial);
                Err(Error::new(ErrorKind::Digest {
                    file: self.file.to_owned(),
                    algorithm,
                    expected: self.remote.etag.clone(),
                    found,
                }))
            }
            _ => Ok(()),
        }
    }

    /// The error of a download that is given up.
    fn interrupted(&self, error: Error, received: u64) -> Error {
        let cause = match error.kind() {
            ErrorKind::Unreachable { cause, .. } => cause.clone(),
            _ if error.is_transient() => error.to_string(),
            _ => return error,
        };
        Error::new(ErrorKind::Interrupted {
            file: self.file.to_owned(),
            received,
            size: self.remote.size,
            cause,
        })
    }

    fn not_written(&self, path: &Path, error: io::Error) -> Error {
        match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                Error::new(ErrorKind::DiskFull {
                    folder: path.parent().unwrap_or(path).to_path_buf(),
                    file: self.file.to_owned(),
                    size: self.remote.size,
                })
            }
            _ => Error::io(path, error),
        }
    }
}

/// What is wrong must not be taken up by the next try.
fn discard(partial: &Partial) {
    // The error that comes of it says more than that this failed.
    let _ = fs::remove_file(&partial.path);
}

/// Whether a part of a file begins where it should: `bytes 5-9/10`.
fn starts_at(answer: &Answer, start: u64) -> bool {
    let range = answer.header("content-range").unwrap_or_default();
    range
        .strip_prefix("bytes ")
        .and_then(|range| range.split_once('-'))
        .is_some_and(|(first, _)| first.trim().parse() == Ok(start))
}
