//! What every architecture offers to generation.

use std::ops::Range;

use mlex_core::Array;
use mlex_nn::Cache;

use crate::{Error, Result};

/// What a model is, as data.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct ModelInfo {
    /// The architecture's name, as config.json gives it.
    pub model_type: String,
    /// How many tokens it knows.
    pub vocab_size: i32,
    /// The width of its hidden states.
    pub hidden_size: i32,
    /// How many layers it has.
    pub num_layers: i32,
    /// Numbers that a token adds to the cache, over all layers.
    pub cache_per_token: i64,
    /// The longest context that it was made for, where the config says.
    pub max_context: Option<i32>,
}

/// What a model computes on.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Input<'a> {
    /// Token ids, integers `[B, L]`.
    Tokens(&'a Array),
    /// Embeddings `[B, L, D]` in their place, as they enter the first layer.
    Embeddings(&'a Array),
    /// Token ids, some of which stand for features of images, videos or sounds.
    Mixed(&'a MixedInput),
}

/// Tokens of one sequence, some of which stand for features that a tower has made.
#[derive(Clone, Debug)]
pub struct MixedInput {
    tokens: Array,
    features: Array,
    is_feature: Array,
    length: i32,
    positions: Option<Positions>,
    spans: Vec<Range<i32>>,
}

/// Positions of tokens in time, height and width.
#[derive(Clone, Debug)]
pub struct Positions {
    /// Those in time, in height and in width: one per token each.
    pub each: [Vec<i32>; 3],
    /// The position of the token after them, in all directions.
    pub next: i32,
}

impl MixedInput {
    /// Token ids `[L]` and features `[L, D]`, of which the rows count where `is_feature` says so.
    /// Where features are added behind layers too, they follow in each row: `[L, (1 + layers) * D]`.
    ///
    /// # Errors
    /// When the lengths do not fit.
    pub fn new(tokens: &[i32], features: &Array, is_feature: &[bool]) -> Result<Self> {
        let length = i32::try_from(tokens.len()).unwrap_or(i32::MAX);
        let rows = features.dim(0)?;
        if features.ndim() != 2 || rows != length || is_feature.len() != tokens.len() {
            let found = format!("{rows} features and {} places", is_feature.len());
            return Err(Error::field("input", format!("{length} of each"), found));
        }
        Ok(Self {
            tokens: Array::from_slice(tokens, &[1, length])?,
            features: features.expand_dims(0)?,
            is_feature: Array::from_slice(is_feature, &[1, length])?,
            length,
            positions: None,
            spans: Vec::new(),
        })
    }

    /// With positions in several directions; without, they count up.
    ///
    /// # Errors
    /// When there is not one for each token.
    pub fn with_positions(mut self, positions: Positions) -> Result<Self> {
        let lengths = positions.each.each_ref().map(Vec::len);
        if lengths != [self.length as usize; 3] {
            let expected = format!("{} in each direction", self.length);
            return Err(Error::field("positions", expected, format!("{lengths:?}")));
        }
        self.positions = Some(positions);
        Ok(self)
    }

    /// With spans of tokens, by their indices, that all see each other.
    #[must_use]
    pub fn with_spans(mut self, spans: Vec<Range<i32>>) -> Self {
        self.spans = spans;
        self
    }

    /// How many tokens there are.
    pub fn length(&self) -> i32 {
        self.length
    }

    /// The positions, where they do not count up.
    pub fn positions(&self) -> Option<&Positions> {
        self.positions.as_ref()
    }

    /// The spans of tokens that see each other.
    pub fn spans(&self) -> &[Range<i32>] {
        &self.spans
    }

    /// The token ids `[1, L]`, 0 where a feature is.
    ///
    /// # Errors
    /// When MLX fails.
    pub fn text_tokens(&self) -> Result<Array> {
        Ok(self.is_feature.where_(0, &self.tokens)?)
    }

    /// `embedded` `[1, L, D]` with the features in their places, in the dtype of `embedded`.
    ///
    /// # Errors
    /// When the widths differ.
    pub fn splice(&self, embedded: &Array) -> Result<Array> {
        Ok(self.splice_deep(embedded, 0)?.0)
    }

    /// As [`splice`](Self::splice), and the features `[1, L, D]` that are added behind each of
    /// the first `layers` layers, zeros where text is.
    ///
    /// # Errors
    /// When the features are not those of as many layers.
    pub fn splice_deep(&self, embedded: &Array, layers: usize) -> Result<(Array, Vec<Array>)> {
        let (width, found) = (embedded.dim(-1)?, self.features.dim(-1)?);
        let count = i32::try_from(layers).unwrap_or(i32::MAX).saturating_add(1);
        let expected = width.saturating_mul(count);
        if expected != found {
            let expected = format!("{expected} numbers");
            return Err(Error::field("feature", expected, found.to_string()));
        }
        let features = self.features.as_type(embedded.dtype())?;
        let is_feature = self.is_feature.expand_dims(-1)?;
        if layers == 0 {
            return Ok((is_feature.where_(&features, embedded)?, Vec::new()));
        }
        let part = |index: i32| features.slice_axis(-1, index * width, (index + 1) * width);
        let spliced = is_feature.where_(&part(0)?, embedded)?;
        let zero = Array::zeros(&[1], embedded.dtype())?;
        let deep = (1..count).map(|index| Ok(is_feature.where_(&part(index)?, &zero)?));
        Ok((spliced, deep.collect::<Result<_>>()?))
    }
}

/// A language model: tokens and a cache to hidden states, hidden states to logits.
///
/// The two are apart so that a prefill projects the last position only.
pub trait Model {
    /// What it is.
    fn info(&self) -> &ModelInfo;

    /// An empty cache for it.
    ///
    /// # Errors
    /// When MLX is out of memory.
    fn new_cache(&self) -> Result<Cache>;

    /// Hidden states `[B, L, D]` of `L` new tokens, which are added to `cache`.
    ///
    /// # Errors
    /// When the shapes do not fit.
    fn forward(&self, input: Input<'_>, cache: &mut Cache) -> Result<Array>;

    /// Embeddings `[B, L, D]` of tokens, integers `[B, L]`, as an [`MtpHead`] takes them.
    ///
    /// # Errors
    /// When the shapes do not fit, or the architecture has no such heads.
    fn embed(&self, tokens: &Array) -> Result<Array> {
        let _ = tokens;
        let found = self.info().model_type.clone();
        Err(Error::unsupported("MTP head", found))
    }

    /// Logits `[.., vocab_size]` of hidden states `[.., D]`.
    ///
    /// # Errors
    /// When the shapes do not fit.
    fn logits(&self, hidden: &Array) -> Result<Array>;

    /// The repetition penalty that greedy decoding of the model is made for, where it is one:
    /// `repetition_penalty` of generation_config.json, or the architecture's own.
    fn repetition_penalty(&self) -> Option<f32> {
        None
    }

    /// The way to fill blocks, where the model has been trained for that.
    fn blocks(&self) -> Option<&dyn BlockModel> {
        None
    }
}

/// A model that fills blocks of mask tokens as well.
pub trait BlockModel {
    /// The token that stands for one to be filled in.
    fn mask_token(&self) -> u32;

    /// As [`Model::forward`] for token ids `[1, L]`, where positions, counted from the first token
    /// of the cache, are in blocks of `block`: they see those of their own block, later ones too,
    /// and all before it.
    ///
    /// # Errors
    /// When the shapes do not fit, or the cache has padding.
    fn forward_blocks(&self, tokens: &Array, block: i32, cache: &mut Cache) -> Result<Array>;
}

/// A head that predicts a further token (multi-token prediction).
pub trait MtpHead {
    /// An empty cache for it.
    ///
    /// # Errors
    /// When MLX is out of memory.
    fn new_cache(&self) -> Result<Cache>;

    /// States `[B, L, D]` after the next token, of which [`Model::logits`] makes the logits of the
    /// token behind it: of the next tokens' [embeddings](Model::embed) `[B, L, D]` and the model's
    /// hidden states `[B, L, D]`, which are added to `cache`.
    ///
    /// # Errors
    /// When the shapes do not fit.
    fn forward(&self, embeddings: &Array, hidden: &Array, cache: &mut Cache) -> Result<Array>;
}
