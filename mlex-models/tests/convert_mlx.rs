//! Conversions of the small checkpoints, tensor by tensor the same bits as mlx-lm's
//! (`tools/make_convert_golden.py` says what `convert.json` holds).
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::BTreeMap;

use common::data;
use mlex_core::io::SafetensorsFile;
use mlex_models::{ConvertOptions, LayoutSettings, ModelFiles, Quantize, Recipe, convert};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// The options of a row.
fn options(row: &Value) -> ConvertOptions {
    let number = |key: &str| row[key].as_i64().map(|number| number as i32);
    let text = |key: &str| row[key].as_str();
    let settings = LayoutSettings {
        bits: number("bits"),
        group_size: number("group_size"),
        mode: text("mode").map(|mode| mode.parse().unwrap()),
    };
    let recipe = text("recipe").map(|name| Recipe::named(name).unwrap());
    let quantizes = settings != LayoutSettings::default() || recipe.is_some();
    ConvertOptions::default()
        .with_dtype(text("dtype").map(|dtype| dtype.parse().unwrap()))
        .with_dequantize(row["dequantize"].as_bool().unwrap_or(false))
        .with_quantize(quantizes.then(|| Quantize::new(settings, recipe).unwrap()))
}

/// What `convert.json` says of each tensor of a file.
fn digests(file: &SafetensorsFile) -> BTreeMap<String, Value> {
    let digest = |name: &str| {
        let info = file.info(name).unwrap();
        let hash = Sha256::digest(file.bytes(name).unwrap());
        let hash: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
        json!([info.dtype.dtype().name(), info.shape, hash[..16]])
    };
    let names = file.names();
    names.map(|name| (name.to_owned(), digest(name))).collect()
}

#[test]
fn converted_tensors_are_those_of_mlx_lm() {
    let rows: Vec<Value> =
        serde_json::from_slice(&std::fs::read(data("convert.json")).unwrap()).unwrap();
    assert!(rows.len() >= 20);
    for row in rows {
        let source = row["source"].as_str().unwrap();
        let case = {
            let mut row = row.clone();
            row.as_object_mut()
                .unwrap()
                .retain(|key, _| key != "tensors" && key != "layouts");
            row.to_string()
        };
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("out");
        let files = ModelFiles::open(data(source)).unwrap();
        let converted = convert(&files, &out, &options(&row), |_| true).unwrap();

        let file = SafetensorsFile::open(out.join("model.safetensors")).unwrap();
        let found = digests(&file);
        let expected = row["tensors"].as_object().unwrap();
        assert!(found.keys().eq(expected.keys()), "{case}: other tensors");
        for (name, found) in &found {
            assert_eq!(found, &expected[name], "{case}: {name}");
        }
        let bytes = file
            .names()
            .map(|name| file.bytes(name).unwrap().len() as u64);
        assert_eq!(converted.bytes, bytes.sum::<u64>(), "{case}");

        let quantization = ModelFiles::open(&out)
            .unwrap()
            .config()
            .unwrap()
            .quantization()
            .unwrap();
        let layouts = row["layouts"].as_object().unwrap();
        for name in found.keys() {
            let Some(path) = name.strip_suffix(".scales") else {
                continue;
            };
            let layout = quantization.layout(path).unwrap();
            let layout = json!([layout.bits, layout.group_size, layout.mode.name()]);
            assert_eq!(layout, layouts[path], "{case}: {path}");
        }
    }
}
