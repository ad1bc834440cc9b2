//! States of prompts in files.
//!
//! A file is safetensors: `tokens`, `hidden` where it is known, and `layers.N.keys`, `.values`
//! (`[1, H_kv, S, D]`), `.conv` and `.state`, or `.rows` (`[1, K - 1, C]`). Its metadata say what
//! it is, of which model, and how the layers hold it.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

use mlex_core::io::{SafetensorsFile, TensorSpec, write_safetensors};
use mlex_core::{Array, Dtype};
use mlex_nn::{Cache, KvPacking, KvState, LayerCache, LayerState, RecurrentState};
use serde::{Deserialize, Serialize};

use super::{KvSettings, MediaSpan, PromptKey};
use crate::error::ResultExt;
use crate::fingerprint::hex;
use crate::model::{Input, Model};
use crate::{Error, Result};

const FORMAT: &str = "mlex-prompt";
const VERSION: u32 = 1;
/// The key of the metadata.
const KEY: &str = "mlex_prompt";

/// What a file of a prompt's state holds.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PromptFileInfo {
    /// The architecture of its model.
    pub model_type: String,
    /// Which model it was made with.
    pub fingerprint: String,
    /// How keys and values are held.
    pub settings: KvSettings,
    /// How many tokens the prompt has.
    pub tokens: usize,
    /// The bytes of the state.
    pub bytes: u64,
}

/// A state and what it is the state of.
pub(super) struct Saved {
    pub(super) key: PromptKey,
    pub(super) settings: KvSettings,
    pub(super) cache: Cache,
    pub(super) hidden: Option<Array>,
}

/// The metadata of a file.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Metadata {
    format: String,
    version: u32,
    model_type: String,
    fingerprint: String,
    settings: KvSettings,
    media: Vec<Media>,
    layers: Vec<Layer>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Media {
    start: usize,
    end: usize,
    digest: String,
}

#[derive(Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
enum Layer {
    Attention {
        seen: i32,
        shift: i32,
        fixed: i32,
        packed: Option<Packed>,
    },
    Recurrent {
        seen: i32,
    },
    Conv {
        seen: i32,
    },
}

/// The form of packed keys and values.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Packed {
    bits: i32,
    group_size: i32,
    dims: [i32; 2],
    dtype: String,
}

/// Writes `saved` to `path`.
///
/// # Errors
/// When MLX fails or the system refuses.
pub(super) fn save(
    path: &Path,
    saved: &Saved,
    model_type: &str,
    fingerprint: &str,
) -> Result<PromptFileInfo> {
    let mut arrays = BTreeMap::new();
    let mut layers = Vec::new();
    for (index, layer) in saved.cache.to_states()?.into_iter().enumerate() {
        let mut add = |name: &str, array: Array| {
            arrays.insert(format!("layers.{index}.{name}"), array);
        };
        layers.push(match layer {
            LayerState::Attention(KvState {
                seen,
                shift,
                fixed,
                packing,
                arrays,
            }) => {
                if let Some([keys, values]) = arrays {
                    add("keys", keys);
                    add("values", values);
                }
                let packed = packing.map(|packing| Packed {
                    bits: packing.bits,
                    group_size: packing.group_size,
                    dims: packing.dims,
                    dtype: packing.dtype.to_string(),
                });
                Layer::Attention {
                    seen,
                    shift,
                    fixed,
                    packed,
                }
            }
            LayerState::Recurrent { seen, state } => {
                if let Some(RecurrentState { conv, state }) = state {
                    add("conv", conv);
                    add("state", state);
                }
                Layer::Recurrent { seen }
            }
            LayerState::Conv { seen, rows } => {
                if let Some(rows) = rows {
                    add("rows", rows);
                }
                Layer::Conv { seen }
            }
            _ => return Err(Error::unsupported("layer cache", "this kind")),
        });
    }
    let tokens = saved.key.tokens();
    let shape = [tokens.len() as i32];
    arrays.insert("tokens".to_owned(), Array::from_slice(tokens, &shape)?);
    if let Some(hidden) = &saved.hidden {
        arrays.insert("hidden".to_owned(), hidden.clone());
    }
    let media = saved.key.media().iter().map(|span| Media {
        start: span.tokens.start,
        end: span.tokens.end,
        digest: hex(&span.digest),
    });
    let metadata = Metadata {
        format: FORMAT.to_owned(),
        version: VERSION,
        model_type: model_type.to_owned(),
        fingerprint: fingerprint.to_owned(),
        settings: saved.settings,
        media: media.collect(),
        layers,
    };
    let metadata = BTreeMap::from([(KEY.to_owned(), serde_json::to_string(&metadata)?)]);
    let specs = arrays.iter().map(|(name, array)| TensorSpec {
        name: name.clone(),
        dtype: array.dtype().into(),
        shape: array.shape().iter().map(|&dim| dim as usize).collect(),
    });
    let specs: Vec<TensorSpec> = specs.collect();
    write_safetensors(path, specs, &metadata, |spec, sink| {
        let Some(array) = arrays.get(&spec.name) else {
            return Ok(());
        };
        let array = array.contiguous()?;
        sink.write_all(array.as_bytes()?)?;
        Ok(())
    })?;
    PromptFileInfo::open(path)
}

