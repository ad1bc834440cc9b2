//! The safetensors files of a checkpoint as one set of tensors.

use std::collections::btree_map::{BTreeMap, Entry};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::json::{UniqueStrings, one_line, quoted};
use super::safetensors::{SafetensorsFile, TensorInfo};
use crate::error::ResultExt;
use crate::{Error, ErrorKind, Result};

/// The index of a checkpoint of several files.
const INDEX_FILE: &str = "model.safetensors.index.json";
/// The one file of a checkpoint without an index.
const SINGLE_FILE: &str = "model.safetensors";
/// The largest index that is read: that of a header, for it says less.
const MAX_INDEX_BYTES: u64 = super::safetensors::MAX_HEADER_BYTES as u64;

/// The tensors of one or more safetensors files.
#[derive(Debug)]
pub struct Checkpoint {
    /// The folder, or the file that was opened by itself.
    path: PathBuf,
    files: Vec<SafetensorsFile>,
    /// Which of the files has the tensor.
    file_of: BTreeMap<String, usize>,
}

impl Checkpoint {
    /// Opens a model folder, or a single safetensors file.
    ///
    /// In a folder these are looked for, in this order: `model.safetensors.index.json` and the
    /// shards that it names; `model.safetensors`; every `model*.safetensors`.
    ///
    /// A shard may hold tensors that the index does not list: they are found too, and where two
    /// shards have a tensor of one name, the index says which counts.
    ///
    /// # Errors
    /// Fails where none of them is there, where the index is no index or names a file outside of
    /// the folder, a file that is missing, or a tensor that its shard does not have, where
    /// two files have the same tensor, and where [`SafetensorsFile::open`] fails.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        if !std::fs::metadata(path).with_path(path)?.is_dir() {
            return Self::open_files(path, [path.to_path_buf()]);
        }
        let index = path.join(INDEX_FILE);
        if index.try_exists().with_path(&index)? {
            return Self::open_indexed(path, &index);
        }
        let single = path.join(SINGLE_FILE);
        if single.try_exists().with_path(&single)? {
            return Self::open_files(path, [single]);
        }
        let files = model_files(path).with_path(path)?;
        if files.is_empty() {
            let expected = format!("{INDEX_FILE}, {SINGLE_FILE} or model*.safetensors");
            return Err(Error::format("folder", expected, "none of them").with_path(path));
        }
        Self::open_files(path, files)
    }

    /// Opens files whose tensors belong together; `path` names the whole in errors.
    ///
    /// # Errors
    /// Fails where [`SafetensorsFile::open`] fails, and where two files have the same tensor.
    pub fn open_files(
        path: impl AsRef<Path>,
        files: impl IntoIterator<Item = PathBuf>,
    ) -> Result<Self> {
        let files = files
            .into_iter()
            .map(SafetensorsFile::open)
            .collect::<Result<Vec<_>>>()?;
        Self::join(path.as_ref(), files, BTreeMap::new())
    }

    fn open_indexed(folder: &Path, index: &Path) -> Result<Self> {
        let weight_map = read_index(index).with_path(index)?;
        let mut files: Vec<SafetensorsFile> = Vec::new();
        let mut number_of_shard: BTreeMap<String, usize> = BTreeMap::new();
        let mut file_of = BTreeMap::new();
        for (name, shard) in weight_map {
            let number = match number_of_shard.entry(shard) {
                Entry::Occupied(known) => *known.get(),
                Entry::Vacant(new) => {
                    let path = shard_path(folder, new.key(), &name).with_path(index)?;
                    files.push(SafetensorsFile::open(path)?);
                    *new.insert(files.len() - 1)
                }
            };
            let file = &files[number];
            if file.info(&name).is_none() {
                let error = Error::new(ErrorKind::MissingTensor);
                return Err(error.with_tensor(name).with_path(file.path()));
            }
            file_of.insert(name, number);
        }
        Self::join(folder, files, file_of)
    }

    /// Adds the tensors that are not in `listed` yet.
    fn join(
        path: &Path,
        files: Vec<SafetensorsFile>,
        listed: BTreeMap<String, usize>,
    ) -> Result<Self> {
        let mut file_of = listed.clone();
        for (number, file) in files.iter().enumerate() {
            for name in file.names().filter(|name| !listed.contains_key(*name)) {
                if let Some(first) = file_of.insert(name.to_owned(), number) {
                    let expected = "a tensor in one file";
                    let found = format!("it in {} too", files[first].path().display());
                    let error = Error::format("name", expected, found);
                    return Err(error.with_tensor(name).with_path(file.path()));
                }
            }
        }
        Ok(Self {
            path: path.to_path_buf(),
            files,
            file_of,
        })
    }

    /// The folder or file that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The files, in the order in which they were opened.
    pub fn files(&self) -> &[SafetensorsFile] {
        &self.files
    }

    /// The names of the tensors, sorted.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.file_of.keys().map(String::as_str)
    }

    /// The tensor's dtype, shape and place in its file, if there is such a tensor.
    pub fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.file(name)?.info(name)
    }

    /// The file that has the tensor, if there is such a tensor.
    pub fn file(&self, name: &str) -> Option<&SafetensorsFile> {
        self.file_of.get(name).map(|&number| &self.files[number])
    }

    /// The tensor's bytes, as [`SafetensorsFile::bytes`].
    ///
    /// # Errors
    /// Fails with [`ErrorKind::MissingTensor`].
    pub fn bytes(&self, name: &str) -> Result<&[u8]> {
        let file = self.file(name).ok_or_else(|| {
            Error::new(ErrorKind::MissingTensor)
                .with_tensor(name)
                .with_path(&self.path)
        })?;
        file.bytes(name)
    }

    /// Tells the system that the tensor's bytes have been copied and need no memory any more.
    pub fn release(&self, name: &str) {
        if let Some(file) = self.file(name) {
            file.release(name);
        }
    }

    /// The `__metadata__` of all files; where two disagree, the first one's.
    pub fn metadata(&self) -> BTreeMap<String, String> {
        let mut all = BTreeMap::new();
        for (key, value) in self.files.iter().flat_map(SafetensorsFile::metadata) {
            all.entry(key.clone()).or_insert_with(|| value.clone());
        }
        all
    }
}

