//! The small checkpoints with towers against what mlx-vlm computed from them
//! (`tools/make_media_golden.py` says what their files hold).

#![allow(clippy::unwrap_used)]

use std::cell::Cell;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use mlex_audio::{MelFeatures, RawFeatures};
use mlex_core::io::SafetensorsFile;
use mlex_core::{Array, Dtype};
use mlex_models::media::MediaPrompt;
use mlex_models::towers::{
    Encoded, MediaKind, MediaTokens, Towers, interruptible, media_kinds, media_tokens,
};
use mlex_models::{
    ConvertOptions, ErrorKind, LayoutSettings, LoadedModel, ModelFiles, Quantize, convert, load,
};
use mlex_vision::{GemmaInput, QwenInput, QwenVideo};
use serde_json::{Value, json};

/// Of the largest value; what the towers' issue asks for is 1e-3.
const TOLERANCE: f32 = 2e-4;

fn data() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data")
}

struct Golden {
    name: String,
    loaded: LoadedModel,
    towers: Towers,
    tokens: MediaTokens,
    expected: SafetensorsFile,
    description: Value,
}

impl Golden {
    fn open(name: &str) -> Self {
        let dir = data().join(name);
        let files = ModelFiles::open(&dir).unwrap();
        let json = std::fs::read(dir.join("media.json")).unwrap();
        Self {
            name: name.to_owned(),
            loaded: load(&files, None, |_| {}).unwrap(),
            towers: Towers::load(&files, None).unwrap().unwrap(),
            tokens: media_tokens(&files.config().unwrap()).unwrap(),
            expected: SafetensorsFile::open(dir.join("media.safetensors")).unwrap(),
            description: serde_json::from_slice(&json).unwrap(),
        }
    }

    fn tensor(&self, name: &str) -> Array {
        let info = self.expected.info(name).unwrap();
        let shape: Vec<i32> = info.shape.iter().map(|&dim| dim as i32).collect();
        let bytes = self.expected.bytes(name).unwrap();
        Array::from_bytes(bytes, &shape, info.dtype.dtype()).unwrap()
    }

    fn check(&self, what: &str, found: &Array, expected: &Array) {
        let expected: Vec<f32> = expected.to_vec().unwrap();
        let found: Vec<f32> = found.as_type(Dtype::Float32).unwrap().to_vec().unwrap();
        assert_eq!(found.len(), expected.len(), "{}: {what}", self.name);
        let scale = expected.iter().fold(0.0f32, |max, x| max.max(x.abs()));
        let error = found.iter().zip(&expected).fold(0.0f32, |max, (a, b)| {
            max.max(if a.is_nan() { f32::MAX } else { (a - b).abs() })
        });
        assert!(
            error <= TOLERANCE * scale,
            "{}: {what}: off by {error}, the largest is {scale}",
            self.name
        );
    }

    /// What the towers make of a medium.
    fn encode(&self, name: &str) -> Encoded {
        self.try_encode(name).unwrap()
    }

    fn try_encode(&self, name: &str) -> mlex_models::Result<Encoded> {
        let medium = &self.description["media"][name];
        let input = self.tensor(&format!("{name}.input"));
        let width = input.dim(1).unwrap() as usize;
        let values: Vec<f32> = input.as_type(Dtype::Float32).unwrap().to_vec().unwrap();
        let number = |field: &str| medium[field].as_u64().unwrap() as usize;
        let sides: Vec<usize> = medium["grid"]
            .as_array()
            .map(|sides| sides.iter().map(|side| side.as_u64().unwrap() as usize))
            .map_or_else(Vec::new, Iterator::collect);
        let kind = medium["kind"].as_str().unwrap();
        match (kind, &sides[..]) {
            ("audio", _) if medium["samples"].is_u64() => self.towers.gemma_samples(&RawFeatures {
                values,
                samples_per_token: width,
                tokens: number("tokens"),
            }),
            ("audio", _) => self.towers.gemma_sound(&MelFeatures {
                values,
                bins: width,
                valid: number("valid"),
                tokens: number("tokens"),
            }),
            (_, &[t, h, w]) => {
                let input = QwenInput {
                    patches: values,
                    patch_len: width,
                    grid: [t, h, w],
                    tokens: number("tokens"),
                };
                if kind == "image" {
                    self.towers.qwen_image(&input)
                } else {
                    let times = medium["timestamps"].as_array().unwrap().iter();
                    self.towers.qwen_video(&QwenVideo {
                        input,
                        timestamps: times.map(|time| time.as_f64().unwrap()).collect(),
                        seconds_per_patch: medium["seconds_per_patch"].as_f64().unwrap_or(1.0),
                    })
                }
            }
            (_, &[h, w]) => {
                let frames = number("frames");
                let inputs: Vec<GemmaInput> = values
                    .chunks(h * w * width)
                    .map(|patches| GemmaInput {
                        patches: patches.to_vec(),
                        patch_len: width,
                        grid: [h, w],
                        tokens: number("tokens") / frames,
                    })
                    .collect();
                if kind == "image" {
                    self.towers.gemma_image(&inputs[0])
                } else {
                    let times: Vec<f64> = (0..frames).map(|n| n as f64).collect();
                    self.towers.gemma_video(&inputs, &times)
                }
            }
            other => panic!("{other:?}"),
        }
    }

