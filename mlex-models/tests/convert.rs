//! GGUF files to MLX directories: the same tensors, config, tokens and template; and what every
//! conversion has in common. `convert_mlx.rs` has what becomes of the tensors.
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};

use common::{Copy, data, message};
use mlex_core::io::{SafetensorsFile, StoredDtype, TensorSpec, write_safetensors_in_order};
use mlex_core::{Array, Dtype};
use mlex_models::text::ChatRequest;
use mlex_models::{
    ConvertOptions, ErrorKind, Input, LayoutSettings, LoadedModel, ModelFiles, Quantize, Recipe,
    convert, load,
};
use serde_json::{Value, json};

fn gguf(name: &str) -> ModelFiles {
    ModelFiles::open(data("gguf").join(format!("{name}.gguf"))).unwrap()
}

/// A converted file of `tests/data/gguf`, in a folder of its own.
struct Converted {
    parent: tempfile::TempDir,
    files: ModelFiles,
}

impl Converted {
    fn of(name: &str, options: ConvertOptions) -> Self {
        let parent = tempfile::tempdir().unwrap();
        let out = parent.path().join("out");
        convert(&gguf(name), &out, &options, |_| true).unwrap();
        let files = ModelFiles::open(out).unwrap();
        Self { parent, files }
    }

    fn json(&self, name: &str) -> Value {
        let text = std::fs::read(self.files.path().join(name)).unwrap();
        assert_eq!(text.last(), Some(&b'\n'), "{name} ends with a line break");
        serde_json::from_slice(&text).unwrap()
    }

    fn tensors(&self) -> SafetensorsFile {
        SafetensorsFile::open(self.files.path().join("model.safetensors")).unwrap()
    }
}