/// Every `model*.safetensors` of the folder, sorted by name.
fn model_files(folder: &Path) -> std::io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        let is_model = path
            .file_name()
            .and_then(|name| name.to_str())
            .is_some_and(|name| name.starts_with("model") && name.ends_with(".safetensors"));
        if is_model {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// Where a shard that the index names lies: in the same folder, and there.
fn shard_path(folder: &Path, shard: &str, tensor: &str) -> Result<PathBuf> {
    let field = || format!("weight_map[{}]", quoted(tensor));
    let is_file_name = !matches!(shard, "" | "." | "..") && !shard.contains(['/', '\\', ':', '\0']);
    if !is_file_name {
        return Err(Error::format(
            field(),
            "a file name without a folder",
            quoted(shard),
        ));
    }
    let path = folder.join(shard);
    if !path.try_exists().with_path(&path)? {
        let found = format!("{}, which is not there", quoted(shard));
        return Err(Error::format(field(), "a file of the same folder", found));
    }
    Ok(path)
}

/// The index's map from tensors to shards.
fn read_index(path: &Path) -> Result<BTreeMap<String, String>> {
    let metadata = std::fs::metadata(path)?;
    if !metadata.is_file() {
        return Err(Error::format("index", "a regular file", "something else"));
    }
    let mut text = Vec::new();
    File::open(path)?
        .take(MAX_INDEX_BYTES + 1)
        .read_to_end(&mut text)?;
    if text.len() as u64 > MAX_INDEX_BYTES {
        let expected = format!("at most {MAX_INDEX_BYTES} bytes");
        return Err(Error::format("index", expected, "more"));
    }
    let index: Index = serde_json::from_slice(&text)
        .map_err(|error| Error::format("index", "JSON with a weight_map", one_line(&error)))?;
    let UniqueStrings(weight_map) = index.weight_map;
    if weight_map.is_empty() {
        return Err(Error::format("weight_map", "at least one tensor", "none"));
    }
    Ok(weight_map)
}

/// The part of an index that counts; its metadata repeat what the shards say.
#[derive(Deserialize)]
struct Index {
    /// Tensor to file.
    weight_map: UniqueStrings,
}

#[cfg(test)]
mod tests;
