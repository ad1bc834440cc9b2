//! From files to towers.

use mlex_audio::{MelConfig, MelExtractor, RawExtractor};
use mlex_core::Dtype;
use mlex_nn::{Taken, Weights};
use mlex_vision::{GemmaVision, ProcessorFiles, QwenVision};
use serde::Deserialize;
use serde_json::Value;

use super::gemma_audio::GemmaAudio;
use super::gemma_unified::{PatchEmbedder, SampleEmbedder};
use super::gemma_vision::GemmaTower;
use super::processor::{self, Ear, Processor};
use super::qwen::{QwenKind, QwenTower};
use super::run::VideoTime;
use super::{Family, GemmaEars, GemmaEyes, MediaKind, MediaTokens, Towers};
use crate::config::{ModelConfig, check, check_size, shown};
use crate::files::{ModelFiles, Tensors};
use crate::load::check_dtype;
use crate::{Error, Result};

const VISION: &str = "vision_config";
const AUDIO: &str = "audio_config";
const TEXT: &str = "text_config";

/// The families of towers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Qwen(QwenKind),
    Gemma,
    GemmaUnified,
}

impl Kind {
    fn of(config: &ModelConfig) -> Option<Self> {
        match config.model_type().ok()? {
            "qwen2_5_vl" => Some(Self::Qwen(QwenKind::Qwen2_5Vl)),
            "qwen3_vl" | "qwen3_vl_moe" => Some(Self::Qwen(QwenKind::Qwen3Vl)),
            "qwen3_5" | "qwen3_5_moe" => Some(Self::Qwen(QwenKind::Qwen3_5)),
            "gemma4" => Some(Self::Gemma),
            "gemma4_unified" => Some(Self::GemmaUnified),
            _ => None,
        }
    }

    /// A tensor that a checkpoint with the tower has, below one of the [places](Self::places).
    fn mark(self, kind: MediaKind) -> &'static str {
        match (self, kind) {
            (Self::Qwen(QwenKind::Qwen2_5Vl), _) => "merger.mlp.2.weight",
            (Self::Qwen(_), _) => "merger.linear_fc2.weight",
            (Self::Gemma, MediaKind::Audio) => "embed_audio.embedding_projection.weight",
            (Self::Gemma, _) => "vision_tower.patch_embedder.position_embedding_table",
            (Self::GemmaUnified, MediaKind::Audio) => "embed_audio.embedding_projection.weight",
            (Self::GemmaUnified, _) => "vision_embedder.pos_embedding",
        }
    }

    /// The prefixes that the towers may have.
    fn places(self) -> &'static [&'static str] {
        match self {
            Self::Qwen(_) => &[
                "vision_tower.",
                "model.visual.",
                "visual.",
                "model.language_model.visual.",
            ],
            Self::Gemma | Self::GemmaUnified => &["", "model."],
        }
    }

    /// Below which prefix a tower is.
    fn place(self, kind: MediaKind, has: impl Fn(&str) -> bool) -> Option<&'static str> {
        let mark = self.mark(kind);
        let mut places = self.places().iter().copied();
        places.find(|place| has(&format!("{place}{mark}")))
    }

    /// The default of a soft token's id, by the family's config in transformers and mlx-vlm.
    fn tokens(self) -> MediaTokens {
        match self {
            Self::Qwen(kind) => {
                let (image, video) = match kind {
                    QwenKind::Qwen3_5 => (248_056, 248_057),
                    _ => (151_655, 151_656),
                };
                MediaTokens {
                    image: Some(image),
                    video: Some(video),
                    audio: None,
                }
            }
            Self::Gemma => MediaTokens {
                image: Some(258_880),
                video: None,
                audio: Some(258_881),
            },
            Self::GemmaUnified => MediaTokens {
                image: Some(258_880),
                video: Some(258_884),
                audio: Some(258_881),
            },
        }
    }
}

#[derive(Debug, Deserialize)]
struct TokenFields {
    image_token_id: Option<u32>,
    video_token_id: Option<u32>,
    audio_token_id: Option<u32>,
}

