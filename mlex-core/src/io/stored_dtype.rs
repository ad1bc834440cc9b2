//! The element types that a safetensors file can hold.

use std::fmt;

use crate::Dtype;

/// The element type of a tensor as it is stored.
///
/// Most are an array's [`Dtype`]. The 8-bit floats have no dtype of their own in MLX: their bytes
/// are kept as they are, and [`f8_e4m3_to_f32`], [`f8_e5m2_to_f32`] and [`f8_e8m0_to_f32`] say
/// what they mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum StoredDtype {
    /// One byte per value, 0 or 1.
    Bool,
    /// Unsigned 8-bit integer.
    U8,
    /// Signed 8-bit integer.
    I8,
    /// Float of 1 sign, 4 exponent (bias 7) and 3 fraction bits, without infinities.
    F8E4M3,
    /// Float of 1 sign, 5 exponent (bias 15) and 2 fraction bits.
    F8E5M2,
    /// A power of two, by its exponent plus 127: the scale of MX formats.
    F8E8M0,
    /// Unsigned 16-bit integer.
    U16,
    /// Signed 16-bit integer.
    I16,
    /// IEEE half precision.
    F16,
    /// The upper half of an IEEE single.
    BF16,
    /// Unsigned 32-bit integer.
    U32,
    /// Signed 32-bit integer.
    I32,
    /// IEEE single precision.
    F32,
    /// Unsigned 64-bit integer.
    U64,
    /// Signed 64-bit integer.
    I64,
    /// IEEE double precision.
    F64,
    /// Two singles, real and imaginary.
    C64,
}

impl StoredDtype {
    /// Every stored dtype.
    pub const ALL: [Self; 17] = [
        Self::Bool,
        Self::U8,
        Self::I8,
        Self::F8E4M3,
        Self::F8E5M2,
        Self::F8E8M0,
        Self::U16,
        Self::I16,
        Self::F16,
        Self::BF16,
        Self::U32,
        Self::I32,
        Self::F32,
        Self::U64,
        Self::I64,
        Self::F64,
        Self::C64,
    ];

    /// The name in a safetensors header.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bool => "BOOL",
            Self::U8 => "U8",
            Self::I8 => "I8",
            Self::F8E4M3 => "F8_E4M3",
            Self::F8E5M2 => "F8_E5M2",
            Self::F8E8M0 => "F8_E8M0",
            Self::U16 => "U16",
            Self::I16 => "I16",
            Self::F16 => "F16",
            Self::BF16 => "BF16",
            Self::U32 => "U32",
            Self::I32 => "I32",
            Self::F32 => "F32",
            Self::U64 => "U64",
            Self::I64 => "I64",
            Self::F64 => "F64",
            Self::C64 => "C64",
        }
    }

    /// The stored dtype of that name in a safetensors header.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| dtype.name() == name)
    }

    /// Bytes per element.
    pub const fn size_in_bytes(self) -> usize {
        match self {
            Self::Bool | Self::U8 | Self::I8 | Self::F8E4M3 | Self::F8E5M2 | Self::F8E8M0 => 1,
            Self::U16 | Self::I16 | Self::F16 | Self::BF16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::F64 | Self::C64 => 8,
        }
    }

    /// The dtype of an array that holds the stored bytes unchanged: `Uint8` for 8-bit floats.
    pub const fn dtype(self) -> Dtype {
        match self {
            Self::Bool => Dtype::Bool,
            Self::U8 | Self::F8E4M3 | Self::F8E5M2 | Self::F8E8M0 => Dtype::Uint8,
            Self::I8 => Dtype::Int8,
            Self::U16 => Dtype::Uint16,
            Self::I16 => Dtype::Int16,
            Self::F16 => Dtype::Float16,
            Self::BF16 => Dtype::Bfloat16,
            Self::U32 => Dtype::Uint32,
            Self::I32 => Dtype::Int32,
            Self::F32 => Dtype::Float32,
            Self::U64 => Dtype::Uint64,
            Self::I64 => Dtype::Int64,
            Self::F64 => Dtype::Float64,
            Self::C64 => Dtype::Complex64,
        }
    }

    /// Whether this is one of the 8-bit floats, which have no array dtype of their own.
    pub const fn is_f8(self) -> bool {
        matches!(self, Self::F8E4M3 | Self::F8E5M2 | Self::F8E8M0)
    }
}

impl From<Dtype> for StoredDtype {
    fn from(dtype: Dtype) -> Self {
        match dtype {
            Dtype::Bool => Self::Bool,
            Dtype::Uint8 => Self::U8,
            Dtype::Uint16 => Self::U16,
            Dtype::Uint32 => Self::U32,
            Dtype::Uint64 => Self::U64,
            Dtype::Int8 => Self::I8,
            Dtype::Int16 => Self::I16,
            Dtype::Int32 => Self::I32,
            Dtype::Int64 => Self::I64,
            Dtype::Float16 => Self::F16,
            Dtype::Float32 => Self::F32,
            Dtype::Float64 => Self::F64,
            Dtype::Bfloat16 => Self::BF16,
            Dtype::Complex64 => Self::C64,
        }
    }
}

