//! Flags that several commands share, and the parsing of their values.

use anyhow::Result;
use mlex_core::{Device, Dtype};
use mlex_models::compute;
use mlex_models::generate::{Dry, KvSettings, Request, SamplerConfig, SessionInfo, Xtc};
use serde_json::Value;

use crate::failure;
use crate::hub::Source;

/// Which model, and how it is run.
#[derive(Debug, clap::Args)]
pub(crate) struct ModelArgs {
    #[command(flatten)]
    pub(crate) source: Source,
    /// Load floating-point weights as this type [default: as stored]
    #[arg(long, value_parser = float_dtype, value_name = "DTYPE")]
    pub(crate) dtype: Option<Dtype>,
    /// What computes: cpu, gpu or gpu:N [default: the GPU where there is one]
    #[arg(long, value_parser = device)]
    pub(crate) device: Option<Device>,
    /// How many threads compute on a CPU [default: the physical cores]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=1024), value_name = "N")]
    pub(crate) threads: Option<u16>,
    /// Compute with MLX's own operations on a CPU too: slower, for comparison
    #[arg(long, hide_short_help = true)]
    pub(crate) no_kernels: bool,
}

impl ModelArgs {
    /// Sets how the process computes. Returns the device, which is there.
    ///
    /// # Errors
    /// When this build of MLX does not have the device.
    pub(crate) fn set_up(&self) -> Result<Device> {
        compute::set_threads(self.threads.unwrap_or(0).into());
        compute::set_kernels(!self.no_kernels);
        let Some(device) = self.device else {
            return Ok(Device::preferred()?);
        };
        if !device.is_available()? {
            anyhow::bail!("device {device} is not available to this build of MLX");
        }
        Ok(device)
    }
}

/// How keys and values are held, with mlx-lm's names and defaults.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Keys and values")]
pub(crate) struct KvArgs {
    /// See the first four tokens and the last ones, so many together [default: all]
    #[arg(long, value_name = "N", conflicts_with = "kv_bits",
          value_parser = clap::value_parser!(i32).range(5..))]
    max_kv_size: Option<i32>,
    /// Hold keys and values in so many bits: 2, 3, 4, 5, 6 or 8 [default: as they are]
    #[arg(long, value_name = "BITS", value_parser = kv_bits)]
    kv_bits: Option<i32>,
    /// With --kv-bits, how many numbers share a scale: 32, 64 or 128
    #[arg(long, default_value = "64", value_name = "N", value_parser = kv_group_size)]
    kv_group_size: i32,
    /// With --kv-bits, from how many tokens on
    #[arg(long, default_value_t = 5000, value_name = "N",
          value_parser = clap::value_parser!(i32).range(0..))]
    quantized_kv_start: i32,
}

impl KvArgs {
    /// The settings.
    pub(crate) fn settings(&self) -> KvSettings {
        let mut settings = KvSettings::new();
        settings.max_kv_size = self.max_kv_size;
        if self.kv_bits.is_some() {
            settings.bits = self.kv_bits;
            settings.group_size = Some(self.kv_group_size);
            settings.quantized_start = self.quantized_kv_start;
        }
        settings
    }
}

/// One of some numbers.
fn one_of(text: &str, known: &[i32]) -> Result<i32, String> {
    let number = text.parse().ok().filter(|number| known.contains(number));
    number.ok_or_else(|| {
        let known: Vec<String> = known.iter().map(i32::to_string).collect();
        format!("expected one of {}", known.join(", "))
    })
}

fn kv_bits(text: &str) -> Result<i32, String> {
    one_of(text, &[2, 3, 4, 5, 6, 8])
}

fn kv_group_size(text: &str) -> Result<i32, String> {
    one_of(text, &[32, 64, 128])
}

