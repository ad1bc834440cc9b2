//! What the tests share: the small checkpoints, copies of them to damage, and a tokenizer.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

use std::path::{Path, PathBuf};

use mlex_core::io::SafetensorsFile;
use mlex_core::{Array, Dtype};
use serde_json::{Map, Value, json};

/// A file or folder of `tests/data`.
pub fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/data")
        .join(name)
}

/// The expected values of a checkpoint.
pub struct Expected(SafetensorsFile);

impl Expected {
    pub fn open(path: &str) -> Self {
        Self(SafetensorsFile::open(data(path)).unwrap())
    }

    pub fn tensor(&self, name: &str) -> Array {
        let info = self.0.info(name).unwrap();
        let shape: Vec<i32> = info.shape.iter().map(|&dim| dim as i32).collect();
        Array::from_bytes(self.0.bytes(name).unwrap(), &shape, info.dtype.dtype()).unwrap()
    }

    pub fn tokens(&self, name: &str) -> Vec<u32> {
        let tokens = self.tensor(name).as_type(Dtype::Uint32).unwrap();
        tokens.to_vec().unwrap()
    }

    /// The rows of a matrix.
    pub fn rows(&self, name: &str) -> Vec<Vec<f32>> {
        let matrix = self.tensor(name);
        let width = *matrix.shape().last().unwrap() as usize;
        let values: Vec<f32> = matrix.to_vec().unwrap();
        values.chunks(width).map(<[f32]>::to_vec).collect()
    }
}

/// A model directory that a test may change.
pub struct Copy {
    dir: tempfile::TempDir,
}

impl Copy {
    /// A copy of a checkpoint of `tests/data`, without its expected values.
    pub fn of(name: &str) -> Self {
        let copy = Self {
            dir: tempfile::tempdir().unwrap(),
        };
        for entry in std::fs::read_dir(data(name)).unwrap() {
            let entry = entry.unwrap();
            if entry.file_name() != "expected.safetensors" {
                std::fs::copy(entry.path(), copy.file(entry.file_name())).unwrap();
            }
        }
        copy
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    pub fn file(&self, name: impl AsRef<Path>) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn write(&self, name: &str, bytes: impl AsRef<[u8]>) -> &Self {
        std::fs::write(self.file(name), bytes).unwrap();
        self
    }

    pub fn read(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.file(name)).unwrap()
    }

    pub fn remove(&self, name: &str) -> &Self {
        std::fs::remove_file(self.file(name)).unwrap();
        self
    }

    /// Changes a JSON file.
    pub fn edit(&self, name: &str, change: impl FnOnce(&mut Map<String, Value>)) -> &Self {
        let mut json: Map<String, Value> = serde_json::from_slice(&self.read(name)).unwrap();
        change(&mut json);
        self.write(name, Value::Object(json).to_string())
    }

    /// Adds [`tokenizer_json`] for `vocab_size` tokens.
    pub fn with_tokenizer(self, vocab_size: usize) -> Self {
        self.write("tokenizer.json", tokenizer_json(vocab_size).to_string());
        self
    }
}

/// The header of a safetensors file, to be changed, and the data after it.
pub struct Header {
    pub json: Map<String, Value>,
    pub data: Vec<u8>,
}

impl Header {
    pub fn read(model: &Copy, file: &str) -> Self {
        let bytes = model.read(file);
        let (length, rest) = bytes.split_at(8);
        let length = u64::from_le_bytes(length.try_into().unwrap()) as usize;
        Self {
            json: serde_json::from_slice(&rest[..length]).unwrap(),
            data: rest[length..].to_vec(),
        }
    }

    pub fn entry(&mut self, name: &str) -> &mut Value {
        self.json.get_mut(name).unwrap()
    }

    pub fn rename(&mut self, from: &str, to: &str) {
        let entry = self.json.remove(from).unwrap();
        self.json.insert(to.to_owned(), entry);
    }

    pub fn write(&self, model: &Copy, file: &str) {
        let header = Value::Object(self.json.clone()).to_string();
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.extend(&self.data);
        model.write(file, bytes);
    }
}

/// The spelling of token 129 of [`tokens`]`(130)`, which is special.
pub const END: &str = "<|end|>";

/// The tokens of a byte-level vocabulary: three special ones, printable ASCII, a space, a line
/// break, the two bytes of `é`, pairs of letters with `e`, and a last special one.
pub fn tokens(vocab_size: usize) -> Vec<String> {
    let mut tokens: Vec<String> = ["<pad>", "<s>", "</s>"].map(str::to_owned).into();
    tokens.extend(('!'..='~').map(String::from));
    tokens.extend(["Ġ", "Ċ", "Ã", "©"].map(str::to_owned));
    tokens.extend(('a'..='z').map(|letter| format!("{letter}e")));
    tokens.extend(["Ġt", "Ġa"].map(str::to_owned));
    tokens.truncate(vocab_size - 1);
    tokens.push(END.to_owned());
    assert_eq!(tokens.len(), vocab_size);
    tokens
}

/// The `tokenizer.json` of [`tokens`].
pub fn tokenizer_json(vocab_size: usize) -> Value {
    let tokens = tokens(vocab_size);
    let vocab: Map<String, Value> = (0..)
        .zip(&tokens)
        .map(|(id, t)| (t.clone(), json!(id)))
        .collect();
    let special = |&id: &usize| {
        json!({"id": id, "content": tokens[id], "special": true, "normalized": false,
               "single_word": false, "lstrip": false, "rstrip": false})
    };
    let added: Vec<Value> = [0, 1, 2, vocab_size - 1].iter().map(special).collect();
    let pairs = tokens.iter().filter(|token| token.chars().count() == 2);
    let merges: Vec<Value> = pairs
        .map(|pair| json!(pair.chars().map(String::from).collect::<Vec<_>>()))
        .collect();
    let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true});
    json!({
        "version": "1.0",
        "added_tokens": added,
        "normalizer": null,
        "pre_tokenizer": bytes,
        "post_processor": null,
        "decoder": bytes,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    })
}

/// The message of an error: one line, the directory in it written as `M`.
pub fn message(error: &mlex_models::Error, dir: &Path) -> String {
    let message = error.to_string();
    assert!(!message.contains(['\n', '\r']), "{message:?}");
    assert!(message.len() < 1000, "{message}");
    message.replace(dir.to_str().unwrap(), "M")
}