    fn media(&self) -> HashMap<String, Encoded> {
        let media = self.description["media"].as_object().unwrap().keys();
        media
            .map(|name| (name.clone(), self.encode(name)))
            .collect()
    }

    /// Logits `[L, V]` of a prompt, in steps that `end` gives the ends of.
    fn logits(
        &self,
        prompt: &MediaPrompt,
        cache: &mut mlex_nn::Cache,
        end: impl Fn(usize) -> usize,
    ) -> Array {
        let model = &*self.loaded.model;
        let (mut rows, mut start) = (Vec::new(), 0);
        while start < prompt.ids().len() {
            let end = prompt.step_end(start, end(start) - start);
            let hidden = prompt.forward(model, cache, start..end).unwrap();
            rows.push(model.logits(&hidden).unwrap().squeeze(0).unwrap());
            start = end;
        }
        Array::concatenate(&rows, 0).unwrap()
    }
}

struct Case {
    name: String,
    ids: Vec<u32>,
    media: Vec<String>,
    turns: Vec<usize>,
}

fn cases(golden: &Golden) -> Vec<Case> {
    let cases = golden.description["cases"].as_array().unwrap();
    let numbers = |value: &Value| -> Vec<usize> {
        let items = value.as_array().unwrap().iter();
        items.map(|item| item.as_u64().unwrap() as usize).collect()
    };
    let case = |case: &Value| Case {
        name: case["name"].as_str().unwrap().to_owned(),
        ids: numbers(&case["tokens"])
            .iter()
            .map(|&id| id as u32)
            .collect(),
        media: case["media"]
            .as_array()
            .unwrap()
            .iter()
            .map(|name| name.as_str().unwrap().to_owned())
            .collect(),
        turns: numbers(&case["turns"]),
    };
    cases.iter().map(case).collect()
}

fn names() -> Vec<String> {
    let entries = std::fs::read_dir(data()).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap())
        .filter(|entry| entry.path().join("media.safetensors").exists())
        .map(|entry| entry.file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert!(names.len() >= 11, "the data are not all there: {names:?}");
    names
}

fn prompt(
    golden: &Golden,
    ids: &[u32],
    media: &[String],
    all: &HashMap<String, Encoded>,
) -> MediaPrompt {
    let media: Vec<Encoded> = media.iter().map(|name| all[name].clone()).collect();
    MediaPrompt::new(ids.to_vec(), &media, golden.tokens).unwrap()
}

#[test]
fn features_of_towers_match() {
    for name in names() {
        let golden = Golden::open(&name);
        for (medium, encoded) in golden.media() {
            let expected = golden.tensor(&format!("{medium}.features"));
            golden.check(&medium, &encoded.features, &expected);
        }
    }
}