/// How tokens are chosen.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Sampling")]
pub(crate) struct SamplerArgs {
    /// Temperature; 0 always takes the likeliest token
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    temp: f32,
    /// Sample from the likeliest tokens that together reach this probability
    #[arg(long, default_value_t = 1.0, allow_negative_numbers = true)]
    top_p: f32,
    /// Sample from this many of the likeliest tokens; 0 is all
    #[arg(long, default_value_t = 0)]
    top_k: u32,
    /// Sample from tokens with at least this share of the likeliest one's probability
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    min_p: f32,
    /// Sample from the tokens of the most expected surprise that together reach this probability
    #[arg(long, default_value_t = 1.0, allow_negative_numbers = true)]
    typical_p: f32,
    /// Leave out the likeliest tokens this often (XTC); 0 is never
    #[arg(
        long,
        default_value_t = 0.0,
        allow_negative_numbers = true,
        value_name = "P"
    )]
    xtc_probability: f32,
    /// What is left out: of the tokens above this probability, all but the least likely
    #[arg(
        long,
        default_value_t = 0.1,
        allow_negative_numbers = true,
        value_name = "P"
    )]
    xtc_threshold: f32,
    /// Make repeated passages less likely (DRY) by this, more for each token; 0 is off
    #[arg(
        long,
        default_value_t = 0.0,
        allow_negative_numbers = true,
        value_name = "AMOUNT"
    )]
    dry_multiplier: f32,
    /// How much more for each token of a repeated passage
    #[arg(
        long,
        default_value_t = 1.75,
        allow_negative_numbers = true,
        value_name = "FACTOR"
    )]
    dry_base: f32,
    /// The shortest passage that counts as repeated
    #[arg(long, default_value_t = 2, value_name = "N")]
    dry_allowed_length: u32,
    /// How many of the last tokens are looked at; 0 is all
    #[arg(long, default_value_t = 0, value_name = "N")]
    dry_range: u32,
    /// A text that ends a passage, in place of line break, colon, quote and asterisk (repeatable)
    #[arg(long, value_name = "TEXT")]
    dry_breaker: Vec<String>,
    /// Seed of the random numbers [default: another one each time]
    #[arg(long)]
    seed: Option<u64>,
    /// Divide the logits of recent tokens by this; 1 is off [default: 1, or what the model asks for]
    #[arg(long, allow_negative_numbers = true, value_name = "FACTOR")]
    repetition_penalty: Option<f32>,
    /// Subtract this from the logits of recent tokens
    #[arg(
        long,
        default_value_t = 0.0,
        allow_negative_numbers = true,
        value_name = "AMOUNT"
    )]
    presence_penalty: f32,
    /// Subtract this from the logits of recent tokens, once for each time they occur
    #[arg(
        long,
        default_value_t = 0.0,
        allow_negative_numbers = true,
        value_name = "AMOUNT"
    )]
    frequency_penalty: f32,
    /// How many tokens count as recent [default: 64, or all for a penalty that the model asks for]
    #[arg(long, value_name = "N")]
    penalty_context: Option<u32>,
    /// Add VALUE to the logit of token ID; -inf forbids it (repeatable)
    #[arg(long, value_parser = logit_bias, value_name = "ID=VALUE")]
    logit_bias: Vec<(u32, f32)>,
}

impl SamplerArgs {
    /// Sets `config` and what goes with it in a request.
    pub(crate) fn apply(&self, config: SamplerConfig, request: &mut Request) {
        request.sampler = config;
        if !self.dry_breaker.is_empty() {
            request.dry_breakers.clone_from(&self.dry_breaker);
        }
    }

    /// What the model asks for, where no flag says something else.
    pub(crate) fn follow(&self, info: &SessionInfo, request: &mut Request) {
        if let (None, Some(penalty)) = (self.repetition_penalty, info.repetition_penalty) {
            request.sampler.repetition_penalty = penalty;
            request.sampler.penalty_context = self.penalty_context.unwrap_or(u32::MAX);
        }
    }

