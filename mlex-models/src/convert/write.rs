//! The tensors of a plan in as many files as they need.

use std::cell::Cell;
use std::collections::{BTreeMap, VecDeque};
use std::io::{self, Write};
use std::path::Path;

use mlex_core::io::{TensorSink, TensorSpec, write_safetensors_in_order};
use serde_json::{Map, Value, json};

use super::plan::Unit;
use super::write_json;
use crate::load::LoadProgress;
use crate::{Error, ErrorKind, Result};

/// What was written.
pub(super) struct Written {
    pub(super) bytes: u64,
    pub(super) files: usize,
}

/// Writes `units` into files of at most `shard_bytes` each, with an index for several. Only a
/// unit that is larger makes a larger file.
///
/// # Errors
/// When a tensor cannot be read or written, or `on_progress` returns `false`.
pub(super) fn write_units(
    dir: &Path,
    units: Vec<Unit>,
    parameters: u64,
    shard_bytes: u64,
    on_progress: &mut dyn FnMut(LoadProgress) -> bool,
) -> Result<Written> {
    let (shards, total) = shards(units, shard_bytes)?;
    let count = shards.len();
    let mut weight_map = BTreeMap::new();
    let mut done = 0;
    for (index, shard) in shards.into_iter().enumerate() {
        let name = if count == 1 {
            "model.safetensors".to_owned()
        } else {
            format!("model-{:05}-of-{count:05}.safetensors", index + 1)
        };
        let specs: Vec<TensorSpec> = shard.iter().flat_map(|unit| unit.specs.clone()).collect();
        weight_map.extend(specs.iter().map(|spec| (spec.name.clone(), json!(name))));
        write_shard(&dir.join(name), &specs, shard, &mut |bytes| {
            done += bytes as u64;
            on_progress(LoadProgress {
                loaded: done.min(total),
                total,
            })
        })?;
    }
    if count > 1 {
        let mut index = Map::new();
        let metadata = json!({"total_size": total, "total_parameters": parameters});
        index.insert("metadata".to_owned(), metadata);
        let weight_map: Map<String, Value> = weight_map.into_iter().collect();
        index.insert("weight_map".to_owned(), Value::Object(weight_map));
        write_json(&dir.join("model.safetensors.index.json"), &index)?;
    }
    Ok(Written {
        bytes: total,
        files: count,
    })
}

/// The units in groups of at most `shard_bytes`, and the bytes of all.
fn shards(units: Vec<Unit>, shard_bytes: u64) -> Result<(Vec<Vec<Unit>>, u64)> {
    let mut shards = vec![Vec::new()];
    let (mut total, mut in_shard) = (0, 0);
    for unit in units {
        let bytes = unit.bytes()?;
        if in_shard > 0 && in_shard + bytes > shard_bytes {
            shards.push(Vec::new());
            in_shard = 0;
        }
        in_shard += bytes;
        total += bytes;
        if let Some(shard) = shards.last_mut() {
            shard.push(unit);
        }
    }
    Ok((shards, total))
}

fn write_shard(
    path: &Path,
    specs: &[TensorSpec],
    units: Vec<Unit>,
    on_written: &mut dyn FnMut(usize) -> bool,
) -> Result<()> {
    let cancelled = Cell::new(false);
    let mut tick = |bytes: usize| {
        if on_written(bytes) {
            return Ok(());
        }
        cancelled.set(true);
        Err(io::Error::from(io::ErrorKind::Interrupted).into())
    };
    let mut units = units.into_iter();
    // The tensors of the last unit that are made but not written.
    let mut made: VecDeque<Vec<u8>> = VecDeque::new();
    let write = |_: &TensorSpec, sink: &mut TensorSink<'_>| {
        if let Some(bytes) = made.pop_front() {
            return Ok(sink.write_all(&bytes)?);
        }
        // A unit makes as many tensors as it has specs, so there is one for this spec.
        let unit = units
            .next()
            .ok_or_else(|| mlex_core::Error::new(mlex_core::ErrorKind::MissingTensor))?;
        made = unit.job.run(sink, &mut tick)?.into();
        Ok(())
    };
    let metadata = BTreeMap::from([("format".to_owned(), "mlx".to_owned())]);
    let written = write_safetensors_in_order(path, specs, &metadata, write);
    if cancelled.get() {
        return Err(Error::new(ErrorKind::Cancelled));
    }
    Ok(written?)
}
