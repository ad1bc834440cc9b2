use super::*;
use crate::io::SafetensorsFile;

fn spec(name: &str, dtype: StoredDtype, shape: &[usize]) -> TensorSpec {
    TensorSpec {
        name: name.to_owned(),
        dtype,
        shape: shape.to_vec(),
    }
}

/// Bytes that say which tensor they belong to.
fn content(spec: &TensorSpec) -> Vec<u8> {
    let seed = spec
        .name
        .bytes()
        .fold(0, |sum: u8, byte| sum.wrapping_add(byte));
    (0..spec.byte_len().unwrap())
        .map(|i| seed.wrapping_add(i as u8))
        .collect()
}

fn write(path: &Path, specs: &[TensorSpec], metadata: &BTreeMap<String, String>) -> Result<()> {
    write_safetensors(path, specs.iter().cloned(), metadata, |spec, sink| {
        // In uneven pieces, as a caller with rows does.
        for piece in content(spec).chunks(5) {
            sink.write_all(piece)?;
        }
        Ok(())
    })
}

fn specs() -> Vec<TensorSpec> {
    let mut specs: Vec<_> = StoredDtype::ALL
        .into_iter()
        .enumerate()
        .map(|(i, dtype)| spec(&format!("t.{}", dtype.name()), dtype, &[3, i]))
        .collect();
    specs.push(spec("scalar \"\n", StoredDtype::U8, &[]));
    specs
}

fn files_in(folder: &Path) -> Vec<String> {
    let name = |entry: io::Result<std::fs::DirEntry>| entry.unwrap().file_name();
    std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| name(entry).into_string().unwrap())
        .collect()
}

#[test]
fn what_is_written_is_read_back_here_and_by_the_formats_library() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let metadata = BTreeMap::from([("format".to_owned(), "mlx".to_owned())]);
    write(&path, &specs(), &metadata).unwrap();
    assert_eq!(files_in(folder.path()), ["model.safetensors"]);

    let file = SafetensorsFile::open(&path).unwrap();
    assert_eq!(file.metadata(), &metadata);
    assert_eq!(file.names().len(), specs().len());
    let bytes = std::fs::read(&path).unwrap();
    let theirs = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    for spec in specs() {
        let info = file.info(&spec.name).unwrap();
        assert_eq!((info.dtype, &info.shape), (spec.dtype, &spec.shape));
        assert_eq!(
            info.range.start % spec.dtype.size_in_bytes(),
            0,
            "{} is not aligned",
            spec.name
        );
        assert_eq!(file.bytes(&spec.name).unwrap(), content(&spec));
        let tensor = theirs.tensor(&spec.name).unwrap();
        assert_eq!(tensor.dtype().to_string(), spec.dtype.name());
        assert_eq!(tensor.data(), content(&spec));
    }
    let header_len = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    assert_eq!(header_len % 8, 0);
    assert_eq!(bytes[8], b'{');
}

#[test]
fn the_same_tensors_give_the_same_file_in_any_order() {
    let folder = tempfile::tempdir().unwrap();
    let [a, b] = ["a", "b"].map(|name| folder.path().join(name));
    let metadata: BTreeMap<_, _> = ["z", "y", "x"]
        .into_iter()
        .map(|key| (key.to_owned(), key.to_owned()))
        .collect();
    write(&a, &specs(), &metadata).unwrap();
    let mut reversed = specs();
    reversed.reverse();
    write(&b, &reversed, &metadata).unwrap();
    assert_eq!(std::fs::read(a).unwrap(), std::fs::read(b).unwrap());
}

#[test]
fn a_failure_leaves_the_old_file_and_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    write(
        &path,
        &[spec("old", StoredDtype::U8, &[4])],
        &BTreeMap::new(),
    )
    .unwrap();
    let old = SafetensorsFile::open(&path).unwrap();

    let two = [
        spec("a", StoredDtype::F32, &[2]),
        spec("b", StoredDtype::F32, &[2]),
    ];
    let none = BTreeMap::new();
    let too_few = write_safetensors(&path, two.clone(), &none, |_, sink| {
        Ok(sink.write_all(&[0; 7])?)
    });
    let error = too_few.unwrap_err();
    assert!(matches!(
        error.kind(),
        ErrorKind::Length {
            expected: 8,
            found: 7,
            ..
        }
    ));
    assert_eq!(
        (error.tensor(), error.path()),
        (Some("a"), Some(path.as_path()))
    );
    let too_many = write_safetensors(&path, two.clone(), &none, |_, sink| {
        Ok(sink.write_all(&[0; 9])?)
    });
    assert!(
        too_many
            .unwrap_err()
            .to_string()
            .ends_with("more than the tensor's 8 bytes")
    );
    let own = write_safetensors(&path, two, &none, |_, _| {
        Err(Error::new(ErrorKind::MissingTensor))
    });
    assert!(matches!(own.unwrap_err().kind(), ErrorKind::MissingTensor));

    assert_eq!(files_in(folder.path()), ["model.safetensors"]);
    assert_eq!(
        SafetensorsFile::open(&path)
            .unwrap()
            .bytes("old")
            .unwrap()
            .len(),
        4
    );

    // Over a file that is mapped: the mapping keeps the old content.
    let before = old.bytes("old").unwrap().to_vec();
    write(&path, &specs(), &none).unwrap();
    old.release("old");
    assert_eq!(old.bytes("old").unwrap(), before);
}

#[test]
fn names_and_shapes_that_cannot_be_written_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let a = spec("a", StoredDtype::U8, &[1]);
    for specs in [
        vec![a.clone(), a.clone()],
        vec![a.clone(), spec("a", StoredDtype::F32, &[1])],
        vec![spec(METADATA_KEY, StoredDtype::U8, &[1])],
        vec![spec("a", StoredDtype::F64, &[usize::MAX, 2])],
        vec![
            spec("a", StoredDtype::U8, &[usize::MAX]),
            spec("b", StoredDtype::U8, &[2]),
        ],
    ] {
        let error = write(&path, &specs, &BTreeMap::new()).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Format { .. }), "{error}");
    }
    assert_eq!(files_in(folder.path()), [""; 0]);
    let missing = folder.path().join("missing").join("model.safetensors");
    let error = write(&missing, &[a], &BTreeMap::new()).unwrap_err();
    assert_eq!(error.path(), Some(missing.as_path()));
}

#[cfg(unix)]
#[test]
fn the_file_has_the_access_of_any_new_file() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let [ours, plain] = ["ours", "plain"].map(|name| folder.path().join(name));
    write(&ours, &specs(), &BTreeMap::new()).unwrap();
    File::create(&plain).unwrap();
    let mode = |path| std::fs::metadata(path).unwrap().permissions().mode();
    assert_eq!(mode(ours), mode(plain));
}
