use std::io::Write;

use super::*;
use crate::io::{StoredDtype, TensorSpec, write_safetensors};

/// Writes a file whose tensors have one byte each.
fn write(folder: &Path, file: &str, tensors: &[(&str, u8)]) {
    let specs = tensors.iter().map(|(name, _)| TensorSpec {
        name: (*name).to_owned(),
        dtype: StoredDtype::U8,
        shape: vec![1],
    });
    let value = |name: &str| tensors.iter().find(|tensor| tensor.0 == name).unwrap().1;
    let metadata = BTreeMap::from([("file".to_owned(), file.to_owned())]);
    write_safetensors(folder.join(file), specs, &metadata, |spec, sink| {
        Ok(sink.write_all(&[value(&spec.name)])?)
    })
    .unwrap();
}

fn write_index(folder: &Path, weight_map: &str) {
    let index = format!(r#"{{"metadata":{{"total_size":1}},"weight_map":{weight_map}}}"#);
    std::fs::write(folder.join(INDEX_FILE), index).unwrap();
}

fn refused(folder: &Path) -> String {
    let message = Checkpoint::open(folder).unwrap_err().to_string();
    assert!(!message.contains('\n'), "{message}");
    message.replace(&format!("{}/", folder.display()), "")
}

#[test]
fn the_index_says_which_file_has_a_tensor() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    write(
        folder,
        "x-1.safetensors",
        &[("a", 1), ("b", 2), ("extra", 9)],
    );
    write(folder, "x-2.safetensors", &[("c", 3), ("b", 4)]);
    write(folder, "model.safetensors", &[("not this", 0)]);
    write_index(
        folder,
        r#"{"a":"x-1.safetensors","b":"x-2.safetensors","c":"x-2.safetensors"}"#,
    );
    let checkpoint = Checkpoint::open(folder).unwrap();
    assert_eq!(
        checkpoint.names().collect::<Vec<_>>(),
        ["a", "b", "c", "extra"]
    );
    assert_eq!(checkpoint.files().len(), 2);
    assert_eq!(checkpoint.bytes("a").unwrap(), [1]);
    assert_eq!(checkpoint.bytes("b").unwrap(), [4]);
    checkpoint.release("b");
    assert_eq!(checkpoint.bytes("extra").unwrap(), [9]);
    assert_eq!(checkpoint.info("c").unwrap().shape, [1]);
    assert!(
        checkpoint
            .file("c")
            .unwrap()
            .path()
            .ends_with("x-2.safetensors")
    );
    assert_eq!(checkpoint.metadata()["file"], "x-1.safetensors");

    let error = checkpoint.bytes("d").unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::MissingTensor));
    assert_eq!((error.path(), error.tensor()), (Some(folder), Some("d")));
}

#[test]
fn without_an_index_the_single_file_counts_and_then_every_model_file() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    assert_eq!(
        Checkpoint::open(folder).unwrap_err().to_string(),
        format!(
            "{}: folder: expected {INDEX_FILE}, {SINGLE_FILE} or model*.safetensors, \
             found none of them",
            folder.display()
        )
    );
    write(folder, "other.safetensors", &[("o", 0)]);
    write(folder, "model-2.safetensors", &[("b", 2)]);
    write(folder, "model-1.safetensors", &[("a", 1)]);
    std::fs::write(folder.join("model.txt"), "no weights").unwrap();
    let checkpoint = Checkpoint::open(folder).unwrap();
    assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["a", "b"]);
    assert!(
        checkpoint.files()[0]
            .path()
            .ends_with("model-1.safetensors")
    );

    write(folder, "model.safetensors", &[("m", 5)]);
    let checkpoint = Checkpoint::open(folder).unwrap();
    assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["m"]);

    let single = folder.join("other.safetensors");
    let checkpoint = Checkpoint::open(&single).unwrap();
    assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["o"]);
    assert_eq!(checkpoint.path(), single);
}

#[test]
fn one_tensor_in_two_files_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), "model-1.safetensors", &[("a", 1)]);
    write(folder.path(), "model-2.safetensors", &[("a", 1)]);
    assert_eq!(
        refused(folder.path()),
        "model-2.safetensors: tensor \"a\": name: expected a tensor in one file, \
         found it in model-1.safetensors too"
    );
}

#[test]
fn missing_shards_and_tensors_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    write_index(folder, r#"{"a":"x-1.safetensors","b":"x-1.safetensors"}"#);
    assert_eq!(
        refused(folder),
        "model.safetensors.index.json: weight_map[\"a\"]: expected a file of the same folder, \
         found \"x-1.safetensors\", which is not there"
    );
    write(folder, "x-1.safetensors", &[("a", 1)]);
    assert_eq!(
        refused(folder),
        "x-1.safetensors: tensor \"b\": no such tensor"
    );
    let shard = folder.join("x-1.safetensors");
    let bytes = std::fs::read(&shard).unwrap();
    std::fs::write(&shard, &bytes[..bytes.len() - 1]).unwrap();
    assert!(refused(folder).starts_with("x-1.safetensors: tensor \"a\": data_offsets: "));
}

#[test]
fn shards_outside_of_the_folder_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let inside = folder.path().join("inside");
    std::fs::create_dir(&inside).unwrap();
    write(folder.path(), "x.safetensors", &[("a", 1)]);
    let absolute = folder.path().join("x.safetensors");
    for shard in [
        "../x.safetensors",
        "",
        ".",
        "..",
        "a/x",
        "a\\\\x",
        "C:x",
        "x\\u0000",
    ]
    .into_iter()
    .chain(absolute.to_str())
    {
        write_index(&inside, &format!(r#"{{"a":"{shard}"}}"#));
        let message = refused(&inside);
        let expected = "model.safetensors.index.json: weight_map[\"a\"]: \
                        expected a file name without a folder";
        assert!(message.starts_with(expected), "{message}");
    }
}

#[test]
fn an_index_that_is_none_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    for text in [
        "",
        "{",
        "[]",
        "{}",
        r#"{"weight_map":[]}"#,
        r#"{"weight_map":{"a":1}}"#,
        "\u{fffd}",
    ] {
        std::fs::write(folder.join(INDEX_FILE), text).unwrap();
        let message = refused(folder);
        let expected = "model.safetensors.index.json: index: expected JSON with a weight_map";
        assert!(message.starts_with(expected), "{message}");
    }
    write_index(folder, r#"{"a":"x","a":"y"}"#);
    assert!(refused(folder).contains("\"a\" is given twice"));
    write_index(folder, "{}");
    assert!(refused(folder).ends_with("weight_map: expected at least one tensor, found none"));
    std::fs::remove_file(folder.join(INDEX_FILE)).unwrap();
    std::fs::create_dir(folder.join(INDEX_FILE)).unwrap();
    assert!(refused(folder).contains("a regular file"));
}

#[test]
fn missing_folders_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("missing");
    let error = Checkpoint::open(&missing).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Io(_)));
    assert_eq!(error.path(), Some(missing.as_path()));
}
