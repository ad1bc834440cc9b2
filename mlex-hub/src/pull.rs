//! From a name to files in the cache.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use crate::api::{self, Listing};
use crate::download::Download;
use crate::http::Http;
use crate::layout::{RepoCache, is_commit, read_json};
use crate::progress::Meter;
use crate::retry::Patience;
use crate::select::{self, CONFIG, INDEX, Plan, Weights};
use crate::{Error, ErrorKind, ModelId, Progress, Result, Settings};

/// The revision that is meant where none is named.
pub const MAIN: &str = "main";
/// How many files are fetched at the same time.
const WORKERS: usize = 4;

/// The Hub and the cache of what came from it.
#[derive(Debug)]
pub struct Hub {
    settings: Settings,
    http: Http,
}

/// A model in the cache.
#[derive(Debug)]
#[non_exhaustive]
pub struct Pulled {
    /// The model directory, or the GGUF file.
    pub path: PathBuf,
    /// The commit that the files are of.
    pub commit: String,
    /// Why the Hub could not say whether there is something newer, if it could not.
    pub unasked: Option<Error>,
}

/// One revision of a repository that is being fetched.
struct Job<'a> {
    hub: &'a Hub,
    repo: &'a str,
    cache: &'a RepoCache,
    listing: &'a Listing,
    meter: Meter<'a>,
}

impl Hub {
    /// The Hub with these settings. Nothing is asked yet.
    ///
    /// # Errors
    /// [`ErrorKind::Value`] for an endpoint or a token that cannot be one.
    pub fn new(settings: Settings) -> Result<Self> {
        let http = Http::new(&settings)?;
        Ok(Self { settings, http })
    }

    /// Brings what the model `id` needs into the cache: config, tokenizer, templates,
    /// safetensors and what belongs to media, or a GGUF file. `revision` is a branch, a tag or
    /// a commit. What is there is not fetched again, and a download that broke off goes on.
    /// Several threads call `on_progress`.
    ///
    /// A commit that the cache has whole is not asked for. Where the settings are offline, or
    /// the Hub does not answer or refuses, a revision that the cache has whole is used as it is.
    ///
    /// # Errors
    /// When the Hub, the network or the disk fails, or the repository has no model.
    pub fn pull(
        &self,
        id: &ModelId,
        revision: &str,
        on_progress: &(dyn Fn(Progress) + Sync),
    ) -> Result<Pulled> {
        self.pull_inner(id, revision, on_progress)
            .map_err(|error| error.with_repo(id.repo()))
    }

    fn pull_inner(
        &self,
        id: &ModelId,
        revision: &str,
        on_progress: &(dyn Fn(Progress) + Sync),
    ) -> Result<Pulled> {
        if self.settings.offline {
            return self.cached(id, revision);
        }
        if is_commit(revision)
            && let Ok(pulled) = self.cached(id, revision)
        {
            return Ok(pulled);
        }
        let cache = RepoCache::new(&self.settings.cache_dir, id.repo(), revision)?;
        let listing = match api::list(&self.http, id.repo(), revision) {
            Ok(listing) => listing,
            Err(error) if matches!(error.kind(), ErrorKind::RevisionNotFound { .. }) => {
                return Err(error);
            }
            Err(error) => {
                return match self.cached(id, revision) {
                    Ok(pulled) => Ok(Pulled {
                        unasked: Some(error.with_repo(id.repo())),
                        ..pulled
                    }),
                    Err(_) => Err(error),
                };
            }
        };
        let job = Job {
            hub: self,
            repo: id.repo(),
            cache: &cache,
            listing: &listing,
            meter: Meter::new(on_progress),
        };
        let file = job.run(id.choice())?;
        // Only now: until then the revision is what the cache had whole.
        cache.set_commit(&listing.commit)?;
        Ok(pulled(&cache, listing.commit, file))
    }

    /// The model as the cache has it; nothing is asked.
    ///
    /// # Errors
    /// [`ErrorKind::NotCached`], [`ErrorKind::Incomplete`], or when the cache cannot be read.
    pub fn cached(&self, id: &ModelId, revision: &str) -> Result<Pulled> {
        self.cached_inner(id, revision)
            .map_err(|error| error.with_repo(id.repo()))
    }

    fn cached_inner(&self, id: &ModelId, revision: &str) -> Result<Pulled> {
        let cache = RepoCache::new(&self.settings.cache_dir, id.repo(), revision)?;
        let not_cached = || ErrorKind::NotCached {
            revision: revision.to_owned(),
            cache: cache.hub().to_path_buf(),
        };
        let commit = cache.cached_commit().ok_or_else(not_cached)?;
        let files = cache.files(&commit)?.ok_or_else(not_cached)?;
        let snapshot = cache.snapshot(&commit);
        let incomplete = |missing| ErrorKind::Incomplete {
            snapshot: snapshot.clone(),
            missing,
        };
        let is_there = |file: &String| snapshot.join(file).is_file();
        let plan = select::plan(&files, id.choice()).map_err(|error| match error.kind() {
            ErrorKind::NoModel { .. } => incomplete(vec!["config or weights".to_owned()]).into(),
            _ => error,
        })?;
        let (mut needed, file) = match plan {
            Plan::Gguf(parts) => (parts.clone(), parts.into_iter().next()),
            Plan::Directory { files, weights } => {
                let weights = match weights {
                    Weights::Files(weights) => weights,
                    Weights::Indexed => indexed(&snapshot)?,
                };
                ([files, weights].concat(), None)
            }
        };
        needed.retain(|file| !is_there(file));
        if !needed.is_empty() {
            return Err(incomplete(needed).into());
        }
        Ok(pulled(&cache, commit, file))
    }
}

