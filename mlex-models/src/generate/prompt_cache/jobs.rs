//! What a session can be asked about its prompt cache.

use std::path::{Path, PathBuf};
use std::sync::mpsc::Sender;

use super::file::{self, PromptFileInfo, Saved};
use super::{Filling, PromptCache, fill};
use crate::generate::Request;
use crate::generate::engine::TextParts;
use crate::media::MediaEngine;
use crate::model::Model;
use crate::{Error, Result};

/// What a [`PromptCache`] holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PromptCacheStats {
    /// How many states.
    pub entries: usize,
    /// The bytes that they take.
    pub bytes: usize,
}

/// Something to be done on the model's thread.
pub(in crate::generate) enum PromptJob {
    Stats(Sender<PromptCacheStats>),
    Clear,
    Save {
        request: Box<Request>,
        path: PathBuf,
        reply: Sender<Result<PromptFileInfo>>,
    },
    Load {
        path: PathBuf,
        reply: Sender<Result<PromptFileInfo>>,
    },
}

/// Does `job`. `fingerprint` is asked for where the model must be told from others.
pub(in crate::generate) fn serve(
    job: PromptJob,
    model: &dyn Model,
    media: &mut MediaEngine,
    text: &TextParts,
    pool: &mut PromptCache,
    fingerprint: &dyn Fn() -> Result<String>,
) {
    match job {
        PromptJob::Stats(reply) => {
            let _ = reply.send(PromptCacheStats {
                entries: pool.len(),
                bytes: pool.nbytes(),
            });
        }
        PromptJob::Clear => pool.clear(),
        PromptJob::Save {
            request,
            path,
            reply,
        } => {
            let saved = save(model, media, text, pool, fingerprint, &request, &path);
            let _ = reply.send(saved);
        }
        PromptJob::Load { path, reply } => {
            let loaded = fingerprint().and_then(|fingerprint| {
                let (entry, info) = file::load(&path, model, &fingerprint)?;
                let Saved {
                    key,
                    settings,
                    cache,
                    hidden,
                } = entry;
                let bytes = cache.nbytes();
                if bytes > pool.limits().max_bytes {
                    let expected = format!("at most {} bytes", pool.limits().max_bytes);
                    let found = format!("{bytes}");
                    return Err(Error::field("size of the state", expected, found).with_path(&path));
                }
                pool.insert(key, settings, cache, hidden);
                Ok(info)
            });
            let _ = reply.send(loaded);
        }
    }
}

/// Computes the prompt of `request`, without what announces an answer, and writes its state to
/// `path`.
fn save(
    model: &dyn Model,
    media: &mut MediaEngine,
    text: &TextParts,
    pool: &mut PromptCache,
    fingerprint: &dyn Fn() -> Result<String>,
    request: &Request,
    path: &Path,
) -> Result<PromptFileInfo> {
    let prompt = text.prompt(request, text.render(request)?, media)?;
    let whole = prompt.key()?;
    let end = match text.turn_end(request, prompt.ids()) {
        Some(end @ 1..) => whole.cut(end),
        _ => whole.len(),
    };
    let key = whole.prefix(end).unwrap_or(whole);
    let filled = fill(
        model,
        pool,
        &Filling {
            key: &key,
            prompt: &prompt,
            settings: &request.kv,
            step: request.prefill_step,
            turn_end: &|| None,
        },
        &mut |_| true,
    )?;
    let saved = Saved {
        key,
        settings: request.kv,
        cache: filled.cache,
        hidden: filled.hidden,
    };
    file::save(path, &saved, &model.info().model_type, &fingerprint()?)
}
