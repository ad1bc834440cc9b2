//! Brings the tensors of other checkpoints into the form of MLX's before layers take them: under
//! the names and in the shapes that mlx-lm saves. Nothing is read for it.
//!
//! What a conversion writes is this form, so a layer's own arrangement of its weights is no part
//! of it; that is what [`Weights::transform`] is for.

use std::cell::RefCell;
use std::rc::Rc;

use mlex_core::{Array, Dtype, Error, ErrorKind, Result};

use crate::{LazyTensor, Weights};

type Load = Box<dyn FnOnce() -> Result<Array>>;

impl Weights {
    /// Gives tensors the full paths that `name` has for theirs. One whose new path is taken keeps
    /// its own, and is left over in the end.
    pub fn rename(&self, name: impl Fn(&str) -> Option<String>) {
        self.with_tensors(|tensors| {
            let renamed: Vec<(String, String)> = tensors
                .keys()
                .filter_map(|path| Some((path.clone(), name(path)?)))
                .collect();
            for (old, new) in renamed {
                if tensors.contains_key(&new) {
                    continue;
                }
                if let Some(tensor) = tensors.remove(&old) {
                    tensors.insert(new, tensor);
                }
            }
        });
    }

    /// Tensors whose full path `matches` become what `change` makes of them when they are read,
    /// of the shape that `shape` gives for theirs; the dtype stays.
    pub fn adapt(
        &self,
        matches: impl Fn(&str) -> bool,
        shape: impl Fn(&[i32]) -> Vec<i32>,
        change: impl Fn(Array) -> Result<Array> + 'static,
    ) {
        let change = Rc::new(change);
        self.with_tensors(|tensors| {
            for (_, tensor) in tensors.iter_mut().filter(|(path, _)| matches(path)) {
                tensor.shape = shape(&tensor.shape);
                let change = Rc::clone(&change);
                tensor.change(move |array| change(array));
            }
        });
    }

    /// The tensors `parts`, all of one shape and dtype, become one named `whole`, with a new first
    /// dimension. Unless all of them are there and alike, nothing changes.
    pub fn stack(&self, parts: impl Iterator<Item = String>, whole: &str) {
        let whole = self.path(whole);
        self.with_tensors(|tensors| {
            if tensors.contains_key(&whole) {
                return;
            }
            let mut paths = Vec::new();
            let mut first: Option<(Vec<i32>, Dtype)> = None;
            // Until one is not there, however many a config claims.
            for path in parts.map(|part| self.path(part)) {
                let Some(tensor) = tensors.get(&path) else {
                    return;
                };
                let (shape, dtype) = first.get_or_insert((tensor.shape.clone(), tensor.dtype));
                if tensor.shape != *shape || tensor.dtype != *dtype {
                    return;
                }
                paths.push(path);
            }
            let Some((shape, dtype)) = first else {
                return;
            };
            let parts: Vec<Load> = paths
                .iter()
                .filter_map(|path| Some(tensors.remove(path)?.load))
                .collect();
            let count = i32::try_from(parts.len()).unwrap_or(i32::MAX);
            let load = move || {
                let parts: Vec<Array> = parts
                    .into_iter()
                    .map(|load| load())
                    .collect::<Result<_>>()?;
                let stacked = Array::stack(&parts, 0)?;
                // At once, so that the parts are gone before the next tensor comes.
                stacked.eval()?;
                Ok(stacked)
            };
            let stacked = LazyTensor {
                shape: [&[count], shape.as_slice()].concat(),
                dtype,
                load: Box::new(load),
            };
            tensors.insert(whole, stacked);
        });
    }

    /// The tensor `whole`, where there is one, becomes several of equal sizes along `axis`, named
    /// `parts`. Unless it divides so, nothing changes.
    pub fn split(&self, whole: &str, axis: usize, parts: &[impl AsRef<str>]) {
        let whole = self.path(whole);
        let parts: Vec<String> = parts.iter().map(|part| self.path(part.as_ref())).collect();
        self.with_tensors(|tensors| {
            let count = parts.len() as i32;
            let divides = tensors.get(&whole).is_some_and(|tensor| {
                let size = tensor.shape.get(axis);
                count > 0 && size.is_some_and(|size| size % count == 0)
            });
            if !divides || parts.iter().any(|part| tensors.contains_key(part)) {
                return;
            }
            let Some(tensor) = tensors.remove(&whole) else {
                return;
            };
            let mut shape = tensor.shape;
            shape[axis] /= count;
            let size = shape[axis];
            let shared = Rc::new(RefCell::new(Shared {
                load: Some(tensor.load),
                array: None,
                left: parts.len(),
            }));
            for (index, part) in parts.into_iter().enumerate() {
                let shared = Rc::clone(&shared);
                let start = index as i32 * size;
                let load = move || shared.borrow_mut().part(axis as i32, start, start + size);
                let part_of_it = LazyTensor {
                    shape: shape.clone(),
                    dtype: tensor.dtype,
                    load: Box::new(load),
                };
                tensors.insert(part, part_of_it);
            }
        });
    }
}

