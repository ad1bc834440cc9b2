//! SmolLM3: Llama with layers that do not encode positions.
//!
//! Reference: mlx-lm `models/smollm3.py`.

use mlex_nn::Weights;
use serde::Deserialize;

use super::decoder::Decoder;
use super::llama;
use crate::config::{ModelConfig, RopeFields, check};
use crate::registry::Entry;
use crate::{Error, Model, Result};

pub(crate) const ENTRY: Entry = Entry {
    model_types: &["smollm3"],
    build,
};

/// The fields of config.json beyond Llama's.
#[derive(Debug, Deserialize)]
struct Config {
    #[serde(default = "interval")]
    no_rope_layer_interval: i32,
    /// 1 for a layer that encodes positions, 0 for one that does not.
    no_rope_layers: Option<Vec<u8>>,
}

fn interval() -> i32 {
    4
}

fn build(config: &ModelConfig, weights: &Weights) -> Result<Box<dyn Model>> {
    let (llama, rope): (llama::Config, RopeFields) = (config.parse()?, config.parse()?);
    let config: Config = config.parse()?;
    let mut decoder = llama.decoder(&rope)?;
    let interval = config.no_rope_layer_interval;
    check("no_rope_layer_interval", interval, 1..=i32::MAX)?;
    let count = decoder.layers.len();
    let uses_rope: Vec<bool> = match &config.no_rope_layers {
        Some(flags) => flags.iter().map(|&flag| flag != 0).collect(),
        None => (1..=count)
            .map(|number| number % interval as usize != 0)
            .collect(),
    };
    if uses_rope.len() != count {
        let expected = format!("{count} entries");
        return Err(Error::field(
            "no_rope_layers",
            expected,
            uses_rope.len().to_string(),
        ));
    }
    for (layer, uses_rope) in decoder.layers.iter_mut().zip(uses_rope) {
        layer.no_rope = !uses_rope;
    }
    Ok(Box::new(Decoder::load(&decoder, weights)?))
}