    /// The settings.
    ///
    /// # Errors
    /// A usage error when a number is outside of its range.
    pub(crate) fn config(&self, command: &str) -> Result<SamplerConfig> {
        let config = SamplerConfig {
            temperature: self.temp,
            top_p: self.top_p,
            top_k: self.top_k,
            min_p: self.min_p,
            typical_p: self.typical_p,
            xtc: (self.xtc_probability != 0.0)
                .then(|| Xtc::new(self.xtc_probability, self.xtc_threshold)),
            dry: (self.dry_multiplier != 0.0).then(|| Dry {
                base: self.dry_base,
                allowed_length: self.dry_allowed_length,
                range: self.dry_range,
                ..Dry::new(self.dry_multiplier)
            }),
            seed: self.seed,
            repetition_penalty: self.repetition_penalty.unwrap_or(1.0),
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            penalty_context: self.penalty_context.unwrap_or(64),
            logit_bias: self.logit_bias.iter().copied().collect(),
        };
        // The ids are checked against the vocabulary when the model is there.
        config
            .validate(i32::MAX)
            .map_err(|error| failure::usage(command, error))?;
        Ok(config)
    }
}

/// A floating-point type that weights can have.
pub(crate) fn float_dtype(text: &str) -> Result<Dtype, String> {
    match text {
        "float32" => Ok(Dtype::Float32),
        "float16" => Ok(Dtype::Float16),
        "bfloat16" => Ok(Dtype::Bfloat16),
        _ => Err("expected float32, float16 or bfloat16".to_owned()),
    }
}

fn device(text: &str) -> Result<Device, String> {
    text.parse()
        .map_err(|_| "expected cpu, gpu or gpu:N".to_owned())
}

fn logit_bias(text: &str) -> Result<(u32, f32), String> {
    let expected = || "expected ID=VALUE, such as 42=-1.5".to_owned();
    let (id, value) = text.split_once('=').ok_or_else(expected)?;
    let id = id.trim().parse().map_err(|_| expected())?;
    let value: f32 = value.trim().parse().map_err(|_| expected())?;
    if value.is_nan() {
        Err(expected())
    } else {
        Ok((id, value))
    }
}

/// `KEY=JSON`.
pub(crate) fn key_json(text: &str) -> Result<(String, Value), String> {
    let (key, json) = text.split_once('=').ok_or("expected KEY=JSON")?;
    let value = serde_json::from_str(json)
        .map_err(|error| format!("{error}; a text needs quotes: '{key}=\"{json}\"'"))?;
    Ok((key.to_owned(), value))
}

/// Token ids with spaces or commas between them.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TokenIds(pub(crate) Vec<u32>);

impl std::str::FromStr for TokenIds {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let words = text
            .split([',', ' ', '\t', '\n', '\r'])
            .filter(|word| !word.is_empty());
        let id = |word: &str| {
            word.parse()
                .map_err(|_| format!("expected token ids such as \"1 2 3\", found {word:?}"))
        };
        words.map(id).collect::<Result<Vec<u32>, _>>().map(Self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn biases() {
        assert_eq!(logit_bias("42=-1.5"), Ok((42, -1.5)));
        assert_eq!(logit_bias("0=-inf"), Ok((0, f32::NEG_INFINITY)));
        for wrong in ["42", "=1", "-1=1", "1=", "1=x", "1=nan", "4294967296=1"] {
            assert!(logit_bias(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn template_arguments() {
        let value = |json| Ok(("k".to_owned(), json));
        assert_eq!(key_json("k=false"), value(Value::Bool(false)));
        assert_eq!(key_json("k=\"a=b\""), value(Value::from("a=b")));
        let error = key_json("effort=high").unwrap_err();
        assert!(
            error.ends_with("a text needs quotes: 'effort=\"high\"'"),
            "{error}"
        );
        assert!(key_json("k").is_err());
    }

    #[test]
    fn token_ids() {
        assert_eq!("1 2,3\n".parse(), Ok(TokenIds(vec![1, 2, 3])));
        assert_eq!("".parse(), Ok(TokenIds(vec![])));
        assert!("1 -2".parse::<TokenIds>().is_err());
        assert!("1 4294967296".parse::<TokenIds>().is_err());
    }
}