/// What is in a folder, sorted.
fn entries(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

fn logits(files: &ModelFiles, dtype: Option<Dtype>) -> Vec<f32> {
    let LoadedModel { model, .. } = load(files, dtype, |_| {}).unwrap();
    let tokens: Vec<i32> = (3..40).collect();
    let tokens = Array::from_slice(&tokens, &[1, tokens.len() as i32]).unwrap();
    let mut cache = model.new_cache().unwrap();
    let hidden = model.forward(Input::Tokens(&tokens), &mut cache).unwrap();
    let logits = model.logits(&hidden).unwrap();
    logits.as_type(Dtype::Float32).unwrap().to_vec().unwrap()
}

const NAMES: [&str; 7] = [
    "llama",
    "llama-bias",
    "llama-blocks",
    "llama-rope-freqs",
    "llama-tied",
    "qwen2",
    "qwen3",
];

#[test]
fn the_directory_gives_the_same_logits_text_and_prompts() {
    for name in NAMES {
        let (before, converted) = (gguf(name), Converted::of(name, ConvertOptions::default()));
        let after = &converted.files;
        assert_eq!(entries(converted.parent.path()), ["out"], "{name}");
        assert_eq!(
            entries(after.path()),
            [
                "README.md",
                "chat_template.jinja",
                "config.json",
                "model.safetensors",
                "tokenizer.json",
                "tokenizer_config.json"
            ],
            "{name}"
        );
        // Bit for bit: the tensors are the same, and so is what is computed.
        assert_eq!(logits(&before, None), logits(after, None), "{name}");

        let (old, new) = (before.tokenizer().unwrap(), after.tokenizer().unwrap());
        for text in ["the rain in thé end.\nis it?", "<s>a<|end|> b"] {
            let ids = old.encode(text, true).unwrap();
            assert_eq!(new.encode(text, true).unwrap(), ids, "{name}");
            assert_eq!(new.decode(&ids, false).unwrap(), text, "{name}");
        }
        assert_eq!(
            (new.bos_id(), new.pad_id()),
            (old.bos_id(), old.pad_id()),
            "{name}"
        );
        // What ends a text, from config and tokenizer together.
        assert_eq!(
            after.config().unwrap().eos_token_ids().unwrap(),
            [2, 63],
            "{name}"
        );

        let messages = [json!({"role": "user", "content": "on and on"})];
        let request = ChatRequest {
            messages: &messages,
            add_generation_prompt: true,
            ..ChatRequest::default()
        };
        let prompt = |files: &ModelFiles| {
            files
                .chat_template()
                .unwrap()
                .unwrap()
                .render(&request)
                .unwrap()
        };
        assert_eq!(prompt(after), "<s>user on and on<|end|><s>", "{name}");
        assert_eq!(prompt(&before), prompt(after), "{name}");
    }
}

#[test]
fn the_config_is_what_the_metadata_say() {
    for name in NAMES {
        let converted = Converted::of(name, ConvertOptions::default());
        let mut config = gguf(name).config().unwrap().json().clone();
        if let Some(section) = config.get("quantization").cloned() {
            config.insert("quantization_config".into(), section);
        }
        assert_eq!(
            converted.json("config.json"),
            Value::Object(config),
            "{name}"
        );
    }
    let tensors = Converted::of("llama-blocks", ConvertOptions::default()).tensors();
    assert_eq!(
        tensors.metadata().get("format").map(String::as_str),
        Some("mlx")
    );
    let dtype = |name: &str| tensors.info(name).unwrap().dtype;
    assert_eq!(dtype("model.embed_tokens.weight"), StoredDtype::U32);
    assert_eq!(dtype("model.embed_tokens.scales"), StoredDtype::F32);
    assert_eq!(
        dtype("model.layers.0.mlp.up_proj.weight"),
        StoredDtype::BF16
    );
    assert_eq!(
        dtype("model.layers.0.mlp.down_proj.weight"),
        StoredDtype::F16
    );
    assert_eq!(dtype("model.norm.weight"), StoredDtype::F32);
}

#[test]
fn floats_become_the_dtype_that_is_asked_for() {
    for (dtype, stored) in [
        (Dtype::Float16, StoredDtype::F16),
        (Dtype::Bfloat16, StoredDtype::BF16),
        (Dtype::Float32, StoredDtype::F32),
    ] {
        let options = ConvertOptions::default().with_dtype(Some(dtype));
        let converted = Converted::of("llama-blocks", options);
        let tensors = converted.tensors();
        for name in tensors.names() {
            let found = tensors.info(name).unwrap().dtype;
            let packed = found == StoredDtype::U32 && name.ends_with(".weight");
            assert!(packed || found == stored, "{name}: {found}");
        }
        // As casting while the model is loaded does.
        assert_eq!(
            logits(&converted.files, None),
            logits(&gguf("llama-blocks"), Some(dtype)),
            "{dtype}"
        );
    }
}

#[test]
fn progress_counts_up_to_all_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let mut seen = Vec::new();
    let out = dir.path().join("out");
    convert(
        &gguf("llama"),
        &out,
        &ConvertOptions::default(),
        |progress| {
            seen.push(progress);
            true
        },
    )
    .unwrap();
    let last = *seen.last().unwrap();
    assert_eq!(last.loaded, last.total);
    assert!(seen.is_sorted_by_key(|progress| progress.loaded));
    let tensors = SafetensorsFile::open(out.join("model.safetensors")).unwrap();
    let bytes = tensors
        .names()
        .map(|name| tensors.bytes(name).unwrap().len() as u64);
    assert_eq!(last.total, bytes.sum::<u64>());
    assert!(seen.len() >= tensors.names().len());
}

/// The message of a conversion that is refused, and which leaves `parent` as it was.
fn refused(files: &ModelFiles, out: &Path, options: ConvertOptions, parent: &Path) -> String {
    let before = entries(parent);
    let error = convert(files, out, &options, |_| true).unwrap_err();
    assert_eq!(entries(parent), before);
    message(&error, parent)
}

#[test]
fn nothing_that_exists_is_overwritten() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, "mine").unwrap();
    let folder = dir.path().join("folder");
    std::fs::create_dir(&folder).unwrap();
    let source = gguf("llama");
    for (out, name) in [(&file, "file"), (&folder, "folder")] {
        assert_eq!(
            refused(&source, out, ConvertOptions::default(), dir.path()),
            format!(
                "M/{name}: output directory: expected one that does not exist, found it exists"
            )
        );
    }
    assert_eq!(std::fs::read(&file).unwrap(), b"mine");
    let below = refused(
        &source,
        &file.join("out"),
        ConvertOptions::default(),
        dir.path(),
    );
    assert!(below.starts_with("M/file/out"), "{below}");
}

