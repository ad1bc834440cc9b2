//! A prompt whose tokens stand for features in places.

use std::ops::Range;

use mlex_core::{Array, Dtype};
use sha2::{Digest, Sha256};

use crate::generate::{MediaSpan, PromptKey};
use crate::model::{Input, MixedInput, Model, Positions};
use crate::towers::{Encoded, MediaTokens, Run};
use crate::{Error, Result};

/// Token ids, some of which stand for features of media.
#[derive(Clone, Debug)]
pub struct MediaPrompt {
    ids: Vec<u32>,
    places: Vec<Place>,
    /// Those in time, height and width, where a run has a grid.
    positions: Option<[Vec<i32>; 3]>,
    /// The position after the last token.
    next: i32,
}

/// Where the tokens of a run are.
#[derive(Clone, Debug)]
struct Place {
    tokens: Range<usize>,
    /// `[tokens, D]`, or more, as [`Encoded`] has them.
    features: Array,
    run: Run,
}

impl From<Vec<u32>> for MediaPrompt {
    /// A prompt of text alone.
    fn from(ids: Vec<u32>) -> Self {
        Self {
            next: i32::try_from(ids.len()).unwrap_or(i32::MAX),
            ids,
            places: Vec::new(),
            positions: None,
        }
    }
}

impl MediaPrompt {
    /// Token ids, among them those of `tokens`, one for each feature of `media`, which come in
    /// the order of the prompt.
    ///
    /// # Errors
    /// When there are not as many tokens as features.
    pub fn new(ids: Vec<u32>, media: &[Encoded], tokens: MediaTokens) -> Result<Self> {
        let mut prompt = Self::from(ids);
        let mut at = 0;
        for encoded in media {
            let id = tokens.of(encoded.kind);
            let mut row = 0;
            for run in &encoded.runs {
                let is_soft = |&found: &u32| Some(found) == id;
                let rest = &prompt.ids[at..];
                let start = rest.iter().position(is_soft).map_or(at, |first| at + first);
                let found = prompt.ids[start..]
                    .iter()
                    .take_while(|id| is_soft(id))
                    .count();
                if found < run.tokens {
                    let kind = encoded.kind;
                    let expected = format!("{} tokens of the kind {kind} in a row", run.tokens);
                    return Err(Error::field("prompt", expected, found.to_string()));
                }
                let end = row + run.tokens;
                prompt.places.push(Place {
                    tokens: start..start + run.tokens,
                    features: encoded.features.slice_axis(0, row as i32, end as i32)?,
                    run: run.clone(),
                });
                (row, at) = (end, start + run.tokens);
            }
        }
        if prompt.places.iter().any(|place| place.run.grid.is_some()) {
            prompt.find_positions();
        }
        Ok(prompt)
    }

    /// The token ids.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// What its state is known by: the ids, and hashes of the features and of how they are placed.
    ///
    /// # Errors
    /// When the features cannot be computed.
    pub fn key(&self) -> Result<PromptKey> {
        let span = |place: &Place| -> Result<MediaSpan> {
            let mut hash = Sha256::new();
            hash.update(place.features.dtype().to_string());
            hash.update(format!("{:?} {:?}", place.features.shape(), place.run));
            hash.update(place.features.contiguous()?.as_bytes()?);
            Ok(MediaSpan {
                tokens: place.tokens.clone(),
                digest: hash.finalize().into(),
            })
        };
        let places = self.places.iter().filter(|place| !place.tokens.is_empty());
        let spans = places.map(span).collect::<Result<_>>()?;
        let key = PromptKey::with_media(self.ids.clone(), spans);
        // Runs follow each other.
        key.ok_or_else(|| Error::field("media", "tokens of their own", "shared ones"))
    }

    /// Text counts on in all directions. The tokens of a picture have one place in time, the
    /// number of their row and of their column; steps in time are as far apart as the run says.
    /// What follows goes on after the largest.
    fn find_positions(&mut self) {
        let mut each: [Vec<i32>; 3] = Default::default();
        let (mut at, mut next) = (0, 0);
        let text = |each: &mut [Vec<i32>; 3], count: usize, next: &mut i32| {
            for _ in 0..count {
                for direction in each.iter_mut() {
                    direction.push(*next);
                }
                *next += 1;
            }
        };
        for Place { tokens, run, .. } in &self.places {
            text(&mut each, tokens.start - at, &mut next);
            at = tokens.end;
            let [steps, rows, columns] = run.grid.unwrap_or([1, 1, tokens.len()]);
            let time = |step: usize| (step as f64 * run.time_step) as i32;
            let columns = columns.max(1);
            let frame = rows.max(1) * columns;
            for token in 0..tokens.len() {
                let (step, place) = (token / frame, token % frame);
                each[0].push(next + time(step));
                each[1].push(next + (place / columns) as i32);
                each[2].push(next + (place % columns) as i32);
            }
            next += (rows.max(columns) as i32).max(time(steps.saturating_sub(1)) + 1);
        }
        text(&mut each, self.ids.len() - at, &mut next);
        self.positions = Some(each);
        self.next = next;
    }

