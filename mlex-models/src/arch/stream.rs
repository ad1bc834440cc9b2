//! What decoders do around their layers: the embedding, the residual stream, masks and caches.
//!
//! [`Stream`] computes with arrays. [`Recording`] is its twin in steps of one sequence, one node
//! of the graph, where the kernels have everything that a model needs.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use mlex_core::Array;
use mlex_nn::{Cache, CacheUpdate, Embedding, KvCache, Mask, Replay, RmsNorm, Sequence, Value};

use crate::model::Input;
use crate::{Error, Result};

/// Constants that some architectures multiply by.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct StreamScales {
    /// What enters the first layer.
    pub(crate) embedding: Option<f32>,
    /// What a layer adds.
    pub(crate) residual: Option<f32>,
}

/// The residual stream. What was added last is kept apart, so that the next norm can add it.
pub(crate) struct Stream {
    x: Array,
    added: Option<Array>,
    scales: StreamScales,
}

impl Stream {
    /// The stream as it enters the first layer.
    pub(crate) fn start(
        embedding: &Embedding,
        input: Input<'_>,
        scales: StreamScales,
    ) -> Result<Self> {
        Ok(Self::of(embed(embedding, input, scales.embedding)?, scales))
    }

    /// As [`start`](Self::start), and what is added behind each of the first `layers` layers: the
    /// further features of media `[B, L, D]`, zeros where text is.
    pub(crate) fn start_deep(
        embedding: &Embedding,
        input: Input<'_>,
        layers: usize,
    ) -> Result<(Self, Vec<Array>)> {
        let scales = StreamScales::default();
        let Input::Mixed(mixed) = input else {
            return Ok((Self::start(embedding, input, scales)?, Vec::new()));
        };
        let embedded = embedding.forward(&mixed.text_tokens()?)?;
        let (x, deep) = mixed.splice_deep(&embedded, layers)?;
        Ok((Self::of(x, scales), deep))
    }

    /// The stream of what enters a layer.
    pub(crate) fn of(x: Array, scales: StreamScales) -> Self {
        Self {
            x,
            added: None,
            scales,
        }
    }

    /// The norm of the stream.
    pub(crate) fn norm(&mut self, norm: &RmsNorm) -> Result<Array> {
        let Some(added) = self.added.take() else {
            return Ok(norm.forward(&self.x)?);
        };
        let (x, normed) = norm.forward_sum(&self.x, &added)?;
        self.x = x;
        Ok(normed)
    }

    /// Adds what a layer gives for [`norm`](Self::norm).
    pub(crate) fn add(&mut self, output: Array) -> Result<()> {
        if let Some(before) = self.added.take() {
            self.x = self.x.add(&before)?;
        }
        self.added = Some(match self.scales.residual {
            Some(scale) => output.multiply(scale)?,
            None => output,
        });
        Ok(())
    }
}

/// What enters the first layer: embeddings of tokens times `scale`, and features as they are.
pub(crate) fn embed(embedding: &Embedding, input: Input<'_>, scale: Option<f32>) -> Result<Array> {
    let embedded = match input {
        Input::Tokens(tokens) => embedding.forward(tokens)?,
        Input::Embeddings(embeddings) => embeddings.clone(),
        Input::Mixed(mixed) => embedding.forward(&mixed.text_tokens()?)?,
    };
    let embedded = match scale {
        Some(scale) => embedded.multiply(scale)?,
        None => embedded,
    };
    match input {
        Input::Mixed(mixed) => mixed.splice(&embedded),
        _ => Ok(embedded),
    }
}

/// Refuses positions in several directions and spans, for models that have no use for them.
pub(crate) fn check_plain(input: Input<'_>) -> Result<()> {
    match input {
        Input::Mixed(mixed) if mixed.positions().is_some() || !mixed.spans().is_empty() => {
            let found = "tokens with positions in several directions or of several spans";
            Err(Error::unsupported("input", found))
        }
        _ => Ok(()),
    }
}

/// A [`Stream`] in steps of a sequence.
pub(crate) struct Recording {
    /// Where layers record their steps.
    pub(crate) sequence: Sequence,
    /// The token ids, where there are any.
    pub(crate) ids: Option<Value>,
    /// The stream without what was added last.
    pub(crate) x: Value,
    added: Option<Value>,
    scales: StreamScales,
    updates: Vec<CacheUpdate>,
}

impl Recording {
    /// As [`Stream::start`]; none where there is no kernel for it, or features are spliced in.
    pub(crate) fn start(
        embedding: &Embedding,
        input: Input<'_>,
        scales: StreamScales,
    ) -> Result<Option<Self>> {
        let started = match input {
            Input::Tokens(tokens) => Sequence::start_with_ids(tokens)?,
            Input::Embeddings(embeddings) => Sequence::start(embeddings)?,
            Input::Mixed(_) => None,
        };
        let Some((mut sequence, value)) = started else {
            return Ok(None);
        };
        let (ids, embedded) = match input {
            Input::Tokens(_) => (Some(value), embedding.record(&mut sequence, value)?),
            Input::Embeddings(_) | Input::Mixed(_) => (None, Some(value)),
        };
        let x = match (embedded, scales.embedding) {
            (Some(x), Some(scale)) => sequence.scale(x, scale),
            (x, _) => x,
        };
        Ok(x.map(|x| Self {
            sequence,
            ids,
            x,
            added: None,
            scales,
            updates: Vec::new(),
        }))
    }