#[test]
fn what_cannot_be_converted_is_refused_before_anything_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let options = ConvertOptions::default().with_dtype(Some(Dtype::Uint8));
    assert_eq!(
        refused(&gguf("llama"), &out, options, dir.path()),
        "dtype: expected a floating-point type, found uint8"
    );
    // A file that is broken in its last tensor.
    let mut bytes = std::fs::read(gguf("llama-tied").path()).unwrap();
    let name = b"blk.1.attn_v.weight";
    let at = bytes
        .windows(name.len())
        .position(|window| window == name)
        .unwrap()
        + name.len()
        + 20;
    bytes[at..at + 4].copy_from_slice(&77u32.to_le_bytes());
    let broken: PathBuf = dir.path().join("broken.gguf");
    std::fs::write(&broken, bytes).unwrap();
    assert_eq!(
        refused(
            &ModelFiles::open(&broken).unwrap(),
            &out,
            ConvertOptions::default(),
            dir.path()
        ),
        "M/broken.gguf: tensor \"blk.1.attn_v.weight\": type: expected a known ggml type, found 77"
    );
}

#[test]
fn a_cancelled_conversion_leaves_nothing() {
    for stop_after in [1, 5] {
        let dir = tempfile::tempdir().unwrap();
        let mut count = 0;
        let out = dir.path().join("out");
        let error = convert(&gguf("llama"), &out, &ConvertOptions::default(), |_| {
            count += 1;
            count < stop_after
        })
        .unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Cancelled), "{error}");
        assert_eq!(count, stop_after);
        assert!(entries(dir.path()).is_empty());
    }
}

/// A converted copy of a checkpoint, in a folder of its own.
fn converted(model: &Copy, options: &ConvertOptions) -> (tempfile::TempDir, ModelFiles) {
    let parent = tempfile::tempdir().unwrap();
    let out = parent.path().join("out");
    let source = ModelFiles::open(model.path()).unwrap();
    convert(&source, &out, options, |_| true).unwrap();
    (parent, ModelFiles::open(out).unwrap())
}

fn quantize(bits: i32, group_size: i32) -> Option<Quantize> {
    let settings = LayoutSettings {
        bits: Some(bits),
        group_size: Some(group_size),
        mode: None,
    };
    Some(Quantize::new(settings, None).unwrap())
}

#[test]
fn what_lies_beside_the_weights_comes_along() {
    let model = Copy::of("llama-bf16").with_tokenizer(130);
    model
        .write("tokenizer_config.json", "{\"a\": 1}")
        .write(
            "generation_config.json",
            "{\"eos_token_id\": [2, 129], \"temperature\": 0.7}",
        )
        .write("chat_template.jinja", "{{ messages }}")
        .write("LICENSE", "as is")
        .write("pytorch_model.bin", "old")
        .write("README.md", "---\nlicense: mit\ntags: [a]\n---\n# Model\n");
    model.edit("config.json", |config| {
        config.insert("_name_or_path".into(), json!("/home/me"));
        config.insert("torch_dtype".into(), json!("bfloat16"));
    });
    let options = ConvertOptions::default()
        .with_dtype(Some(Dtype::Float16))
        .with_quantize(quantize(4, 32))
        .with_base_model(Some("org/model".into()));
    let (_parent, after) = converted(&model, &options);
    assert_eq!(
        entries(after.path()),
        [
            "LICENSE",
            "README.md",
            "chat_template.jinja",
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json"
        ]
    );
    for name in [
        "LICENSE",
        "chat_template.jinja",
        "generation_config.json",
        "tokenizer.json",
    ] {
        let copied = std::fs::read(after.path().join(name)).unwrap();
        assert_eq!(copied, model.read(name), "{name}");
    }
    let config: Value =
        serde_json::from_slice(&std::fs::read(after.path().join("config.json")).unwrap()).unwrap();
    assert_eq!(config["_name_or_path"], Value::Null);
    assert_eq!(config["torch_dtype"], "float16");
    let section = json!({"group_size": 32, "bits": 4, "mode": "affine"});
    assert_eq!(config["quantization"], section);
    assert_eq!(config["quantization_config"], section);
    assert_eq!(config["eos_token_id"], json!([2, 129]));
    let card = std::fs::read_to_string(after.path().join("README.md")).unwrap();
    let front = "---\nlicense: mit\nlibrary_name: mlx\npipeline_tag: text-generation\n\
                 base_model: org/model\nbase_model_relation: quantized\ntags:\n- a\n- mlx\n---\n";
    assert!(card.starts_with(front), "{card}");
    assert!(card.contains("- 4-bit affine, group 32\n"), "{card}");
}