/// A tensor that several are parts of; it is read once, and kept until all have their part.
struct Shared {
    load: Option<Load>,
    array: Option<Array>,
    left: usize,
}

impl Shared {
    fn part(&mut self, axis: i32, start: i32, stop: i32) -> Result<Array> {
        if let Some(load) = self.load.take() {
            self.array = Some(load()?);
        }
        self.left -= 1;
        let whole = match &self.array {
            Some(whole) if self.left > 0 => whole.clone(),
            _ => self
                .array
                .take()
                // Only where reading it has failed for another part.
                .ok_or_else(|| Error::new(ErrorKind::MissingTensor))?,
        };
        if (start, stop) == (0, whole.dim(axis)?) {
            return Ok(whole);
        }
        let part = whole.slice_axis(axis, start, stop)?.contiguous()?;
        part.eval()?;
        Ok(part)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::QuantizationConfig;

    fn weights(names: &[&str], shape: &[i32]) -> Weights {
        let tensor = |(index, name): (usize, &&str)| {
            let size = shape.iter().product::<i32>();
            let values: Vec<f32> = (0..size)
                .map(|i| (index as i32 * size + i) as f32)
                .collect();
            let array = Array::from_slice(&values, shape).unwrap();
            ((*name).to_owned(), LazyTensor::ready(array))
        };
        let tensors: BTreeMap<_, _> = names.iter().enumerate().map(tensor).collect();
        Weights::new(tensors, QuantizationConfig::default())
    }

    fn values(array: &Array) -> Vec<f32> {
        array.to_vec().unwrap()
    }

    #[test]
    fn parts_become_one_and_one_becomes_parts() {
        let all = weights(&["m.e.0.w", "m.e.1.w"], &[2, 2]);
        let m = all.pp("m");
        m.stack((0..2).map(|index| format!("e.{index}.w")), "s.w");
        m.split("s.w", 1, &["a", "b"]);
        // Rows 0 and 2, and rows 1 and 3.
        let b = m.get("b", &[2, 1, 2]).unwrap();
        let a = m.get("a", &[2, 1, 2]).unwrap();
        assert_eq!(values(&a), [0.0, 1.0, 4.0, 5.0]);
        assert_eq!(values(&b), [2.0, 3.0, 6.0, 7.0]);
        all.finish().unwrap();
    }

    #[test]
    fn what_does_not_fit_is_left_alone() {
        let all = weights(&["e.0", "e.1", "taken"], &[3]);
        all.stack((0..3).map(|index| format!("e.{index}")), "whole");
        all.stack((0..2).map(|index| format!("e.{index}")), "taken");
        all.split("e.0", 0, &["a", "b"]);
        all.split("e.0", 1, &["a"]);
        all.split("nothing", 0, &["a"]);
        all.rename(|path| (path == "e.0").then(|| "taken".to_owned()));
        assert!(
            ["e.0", "e.1", "taken"]
                .iter()
                .all(|name| all.contains(name))
        );
        assert!(!all.contains("a") && !all.contains("whole"));
    }

    #[test]
    fn a_record_has_the_form_of_mlx_and_no_arrangement_of_a_layer() {
        let all = weights(&["old.conv", "old.proj"], &[2, 1, 3]).recording();
        all.rename(|path| Some(path.replace("old", "new")));
        let new = all.pp("new");
        let moved = |shape: &[i32]| vec![shape[0], shape[2], shape[1]];
        let is_conv = |path: &str| path.ends_with("conv");
        all.adapt(is_conv, moved, |array| array.move_axis(2, 1));
        all.transform(|path| path.ends_with("proj"), |array| array.multiply(2.0));
        new.get("conv", &[2, 3, 1]).unwrap();
        new.get("proj", &[2, 1, 3]).unwrap();
        all.finish().unwrap();
        let mut taken = all.taken().tensors;
        let mut read = |name: &str| {
            let array = (taken.remove(name).unwrap().load)().unwrap();
            values(&array.contiguous().unwrap())
        };
        assert_eq!(read("new.conv"), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
        assert_eq!(read("new.proj"), [6.0, 7.0, 8.0, 9.0, 10.0, 11.0]);
    }
}
