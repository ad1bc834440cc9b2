//! The prefill of a prompt whose beginning may be known.

use mlex_core::Array;
use mlex_nn::Cache;

use super::{KvSettings, PromptCache, PromptKey};
use crate::Result;
use crate::generate::token_stream::prefill;
use crate::generate::{PrefillProgress, PrefillStep};
use crate::media::MediaPrompt;
use crate::model::Model;

/// A prompt to be computed.
pub(in crate::generate) struct Filling<'a> {
    /// What it is known by; only so many tokens are computed.
    pub(in crate::generate) key: &'a PromptKey,
    pub(in crate::generate) prompt: &'a MediaPrompt,
    pub(in crate::generate) settings: &'a KvSettings,
    /// How many tokens are given to the model at once.
    pub(in crate::generate) step: PrefillStep,
    /// How many tokens come before what announces the answer. What follows is not what the next
    /// prompt of a conversation has there. Asked for where layers cannot go back.
    pub(in crate::generate) turn_end: &'a dyn Fn() -> Option<usize>,
}

/// A prompt that was computed.
pub(in crate::generate) struct Filled {
    pub(in crate::generate) cache: Cache,
    /// The hidden state `[1, D]` of the last position; none when it was cancelled.
    pub(in crate::generate) hidden: Option<Array>,
    /// Tokens whose state was known.
    pub(in crate::generate) known: usize,
}

/// Computes the state of a prompt from the longest beginning that `pool` knows, and leaves there
/// what later prompts may need.
///
/// # Errors
/// When the prompt is empty, has a token outside of the vocabulary, or MLX fails.
pub(in crate::generate) fn fill(
    model: &dyn Model,
    pool: &mut PromptCache,
    filling: &Filling<'_>,
    on_progress: &mut dyn FnMut(PrefillProgress) -> bool,
) -> Result<Filled> {
    let Filling {
        key,
        prompt,
        settings,
        step,
        turn_end,
    } = *filling;
    let total = key.len();
    let found = pool.find(key, settings)?;
    let (mut cache, known, mut hidden) = match found {
        Some(found) => (found.cache, found.length, found.hidden),
        None => (settings.new_cache(model)?, 0, None),
    };
    // Without limits a longer state gives all shorter ones.
    let snapshots = !cache.keeps_all();
    if known > 0 {
        tracing::debug!(known, total, "the beginning of the prompt is known");
    }
    if hidden.is_some() {
        let all = PrefillProgress {
            processed: total,
            total,
        };
        hidden = hidden.filter(|_| on_progress(all));
        return Ok(Filled {
            cache,
            hidden,
            known,
        });
    }
    let mut marks = Vec::new();
    // With a limit what a query sees depends on where chunks end, and is to be what mlx-lm has.
    if snapshots && settings.max_kv_size.is_none() {
        let every = pool.limits().snapshot_every.max(1);
        marks.extend((every..total).step_by(every));
        marks.extend(turn_end());
        marks.retain(|&mark| known < mark && mark < total && key.cut(mark) == mark);
        marks.sort_unstable();
        marks.dedup();
    }
    marks.push(total);
    let mut ends = marks.clone();
    if settings.last_token_alone() && known + 1 < total {
        let before = key.cut(total - 1);
        if known < before && !marks.contains(&before) {
            ends.insert(ends.len() - 1, before);
        }
    }
    let mut done = known;
    for mark in ends {
        let mut progress = |part: PrefillProgress| {
            on_progress(PrefillProgress {
                processed: done + part.processed,
                total,
            })
        };
        hidden = prefill(model, &mut cache, prompt, done..mark, step, &mut progress)?;
        if hidden.is_none() {
            // Whole steps are in the cache, the last of them computed.
            let seen = usize::try_from(cache.len()).unwrap_or(0);
            if let Some(key) = key.prefix(seen) {
                pool.insert(key, *settings, cache.clone(), None);
            }
            break;
        }
        done = mark;
        if snapshots
            && marks.contains(&mark)
            && let Some(key) = key.prefix(mark)
        {
            mlex_core::eval(cache.arrays())?;
            pool.insert(key, *settings, cache.clone(), hidden.clone());
        }
    }
    Ok(Filled {
        cache,
        hidden,
        known,
    })
}