/// The ids of the tokens that stand for features; none for a model without towers.
///
/// # Errors
/// When the config has something else in their place.
pub fn media_tokens(config: &ModelConfig) -> Result<MediaTokens> {
    let Some(kind) = Kind::of(config) else {
        return Ok(MediaTokens::default());
    };
    let fields: TokenFields = config.parse()?;
    let default = kind.tokens();
    Ok(MediaTokens {
        image: fields.image_token_id.or(default.image),
        video: fields.video_token_id.or(default.video),
        audio: fields.audio_token_id.or(default.audio),
    })
}

/// What a model takes beside text, by its config and the names of its tensors.
///
/// # Errors
/// When a file is missing or wrong; the error names it.
pub fn media_kinds(files: &ModelFiles) -> Result<Vec<MediaKind>> {
    if files.is_gguf() {
        return Ok(Vec::new());
    }
    let config = files.config()?;
    let Some(kind) = Kind::of(&config) else {
        return Ok(Vec::new());
    };
    kinds(kind, &config, &files.tensors()?)
}

fn kinds(kind: Kind, config: &ModelConfig, tensors: &Tensors) -> Result<Vec<MediaKind>> {
    let has = |name: &str| tensors.contains_key(name);
    let described = |name: &str| matches!(config.json().get(name), Some(Value::Object(_)));
    let mut kinds = Vec::new();
    if described(VISION) && kind.place(MediaKind::Image, has).is_some() {
        kinds.push(MediaKind::Image);
        if media_tokens(config)?.video.is_some() {
            kinds.push(MediaKind::Video);
        }
    }
    let hears = !matches!(kind, Kind::Qwen(_)) && described(AUDIO);
    if hears && kind.place(MediaKind::Audio, has).is_some() {
        kinds.push(MediaKind::Audio);
    }
    Ok(kinds)
}

impl Towers {
    /// Loads the towers of `files` on the current stream's device; none where there are none.
    /// Floating-point tensors become `dtype` where one is given.
    ///
    /// # Errors
    /// When a file, a field of a config or a tensor is missing or wrong; the error names it.
    pub fn load(files: &ModelFiles, dtype: Option<Dtype>) -> Result<Option<Self>> {
        check_dtype(dtype)?;
        let config = files.config()?;
        let Some(kind) = Kind::of(&config).filter(|_| !files.is_gguf()) else {
            return Ok(None);
        };
        let build = || {
            let tensors = files.tensors()?;
            let kinds = kinds(kind, &config, &tensors)?;
            if kinds.is_empty() {
                return Ok(None);
            }
            let weights = Weights::new(tensors, config.quantization()?).with_dtype(dtype);
            Ok(Some(Self {
                processor: processor_of(kind, &kinds, &config, files)?,
                family: family(kind, &kinds, &config, &weights)?,
            }))
        };
        build().map_err(|error: Error| files.locate(error))
    }
}

impl Processor {
    /// What prepares media of `kinds` for the towers of `files`; none for a model without towers.
    pub(crate) fn load(files: &ModelFiles, kinds: &[MediaKind]) -> Result<Option<Self>> {
        let config = files.config()?;
        let Some(kind) = Kind::of(&config).filter(|_| !kinds.is_empty()) else {
            return Ok(None);
        };
        let built = processor_of(kind, kinds, &config, files);
        built.map(Some).map_err(|error| files.locate(error))
    }
}

/// What the towers of `files` take of the checkpoint, none of it read; none where there are none.
///
/// # Errors
/// As [`Towers::load`].
pub(crate) fn taken(files: &ModelFiles, config: &ModelConfig) -> Result<Option<Taken>> {
    let Some(kind) = Kind::of(config).filter(|_| !files.is_gguf()) else {
        return Ok(None);
    };
    let tensors = files.tensors()?;
    let kinds = kinds(kind, config, &tensors)?;
    if kinds.is_empty() {
        return Ok(None);
    }
    let weights = Weights::new(tensors, config.quantization()?).recording();
    family(kind, &kinds, config, &weights)?;
    Ok(Some(weights.taken()))
}

