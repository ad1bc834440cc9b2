//! Weights quantized by the kernels: bit for bit those of `mx.quantize` on a CPU, on the weights
//! of `tools/make_quantize_golden.py` and on random ones.
#![allow(clippy::unwrap_used)]

use std::path::Path;

use mlex_core::io::SafetensorsFile;
use mlex_core::{
    Array, Device, Dtype, QuantizationMode, Quantized, QuantizedWeight, Stream, random,
};
use mlex_nn::dispatch;

/// Every layout that MLX has.
fn layouts() -> Vec<Quantized> {
    let modes = [
        QuantizationMode::Affine,
        QuantizationMode::Mxfp4,
        QuantizationMode::Mxfp8,
        QuantizationMode::Nvfp4,
    ];
    let of_mode = |mode: QuantizationMode| {
        let groups = mode.group_sizes().iter();
        let of_group = move |&group_size: &i32| {
            mode.widths().iter().map(move |&bits| Quantized {
                bits,
                group_size,
                mode,
            })
        };
        groups.flat_map(of_group)
    };
    modes.into_iter().flat_map(of_mode).collect()
}

/// Where the two differ first, if they do.
fn difference(found: &QuantizedWeight, expected: &QuantizedWeight) -> Option<String> {
    let parts = |weight: &QuantizedWeight| {
        [
            Some(weight.weight.clone()),
            Some(weight.scales.clone()),
            weight.biases.clone(),
        ]
    };
    let names = ["weight", "scales", "biases"];
    for (name, (found, expected)) in names
        .iter()
        .zip(parts(found).into_iter().zip(parts(expected)))
    {
        let (found, expected) = match (found, expected) {
            (Some(found), Some(expected)) => (found, expected),
            (None, None) => continue,
            _ => return Some(format!("{name}: only one has them")),
        };
        if (found.shape(), found.dtype()) != (expected.shape(), expected.dtype()) {
            return Some(format!("{name}: another shape or type"));
        }
        let (found, expected) = (found.as_bytes().unwrap(), expected.as_bytes().unwrap());
        if let Some(at) = found.iter().zip(expected).position(|(a, b)| a != b) {
            return Some(format!("{name}: byte {at}"));
        }
    }
    None
}

fn on_cpu() {
    Stream::default_of(Device::Cpu).unwrap().set_current();
}

#[test]
fn hard_weights_are_those_of_mlx() {
    on_cpu();
    let data = "../mlex-core/tests/data/quantize.safetensors";
    let file = SafetensorsFile::open(Path::new(env!("CARGO_MANIFEST_DIR")).join(data)).unwrap();
    let tensor = |name: &str| {
        let info = file.info(name)?;
        let shape: Vec<i32> = info.shape.iter().map(|&dim| dim as i32).collect();
        Some(Array::from_bytes(file.bytes(name).unwrap(), &shape, info.dtype.dtype()).unwrap())
    };
    for dtype in [Dtype::Float32, Dtype::Float16, Dtype::Bfloat16] {
        let weights = tensor(dtype.name()).unwrap();
        for layout in layouts() {
            let Quantized {
                bits,
                group_size,
                mode,
            } = layout;
            let case = format!("{dtype}.{mode}.{bits}.{group_size}");
            let expected = QuantizedWeight {
                weight: tensor(&format!("{case}.weight")).unwrap(),
                scales: tensor(&format!("{case}.scales")).unwrap(),
                biases: tensor(&format!("{case}.biases")),
                layout,
            };
            let found = dispatch::quantize(&weights, layout).unwrap();
            assert_eq!(difference(&found, &expected), None, "{case}");
        }
    }
}

#[test]
fn stacks_keep_their_shape_and_other_layouts_are_refused() {
    on_cpu();
    let layout = Quantized::from(QuantizationMode::Nvfp4);
    let weights = Array::zeros(&[3, 5, 32], Dtype::Bfloat16).unwrap();
    let packed = dispatch::quantize(&weights, layout).unwrap();
    assert_eq!(packed.weight.shape(), [3, 5, 4]);
    assert_eq!(packed.scales.shape(), [3, 5, 2]);
    // A view whose rows are not neighbours in memory.
    let turned = Array::zeros(&[32, 5], Dtype::Float32).unwrap().t().unwrap();
    let packed = dispatch::quantize(&turned, layout).unwrap();
    assert_eq!(packed.weight.shape(), [5, 4]);
    let odd = Array::zeros(&[5, 24], Dtype::Float32).unwrap();
    assert!(dispatch::quantize(&odd, layout).is_err());
    let seven = Quantized { bits: 7, ..layout };
    assert!(dispatch::quantize(&weights, seven).is_err());
}

/// MLX's own operation is the truth, whatever the magnitude.
#[test]
fn random_weights_are_those_of_mlx() {
    on_cpu();
    for seed in 0..60 {
        let key = random::key(seed).unwrap();
        let size = |salt: u64, count: u64| 1 + (seed * salt % count) as i32;
        let shape = [size(7, 5), 128 * size(11, 3)];
        let weights = random::normal(0.0, 1.0, &shape, Dtype::Float32, &key)
            .unwrap()
            .multiply(2f32.powi((seed % 29) as i32 - 14))
            .unwrap();
        for dtype in [Dtype::Float32, Dtype::Float16, Dtype::Bfloat16] {
            let weights = weights.as_type(dtype).unwrap();
            for layout in layouts() {
                let found = dispatch::quantize(&weights, layout).unwrap();
                let expected = QuantizedWeight::quantize(&weights, layout).unwrap();
                let difference = difference(&found, &expected);
                assert_eq!(difference, None, "seed {seed}: {layout} of {dtype}");
            }
        }
    }
}