    /// The norm of the stream; none where there is no kernel for it.
    pub(crate) fn norm(&mut self, norm: &RmsNorm) -> Result<Option<Value>> {
        let Some(added) = self.added.take() else {
            return Ok(norm.record(&mut self.sequence, self.x)?);
        };
        let scale = self.scales.residual.unwrap_or(1.0);
        let sum = norm.record_sum(&mut self.sequence, self.x, added, scale)?;
        Ok(sum.map(|(x, normed)| {
            self.x = x;
            normed
        }))
    }

    /// Adds what a layer gives for [`norm`](Self::norm).
    pub(crate) fn add(&mut self, output: Value) {
        self.added = Some(output);
    }

    /// Notes what becomes of the next layer's cache.
    pub(crate) fn update(&mut self, update: CacheUpdate) {
        self.updates.push(update);
    }

    /// The sequence, and what becomes of the caches of the layers so far.
    pub(crate) fn parts(&mut self) -> (&mut Sequence, &[CacheUpdate]) {
        (&mut self.sequence, &self.updates)
    }

    /// The same, and the steps are kept for the next token where they are those of any.
    pub(crate) fn finish_decode(
        self,
        hidden: Value,
        cache: &mut Cache,
        kept: &DecodeSteps,
    ) -> Result<Array> {
        let (updates, caches) = (&self.updates, cache.layers_mut());
        let finished = self.sequence.finish_replayable(hidden, updates, caches);
        let (hidden, replay) = finished?;
        *kept.lock() = replay.map(Arc::new);
        Ok(hidden)
    }

    /// The hidden states, and the caches after them.
    pub(crate) fn finish(self, hidden: Value, cache: &mut Cache) -> Result<Array> {
        let (updates, caches) = (&self.updates, cache.layers_mut());
        Ok(self.sequence.finish_updating(hidden, updates, caches)?)
    }
}

/// The steps of a model for one token, recorded with the first and done again for those after it.
#[derive(Debug, Default)]
pub(crate) struct DecodeSteps(Mutex<Option<Arc<Replay>>>);

impl DecodeSteps {
    fn lock(&self) -> MutexGuard<'_, Option<Arc<Replay>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the steps for this input could be those of any token.
    pub(crate) fn apply(masks: &Masks) -> bool {
        masks.length == 1 && masks.are_plain()
    }

    /// The hidden states of a token, and the caches after it; none where nothing is kept, or
    /// not of such a step. The masks are such that it [applies](Self::apply).
    pub(crate) fn run(&self, input: Input<'_>, cache: &mut Cache) -> Result<Option<Array>> {
        let (Input::Tokens(x) | Input::Embeddings(x)) = input else {
            return Ok(None);
        };
        let kept = self.lock().clone();
        match kept {
            Some(replay) => Ok(replay.run(x, cache.layers_mut())?),
            None => Ok(None),
        }
    }
}

/// One mask for all layers of a kind: they have seen the same tokens.
pub(crate) struct Masks {
    length: i32,
    /// Of new tokens that see each other.
    spans: Vec<Range<i32>>,
    masks: Vec<(Option<i32>, Mask)>,
}

impl Masks {
    /// For the new tokens of `input`.
    pub(crate) fn new(input: Input<'_>) -> Result<Self> {
        let spans = match input {
            Input::Mixed(mixed) => mixed.spans().to_vec(),
            _ => Vec::new(),
        };
        Ok(Self {
            length: length(input)?,
            spans,
            masks: Vec::new(),
        })
    }

    /// Makes the mask of layers with this window, if there is none yet.
    pub(crate) fn add(&mut self, window: Option<i32>, cache: &KvCache) -> Result<()> {
        if !self.masks.iter().any(|(known, _)| *known == window) {
            // Layers that see everything see nothing ahead (Gemma 4, which alone has spans).
            let spans = window.map_or(&[][..], |_| &self.spans);
            let mask = cache.mask_with_spans(self.length, spans)?;
            self.masks.push((window, mask));
        }
        Ok(())
    }

    /// Whether none is an array.
    fn are_plain(&self) -> bool {
        let plain = |mask: &Mask| matches!(mask, Mask::None | Mask::Causal);
        self.masks.iter().all(|(_, mask)| plain(mask))
    }

    /// The mask of layers with this window.
    pub(crate) fn of(&self, window: Option<i32>) -> &Mask {
        let known = self.masks.iter().find(|(known, _)| *known == window);
        // One was added for each window.
        known.map_or(&Mask::Causal, |(_, mask)| mask)
    }
}

/// How many new tokens there are.
pub(super) fn length(input: Input<'_>) -> Result<i32> {
    Ok(match input {
        Input::Mixed(mixed) => mixed.length(),
        Input::Tokens(tokens) => tokens.dim(1)?,
        Input::Embeddings(embeddings) => embeddings.dim(1)?,
    })
}

/// Refuses a cache for another number of layers.
pub(crate) fn check_cache(cache: &Cache, layers: usize) -> Result<()> {
    let found = cache.layers().len();
    if found == layers {
        return Ok(());
    }
    let expected = format!("{layers} layers");
    Err(Error::field("cache", expected, found.to_string()))
}