impl fmt::Display for StoredDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The value of an `F8_E4M3` byte (the OCP variant "E4M3FN": 0x7f and 0xff are NaN, nothing is
/// infinite, the largest value is 448).
pub const fn f8_e4m3_to_f32(byte: u8) -> f32 {
    F8_E4M3_VALUES[byte as usize]
}

/// The value of an `F8_E5M2` byte: the upper half of an IEEE half, infinities included.
pub const fn f8_e5m2_to_f32(byte: u8) -> f32 {
    F8_E5M2_VALUES[byte as usize]
}

/// The value of an `F8_E8M0` byte: two to the power of `byte - 127`, and NaN for 255.
pub const fn f8_e8m0_to_f32(byte: u8) -> f32 {
    match byte {
        // 2^-127 is below the normal range of a single: its fraction has only the top bit.
        0 => f32::from_bits(1 << 22),
        255 => f32::NAN,
        exponent => f32::from_bits((exponent as u32) << 23),
    }
}

/// The value of every `F8_E4M3` byte.
pub static F8_E4M3_VALUES: [f32; 256] = f8_values(3, 7, false);

/// The value of every `F8_E5M2` byte.
pub static F8_E5M2_VALUES: [f32; 256] = f8_values(2, 15, true);

/// The values of an 8-bit float with a sign bit, `fraction_bits` and that exponent bias. With
/// `ieee` the largest exponent means infinity and NaN; else only all ones mean NaN.
const fn f8_values(fraction_bits: u32, bias: i32, ieee: bool) -> [f32; 256] {
    let mut values = [0.0; 256];
    let mut byte = 0;
    while byte < 256 {
        let magnitude = byte as u32 & 0x7f;
        let exponent = (magnitude >> fraction_bits) as i32;
        let fraction = magnitude & ((1 << fraction_bits) - 1);
        let largest_exponent = 0x7f >> fraction_bits;
        let value = if ieee && exponent == largest_exponent {
            if fraction == 0 {
                f32::INFINITY
            } else {
                f32::NAN
            }
        } else if !ieee && magnitude == 0x7f {
            f32::NAN
        } else if exponent == 0 {
            fraction as f32 * power_of_two(1 - bias - fraction_bits as i32)
        } else {
            let significand = fraction | (1 << fraction_bits);
            significand as f32 * power_of_two(exponent - bias - fraction_bits as i32)
        };
        values[byte] = if byte & 0x80 == 0 { value } else { -value };
        byte += 1;
    }
    values
}

/// Two to a power within the normal range of a single.
const fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((exponent + 127) as u32) << 23)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lead_back_and_sizes_agree_with_the_array_dtype() {
        for dtype in StoredDtype::ALL {
            assert_eq!(StoredDtype::from_name(dtype.name()), Some(dtype));
            assert_eq!(dtype.size_in_bytes(), dtype.dtype().size_in_bytes());
            if !dtype.is_f8() {
                assert_eq!(StoredDtype::from(dtype.dtype()), dtype);
            }
        }
        assert_eq!(StoredDtype::from_name("Q8"), None);
    }

    /// Corner values of the OCP 8-bit floating point specification (revision 1.0, table 2).
    #[test]
    fn f8_corner_values() {
        assert_eq!(f8_e4m3_to_f32(0x00), 0.0);
        assert!(f8_e4m3_to_f32(0x80).is_sign_negative());
        assert_eq!(f8_e4m3_to_f32(0x01), 2f32.powi(-9));
        assert_eq!(f8_e4m3_to_f32(0x07), 0.875 * 2f32.powi(-6));
        assert_eq!(f8_e4m3_to_f32(0x08), 2f32.powi(-6));
        assert_eq!(f8_e4m3_to_f32(0x38), 1.0);
        assert_eq!(f8_e4m3_to_f32(0x7e), 448.0);
        assert_eq!(f8_e4m3_to_f32(0xfe), -448.0);
        assert!(f8_e4m3_to_f32(0x7f).is_nan() && f8_e4m3_to_f32(0xff).is_nan());

        assert_eq!(f8_e5m2_to_f32(0x01), 2f32.powi(-16));
        assert_eq!(f8_e5m2_to_f32(0x03), 0.75 * 2f32.powi(-14));
        assert_eq!(f8_e5m2_to_f32(0x04), 2f32.powi(-14));
        assert_eq!(f8_e5m2_to_f32(0x7b), 57344.0);
        assert_eq!(f8_e5m2_to_f32(0x7c), f32::INFINITY);
        assert_eq!(f8_e5m2_to_f32(0xfc), f32::NEG_INFINITY);
        assert!((0x7d..=0x7f).all(|byte| f8_e5m2_to_f32(byte).is_nan()));

        assert_eq!(f8_e8m0_to_f32(0), 2f32.powi(-127));
        assert_eq!(f8_e8m0_to_f32(127), 1.0);
        assert_eq!(f8_e8m0_to_f32(254), 2f32.powi(127));
        assert!(f8_e8m0_to_f32(255).is_nan());
    }

    #[test]
    fn f8_e5m2_is_the_upper_half_of_an_ieee_half() {
        for byte in 0..=255_u8 {
            let half = half::f16::from_bits(u16::from(byte) << 8).to_f32();
            let value = f8_e5m2_to_f32(byte);
            assert!(
                value == half || value.is_nan() && half.is_nan(),
                "{byte:#x}"
            );
        }
    }

    #[test]
    fn f8_e4m3_follows_its_formula() {
        for byte in (0..=255_u8).filter(|byte| byte & 0x7f != 0x7f) {
            let sign = if byte & 0x80 == 0 { 1.0 } else { -1.0 };
            let exponent = i32::from(byte >> 3 & 15);
            let fraction = f32::from(byte & 7) / 8.0;
            let expected = if exponent == 0 {
                sign * fraction * 2f32.powi(-6)
            } else {
                sign * (1.0 + fraction) * 2f32.powi(exponent - 7)
            };
            assert_eq!(f8_e4m3_to_f32(byte), expected, "{byte:#x}");
        }
    }
}
