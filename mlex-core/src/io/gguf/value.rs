//! The metadata of a GGUF file.

use std::collections::BTreeMap;

use crate::{Error, Result};

/// A metadata value.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
#[allow(missing_docs)] // each is the type of that name
pub enum GgufValue {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    String(String),
    Array(GgufArray),
    U64(u64),
    I64(i64),
    F64(f64),
}

/// A metadata array: elements of one type.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
#[allow(missing_docs)] // each is an array of the type of that name
pub enum GgufArray {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    F32(Vec<f32>),
    Bool(Vec<bool>),
    String(Vec<String>),
    Array(Vec<GgufArray>),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F64(Vec<f64>),
}

impl GgufValue {
    /// The type in words, for errors.
    pub fn type_name(&self) -> &'static str {
        match self {
            Self::U8(_) => "u8",
            Self::I8(_) => "i8",
            Self::U16(_) => "u16",
            Self::I16(_) => "i16",
            Self::U32(_) => "u32",
            Self::I32(_) => "i32",
            Self::F32(_) => "f32",
            Self::Bool(_) => "bool",
            Self::String(_) => "string",
            Self::Array(array) => array.type_name(),
            Self::U64(_) => "u64",
            Self::I64(_) => "i64",
            Self::F64(_) => "f64",
        }
    }

    /// The integer, if it is one of any width.
    pub fn as_integer(&self) -> Option<i128> {
        Some(match *self {
            Self::U8(n) => n.into(),
            Self::I8(n) => n.into(),
            Self::U16(n) => n.into(),
            Self::I16(n) => n.into(),
            Self::U32(n) => n.into(),
            Self::I32(n) => n.into(),
            Self::U64(n) => n.into(),
            Self::I64(n) => n.into(),
            _ => return None,
        })
    }
}

impl GgufArray {
    /// The type in words, for errors.
    pub fn type_name(&self) -> &'static str {
        match self {
            Self::U8(_) => "array of u8",
            Self::I8(_) => "array of i8",
            Self::U16(_) => "array of u16",
            Self::I16(_) => "array of i16",
            Self::U32(_) => "array of u32",
            Self::I32(_) => "array of i32",
            Self::F32(_) => "array of f32",
            Self::Bool(_) => "array of bool",
            Self::String(_) => "array of string",
            Self::Array(_) => "array of arrays",
            Self::U64(_) => "array of u64",
            Self::I64(_) => "array of i64",
            Self::F64(_) => "array of f64",
        }
    }

    /// How many elements it has.
    pub fn len(&self) -> usize {
        match self {
            Self::U8(array) => array.len(),
            Self::I8(array) => array.len(),
            Self::U16(array) => array.len(),
            Self::I16(array) => array.len(),
            Self::U32(array) => array.len(),
            Self::I32(array) => array.len(),
            Self::F32(array) => array.len(),
            Self::Bool(array) => array.len(),
            Self::String(array) => array.len(),
            Self::Array(array) => array.len(),
            Self::U64(array) => array.len(),
            Self::I64(array) => array.len(),
            Self::F64(array) => array.len(),
        }
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The integers, if they are integers of any width.
    pub fn to_integers(&self) -> Option<Vec<i128>> {
        fn widen<T: Copy + Into<i128>>(array: &[T]) -> Vec<i128> {
            array.iter().map(|&n| n.into()).collect()
        }
        Some(match self {
            Self::U8(array) => widen(array),
            Self::I8(array) => widen(array),
            Self::U16(array) => widen(array),
            Self::I16(array) => widen(array),
            Self::U32(array) => widen(array),
            Self::I32(array) => widen(array),
            Self::U64(array) => widen(array),
            Self::I64(array) => widen(array),
            _ => return None,
        })
    }
}

/// A Rust type that a metadata value can be read as.
///
/// Integers are read from integers of any width that hold the value, `f32` and `f64` from either
/// float. Nothing else is converted.
pub trait FromGguf<'a>: Sized {
    /// The type in words, for errors.
    const EXPECTED: &'static str;

    /// The value, if it has this type.
    fn from_gguf(value: &'a GgufValue) -> Option<Self>;
}