fn pulled(cache: &RepoCache, commit: String, file: Option<String>) -> Pulled {
    let snapshot = cache.snapshot(&commit);
    Pulled {
        path: file.map_or(snapshot.clone(), |file| snapshot.join(file)),
        commit,
        unasked: None,
    }
}

/// The shards that the index of a snapshot names, whether or not they are there.
fn indexed(snapshot: &Path) -> Result<Vec<String>> {
    let path = snapshot.join(INDEX);
    let index = match read_json(&path) {
        Ok(index) => index,
        // It is missing like any other file that is needed.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(Error::io(path, error)),
    };
    select::named_shards(&index)
}

impl Job<'_> {
    /// Fetches what is not there. Gives the GGUF file, unless the model is a directory.
    fn run(&self, choice: Option<&str>) -> Result<Option<String>> {
        let (files, weights) = match select::plan(&self.listing.files, choice)? {
            Plan::Gguf(parts) => {
                self.fetch_all(&parts)?;
                return Ok(parts.into_iter().next());
            }
            Plan::Directory { files, weights } => (files, weights),
        };
        let weights = match weights {
            Weights::Files(weights) => weights,
            Weights::Indexed => {
                self.fetch_all(&[INDEX.to_owned()])?;
                let path = self.path(INDEX);
                let index = read_json(&path).map_err(|error| Error::io(path, error))?;
                select::shards(&index, &self.listing.files)?
            }
        };
        // The config comes last: a snapshot that has one is whole.
        let last = |file: &String| file == CONFIG;
        let most: Vec<String> = [files, weights].concat();
        let most: Vec<String> = most.into_iter().filter(|file| !last(file)).collect();
        self.fetch_all(&most)?;
        self.fetch_all(&[CONFIG.to_owned()])?;
        Ok(None)
    }

    /// Where a file will be.
    fn path(&self, file: &str) -> PathBuf {
        self.cache.snapshot(&self.listing.commit).join(file)
    }

    /// Fetches files, several at a time, until all are there or one has failed.
    fn fetch_all(&self, files: &[String]) -> Result<()> {
        let absent: Vec<&String> = files
            .iter()
            .filter(|file| !self.path(file).exists())
            .collect();
        let known = absent.iter().filter_map(|file| self.listed_size(file));
        known.for_each(|size| self.meter.expect(size));
        let queue = Mutex::new(absent.iter());
        let next = || {
            let mut queue = queue.lock().unwrap_or_else(PoisonError::into_inner);
            queue.next()
        };
        let stop = AtomicBool::new(false);
        let failed = Mutex::new(None);
        let work = || {
            while !stop.load(Ordering::Relaxed)
                && let Some(file) = next()
            {
                if let Err(error) = self.fetch(file, &stop) {
                    // Those that are stopped by it fail later.
                    let mut failed = failed.lock().unwrap_or_else(PoisonError::into_inner);
                    failed.get_or_insert(error);
                    stop.store(true, Ordering::Relaxed);
                }
            }
        };
        thread::scope(|scope| {
            for _ in 1..WORKERS.min(absent.len()) {
                scope.spawn(work);
            }
            work();
        });
        let failed = failed.into_inner().unwrap_or_else(PoisonError::into_inner);
        failed.map_or(Ok(()), Err)
    }

    fn listed_size(&self, file: &str) -> Option<u64> {
        self.listing.files.get(file).copied().flatten()
    }

    fn fetch(&self, file: &str, stop: &AtomicBool) -> Result<()> {
        let (http, commit) = (&self.hub.http, &self.listing.commit);
        let listed_size = self.listed_size(file);
        let retry_delay = self.hub.settings.retry_delay;
        let mut patience = Patience::new(retry_delay, stop);
        let remote = loop {
            match api::describe(http, self.repo, commit, file, listed_size) {
                Err(error) if patience.again(&error) => {}
                described => break described?,
            }
        };
        if listed_size.is_none() {
            self.meter.expect(remote.size);
        }
        let blob = self.cache.blob(&remote.etag);
        if let Some(folder) = blob.parent() {
            fs::create_dir_all(folder).map_err(|error| Error::io(folder, error))?;
        }
        let lock = self.cache.lock(&remote.etag)?;
        if blob.exists() {
            self.meter.add(remote.size);
        } else {
            let download = Download {
                http,
                url: api::file_url(http, self.repo, commit, file),
                commit,
                file,
                remote: &remote,
                blob,
                meter: &self.meter,
                stop,
                retry_delay,
            };
            download.run()?;
        }
        drop(lock);
        self.cache.link(commit, file, &remote.etag)
    }
}