#[test]
fn towers_end_between_blocks() {
    // How often each asks, and what it asks after.
    let asked = |golden: &Golden, medium: &str, most: usize| {
        let count = Rc::new(Cell::new(0));
        let stop = {
            let count = Rc::clone(&count);
            move || count.replace(count.get() + 1) >= most
        };
        let result = interruptible(stop, || golden.try_encode(medium));
        (count.get(), result)
    };
    for (name, medium, blocks) in [
        ("media-gemma4-small", "a", 1),
        ("media-gemma4-small", "s", 1),
        ("media-gemma4-large", "b", 2),
        // Of each of three frames, and before it.
        ("media-gemma4-large", "v", 9),
    ] {
        let golden = Golden::open(name);
        let (count, encoded) = asked(&golden, medium, usize::MAX);
        assert_eq!(count, blocks, "{name}: {medium}");
        let expected = golden.tensor(&format!("{medium}.features"));
        golden.check(medium, &encoded.unwrap().features, &expected);
        for most in 0..blocks {
            let (count, result) = asked(&golden, medium, most);
            let error = result.unwrap_err();
            assert!(matches!(error.kind(), ErrorKind::Cancelled), "{error}");
            assert_eq!(count, most + 1, "{name}: {medium}");
        }
        // Nothing is asked outside.
        assert!(golden.try_encode(medium).is_ok());
    }
}

#[test]
fn towers_in_half_precision_are_near() {
    for name in names() {
        let mut golden = Golden::open(&name);
        let files = ModelFiles::open(data().join(&name)).unwrap();
        let half = Some(Dtype::Bfloat16);
        golden.towers = Towers::load(&files, half).unwrap().unwrap();
        for (medium, encoded) in golden.media() {
            // Samples go into the projection as they are.
            let dtype = encoded.features.dtype();
            let samples = name.contains("unified") && encoded.kind == MediaKind::Audio;
            assert!(dtype == Dtype::Bfloat16 || samples, "{name}: {medium}");
            let found = encoded.features.as_type(Dtype::Float32).unwrap();
            let expected = golden.tensor(&format!("{medium}.features"));
            let error = found.subtract(&expected).unwrap().abs().unwrap();
            let error: f32 = error.max_all().unwrap().item().unwrap();
            let largest = expected.abs().unwrap().max_all().unwrap();
            let largest: f32 = largest.item().unwrap();
            assert!(
                error < 0.06 * largest,
                "{name}: {medium}: {error} of {largest}"
            );
        }
    }
}

#[test]
fn logits_of_prompts_with_media_match() {
    for name in names() {
        let golden = Golden::open(&name);
        let media = golden.media();
        for case in cases(&golden) {
            let expected = golden.tensor(&format!("{}.logits", case.name));
            let prompt = prompt(&golden, &case.ids, &case.media, &media);
            let mut cache = golden.loaded.model.new_cache().unwrap();
            let logits = golden.logits(&prompt, &mut cache, |_| usize::MAX);
            golden.check(&case.name, &logits, &expected);
            // In small steps: tokens that see each other stay together.
            let mut cache = golden.loaded.model.new_cache().unwrap();
            let logits = golden.logits(&prompt, &mut cache, |start| start + 5);
            golden.check(&format!("{} in steps", case.name), &logits, &expected);
        }
    }
}

#[test]
fn a_second_turn_goes_on_with_the_cache() {
    for name in names() {
        let golden = Golden::open(&name);
        let media = golden.media();
        for case in cases(&golden) {
            let &[split] = &case.turns[..] else { continue };
            let expected = golden.tensor(&format!("{}.logits", case.name));
            let (first, second) = case.ids.split_at(split);
            let mut cache = golden.loaded.model.new_cache().unwrap();
            let rows =
                [(first, &case.media[..1]), (second, &case.media[1..])].map(|(ids, names)| {
                    let prompt = prompt(&golden, ids, names, &media);
                    golden.logits(&prompt, &mut cache, |_| usize::MAX)
                });
            let logits = Array::concatenate(&rows, 0).unwrap();
            golden.check("second turn", &logits, &expected);
            // What an image has taken cannot be taken back in part where positions jump.
            if name.contains("qwen") {
                assert!(!cache.can_trim(1));
            }
        }
    }
}

