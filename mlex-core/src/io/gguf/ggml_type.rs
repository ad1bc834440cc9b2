//! The element types of GGUF tensors.

use std::fmt;

/// How a GGUF tensor's elements are stored: by blocks, each of a fixed number of elements and
/// bytes. The numbers are ggml's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[allow(missing_docs)] // the names are ggml's, and say all there is to say
#[allow(non_camel_case_types)] // as ggml writes them
pub enum GgmlType {
    F32,
    F16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q8_1,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    Q8_K,
    IQ2_XXS,
    IQ2_XS,
    IQ3_XXS,
    IQ1_S,
    IQ4_NL,
    IQ3_S,
    IQ2_S,
    IQ4_XS,
    I8,
    I16,
    I32,
    I64,
    F64,
    IQ1_M,
    BF16,
    TQ1_0,
    TQ2_0,
    MXFP4,
    /// A type that this crate does not know, by its number.
    Unknown(u32),
}

/// Number, type, name, elements per block, bytes per block.
#[rustfmt::skip]
const TYPES: [(u32, GgmlType, &str, usize, usize); 32] = [
    (0,  GgmlType::F32,     "F32",     1,   4),
    (1,  GgmlType::F16,     "F16",     1,   2),
    (2,  GgmlType::Q4_0,    "Q4_0",    32,  18),
    (3,  GgmlType::Q4_1,    "Q4_1",    32,  20),
    (6,  GgmlType::Q5_0,    "Q5_0",    32,  22),
    (7,  GgmlType::Q5_1,    "Q5_1",    32,  24),
    (8,  GgmlType::Q8_0,    "Q8_0",    32,  34),
    (9,  GgmlType::Q8_1,    "Q8_1",    32,  36),
    (10, GgmlType::Q2_K,    "Q2_K",    256, 84),
    (11, GgmlType::Q3_K,    "Q3_K",    256, 110),
    (12, GgmlType::Q4_K,    "Q4_K",    256, 144),
    (13, GgmlType::Q5_K,    "Q5_K",    256, 176),
    (14, GgmlType::Q6_K,    "Q6_K",    256, 210),
    (15, GgmlType::Q8_K,    "Q8_K",    256, 292),
    (16, GgmlType::IQ2_XXS, "IQ2_XXS", 256, 66),
    (17, GgmlType::IQ2_XS,  "IQ2_XS",  256, 74),
    (18, GgmlType::IQ3_XXS, "IQ3_XXS", 256, 98),
    (19, GgmlType::IQ1_S,   "IQ1_S",   256, 50),
    (20, GgmlType::IQ4_NL,  "IQ4_NL",  32,  18),
    (21, GgmlType::IQ3_S,   "IQ3_S",   256, 110),
    (22, GgmlType::IQ2_S,   "IQ2_S",   256, 82),
    (23, GgmlType::IQ4_XS,  "IQ4_XS",  256, 136),
    (24, GgmlType::I8,      "I8",      1,   1),
    (25, GgmlType::I16,     "I16",     1,   2),
    (26, GgmlType::I32,     "I32",     1,   4),
    (27, GgmlType::I64,     "I64",     1,   8),
    (28, GgmlType::F64,     "F64",     1,   8),
    (29, GgmlType::IQ1_M,   "IQ1_M",   256, 56),
    (30, GgmlType::BF16,    "BF16",    1,   2),
    (34, GgmlType::TQ1_0,   "TQ1_0",   256, 54),
    (35, GgmlType::TQ2_0,   "TQ2_0",   256, 66),
    (39, GgmlType::MXFP4,   "MXFP4",   32,  17),
];

/// Elements and bytes of one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockSize {
    /// Elements per block, consecutive in a row.
    pub elements: usize,
    /// Bytes per block.
    pub bytes: usize,
}

impl GgmlType {
    /// The type of that number.
    pub fn from_number(number: u32) -> Self {
        TYPES
            .iter()
            .find(|row| row.0 == number)
            .map_or(Self::Unknown(number), |row| row.1)
    }

    /// The size of a block; `None` for a type that is not known.
    pub fn block(self) -> Option<BlockSize> {
        let &(_, _, _, elements, bytes) = TYPES.iter().find(|row| row.1 == self)?;
        Some(BlockSize { elements, bytes })
    }
}

impl fmt::Display for GgmlType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Self::Unknown(number) = self {
            return write!(f, "ggml type {number}");
        }
        let row = TYPES.iter().find(|row| row.1 == *self);
        f.write_str(row.map_or("", |row| row.2))
    }
}
