//! What the tests of several kernels share.
#![allow(dead_code, reason = "each test uses some of it")]

pub(crate) mod conv;
pub(crate) mod recurrent;
pub(crate) mod weights;

use half::{bf16, f16};
use mlex_kernels::{Activation, Element, Floats, Level};

/// A small generator, so that a test draws many numbers from one seed of proptest.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn bits(&mut self) -> u32 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) ^ (self.0 >> 50)) as u32 ^ (self.0 >> 13) as u32
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        self.bits() as usize % n
    }

    /// Between -1 and 1.
    pub(crate) fn float(&mut self) -> f32 {
        (self.bits() >> 8) as f32 / (1u32 << 23) as f32 - 1.0
    }

    pub(crate) fn floats<T: Element>(&mut self, n: usize) -> Vec<T> {
        (0..n).map(|_| T::from_f32(self.float())).collect()
    }
}

/// Floats of any type.
#[derive(Clone)]
pub(crate) enum Values {
    F32(Vec<f32>),
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
}

impl Values {
    pub(crate) fn new(kind: usize, values: &[f32]) -> Self {
        match kind % 3 {
            0 => Self::F32(values.to_vec()),
            1 => Self::F16(values.iter().map(|&v| f16::from_f32(v)).collect()),
            _ => Self::Bf16(values.iter().map(|&v| bf16::from_f32(v)).collect()),
        }
    }

    pub(crate) fn view(&self) -> Floats<'_> {
        match self {
            Self::F32(v) => Floats::F32(v),
            Self::F16(v) => Floats::F16(v),
            Self::Bf16(v) => Floats::Bf16(v),
        }
    }
}

/// Runs a check at every level of this CPU.
pub(crate) fn at_every_level(mut check: impl FnMut(Level)) {
    for &level in Level::available() {
        level.with(|| check(level));
    }
}

/// The relative size of the rounding of a type.
pub(crate) fn epsilon<T: Element>() -> f64 {
    match size_of::<T>() {
        4 => 6e-8,
        _ if T::from_f32(1.0 + 1.0 / 1024.0).to_f32() > 1.0 => 4.9e-4,
        _ => 3.91e-3,
    }
}

/// erfc by its continued fraction and, for small arguments, its series.
pub(crate) fn erfc(z: f64) -> f64 {
    if z < 0.0 {
        return 2.0 - erfc(-z);
    }
    let root = std::f64::consts::PI.sqrt();
    if z < 2.0 {
        let (mut term, mut sum) = (z, z);
        for n in 1..80 {
            term *= -z * z / f64::from(n);
            sum += term / f64::from(2 * n + 1);
        }
        return 1.0 - 2.0 / root * sum;
    }
    let fraction = (1..200)
        .rev()
        .fold(0.0, |f, n| f64::from(n) / 2.0 / (z + f));
    (-z * z).exp() / root / (z + fraction)
}

/// The activations by their definitions.
pub(crate) fn activation(kind: Activation, x: f64) -> f64 {
    match kind {
        Activation::Sigmoid => 1.0 / (1.0 + (-x).exp()),
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::GeluTanh => {
            let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
            // (1 + tanh u) / 2 without its cancellation.
            x / (1.0 + (-2.0 * u).exp())
        }
        Activation::Gelu => x * 0.5 * erfc(-x / std::f64::consts::SQRT_2),
    }
}

pub(crate) const ACTIVATIONS: [Activation; 4] = [
    Activation::Silu,
    Activation::GeluTanh,
    Activation::Gelu,
    Activation::Sigmoid,
];