macro_rules! integer_from_gguf {
    ($($type:ty => $name:literal),*) => {$(
        impl FromGguf<'_> for $type {
            const EXPECTED: &'static str = $name;

            fn from_gguf(value: &GgufValue) -> Option<Self> {
                value.as_integer()?.try_into().ok()
            }
        }

        impl FromGguf<'_> for Vec<$type> {
            const EXPECTED: &'static str = concat!("array of ", $name);

            fn from_gguf(value: &GgufValue) -> Option<Self> {
                let GgufValue::Array(array) = value else { return None };
                let integers = array.to_integers()?;
                integers.into_iter().map(|n| n.try_into().ok()).collect()
            }
        }
    )*};
}

integer_from_gguf!(u32 => "u32", i32 => "i32", u64 => "u64", i64 => "i64", usize => "u64");

impl FromGguf<'_> for f32 {
    const EXPECTED: &'static str = "f32";

    fn from_gguf(value: &GgufValue) -> Option<Self> {
        match *value {
            GgufValue::F32(x) => Some(x),
            GgufValue::F64(x) => Some(x as f32),
            _ => None,
        }
    }
}

impl FromGguf<'_> for f64 {
    const EXPECTED: &'static str = "f64";

    fn from_gguf(value: &GgufValue) -> Option<Self> {
        match *value {
            GgufValue::F32(x) => Some(x.into()),
            GgufValue::F64(x) => Some(x),
            _ => None,
        }
    }
}

impl FromGguf<'_> for bool {
    const EXPECTED: &'static str = "bool";

    fn from_gguf(value: &GgufValue) -> Option<Self> {
        match *value {
            GgufValue::Bool(x) => Some(x),
            _ => None,
        }
    }
}

impl<'a> FromGguf<'a> for &'a str {
    const EXPECTED: &'static str = "string";

    fn from_gguf(value: &'a GgufValue) -> Option<Self> {
        match value {
            GgufValue::String(text) => Some(text),
            _ => None,
        }
    }
}

impl<'a> FromGguf<'a> for &'a GgufArray {
    const EXPECTED: &'static str = "array";

    fn from_gguf(value: &'a GgufValue) -> Option<Self> {
        match value {
            GgufValue::Array(array) => Some(array),
            _ => None,
        }
    }
}

impl<'a> FromGguf<'a> for &'a [String] {
    const EXPECTED: &'static str = "array of string";

    fn from_gguf(value: &'a GgufValue) -> Option<Self> {
        match value {
            GgufValue::Array(GgufArray::String(array)) => Some(array),
            _ => None,
        }
    }
}

impl<'a> FromGguf<'a> for &'a [f32] {
    const EXPECTED: &'static str = "array of f32";

    fn from_gguf(value: &'a GgufValue) -> Option<Self> {
        match value {
            GgufValue::Array(GgufArray::F32(array)) => Some(array),
            _ => None,
        }
    }
}

/// The metadata by their keys.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GgufMetadata(pub(super) BTreeMap<String, GgufValue>);

impl GgufMetadata {
    /// The value of that key as it is, if there is one.
    pub fn value(&self, key: &str) -> Option<&GgufValue> {
        self.0.get(key)
    }

    /// The value of that key as a `T`, if there is one.
    ///
    /// # Errors
    /// Fails where it has another type, or does not fit.
    pub fn get<'a, T: FromGguf<'a>>(&'a self, key: &str) -> Result<Option<T>> {
        let Some(value) = self.value(key) else {
            return Ok(None);
        };
        match T::from_gguf(value) {
            Some(value) => Ok(Some(value)),
            None => {
                let found = match value.as_integer() {
                    Some(n) => format!("{} {n}", value.type_name()),
                    None => value.type_name().to_owned(),
                };
                Err(Error::format(
                    format!("metadata {key:?}"),
                    T::EXPECTED,
                    found,
                ))
            }
        }
    }

    /// The value of that key as a `T`.
    ///
    /// # Errors
    /// Fails where there is none, and where [`get`](Self::get) fails.
    pub fn require<'a, T: FromGguf<'a>>(&'a self, key: &str) -> Result<T> {
        self.get(key)?
            .ok_or_else(|| Error::format(format!("metadata {key:?}"), T::EXPECTED, "nothing"))
    }

    /// Keys and values, sorted by key.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &GgufValue)> {
        self.0.iter().map(|(key, value)| (key.as_str(), value))
    }
}
