//! Every small checkpoint of `tests/data` against what mlx-lm computed from it
//! (`tools/make_model_golden.py` says what `expected.safetensors` holds).

#![allow(clippy::unwrap_used)]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use mlex_core::io::SafetensorsFile;
use mlex_core::{Array, Dtype};
use mlex_models::generate::{Sampler, SamplerConfig, StreamOptions, TokenStream};
use mlex_models::{Input, LoadedModel, ModelFiles, load};

fn data() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data")
}

/// A checkpoint, and what is expected of it.
struct Golden {
    name: String,
    loaded: LoadedModel,
    expected: SafetensorsFile,
}

impl Golden {
    fn open(name: &str, dtype: Option<Dtype>) -> Self {
        let dir = data().join(name);
        let files = ModelFiles::open(&dir).unwrap();
        Self {
            name: name.to_owned(),
            loaded: load(&files, dtype, |_| {}).unwrap(),
            expected: SafetensorsFile::open(dir.join("expected.safetensors")).unwrap(),
        }
    }

    fn has(&self, name: &str) -> bool {
        self.expected.info(name).is_some()
    }

    fn tensor(&self, name: &str) -> Array {
        let info = self.expected.info(name).unwrap();
        let shape: Vec<i32> = info.shape.iter().map(|&dim| dim as i32).collect();
        let bytes = self.expected.bytes(name).unwrap();
        Array::from_bytes(bytes, &shape, info.dtype.dtype()).unwrap()
    }

    fn tokens(&self, name: &str) -> Vec<u32> {
        let tokens = self.tensor(name).as_type(Dtype::Int32).unwrap();
        tokens
            .to_vec::<i32>()
            .unwrap()
            .into_iter()
            .map(|id| id as u32)
            .collect()
    }

    /// Logits `[L, V]` of the prompt, given to the model in pieces of the given lengths.
    fn logits(&self, pieces: impl Fn(&[u32]) -> Vec<Vec<u32>>) -> Array {
        let model = &*self.loaded.model;
        let mut cache = model.new_cache().unwrap();
        let rows: Vec<Array> = pieces(&self.tokens("tokens"))
            .iter()
            .map(|piece| {
                let ids: Vec<i32> = piece.iter().map(|&id| id as i32).collect();
                let ids = Array::from_slice(&ids, &[1, ids.len() as i32]).unwrap();
                let hidden = model.forward(Input::Tokens(&ids), &mut cache).unwrap();
                model.logits(&hidden).unwrap().squeeze(0).unwrap()
            })
            .collect();
        Array::concatenate(&rows, 0).unwrap()
    }

    /// What is wrong unless `found` is within `tolerance` of `expected`, relative to its largest
    /// element.
    fn check(
        &self,
        what: &str,
        found: &Array,
        expected: &Array,
        tolerance: f32,
    ) -> Result<(), String> {
        let expected: Vec<f32> = expected.to_vec().unwrap();
        let found: Vec<f32> = found.as_type(Dtype::Float32).unwrap().to_vec().unwrap();
        assert_eq!(found.len(), expected.len(), "{}: {what}", self.name);
        let scale = expected.iter().fold(0.0f32, |max, x| max.max(x.abs()));
        let error = found.iter().zip(&expected).fold(0.0f32, |max, (a, b)| {
            max.max(if a.is_nan() { f32::MAX } else { (a - b).abs() })
        });
        if error <= tolerance * scale {
            return Ok(());
        }
        Err(format!(
            "{}: {what}: off by {error}, the largest logit is {scale}, allowed {tolerance}",
            self.name
        ))
    }
}

fn whole(tokens: &[u32]) -> Vec<Vec<u32>> {
    vec![tokens.to_vec()]
}

/// Names of the checkpoints: every directory with expected values, so that a new one is tested
/// without a further line here. `MLEX_GOLDENS=NAME,NAME` leaves only these: on CUDA, where MLX
/// compiles kernels for each of them, several processes may so share the work.
fn names() -> Vec<String> {
    let entries = std::fs::read_dir(data()).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap())
        .filter(|entry| entry.path().join("expected.safetensors").exists())
        .map(|entry| entry.file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert!(names.len() >= 50, "the data are not all there: {names:?}");
    if let Ok(wanted) = std::env::var("MLEX_GOLDENS") {
        let wanted: Vec<&str> = wanted.split(',').collect();
        names.retain(|name| wanted.contains(&name.as_str()));
        assert!(!names.is_empty(), "there are none of {wanted:?}");
    }
    names
}

