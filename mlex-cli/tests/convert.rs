//! `mlex convert` on small checkpoints. What it writes is tested in mlex-models.
// Helpers are not in a test function, which clippy would let unwrap.
#![allow(clippy::unwrap_used)]

mod common;

use std::path::Path;
use std::process::Command;

use common::{copy_of, document, fails, mlex, small, stderr, succeeds};
use serde_json::{Value, json};

fn convert(model: &Path, out: &Path, flags: &[&str]) -> Command {
    let mut command = mlex(["convert", "--model"]);
    command.arg(model).arg("--out").arg(out).args(flags);
    command
}

fn inspect(model: &Path) -> Value {
    document(mlex(["inspect", "--json", "--model"]).arg(model))
}

/// How the model's layers are stored.
fn layouts(model: &Path) -> Vec<Value> {
    let report = inspect(model);
    let layouts = report["layouts"].as_array().unwrap().iter();
    layouts
        .map(|layout| {
            json!([
                layout["dtype"],
                layout["mode"],
                layout["bits"],
                layout["group_size"]
            ])
        })
        .collect()
}

#[test]
fn flags_say_how_layers_are_stored() {
    let dir = tempfile::tempdir().unwrap();
    let mut count = 0;
    let mut stored = |source: &Path, flags: &[&str]| {
        count += 1;
        let out = dir.path().join(count.to_string());
        let text = succeeds(&mut convert(source, &out, flags));
        assert!(
            text.contains(&format!("{}: 3 files, ", out.display())),
            "{text}"
        );
        assert!(text.ends_with(" bits per weight\n"), "{text}");
        (layouts(&out), out)
    };
    let dense = |dtype: &str| json!([dtype, null, null, null]);
    let packed = |mode: &str, bits: i32, group: i32| json!([null, mode, bits, group]);
    // 128 wide inside, so that every group size divides it.
    let (found, plain) = stored(&small("llama-4bit"), &["--dequantize"]);
    assert_eq!(found, [dense("float32")]);
    for (flags, expected) in [
        (&["--quantize"][..], packed("affine", 4, 64)),
        (&["--bits", "3"], packed("affine", 3, 64)),
        (&["-q", "--group-size", "32"], packed("affine", 4, 32)),
        (&["--mode", "mxfp4"], packed("mxfp4", 4, 32)),
        (&["--mode", "mxfp8"], packed("mxfp8", 8, 32)),
        (&["--mode", "nvfp4"], packed("nvfp4", 4, 16)),
    ] {
        let (found, _) = stored(&plain, flags);
        assert_eq!(found, [expected, dense("float32")], "{flags:?}");
    }
    let (found, _) = stored(&plain, &["--dtype", "bfloat16"]);
    assert_eq!(found, [dense("bfloat16")]);
    let (found, _) = stored(&plain, &["--recipe", "mixed_3_6", "--dtype", "float16"]);
    assert!(found.contains(&packed("affine", 3, 64)), "{found:?}");
    assert!(found.contains(&packed("affine", 6, 64)), "{found:?}");
    // Quantized anew in one go.
    let (found, _) = stored(&small("llama-4bit"), &["-d", "-q", "--bits", "8"]);
    assert_eq!(found, [packed("affine", 8, 64), dense("float32")]);
    // A recipe of one's own.
    let recipe = dir.path().join("recipe.json");
    std::fs::write(
        &recipe,
        "{\"bits\": 8, \"*.mlp.*\": {\"mode\": \"mxfp4\"}, \"lm_head\": false}",
    )
    .unwrap();
    let (found, _) = stored(&plain, &["--recipe", recipe.to_str().unwrap()]);
    assert!(found.contains(&packed("affine", 8, 64)), "{found:?}");
    assert!(found.contains(&packed("mxfp4", 4, 32)), "{found:?}");
}

#[test]
fn what_cannot_be_done_is_told_with_a_hint() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("made");
    let (error, hint) = fails(&mut convert(&small("llama-4bit"), &out, &["--quantize"]));
    assert!(
        error.starts_with("quantize: expected dense layers"),
        "{error}"
    );
    assert!(hint.contains("--dequantize"), "{hint}");
    let (error, hint) = fails(&mut convert(
        &small("llama-f32"),
        &out,
        &["--recipe", "mixed_9_9"],
    ));
    assert!(error.starts_with("mixed_9_9: No such file"), "{error}");
    assert!(hint.contains("mixed_2_6"), "{hint}");
    let recipe = dir.path().join("recipe.json");
    std::fs::write(&recipe, "{\"lm_head\": {\"bit\": 4}}").unwrap();
    let flags = ["--recipe", recipe.to_str().unwrap()];
    let (error, _) = fails(&mut convert(&small("llama-f32"), &out, &flags));
    let expected = "recipe[\"lm_head\"]: expected bits, group_size or mode, found \"bit\"";
    assert_eq!(error, format!("{}: {expected}", recipe.display()));
    assert!(!out.exists());
    let (error, hint) = fails(&mut convert(&small("llama-f32"), dir.path(), &[]));
    assert!(error.ends_with("it exists"), "{error}");
    assert!(hint.contains("another --out"), "{hint}");
}

#[test]
fn what_is_left_out_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let model = copy_of("llama-extra-keys");
    let output = convert(model.path(), &dir.path().join("made"), &[])
        .output()
        .unwrap();
    assert!(output.status.success());
    let note = "note: 3 tensors that the model does not use are left out (";
    assert!(stderr(&output).starts_with(note), "{}", stderr(&output));
}