#[test]
fn what_a_model_takes_is_known_from_its_files() {
    use MediaKind::{Audio, Image, Video};
    for (name, expected) in [
        ("media-qwen3_5", vec![Image, Video]),
        ("media-qwen3_vl", vec![Image, Video]),
        ("media-qwen3_vl_moe", vec![Image, Video]),
        ("media-qwen2_5_vl", vec![Image, Video]),
        ("media-gemma4-small", vec![Image, Video, Audio]),
        ("media-gemma4-large", vec![Image, Video]),
        ("media-gemma4-unified", vec![Image, Video, Audio]),
        // The config speaks of a tower that is not there.
        ("qwen3_5-4bit", vec![]),
        ("llama-f32", vec![]),
    ] {
        let files = ModelFiles::open(data().join(name)).unwrap();
        assert_eq!(media_kinds(&files).unwrap(), expected, "{name}");
        let towers = Towers::load(&files, None).unwrap();
        let kinds = towers.map_or_else(Vec::new, |towers| towers.kinds());
        assert_eq!(kinds, expected, "{name}");
    }
}

#[test]
fn a_kind_that_is_not_taken_is_named_with_the_model() {
    let golden = Golden::open("media-qwen3_5");
    let error = golden.towers.check(MediaKind::Audio).unwrap_err();
    assert_eq!(error.to_string(), "qwen3_5: input: audio is not supported");
}

/// A copy of a checkpoint whose config is changed.
fn changed(name: &str, change: impl FnOnce(&mut Value)) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(data().join(name).join(file), dir.path().join(file)).unwrap();
    }
    let path = dir.path().join("config.json");
    let mut config = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    change(&mut config);
    std::fs::write(path, config.to_string()).unwrap();
    dir
}