/// Fails with all checkpoints that `check` finds fault with.
fn check_all(check: impl Fn(&str) -> Result<(), String>) {
    let checked = |name: &String| {
        let found = catch_unwind(AssertUnwindSafe(|| check(name)));
        found.unwrap_or_else(|_| Err(format!("{name}: it panicked")))
    };
    let faults: Vec<String> = names()
        .iter()
        .map(checked)
        .filter_map(Result::err)
        .collect();
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

/// How far logits may be off, relative to the largest one: 1e-4 in f32. In a half type every
/// activation is rounded, so that the reference's own run is away from its run in f32: two runs
/// may each be away by that much, to either side, and the largest error of few is not exact.
fn tolerance(golden: &Golden) -> f32 {
    if !golden.has("logits_f32") {
        return 1e-4;
    }
    let own = golden.tensor(if golden.has("logits_cpu") {
        "logits_cpu"
    } else {
        "logits"
    });
    let exact = golden.tensor("logits_f32");
    let largest = |x: &Array| x.abs().unwrap().max_all().unwrap().item::<f32>().unwrap();
    2.5 * largest(&own.subtract(&exact).unwrap()) / largest(&exact)
}

#[test]
fn prefill_in_one_go_matches() {
    check_all(|name| {
        let golden = Golden::open(name, None);
        let logits = golden.logits(whole);
        golden.check(
            "logits",
            &logits,
            &golden.tensor("logits"),
            tolerance(&golden),
        )
    });
}

#[test]
fn half_checkpoints_loaded_in_f32_match_the_reference_in_f32() {
    check_all(|name| {
        let golden = Golden::open(name, Some(Dtype::Float32));
        if !golden.has("logits_f32") {
            return Ok(());
        }
        let logits = golden.logits(whole);
        golden.check("logits in f32", &logits, &golden.tensor("logits_f32"), 1e-4)
    });
}

#[test]
fn prefill_in_uneven_chunks_matches() {
    check_all(|name| {
        let golden = Golden::open(name, None);
        let logits = golden.logits(|tokens| {
            let (first, rest) = tokens.split_at(7);
            let (second, rest) = rest.split_at(1);
            let (third, rest) = rest.split_at(11);
            [first, second, third, rest].map(<[u32]>::to_vec).to_vec()
        });
        golden.check(
            "chunked",
            &logits,
            &golden.tensor("logits"),
            tolerance(&golden),
        )
    });
}

#[test]
fn token_by_token_matches() {
    check_all(|name| {
        let golden = Golden::open(name, None);
        let logits = golden.logits(|tokens| tokens.iter().map(|&id| vec![id]).collect());
        golden.check(
            "stepwise",
            &logits,
            &golden.tensor("logits"),
            tolerance(&golden),
        )
    });
}

#[test]
fn a_batch_with_left_padding_matches() {
    check_all(|name| {
        let golden = Golden::open(name, None);
        let model = &*golden.loaded.model;
        let tokens = golden.tensor("batch_tokens").as_type(Dtype::Int32).unwrap();
        let padding = golden
            .tensor("batch_left_padding")
            .as_type(Dtype::Int32)
            .unwrap();
        let padding: Vec<i32> = padding.to_vec().unwrap();
        let mut cache = model.new_cache().unwrap();
        cache.set_left_padding(&padding).unwrap();
        let hidden = model.forward(Input::Tokens(&tokens), &mut cache).unwrap();
        let logits = model
            .logits(&hidden)
            .unwrap()
            .as_type(Dtype::Float32)
            .unwrap();
        let expected = golden.tensor("batch_logits");
        let length = tokens.dim(1).unwrap();
        for (row, &padding) in padding.iter().enumerate() {
            // What stands at padding is of no meaning.
            let real = |all: &Array| {
                all.at(0, row as i32)
                    .unwrap()
                    .slice_axis(0, padding, length)
                    .unwrap()
            };
            let what = format!("row {row}");
            golden.check(&what, &real(&logits), &real(&expected), tolerance(&golden))?;
        }
        Ok(())
    });
}

#[test]
fn greedy_tokens_match() {
    check_all(|name| {
        // In half precision the reference's choices hold in f32 too, by a margin.
        let golden = Golden::open(name, Some(Dtype::Float32));
        let model = &*golden.loaded.model;
        let prompt = golden.tokens("tokens");
        let expected = golden.tokens("greedy");
        let sampler =
            Sampler::new(SamplerConfig::default(), model.info().vocab_size, &prompt).unwrap();
        let mut cache = model.new_cache().unwrap();
        let options = StreamOptions {
            max_tokens: expected.len(),
            prefill_step: 10.into(),
            ..StreamOptions::default()
        };
        let stream =
            TokenStream::new(model, &mut cache, sampler, &prompt, options, &mut |_| true).unwrap();
        let found: Vec<u32> = stream.map(|id| id.unwrap()).collect();
        if found != expected {
            return Err(format!("{name}: {found:?} where {expected:?} is expected"));
        }
        let seen = prompt.len() + expected.len() - 1;
        if cache.len() as usize != seen {
            return Err(format!("{name}: the cache has {} of {seen}", cache.len()));
        }
        Ok(())
    });
}

#[test]
fn mlx_operations_and_kernels_agree() {
    // The last one's scales are held in float16 when it is loaded in float32.
    for (name, expected) in [
        ("llama-f32", "logits"),
        ("llama-4bit", "logits"),
        ("qwen2-f32", "logits"),
        ("qwen3-f32", "logits"),
        ("llama-sliding", "logits"),
        ("qwen3_moe-4bit", "logits"),
        ("qwen3_next-f32", "logits"),
        ("qwen3_next-4bit", "logits"),
        ("qwen3_5_moe-hf", "logits"),
        ("gemma4-large-4bit", "logits_f32"),
    ] {
        let golden = Golden::open(name, Some(Dtype::Float32));
        mlex_nn::dispatch::set_kernels(false);
        let logits = golden.logits(whole);
        logits.eval().unwrap();
        mlex_nn::dispatch::set_kernels(true);
        let checked = golden.check("without kernels", &logits, &golden.tensor(expected), 1e-4);
        checked.unwrap();
    }
}
