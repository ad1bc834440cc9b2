//! `mlex convert` on a checkpoint that is many times larger than one of its layers: what memory it
//! takes, and what is left where it is killed.
#![cfg(target_os = "linux")]
// Helpers are not in a test function, which clippy would let unwrap.
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use common::{fails, mlex, small};
use mlex_core::Dtype;
use mlex_core::io::{TensorSink, TensorSpec, write_safetensors_in_order};
use serde_json::json;

const MIB: u64 = 1 << 20;
const HIDDEN: usize = 1024;
const INNER: usize = 2816;
const LAYERS: usize = 12;
const VOCABULARY: usize = 4096;

/// The tensors of a layer of the large checkpoint.
const LAYER: [(&str, &[usize]); 9] = [
    ("input_layernorm", &[HIDDEN]),
    ("post_attention_layernorm", &[HIDDEN]),
    ("self_attn.q_proj", &[HIDDEN, HIDDEN]),
    ("self_attn.k_proj", &[HIDDEN / 4, HIDDEN]),
    ("self_attn.v_proj", &[HIDDEN / 4, HIDDEN]),
    ("self_attn.o_proj", &[HIDDEN, HIDDEN]),
    ("mlp.gate_proj", &[INNER, HIDDEN]),
    ("mlp.up_proj", &[INNER, HIDDEN]),
    ("mlp.down_proj", &[HIDDEN, INNER]),
];

/// A llama of some 290 MB in bfloat16, 22 MiB a layer, and the bytes of a layer.
fn large(dir: &Path) -> u64 {
    let spec = |name: String, shape: &[usize]| TensorSpec {
        name: format!("model.{name}.weight"),
        dtype: Dtype::Bfloat16.into(),
        shape: shape.to_vec(),
    };
    let layer =
        |layer: usize| LAYER.map(|(name, shape)| spec(format!("layers.{layer}.{name}"), shape));
    let bytes = |spec: &TensorSpec| spec.byte_len().unwrap();
    let ends = [
        spec("embed_tokens".to_owned(), &[VOCABULARY, HIDDEN]),
        spec("norm".to_owned(), &[HIDDEN]),
    ];
    let specs: Vec<TensorSpec> = (0..LAYERS).flat_map(layer).chain(ends).collect();
    // Numbers of either sign from 2^-7 to 2^-5: an exponent of 121 or 122 and random bits.
    let mut state = 1_u64;
    let numbers: Vec<u8> = std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let number = (state as u16 & 0x80ff) + (121 << 7);
        number.to_le_bytes()
    })
    .take(1 << 19)
    .flatten()
    .collect();
    let write = |spec: &TensorSpec, sink: &mut TensorSink<'_>| {
        let mut left = spec.byte_len()? as usize;
        while left > 0 {
            let piece = left.min(numbers.len());
            sink.write_all(&numbers[..piece])?;
            left -= piece;
        }
        Ok(())
    };
    let file = dir.join("model.safetensors");
    write_safetensors_in_order(file, &specs, &BTreeMap::new(), write).unwrap();
    let config = json!({
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": true,
    });
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
    layer(0).iter().map(bytes).sum()
}

fn convert(model: &Path, out: &Path, flags: &[&str]) -> Command {
    let mut command = mlex(["convert", "--model"]);
    command.arg(model).arg("--out").arg(out).args(flags);
    command.stdout(Stdio::null()).stderr(Stdio::null());
    command
}

/// The most memory that a child had so far, mapped files included.
fn high_water(child: &Child) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{}/status", child.id())).ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kilobytes: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kilobytes * 1024)
}

/// The most memory that a conversion has at a time.
fn peak(model: &Path, out: &Path, flags: &[&str]) -> u64 {
    let mut child = convert(model, out, flags).spawn().unwrap();
    let mut peak = 0;
    let status = loop {
        peak = high_water(&child).unwrap_or(0).max(peak);
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        sleep(Duration::from_millis(1));
    };
    assert!(status.success(), "{flags:?}: {status}");
    peak
}

/// What stands under a directory of a conversion that is not finished.
fn partial(parent: &Path) -> Option<PathBuf> {
    let mut entries = fs::read_dir(parent)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    entries.find(|path| path.to_string_lossy().contains("made.partial-"))
}

#[test]
fn memory_stays_near_one_layer_and_nothing_half_written_looks_whole() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("large");
    fs::create_dir(&model).unwrap();
    let layer = large(&model);
    let total = fs::metadata(model.join("model.safetensors")).unwrap().len();
    assert!(total > 12 * layer);

    // Killed while it writes.
    let out = dir.path().join("made");
    let mut child = convert(&model, &out, &["--quantize"]).spawn().unwrap();
    let left = loop {
        if let Some(partial) = partial(dir.path()) {
            break partial;
        }
        assert_eq!(child.try_wait().unwrap(), None, "it was faster");
        sleep(Duration::from_millis(1));
    };
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(!out.exists());
    let (error, _) = fails(mlex(["inspect", "--model"]).arg(&left));
    assert!(error.contains("config.json"), "{error}");
    fs::remove_dir_all(left).unwrap();

    // What the program takes without weights to speak of.
    let floor = peak(
        &small("llama-bf16"),
        &dir.path().join("small"),
        &["--dequantize"],
    );
    for flags in [
        &["--dtype", "float16"][..],
        &["--quantize"],
        &["--mode", "nvfp4"],
        &["--bits", "8", "--dtype", "float32"],
    ] {
        let peak = peak(&model, &out, flags);
        println!(
            "{flags:?}: {} MiB, {} MiB without weights; a layer has {} MiB, all {} MiB",
            peak / MIB,
            floor / MIB,
            layer / MIB,
            total / MIB
        );
        let more = peak.saturating_sub(floor);
        assert!(more < layer * 3 / 2, "{flags:?}: {} MiB", more / MIB);
        fs::remove_dir_all(&out).unwrap();
    }
}