/// Reads the state of a prompt for `model`.
///
/// # Errors
/// When the file is no such state, is another model's, or does not hold what it says.
pub(super) fn load(
    path: &Path,
    model: &dyn Model,
    fingerprint: &str,
) -> Result<(Saved, PromptFileInfo)> {
    let opened = Opened::open(path)?;
    let saved = opened.state(model, fingerprint).with_path(path)?;
    Ok((saved, opened.info()))
}

impl PromptFileInfo {
    /// What the file at `path` holds, from its header.
    ///
    /// # Errors
    /// When it cannot be read or is no state of a prompt.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        Ok(Opened::open(path.as_ref())?.info())
    }
}

/// A file whose metadata were read.
struct Opened {
    file: SafetensorsFile,
    metadata: Metadata,
}

impl Opened {
    fn open(path: &Path) -> Result<Self> {
        let file = SafetensorsFile::open(path)?;
        let metadata = Self::metadata(&file).with_path(path)?;
        Ok(Self { file, metadata })
    }

    fn metadata(file: &SafetensorsFile) -> Result<Metadata> {
        let json = file.metadata().get(KEY);
        let json = json.ok_or_else(|| Error::missing(format!("{KEY}: no state of a prompt")))?;
        let metadata: Metadata = serde_json::from_str(json)?;
        if metadata.format != FORMAT || metadata.version != VERSION {
            let expected = format!("{FORMAT} {VERSION}");
            let found = format!("{} {}", metadata.format, metadata.version);
            return Err(Error::field("format", expected, found));
        }
        let tokens = file.info("tokens").map(|info| info.shape.as_slice());
        match tokens {
            Some([count]) if *count > 0 => Ok(metadata),
            found => {
                let found = format!("{found:?}");
                Err(Error::field("tokens", "a list of ids", found))
            }
        }
    }

    fn info(&self) -> PromptFileInfo {
        let tokens = self.file.info("tokens");
        let names = self.file.names();
        let sizes = names.filter_map(|name| self.file.info(name));
        PromptFileInfo {
            model_type: self.metadata.model_type.clone(),
            fingerprint: self.metadata.fingerprint.clone(),
            settings: self.metadata.settings,
            tokens: tokens.map_or(0, |info| info.shape.iter().product()),
            bytes: sizes.map(|info| info.range.len() as u64).sum(),
        }
    }

    fn state(&self, model: &dyn Model, fingerprint: &str) -> Result<Saved> {
        let metadata = &self.metadata;
        if metadata.fingerprint != fingerprint {
            let expected = format!("{fingerprint} ({})", model.info().model_type);
            let found = format!("{} ({})", metadata.fingerprint, metadata.model_type);
            return Err(Error::field("model", expected, found));
        }
        let tokens = self.tensor("tokens")?;
        if tokens.dtype() != Dtype::Uint32 {
            let found = tokens.dtype().to_string();
            return Err(Error::field("tokens", "u32", found));
        }
        let tokens: Vec<u32> = tokens.to_vec()?;
        let vocab_size = model.info().vocab_size as u32;
        if let Some(id) = tokens.iter().find(|&&id| id >= vocab_size) {
            let expected = format!("ids below {vocab_size}");
            return Err(Error::field("tokens", expected, id.to_string()));
        }
        let media = metadata.media.iter().map(Media::span);
        let key = PromptKey::with_media(tokens, media.collect::<Result<_>>()?);
        let key = key.ok_or_else(|| Error::field("media", "spans of the tokens", "others"))?;
        let layers = metadata.layers.iter().enumerate();
        let states = layers.map(|(index, layer)| self.layer(index, layer));
        let mut cache = metadata.settings.new_cache(model)?;
        cache.restore(states.collect::<Result<_>>()?)?;
        if cache.len() as usize != key.len() {
            let expected = format!("{} tokens seen", key.len());
            return Err(Error::field("layers", expected, cache.len().to_string()));
        }
        let hidden = match self.file.info("hidden") {
            Some(_) => Some(self.tensor("hidden")?),
            None => None,
        };
        if let Some(hidden) = &hidden
            && hidden.shape() != [1, model.info().hidden_size]
        {
            let expected = format!("[1, {}]", model.info().hidden_size);
            let found = format!("{:?}", hidden.shape());
            return Err(Error::field("hidden", expected, found));
        }
        try_step(model, &cache)?;
        Ok(Saved {
            key,
            settings: metadata.settings,
            cache,
            hidden,
        })
    }