#[test]
fn large_models_come_in_shards_with_an_index() {
    let model = Copy::of("llama-f32");
    let options = ConvertOptions::default().with_quantize(quantize(4, 32));
    let (_whole, whole) = converted(&model, &options);
    let (_parent, parts) = converted(&model, &options.with_shard_bytes(Some(25_000)));
    let names = entries(parts.path());
    let shards: Vec<&String> = names
        .iter()
        .filter(|n| n.ends_with(".safetensors"))
        .collect();
    assert!(shards.len() > 2, "{names:?}");
    let index: Value = serde_json::from_slice(
        &std::fs::read(parts.path().join("model.safetensors.index.json")).unwrap(),
    )
    .unwrap();
    let (mut total, mut count) = (0, 0);
    for shard in &shards {
        let file = SafetensorsFile::open(parts.path().join(shard)).unwrap();
        let bytes = |name| file.bytes(name).unwrap().len() as u64;
        let in_shard: u64 = file.names().map(bytes).sum();
        assert!(in_shard <= 25_000, "{shard}");
        total += in_shard;
        count += file.names().len();
        for name in file.names() {
            assert_eq!(index["weight_map"][name], json!(shard), "{name}");
            // Each is aligned for its type.
            let info = file.info(name).unwrap();
            assert_eq!(info.range.start % info.dtype.size_in_bytes(), 0, "{name}");
        }
    }
    assert_eq!(index["metadata"]["total_size"], total);
    // 2 layers of 130 x 64 embedding and head, and so on: as `inspect` counts them.
    let parameters = 2 * 130 * 64 + 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 80 * 64 + 2 * 64) + 64;
    assert_eq!(index["metadata"]["total_parameters"], parameters);
    assert_eq!(index["weight_map"].as_object().unwrap().len(), count);
    assert_eq!(logits(&whole, None), logits(&parts, None));
}

/// The message of a conversion that is refused, and leaves nothing behind.
fn refuses(name: &str, options: ConvertOptions) -> String {
    let dir = tempfile::tempdir().unwrap();
    let source = ModelFiles::open(data(name)).unwrap();
    refused(&source, &dir.path().join("out"), options, dir.path())
}

#[test]
fn options_that_do_not_fit_the_model() {
    let nothing =
        "quantize: expected dense layers whose columns the group size divides, found none";
    let four = || ConvertOptions::default().with_quantize(quantize(4, 32));
    assert_eq!(refuses("llama-4bit", four()), nothing);
    assert_eq!(
        refuses(
            "llama-f32",
            ConvertOptions::default().with_quantize(quantize(4, 128))
        ),
        nothing
    );
    let with = |recipe: Value| {
        let recipe = Recipe::from_json(recipe.as_object().unwrap()).unwrap();
        let quantize = Quantize::new(LayoutSettings::default(), Some(recipe)).unwrap();
        ConvertOptions::default().with_quantize(Some(quantize))
    };
    assert_eq!(
        refuses(
            "llama-f32",
            with(json!({"lm_head": false, "*.down_project": {"bits": 8}}))
        ),
        "recipe[\"*.down_project\"]: expected a layer that it matches, and no earlier pattern \
         does, found none"
    );
    assert_eq!(
        refuses("llama-f32", with(json!({"*": 4, "lm_head": 8}))),
        "recipe[\"lm_head\"]: expected a layer that it matches, and no earlier pattern does, \
         found none"
    );
    assert_eq!(
        refuses(
            "llama-f32",
            with(json!({"*.down_proj": {"group_size": 128}}))
        ),
        "recipe[\"*.down_proj\"]: expected a group size that divides the 80 columns of \
         model.layers.0.mlp.down_proj, found 128"
    );
    assert_eq!(
        refuses("llama-f32", with(json!({"*.down_proj": 7}))),
        "recipe[\"*.down_proj\"].bits: expected 2, 3, 4, 5, 6 or 8 for affine, found 7"
    );
}