#[test]
fn what_is_wrong_with_a_tower_is_named() {
    let error = |name: &str, section: &str, field: &str, value: Value| {
        let dir = changed(name, |config| config[section][field] = value);
        let files = ModelFiles::open(dir.path()).unwrap();
        let error = Towers::load(&files, None).unwrap_err().to_string();
        assert!(!error.contains('\n'), "{error}");
        error.replace(&dir.path().display().to_string(), "")
    };
    let (deep, windows) = ("media-qwen3_vl", "media-qwen2_5_vl");
    let (qwen, gemma, unified) = (
        "media-qwen3_5",
        "media-gemma4-small",
        "media-gemma4-unified",
    );
    let (vision, audio) = ("vision_config", "audio_config");
    for (name, section, field, value, expected) in [
        (
            qwen,
            vision,
            "depth",
            json!(1 << 30),
            "vision_config.depth: expected a number from 1",
        ),
        (
            qwen,
            vision,
            "depth",
            json!(-1),
            "vision_config.depth: expected a number from 1",
        ),
        (
            qwen,
            vision,
            "num_heads",
            json!(0),
            "vision_config.num_heads: expected a number from 1",
        ),
        (
            qwen,
            vision,
            "num_heads",
            json!(3),
            "vision_config.hidden_size: expected a multiple of 4 * 3",
        ),
        (
            qwen,
            vision,
            "patch_size",
            json!("x"),
            "vision_config.patch_size: expected a whole number",
        ),
        (
            qwen,
            vision,
            "hidden_size",
            json!(null),
            "missing field vision_config.hidden_size",
        ),
        (
            qwen,
            vision,
            "hidden_act",
            json!("relu"),
            "vision_config.hidden_act: relu is not supported",
        ),
        (
            qwen,
            vision,
            "deepstack_visual_indexes",
            json!([1]),
            "vision_config.deepstack_visual_indexes: a list of layers is not supported",
        ),
        (
            deep,
            vision,
            "deepstack_visual_indexes",
            json!([0, 3]),
            "vision_config.deepstack_visual_indexes: expected blocks from 0 to 2, each once, found 3",
        ),
        (
            deep,
            vision,
            "deepstack_visual_indexes",
            json!([-1]),
            "vision_config.deepstack_visual_indexes: expected blocks from 0 to 2, each once, found -1",
        ),
        (
            deep,
            vision,
            "deepstack_visual_indexes",
            json!([1, 1]),
            "vision_config.deepstack_visual_indexes: expected blocks from 0 to 2, each once, found 1",
        ),
        (
            deep,
            vision,
            "deepstack_visual_indexes",
            json!(2),
            "vision_config.deepstack_visual_indexes: expected a list",
        ),
        (
            windows,
            vision,
            "window_size",
            json!(0),
            "vision_config.window_size: expected a multiple of 8 (patch_size * spatial_merge_size), found 0",
        ),
        (
            windows,
            vision,
            "window_size",
            json!(20),
            "vision_config.window_size: expected a multiple of 8 (patch_size * spatial_merge_size), found 20",
        ),
        (
            windows,
            vision,
            "fullatt_block_indexes",
            json!([3]),
            "vision_config.fullatt_block_indexes: expected blocks from 0 to 2, each once, found 3",
        ),
        (
            windows,
            vision,
            "hidden_act",
            json!("gelu_pytorch_tanh"),
            "vision_config.hidden_act: gelu_pytorch_tanh is not supported",
        ),
        (
            windows,
            vision,
            "tokens_per_second",
            json!(0),
            "vision_config.tokens_per_second: expected a number from 1 to 1000",
        ),
        (
            gemma,
            vision,
            "head_dim",
            json!(6),
            "vision_config.head_dim: expected a multiple of 4",
        ),
        (
            gemma,
            vision,
            "num_key_value_heads",
            json!(3),
            "vision_config.num_key_value_heads",
        ),
        (
            gemma,
            vision,
            "rms_norm_eps",
            json!(0),
            "vision_config.rms_norm_eps: expected a positive",
        ),
        (
            gemma,
            audio,
            "attention_chunk_size",
            json!(0),
            "audio_config.attention_chunk_size",
        ),
        (
            gemma,
            audio,
            "attention_context_left",
            json!(1 << 30),
            "audio_config.attention_context_left",
        ),
        (
            gemma,
            audio,
            "num_attention_heads",
            json!(5),
            "audio_config.hidden_size",
        ),
        (
            unified,
            vision,
            "model_patch_size",
            json!(1 << 20),
            "vision_config.model_patch_size",
        ),
        (
            unified,
            vision,
            "output_proj_dims",
            json!(8),
            "vision_config.output_proj_dims",
        ),
        (
            unified,
            audio,
            "output_proj_dims",
            json!(0),
            "audio_config.output_proj_dims",
        ),
    ] {
        let found = error(name, section, field, value);
        assert!(
            found.starts_with(&format!("/config.json: {expected}")),
            "{found}"
        );
    }
    // A merger that is not there, and one that nothing takes.
    let found = error(deep, vision, "deepstack_visual_indexes", json!([0, 1, 2]));
    let name = "vision_tower.deepstack_merger_list.2.linear_fc1.bias";
    assert!(found.contains(name) && !found.contains('\n'), "{found}");
    let found = error(deep, vision, "deepstack_visual_indexes", json!([0]));
    assert!(found.contains("deepstack_merger_list.1."), "{found}");
    // Sizes that the tensors do not have.
    let found = error(qwen, vision, "hidden_size", json!(64));
    let name = "vision_tower.patch_embed.proj.weight: expected shape [64, 3, 2, 4, 4]";
    assert!(found.contains(name), "{found}");
}

#[test]
fn what_is_wrong_with_a_language_model_that_sees_is_named() {
    let error = |name: &str, change: &dyn Fn(&mut Value)| {
        let dir = changed(name, |config| change(config));
        let files = ModelFiles::open(dir.path()).unwrap();
        let error = load(&files, None, |_| {}).unwrap_err().to_string();
        error.replace(&dir.path().display().to_string(), "")
    };
    let deep = "deepstack_visual_indexes";
    let found = error("media-qwen3_vl", &|config| {
        config["vision_config"][deep] = json!([0, 1, 2, 3]);
    });
    let expected = "/config.json: vision_config.deepstack_visual_indexes: \
                    expected at most 3, as the language model has layers, found 4";
    assert_eq!(found, expected);
    let found = error("media-qwen3_vl", &|config| {
        config["vision_config"][deep] = json!({});
    });
    let expected = "/config.json: vision_config.deepstack_visual_indexes: \
                    expected a list, found an object";
    assert_eq!(found, expected);
    for (section, shown) in [
        (json!([4, 4, 4]), "[4, 4, 4]"),
        (json!([-8, 8, 8]), "[-8, 8, 8]"),
    ] {
        let found = error("media-qwen2_5_vl", &|config| {
            config["rope_scaling"]["mrope_section"] = section.clone();
        });
        let expected = format!(
            "/config.json: rope_scaling.mrope_section: \
             expected three counts that add up to the 8 pairs of a head, found {shown}"
        );
        assert_eq!(found, expected);
    }
}