    fn layer(&self, index: usize, layer: &Layer) -> Result<LayerState> {
        let tensor = |name: &str| self.tensor(&format!("layers.{index}.{name}"));
        let pair = |seen: i32, names: [&str; 2]| -> Result<Option<[Array; 2]>> {
            if seen == 0 {
                return Ok(None);
            }
            Ok(Some([tensor(names[0])?, tensor(names[1])?]))
        };
        Ok(match layer {
            Layer::Attention {
                seen,
                shift,
                fixed,
                packed,
            } => {
                let packing = match packed {
                    Some(packed) => Some(KvPacking {
                        bits: packed.bits,
                        group_size: packed.group_size,
                        dims: packed.dims,
                        dtype: packed.dtype.parse()?,
                    }),
                    None => None,
                };
                LayerState::Attention(KvState {
                    seen: *seen,
                    shift: *shift,
                    fixed: *fixed,
                    packing,
                    arrays: pair(*seen, ["keys", "values"])?,
                })
            }
            Layer::Recurrent { seen } => {
                let seen = *seen;
                let state = pair(seen, ["conv", "state"])?;
                let state = state.map(|[conv, state]| RecurrentState { conv, state });
                LayerState::Recurrent { seen, state }
            }
            Layer::Conv { seen } => LayerState::Conv {
                seen: *seen,
                rows: (*seen != 0).then(|| tensor("rows")).transpose()?,
            },
        })
    }

    fn tensor(&self, name: &str) -> Result<Array> {
        let bytes = self.file.bytes(name)?;
        let info = self.file.info(name);
        let info = info.ok_or_else(|| Error::missing(format!("tensor {name:?}")))?;
        let shape = crate::files::dims(name, &info.shape)?;
        let dtype = info.dtype.dtype();
        if dtype.size_in_bytes() != info.dtype.size_in_bytes() {
            let found = info.dtype.to_string();
            return Err(Error::field(name, "a type that states have", found));
        }
        Ok(Array::from_bytes(bytes, &shape, dtype)?)
    }
}

/// A step that is thrown away: shapes that are not the model's show here. States of fixed size
/// stay as they were.
fn try_step(model: &dyn Model, cache: &Cache) -> Result<()> {
    let token = Array::from_slice(&[0i32], &[1, 1])?;
    let mut next = cache.clone();
    model.forward(Input::Tokens(&token), &mut next)?.eval()?;
    let pairs = cache.layers().iter().zip(next.layers());
    for (index, (layer, next)) in pairs.enumerate() {
        if matches!(layer, LayerCache::Attention(_)) {
            continue;
        }
        let form = |layer: &LayerCache| -> Vec<String> {
            let form = |array: &Array| format!("{} {:?}", array.dtype(), array.shape());
            layer.arrays().map(form).collect()
        };
        let (found, expected) = (form(layer).join(" and "), form(next).join(" and "));
        if found != expected {
            return Err(Error::field(format!("layers.{index}"), expected, found));
        }
    }
    Ok(())
}

impl Media {
    fn span(&self) -> Result<MediaSpan> {
        let digest = bytes(&self.digest);
        let wrong = || Error::field("media", "a SHA-256 in hexadecimal", &self.digest);
        Ok(MediaSpan {
            tokens: self.start..self.end,
            digest: digest.ok_or_else(wrong)?,
        })
    }
}

fn bytes(hex: &str) -> Option<[u8; 32]> {
    let digits: Option<Vec<u8>> = hex
        .chars()
        .map(|digit| digit.to_digit(16).map(|digit| digit as u8))
        .collect();
    let pairs = digits?;
    let bytes: Vec<u8> = pairs
        .chunks_exact(2)
        .map(|pair| pair[0] << 4 | pair[1])
        .collect();
    (pairs.len() == 64).then_some(())?;
    bytes.try_into().ok()
}