#[test]
fn a_recipe_of_patterns_tells_layers_apart() {
    let recipe = json!({
        "bits": 4,
        "group_size": 32,
        "model.embed_tokens": {"bits": 8},
        "*.0.mlp.*": false,
        "*.v_proj": 6,
        "*.o_proj": {"mode": "mxfp8"},
        "lm_head": true,
    });
    let recipe = Recipe::from_json(recipe.as_object().unwrap()).unwrap();
    let quantize = Quantize::new(LayoutSettings::default(), Some(recipe)).unwrap();
    let options = ConvertOptions::default().with_quantize(Some(quantize));
    let (_parent, after) = converted(&Copy::of("llama-f32"), &options);
    let quantization = after.config().unwrap().quantization().unwrap();
    let tensors = after.tensors().unwrap();
    let stored = |path: &str| {
        let scales = tensors.contains_key(&format!("{path}.scales"));
        let layout = quantization.layout(path).filter(|_| scales);
        layout.map(|layout| layout.to_string())
    };
    for (path, expected) in [
        ("model.embed_tokens", Some("8-bit affine, group 32")),
        ("model.layers.0.mlp.up_proj", None),
        ("model.layers.1.mlp.up_proj", Some("4-bit affine, group 32")),
        // 80 columns have no groups of 32.
        ("model.layers.1.mlp.down_proj", None),
        (
            "model.layers.0.self_attn.v_proj",
            Some("6-bit affine, group 32"),
        ),
        (
            "model.layers.1.self_attn.o_proj",
            Some("8-bit mxfp8, group 32"),
        ),
        ("lm_head", Some("4-bit affine, group 32")),
    ] {
        assert_eq!(stored(path).as_deref(), expected, "{path}");
    }
    load(&after, None, |_| {}).unwrap();
}

#[test]
fn eight_bit_floats_become_dense() {
    let model = Copy::of("fp8-block");
    let (_parent, after) = converted(&model, &ConvertOptions::default());
    let config = after.config().unwrap();
    assert_eq!(config.json().get("quantization_config"), None);
    let before = ModelFiles::open(model.path()).unwrap();
    assert_eq!(logits(&before, None), logits(&after, None));
    let tensors = after.tensors().unwrap();
    assert!(tensors.keys().all(|name| !name.contains("scale")));
}

#[test]
fn tensors_that_the_model_does_not_use_are_left_out() {
    let model = Copy::of("llama-extra-keys");
    let parent = tempfile::tempdir().unwrap();
    let out = parent.path().join("out");
    let source = ModelFiles::open(model.path()).unwrap();
    let converted = convert(&source, &out, &ConvertOptions::default(), |_| true).unwrap();
    let mut left_out = converted.left_out;
    left_out.sort();
    assert_eq!(
        left_out,
        [
            "lm_head.weight",
            "model.layers.0.self_attn.rotary_emb.inv_freq",
            "model.layers.1.self_attn.rotary_emb.inv_freq",
        ]
    );
    let names: Vec<String> = source.tensors().unwrap().into_keys().collect();
    let after = ModelFiles::open(out).unwrap().tensors().unwrap();
    assert_eq!(after.len(), names.len() - 3);
}

