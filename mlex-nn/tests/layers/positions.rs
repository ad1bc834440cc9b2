//! Rotary position embedding, by the settings that config.json has.

use mlex_core::Array;
use mlex_nn::{Offset, Result, Rope, RopeConfig, RopeScaling};
use serde_json::Value;

use crate::cases::Case;
use crate::one;

pub(crate) fn run(case: &Case) -> Option<Result<Vec<Array>>> {
    if case.op != "rope" {
        return None;
    }
    let params = &case.params;
    let offset = match case.named("offsets") {
        Some(offsets) => Offset::PerRow(offsets.to_vec::<i32>().unwrap().into()),
        None => Offset::Same(params.int("offset")),
    };
    let longest = params.get("max_position_embeddings");
    let longest = longest.and_then(|longest| longest.as_f64()).unwrap_or(0.0) as f32;
    let config = RopeConfig {
        dims: params.int("dims"),
        base: params.float("base"),
        traditional: params.bool("traditional"),
        scaling: match params.get("scaling") {
            Some(scaling) => parse(scaling, longest),
            None => RopeScaling::None,
        },
    };
    one(Rope::new(&config).and_then(|rope| rope.forward(case.x(), &offset)))
}

/// The defaults are those of mlx-lm's rope_utils.py.
fn parse(scaling: &Value, max_position_embeddings: f32) -> RopeScaling {
    let or = |key: &str, default: f64| scaling[key].as_f64().unwrap_or(default) as f32;
    let need = |key: &str| scaling[key].as_f64().unwrap() as f32;
    let kind = scaling.get("type").unwrap_or(&scaling["rope_type"]);
    match kind.as_str().unwrap() {
        "default" => RopeScaling::None,
        "linear" => RopeScaling::Linear {
            factor: need("factor"),
        },
        "llama3" => RopeScaling::Llama3 {
            factor: need("factor"),
            low_freq_factor: or("low_freq_factor", 1.0),
            high_freq_factor: or("high_freq_factor", 4.0),
            original_max_position_embeddings: or("original_max_position_embeddings", 8192.0),
        },
        "yarn" => RopeScaling::Yarn {
            factor: need("factor"),
            original_max_position_embeddings: or("original_max_position_embeddings", 4096.0),
            beta_fast: or("beta_fast", 32.0),
            beta_slow: or("beta_slow", 1.0),
            mscale: or("mscale", 1.0),
            mscale_all_dim: or("mscale_all_dim", 0.0),
        },
        "longrope" => {
            let factors = scaling["long_factor"].as_array().unwrap().iter();
            RopeScaling::Long {
                long_factor: factors.map(|f| f.as_f64().unwrap() as f32).collect(),
                max_position_embeddings,
                original_max_position_embeddings: need("original_max_position_embeddings"),
            }
        }
        "proportional" => RopeScaling::Proportional {
            factor: or("factor", 1.0),
            partial_rotary_factor: or("partial_rotary_factor", 1.0),
        },
        kind => panic!("no rope type {kind}"),
    }
}