/// Builds towers of weights, of which nothing of a tower may be left.
fn family(
    kind: Kind,
    kinds: &[MediaKind],
    config: &ModelConfig,
    weights: &Weights,
) -> Result<Family> {
    let family = match kind {
        Kind::Qwen(kind) => qwen(kind, config, weights)?,
        _ => gemma(kind, kinds, config, weights)?,
    };
    discard_rest(kind, weights);
    weights.finish()?;
    Ok(family)
}

/// Drops what belongs to the language model, and what towers have and do not use.
fn discard_rest(kind: Kind, weights: &Weights) {
    const UNUSED: [&str; 6] = [
        "rotary_emb",
        "position_ids",
        "input_max",
        "input_min",
        "output_max",
        "output_min",
    ];
    const TOWERS: [&str; 5] = [
        "vision_tower.",
        "vision_embedder.",
        "embed_vision.",
        "audio_tower.",
        "embed_audio.",
    ];
    weights.discard(|path| {
        let is_tower = match kind {
            Kind::Qwen(_) => kind.places().iter().any(|place| path.starts_with(place)),
            _ => {
                let inner = path.strip_prefix("model.").unwrap_or(path);
                TOWERS.iter().any(|tower| inner.starts_with(tower))
            }
        };
        !is_tower || UNUSED.iter().any(|name| path.contains(name))
    });
}

/// A section of the config.
fn section(config: &ModelConfig, name: &str) -> Result<ModelConfig> {
    match config.json().get(name) {
        Some(Value::Object(section)) => Ok(ModelConfig::new(section.clone())),
        Some(other) => Err(Error::field(name, "an object", shown(other))),
        None => Err(Error::missing(format!("field {name}"))),
    }
}

/// The place of a tower, whose prefix ends with a dot or is empty.
fn at(weights: &Weights, place: &str) -> Weights {
    match place.strip_suffix('.') {
        Some(place) => weights.pp(place),
        None => weights.clone(),
    }
}

fn place_of(kind: Kind, media: MediaKind, weights: &Weights) -> Result<Weights> {
    let place = kind.place(media, |name| weights.contains(name));
    let missing = || Error::missing(format!("the tensors of the {media} tower"));
    Ok(at(weights, place.ok_or_else(missing)?))
}

#[derive(Debug, Deserialize)]
struct TimeFields {
    tokens_per_second: Option<i32>,
}

fn qwen_processor(
    kind: QwenKind,
    config: &ModelConfig,
    files: &ProcessorFiles,
) -> Result<processor::Family> {
    let (vision, time) = match kind {
        QwenKind::Qwen2_5Vl => {
            let fields: TimeFields = section(config, VISION)?.parse()?;
            let per_second = fields.tokens_per_second.unwrap_or(4);
            check("vision_config.tokens_per_second", per_second, 1..=1000)?;
            let time = VideoTime::Positions(f64::from(per_second));
            (QwenVision::qwen2_5(files)?, time)
        }
        _ => (QwenVision::new(files)?, VideoTime::Text),
    };
    Ok(processor::Family::Qwen { vision, time })
}

fn qwen(kind: QwenKind, config: &ModelConfig, weights: &Weights) -> Result<Family> {
    let tower = place_of(Kind::Qwen(kind), MediaKind::Image, weights)?;
    let vision = section(config, VISION)?;
    let tower = QwenTower::load(&vision, &tower, kind).map_err(|error| error.in_section(VISION))?;
    Ok(Family::Qwen(Box::new(tower)))
}

#[derive(Debug, Deserialize)]
struct TextFields {
    hidden_size: Option<i32>,
    use_bidirectional_attention: Option<String>,
}