/// Expected: mlx-lm's `sanitize` of qwen3_5, which drops towers and heads for speculative decoding.
#[test]
fn of_a_model_that_sees_the_language_model_is_converted() {
    let model = Copy::of("qwen3_5-hf");
    let source = ModelFiles::open(model.path()).unwrap();
    let config = source.config().unwrap();
    assert!(config.json().contains_key("vision_config"));
    let (_parent, after) = converted(&model, &ConvertOptions::default());
    let config = after.config().unwrap();
    assert!(!config.json().contains_key("vision_config"));
    assert!(config.json().contains_key("text_config"));
    let tensors = after.tensors().unwrap();
    let known = ["language_model.model.", "language_model.lm_head."];
    for name in tensors.keys() {
        assert!(known.iter().any(|start| name.starts_with(start)), "{name}");
    }
    assert_eq!(logits(&source, None), logits(&after, None));
}

/// A copy of a mixture of experts whose experts are the numbers of these codes, halved: dense, or
/// as 8-bit floats with one scale each.
fn with_experts(eight_bits: bool) -> Copy {
    let model = Copy::of("qwen3_moe-hf");
    let source = SafetensorsFile::open(model.path().join("model.safetensors")).unwrap();
    let mut tensors = BTreeMap::new();
    for (index, name) in source.names().enumerate() {
        let info = source.info(name).unwrap();
        let (shape, bytes) = (info.shape.clone(), source.bytes(name).unwrap().to_vec());
        if !name.contains(".experts.") {
            tensors.insert(name.to_owned(), (info.dtype, shape, bytes));
            continue;
        }
        // Numbers below 2 of either sign.
        let code = |at: usize| ((at * 37 + index * 11) as u8) & 0xbf;
        let codes: Vec<u8> = (0..shape.iter().product()).map(code).collect();
        if eight_bits {
            let scale = 0.5f32.to_le_bytes().to_vec();
            let scale = (Dtype::Float32.into(), vec![1, 1], scale);
            tensors.insert(format!("{name}_scale_inv"), scale);
            tensors.insert(name.to_owned(), (StoredDtype::F8E4M3, shape, codes));
        } else {
            let dims: Vec<i32> = shape.iter().map(|&dim| dim as i32).collect();
            let values = Array::from_bytes(&codes, &dims, Dtype::Uint8).unwrap();
            let values = values.from_fp8(Dtype::Bfloat16).unwrap();
            let bytes = values.multiply(0.5).unwrap().as_bytes().unwrap().to_vec();
            tensors.insert(name.to_owned(), (Dtype::Bfloat16.into(), shape, bytes));
        }
    }
    let specs: Vec<TensorSpec> = tensors
        .iter()
        .map(|(name, (dtype, shape, _))| TensorSpec {
            name: name.clone(),
            dtype: *dtype,
            shape: shape.clone(),
        })
        .collect();
    let file = model.path().join("model.safetensors");
    write_safetensors_in_order(file, &specs, &BTreeMap::new(), |spec, sink| {
        Ok(sink.write_all(&tensors[&spec.name].2)?)
    })
    .unwrap();
    if eight_bits {
        model.edit("config.json", |config| {
            let section = json!({"quant_method": "fp8", "weight_block_size": [128, 128]});
            config.insert("quantization_config".into(), section);
        });
    }
    model
}

/// As Qwen and DeepSeek have them. Halving loses nothing, so both are the same numbers.
#[test]
fn experts_of_eight_bit_floats_are_stacked() {
    let options = ConvertOptions::default();
    let [(_dense, dense), (_packed, packed)] =
        [false, true].map(|eight_bits| converted(&with_experts(eight_bits), &options));
    let file =
        |files: &ModelFiles| SafetensorsFile::open(files.path().join("model.safetensors")).unwrap();
    let (dense, packed) = (file(&dense), file(&packed));
    assert!(dense.names().eq(packed.names()));
    assert!(
        dense
            .names()
            .any(|name| name.contains("switch_mlp.up_proj"))
    );
    assert!(dense.names().all(|name| !name.contains("experts.0")));
    for name in dense.names() {
        assert_eq!(
            dense.bytes(name).unwrap(),
            packed.bytes(name).unwrap(),
            "{name}"
        );
    }
}
