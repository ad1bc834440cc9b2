//! Element types.

use std::fmt;
use std::str::FromStr;

use half::{bf16, f16};
use mlex_sys as sys;

use crate::{Error, ErrorKind};

macro_rules! dtypes {
    ($($(#[$doc:meta])* $name:ident = $raw:ident, $size:literal, $text:literal;)*) => {
        /// The type of an array's elements: all of MLX's.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Dtype {
            $($(#[$doc])* $name,)*
        }

        impl Dtype {
            /// Every dtype.
            pub const ALL: &[Self] = &[$(Self::$name),*];

            /// Bytes per element.
            pub const fn size_in_bytes(self) -> usize {
                match self {
                    $(Self::$name => $size,)*
                }
            }

            /// The name as MLX and numpy write it, such as `bfloat16`.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$name => $text,)*
                }
            }

            pub(crate) const fn to_raw(self) -> sys::mlx_dtype {
                match self {
                    $(Self::$name => sys::$raw,)*
                }
            }

            pub(crate) fn from_raw(raw: sys::mlx_dtype) -> Self {
                match raw {
                    $(sys::$raw => Self::$name,)*
                    // mlx-c converts from MLX's enum, which has these and no others.
                    _ => unreachable!("dtype {raw} of mlx-c"),
                }
            }
        }
    };
}

dtypes! {
    /// One byte, 0 or 1.
    Bool = MLX_BOOL, 1, "bool";
    /// Unsigned 8 bits.
    Uint8 = MLX_UINT8, 1, "uint8";
    /// Unsigned 16 bits.
    Uint16 = MLX_UINT16, 2, "uint16";
    /// Unsigned 32 bits.
    Uint32 = MLX_UINT32, 4, "uint32";
    /// Unsigned 64 bits.
    Uint64 = MLX_UINT64, 8, "uint64";
    /// Signed 8 bits.
    Int8 = MLX_INT8, 1, "int8";
    /// Signed 16 bits.
    Int16 = MLX_INT16, 2, "int16";
    /// Signed 32 bits.
    Int32 = MLX_INT32, 4, "int32";
    /// Signed 64 bits.
    Int64 = MLX_INT64, 8, "int64";
    /// IEEE half precision.
    Float16 = MLX_FLOAT16, 2, "float16";
    /// IEEE single precision.
    Float32 = MLX_FLOAT32, 4, "float32";
    /// IEEE double precision (MLX has it on the CPU only).
    Float64 = MLX_FLOAT64, 8, "float64";
    /// The upper half of a `float32`.
    Bfloat16 = MLX_BFLOAT16, 2, "bfloat16";
    /// Two `float32`: real and imaginary part.
    Complex64 = MLX_COMPLEX64, 8, "complex64";
}

impl Dtype {
    /// Whether it is one of the four real floating-point types.
    pub const fn is_float(self) -> bool {
        matches!(
            self,
            Self::Float16 | Self::Float32 | Self::Float64 | Self::Bfloat16
        )
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Dtype {
    type Err = Error;

    /// The dtype with that [`name`](Dtype::name).
    fn from_str(text: &str) -> Result<Self, Error> {
        Self::ALL
            .iter()
            .copied()
            .find(|dtype| dtype.name() == text)
            .ok_or_else(|| {
                Error::new(ErrorKind::Argument {
                    argument: "dtype",
                    expected: "a name such as float32, float16 or bfloat16",
                    found: format!("{text:?}"),
                })
            })
    }
}

/// A complex number of two `f32`, laid out as MLX has it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C)]
pub struct Complex64 {
    /// The real part.
    pub re: f32,
    /// The imaginary part.
    pub im: f32,
}

mod sealed {
    pub trait Sealed {}
}

/// A Rust type that is the element of a [`Dtype`].
pub trait Element: Copy + sealed::Sealed + 'static {
    /// The dtype it is the element of.
    const DTYPE: Dtype;
}

macro_rules! elements {
    ($($type:ty => $dtype:ident),* $(,)?) => {
        $(
            impl sealed::Sealed for $type {}
            impl Element for $type {
                const DTYPE: Dtype = Dtype::$dtype;
            }
        )*
    };
}

elements! {
    bool => Bool, u8 => Uint8, u16 => Uint16, u32 => Uint32, u64 => Uint64,
    i8 => Int8, i16 => Int16, i32 => Int32, i64 => Int64,
    f16 => Float16, f32 => Float32, f64 => Float64, bf16 => Bfloat16, Complex64 => Complex64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_back() {
        for &dtype in Dtype::ALL {
            assert_eq!(dtype.name().parse::<Dtype>().unwrap(), dtype);
        }
        assert_eq!(
            "float8".parse::<Dtype>().unwrap_err().to_string(),
            "dtype: expected a name such as float32, float16 or bfloat16, found \"float8\""
        );
    }
}