fn gemma(
    kind: Kind,
    kinds: &[MediaKind],
    config: &ModelConfig,
    weights: &Weights,
) -> Result<Family> {
    let unified = kind == Kind::GemmaUnified;
    let text: TextFields = section(config, TEXT)?.parse()?;
    // The text model's own default.
    let width = text
        .hidden_size
        .unwrap_or(if unified { 3840 } else { 1536 });
    check_size("text_config.hidden_size", width)?;
    let vision = if kinds.contains(&MediaKind::Image) {
        let config = section(config, VISION)?;
        let place = place_of(kind, MediaKind::Image, weights)?;
        let projector = place.pp("embed_vision");
        let eyes = if unified {
            let embedder = place.pp("vision_embedder");
            PatchEmbedder::load(&config, &embedder, &projector, width)
                .map(|embedder| GemmaEyes::Unified(Box::new(embedder)))
        } else {
            let tower = place.pp("vision_tower");
            GemmaTower::load(&config, &tower, &projector, width)
                .map(|tower| GemmaEyes::Tower(Box::new(tower)))
        };
        Some(eyes.map_err(|error| error.in_section(VISION))?)
    } else {
        None
    };
    let audio = if kinds.contains(&MediaKind::Audio) {
        let config = section(config, AUDIO)?;
        let place = place_of(kind, MediaKind::Audio, weights)?;
        let projector = place.pp("embed_audio");
        let ears = if unified {
            SampleEmbedder::load(&config, &projector, width)
                .map(|embedder| GemmaEars::Unified(Box::new(embedder)))
        } else {
            GemmaAudio::load(&config, &place.pp("audio_tower"), &projector, width)
                .map(|tower| GemmaEars::Tower(Box::new(tower)))
        };
        Some(ears.map_err(|error| error.in_section(AUDIO))?)
    } else {
        None
    };
    Ok(Family::Gemma { vision, audio })
}

/// What prepares media of `kinds` for towers.
fn processor_of(
    kind: Kind,
    kinds: &[MediaKind],
    config: &ModelConfig,
    files: &ModelFiles,
) -> Result<Processor> {
    let files = ProcessorFiles::read(files.path())?;
    let family = match kind {
        Kind::Qwen(kind) => qwen_processor(kind, config, &files)?,
        Kind::Gemma | Kind::GemmaUnified => {
            let unified = kind == Kind::GemmaUnified;
            let text: TextFields = section(config, TEXT)?.parse()?;
            let vision = kinds.contains(&MediaKind::Image);
            let vision = vision.then(|| GemmaVision::new(&files, unified));
            let audio = kinds.contains(&MediaKind::Audio);
            let audio = audio.then(|| ear(&files, unified));
            processor::Family::Gemma {
                vision: vision.transpose()?,
                audio: audio.transpose()?,
                has_video: kinds.contains(&MediaKind::Video),
                together: match text.use_bidirectional_attention.as_deref() {
                    Some(which) => which == "vision",
                    // The text model's own default.
                    None => unified,
                },
            }
        }
    };
    Ok(Processor {
        model_type: config.model_type()?.to_owned(),
        family,
    })
}

fn ear(files: &ProcessorFiles, unified: bool) -> Result<Ear> {
    let settings = extractor_settings(files);
    if unified {
        return Ok(Ear::Raw(raw(settings)?));
    }
    let settings = match settings {
        Some(settings) => MelConfig::from_json(settings)?,
        None => MelConfig::default(),
    };
    Ok(Ear::Mel(MelExtractor::new(settings)?))
}

/// `feature_extractor` of processor_config.json, or preprocessor_config.json where it is one.
fn extractor_settings(files: &ProcessorFiles) -> Option<&Value> {
    let inner = files.processor.as_ref()?.get("feature_extractor");
    inner.filter(|settings| settings.is_object())
}

#[derive(Debug, Deserialize)]
struct RawFields {
    sampling_rate: Option<u32>,
    audio_samples_per_token: Option<usize>,
}

fn raw(settings: Option<&Value>) -> Result<RawExtractor> {
    let Some(Value::Object(settings)) = settings else {
        return Ok(RawExtractor::default());
    };
    let fields: RawFields = ModelConfig::new(settings.clone()).parse()?;
    let rate = fields.sampling_rate.unwrap_or(16_000);
    let samples = fields.audio_samples_per_token.unwrap_or(640);
    Ok(RawExtractor::new(rate, samples)?)
}