    /// Where a step of about `step` tokens from `start` on ends: tokens that see each other stay
    /// together.
    pub fn step_end(&self, start: usize, step: usize) -> usize {
        let end = start.saturating_add(step.max(1)).min(self.ids.len());
        let cut = self
            .places
            .iter()
            .find(|place| place.run.together && place.tokens.start < end && end < place.tokens.end);
        match cut {
            Some(place) if place.tokens.start > start => place.tokens.start,
            Some(place) => place.tokens.end,
            None => end,
        }
    }

    /// Hidden states `[1, L, D]` of the tokens of `range`, with `model` and the cache of what
    /// comes before them.
    ///
    /// # Errors
    /// When a token is not in the vocabulary, the features do not fit the model or MLX fails.
    pub fn forward(
        &self,
        model: &dyn Model,
        cache: &mut mlex_nn::Cache,
        range: Range<usize>,
    ) -> Result<Array> {
        let ids = checked(self.ids.get(range.clone()).unwrap_or_default(), model)?;
        let places = || {
            let inside =
                |place: &&Place| place.tokens.start < range.end && range.start < place.tokens.end;
            self.places.iter().filter(inside)
        };
        if places().next().is_none() {
            let tokens = Array::from_slice(&ids, &[1, ids.len() as i32])?;
            return model.forward(Input::Tokens(&tokens), cache);
        }
        // Relative to what the cache has seen, should the prompt not be the first of it.
        let first = cache.position() - self.position(range.start);
        let mut parts = Vec::new();
        let mut is_feature = vec![false; ids.len()];
        let mut spans = Vec::new();
        let (mut at, mut like) = (range.start, None);
        for place in places() {
            let within = place.tokens.start.max(range.start)..place.tokens.end.min(range.end);
            parts.push((within.start - at, None));
            let rows = [within.start, within.end].map(|token| (token - place.tokens.start) as i32);
            let features = place.features.slice_axis(0, rows[0], rows[1])?;
            like.get_or_insert((features.dim(1)?, features.dtype()));
            parts.push((within.len(), Some(features)));
            let inside = within.start - range.start..within.end - range.start;
            if place.run.together {
                spans.push(inside.start as i32..inside.end as i32);
            }
            is_feature[inside].fill(true);
            at = within.end;
        }
        parts.push((range.end - at, None));
        // There is a place.
        let (width, dtype) = like.unwrap_or((model.info().hidden_size, Dtype::Float32));
        let rows = parts.into_iter().filter(|(count, _)| *count > 0);
        let rows = rows.map(|(count, features)| match features {
            Some(features) => features.as_type(dtype),
            None => Array::zeros(&[count as i32, width], dtype),
        });
        let rows = rows.collect::<mlex_core::Result<Vec<_>>>()?;
        let features = Array::concatenate(&rows, 0)?;
        let mut input = MixedInput::new(&ids, &features, &is_feature)?.with_spans(spans);
        if let Some(each) = &self.positions {
            let moved = |direction: &Vec<i32>| {
                let positions = direction[range.clone()].iter();
                positions.map(|position| position + first).collect()
            };
            input = input.with_positions(Positions {
                each: each.each_ref().map(moved),
                next: self.position(range.end) + first,
            })?;
        }
        model.forward(Input::Mixed(&input), cache)
    }

    /// The position of a token, or after the last one.
    fn position(&self, token: usize) -> i32 {
        let known = self.positions.as_ref();
        match known.map(|positions| positions[0].get(token).copied()) {
            Some(position) => position.unwrap_or(self.next),
            None => token as i32,
        }
    }
}

/// Ids as MLX takes them.
pub(crate) fn checked(ids: &[u32], model: &dyn Model) -> Result<Vec<i32>> {
    let vocab_size = model.info().vocab_size;
    let check = |&id: &u32| match i32::try_from(id) {
        Ok(id) if id < vocab_size => Ok(id),
        _ => {
            let expected = format!("an id below {vocab_size}");
            Err(Error::field("token", expected, id.to_string()))
        }
    };
    ids.iter().map(check).collect()
}
