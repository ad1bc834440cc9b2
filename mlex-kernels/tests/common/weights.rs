//! Quantized weights for tests, and what products with them may be off by.
//!
//! The layouts and the numbers of FP4, FP8 and the scales are those of the OCP Microscaling
//! and NVFP4 formats, and of MLX for what those leave open (codes packed from the lowest
//! bit on, no FP8 code is NaN, scale byte 0 is 2^-127).

use mlex_kernels::{Element, Mode, QuantizedWeight, Scales};

use super::{Random, Values, epsilon};

/// Random quantized weights with their values in f64.
pub(crate) struct Fixture {
    pub(crate) mode: Mode,
    pub(crate) experts: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
    pub(crate) packed: Vec<u32>,
    pub(crate) scales: Values,
    pub(crate) biases: Values,
    pub(crate) bytes: Vec<u8>,
    pub(crate) values: Vec<f64>,
}

fn fp4(code: u32) -> f64 {
    let magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][code as usize & 7];
    if code & 8 == 0 { magnitude } else { -magnitude }
}

fn fp8(code: u32) -> f64 {
    let (exponent, mantissa) = ((code >> 3) & 15, f64::from(code & 7));
    let magnitude = if exponent == 0 {
        mantissa / 8.0 * 2f64.powi(-6)
    } else {
        (1.0 + mantissa / 8.0) * 2f64.powi(exponent as i32 - 7)
    };
    if code & 128 == 0 {
        magnitude
    } else {
        -magnitude
    }
}

impl Fixture {
    pub(crate) fn new(
        mode: Mode,
        experts: usize,
        n: usize,
        k: usize,
        kind: usize,
        r: &mut Random,
    ) -> Self {
        let (bits, group) = (mode.bits(), mode.group_size());
        let packed: Vec<u32> = (0..experts * n * k * bits / 32).map(|_| r.bits()).collect();
        let groups = experts * n * k / group;
        // Scales of both signs, biases about minus the middle code times the scale.
        let scales: Vec<f32> = (0..groups).map(|_| r.float() * 0.1).collect();
        let middle = (1 << (bits - 1)) as f32;
        let biases: Vec<f32> = scales
            .iter()
            .map(|s| -s * middle * (1.0 + 0.2 * r.float()))
            .collect();
        let (scales, biases) = (Values::new(kind, &scales), Values::new(kind, &biases));
        let bytes: Vec<u8> = (0..groups)
            .map(|_| match mode {
                Mode::Nvfp4 => r.below(256) as u8,
                _ => 120 + r.below(12) as u8,
            })
            .collect();
        let code = |i: usize| {
            (0..bits).fold(0, |code, b| {
                let at = i * bits + b;
                code | ((packed[at / 32] >> (at % 32)) & 1) << b
            })
        };
        let values = (0..experts * n * k)
            .map(|i| {
                let g = i / group;
                match mode {
                    Mode::Affine { .. } => {
                        let (s, b) = (scales.view().get(g), biases.view().get(g));
                        f64::from(s) * f64::from(code(i)) + f64::from(b)
                    }
                    Mode::Mxfp4 => fp4(code(i)) * 2f64.powi(i32::from(bytes[g]) - 127),
                    Mode::Mxfp8 => fp8(code(i)) * 2f64.powi(i32::from(bytes[g]) - 127),
                    _ => fp4(code(i)) * fp8(u32::from(bytes[g])),
                }
            })
            .collect();
        Self {
            mode,
            experts,
            n,
            k,
            packed,
            scales,
            biases,
            bytes,
            values,
        }
    }

    pub(crate) fn view(&self) -> QuantizedWeight<'_> {
        let scales = match self.mode {
            Mode::Affine { .. } => Scales::Affine {
                scales: self.scales.view(),
                biases: self.biases.view(),
            },
            _ => Scales::Bytes(&self.bytes),
        };
        QuantizedWeight::with_experts(
            self.mode,
            self.experts,
            self.n,
            self.k,
            &self.packed,
            scales,
        )
        .expect("a valid weight")
    }

    /// Compares `y` with the exact product; `precision` is relative to `sum |x| |w|`.
    pub(crate) fn check<T: Element>(
        &self,
        y: &[T],
        x: &[T],
        experts: &[u32],
        precision: f64,
        what: &str,
    ) {
        for (m, &expert) in experts.iter().enumerate() {
            let x = &x[m * self.k..][..self.k];
            for n in 0..self.n {
                let w = &self.values[(expert as usize * self.n + n) * self.k..][..self.k];
                let (mut sum, mut size) = (0.0, 0.0);
                // Integer codes are summed apart from the bias, which is of their size.
                for (&x, &w) in x.iter().zip(w) {
                    sum += f64::from(x.to_f32()) * w;
                    size += f64::from(x.to_f32()).abs() * w.abs();
                }
                let found = f64::from(y[m * self.n + n].to_f32());
                let error = (found - sum).abs();
                let allowed = precision * size + epsilon::<T>() * sum.abs() + 1e-30;
                assert!(
                    error <= allowed,
                    "{what}: y[{m}, {n}] = {found}, expected {sum}, error {error:e} > {allowed:e}"
                );
            }
        }
    }
}

pub(crate) fn modes() -> Vec<Mode> {
    let mut modes = vec![Mode::Mxfp4, Mode::Mxfp8, Mode::Nvfp4];
    for bits in [2, 3, 4, 5, 6, 8] {
        for group_size in [32, 64, 128] {
            modes.push(Mode::Affine { bits, group_size });
        }
    }
    modes
}

/// What rounding may do, relative to the sum of the sizes of the products. Codes up to 255
/// with a bias that cancels them cost up to 7 bits, but errors of either sign average out.
pub(crate) const EXACT: f64 = 2e-6;
/// The same for `x` of 16 bits, which is taken as 16-bit integers.
pub(crate) const COARSE: f64 = 1e-4;
/// The same with `x` and the weights in bfloat16.
pub(crate) const BRAIN: f64 = 5e-3;
