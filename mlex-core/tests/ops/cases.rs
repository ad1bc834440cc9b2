//! Golden cases: a safetensors file with the tensors, a JSON list with one row per case
//! (tools/README.md says how they are made).

use std::path::Path;

use mlex_core::io::SafetensorsFile;
use mlex_core::{Array, Dtype};
use serde_json::Value;

/// One row and its tensors.
pub(crate) struct Case {
    pub name: String,
    pub op: String,
    pub params: Params,
    pub inputs: Vec<Array>,
    pub outputs: Vec<Array>,
}

impl Case {
    /// The only input of an operation that has one.
    pub(crate) fn x(&self) -> &Array {
        &self.inputs[0]
    }

    /// The input that the row's `names` calls so.
    #[allow(dead_code, reason = "the rows of ops.json have no names")]
    pub(crate) fn named(&self, name: &str) -> Option<&Array> {
        let names = self.params.get("names")?.as_array()?;
        let index = names.iter().position(|entry| entry == name)?;
        self.inputs.get(index)
    }
}

/// The `params` of a row.
pub(crate) struct Params(Value);

#[allow(dead_code, reason = "each test crate needs some of them")]
impl Params {
    pub(crate) fn get(&self, key: &str) -> Option<&Value> {
        self.0.get(key).filter(|value| !value.is_null())
    }

    fn need(&self, key: &str) -> &Value {
        self.get(key)
            .unwrap_or_else(|| panic!("no {key} in {}", self.0))
    }

    pub(crate) fn int(&self, key: &str) -> i32 {
        self.need(key).as_i64().unwrap().try_into().unwrap()
    }

    pub(crate) fn ints(&self, key: &str) -> Vec<i32> {
        let list = self.need(key).as_array().unwrap();
        let int = |value: &Value| value.as_i64().unwrap().try_into().unwrap();
        list.iter().map(int).collect()
    }

    pub(crate) fn float(&self, key: &str) -> f32 {
        self.need(key).as_f64().unwrap() as f32
    }

    pub(crate) fn bool(&self, key: &str) -> bool {
        self.need(key).as_bool().unwrap()
    }

    pub(crate) fn text(&self, key: &str) -> &str {
        self.need(key).as_str().unwrap()
    }

    pub(crate) fn dtype(&self, key: &str) -> Dtype {
        self.text(key).parse().unwrap()
    }
}

/// The cases of `stem.json` and `stem.safetensors`.
pub(crate) fn load(stem: &Path) -> Vec<Case> {
    let text = std::fs::read_to_string(stem.with_extension("json")).unwrap();
    let rows: Vec<Value> = serde_json::from_str(&text).unwrap();
    let file = SafetensorsFile::open(stem.with_extension("safetensors")).unwrap();
    let tensors = |name: &str, kind: &str, count: &Value| -> Vec<Array> {
        let count = count.as_u64().unwrap();
        (0..count)
            .map(|index| tensor(&file, &format!("{name}.{kind}{index}")))
            .collect()
    };
    rows.into_iter()
        .map(|mut row| {
            let name = row["name"].as_str().unwrap().to_owned();
            Case {
                op: row["op"].as_str().unwrap().to_owned(),
                inputs: tensors(&name, "in", &row["inputs"]),
                outputs: tensors(&name, "out", &row["outputs"]),
                params: Params(row["params"].take()),
                name,
            }
        })
        .collect()
}

/// A tensor of a file as an array.
pub(crate) fn tensor(file: &SafetensorsFile, name: &str) -> Array {
    let info = file
        .info(name)
        .unwrap_or_else(|| panic!("no tensor {name}"));
    let shape: Vec<i32> = info.shape.iter().map(|&dim| dim as i32).collect();
    Array::from_bytes(file.bytes(name).unwrap(), &shape, info.dtype.dtype()).unwrap()
}

/// How far a value may be from the expected one: `atol + rtol * |expected|`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tolerance {
    pub rtol: f64,
    pub atol: f64,
}

impl Tolerance {
    pub(crate) const EXACT: Self = Self::new(0.0, 0.0);

    pub(crate) const fn new(rtol: f64, atol: f64) -> Self {
        Self { rtol, atol }
    }
}

/// What is wrong with `found`, if anything is.
pub(crate) fn difference(found: &Array, expected: &Array, tolerance: Tolerance) -> Option<String> {
    if found.shape() != expected.shape() || found.dtype() != expected.dtype() {
        return Some(format!("{found:?} where {expected:?} is expected"));
    }
    let (found, expected) = match (values(found), values(expected)) {
        (Ok(found), Ok(expected)) => (found, expected),
        (Err(error), _) | (_, Err(error)) => return Some(error.to_string()),
    };
    let Tolerance { rtol, atol } = tolerance;
    let close = |&(_, (a, b)): &(usize, (&f64, &f64))| {
        // Everything is within a part of infinity: only itself is right there.
        let near = || b.is_finite() && (a - b).abs() <= atol + rtol * b.abs();
        a == b || (a.is_nan() && b.is_nan()) || near()
    };
    let wrong: Vec<_> = found
        .iter()
        .zip(&expected)
        .enumerate()
        .filter(|pair| !close(pair))
        .collect();
    let (index, (a, b)) = wrong.first()?;
    let count = wrong.len();
    let worst = wrong
        .iter()
        .map(|(_, (a, b))| (*a - *b).abs())
        .fold(0.0, f64::max);
    Some(format!(
        "{count} of {} values differ by up to {worst:e}, first at {index}: {a} where {b} is expected",
        expected.len()
    ))
}

/// The elements as f64, which holds those of every dtype but the largest 64-bit integers.
pub(crate) fn values(array: &Array) -> mlex_core::Result<Vec<f64>> {
    Ok(match array.dtype() {
        Dtype::Float64 => array.to_vec::<f64>()?,
        Dtype::Int64 => array.to_vec::<i64>()?.iter().map(|&x| x as f64).collect(),
        Dtype::Uint64 => array.to_vec::<u64>()?.iter().map(|&x| x as f64).collect(),
        Dtype::Uint32 => array.to_vec::<u32>()?.iter().map(|&x| x.into()).collect(),
        Dtype::Int32 => array.to_vec::<i32>()?.iter().map(|&x| x.into()).collect(),
        _ => {
            let wide = array.as_type(Dtype::Float32)?.to_vec::<f32>()?;
            wide.iter().map(|&x| x.into()).collect()
        }
    })
}