#[test]
fn features_of_another_model_are_refused() {
    let [deep, flat] = ["media-qwen3_vl", "media-qwen3_5"].map(Golden::open);
    for (model, towers, expected) in [
        (&deep, &flat, "feature: expected 96 numbers, found 32"),
        (&flat, &deep, "feature: expected 32 numbers, found 96"),
    ] {
        let image = towers.encode("a");
        let ids = vec![model.tokens.image.unwrap(); image.runs[0].tokens];
        let prompt = MediaPrompt::new(ids, &[image], model.tokens).unwrap();
        let mut cache = model.loaded.model.new_cache().unwrap();
        let count = prompt.ids().len();
        let found = prompt.forward(&*model.loaded.model, &mut cache, 0..count);
        assert_eq!(found.unwrap_err().to_string(), expected);
    }
}

#[test]
fn a_conversion_keeps_the_towers() {
    for (name, mark) in [
        ("media-qwen3_5-hf", "model.visual.blocks.0.attn.qkv"),
        (
            "media-qwen3_vl_moe",
            "model.visual.deepstack_merger_list.0.linear_fc1",
        ),
        ("media-qwen2_5_vl", "visual.merger.mlp.0"),
        (
            "media-gemma4-small",
            "model.vision_tower.encoder.layers.0.self_attn.q_proj.linear",
        ),
        ("media-gemma4-unified", "vision_embedder.patch_ln1"),
    ] {
        let files = ModelFiles::open(data().join(name)).unwrap();
        let dir = tempfile::tempdir().unwrap();
        for bits in [None, Some(4)] {
            let out = dir.path().join(format!("{bits:?}"));
            let quantize = bits.map(|bits| {
                let settings = LayoutSettings {
                    bits: Some(bits),
                    group_size: Some(32),
                    mode: None,
                };
                Quantize::new(settings, None).unwrap()
            });
            let options = ConvertOptions::default().with_quantize(quantize);
            convert(&files, &out, &options, |_| true).unwrap();
            let after = ModelFiles::open(&out).unwrap();
            assert_eq!(media_kinds(&after).unwrap(), media_kinds(&files).unwrap());
            let tensors = after.tensors().unwrap();
            assert!(tensors.contains_key(&format!("{mark}.weight")), "{name}");
            // Towers stay dense; what brings their output into the model does not.
            assert!(!tensors.contains_key(&format!("{mark}.scales")), "{name}");
            let towers = Towers::load(&after, None).unwrap().unwrap();
            if bits.is_none() || name.contains("qwen") {
                let golden = Golden {
                    towers,
                    ..Golden::open(name)
                };
                let image = golden.encode("a");
                golden.check("converted", &image.features, &golden.tensor("a.features"));
            }
        }
    }
}

#[test]
fn wrong_counts_are_errors() {
    let golden = Golden::open("media-qwen3_5");
    let image = golden.encode("a");
    let id = golden.tokens.image.unwrap();
    let ids = vec![id; image.runs[0].tokens - 1];
    let error = MediaPrompt::new(ids, &[image], golden.tokens).unwrap_err();
    assert_eq!(
        error.to_string(),
        "prompt: expected 6 tokens of the kind image in a row, found 5"
    );
    // Patches of another size.
    let input = QwenInput {
        patches: vec![0.0; 4 * 5],
        patch_len: 5,
        grid: [1, 2, 2],
        tokens: 1,
    };
    let error = golden.towers.qwen_image(&input).unwrap_err().to_string();
    assert!(error.contains("expected 96 values"), "{error}");
    let input = QwenInput {
        patches: vec![0.0; 96],
        patch_len: 96,
        grid: [1, 1 << 40, 2],
        tokens: 1,
    };
    assert!(golden.towers.qwen_image(&input).is_err());
}
