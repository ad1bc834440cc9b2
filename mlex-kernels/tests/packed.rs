//! Packed keys and values: codes, scales and biases by the definition of MLX's affine
//! quantization, and attention over what they stand for.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Random, at_every_level, epsilon};
use half::{bf16, f16};
use mlex_kernels::{
    AttentionOptions, AttentionShape, Element, FloatType, Heads, Mask, OutputOrder, PackedHeads,
    PackedRow, attention, attention_packed, pack_rows,
};

/// The codes, scale and bias of a group, in the steps that MLX's source has.
fn group(values: &[f32], bits: usize) -> (Vec<u32>, f32, f32) {
    let max = values.iter().copied().fold(f32::MIN, f32::max);
    let min = values.iter().copied().fold(f32::MAX, f32::min);
    let bins = ((1u32 << bits) - 1) as f32;
    let by_min = min.abs() > max.abs();
    let mut scale = f32::max((max - min) / bins, 1e-7) * if by_min { 1.0 } else { -1.0 };
    let edge = if by_min { min } else { max };
    let steps = (edge / scale).round_ties_even();
    let mut bias = 0.0;
    if steps != 0.0 {
        (scale, bias) = (edge / steps, edge);
    }
    let code = |value: &f32| ((value - bias) / scale).round_ties_even().clamp(0.0, bins) as u32;
    (values.iter().map(code).collect(), scale, bias)
}

/// What a packed row holds, read bit by bit.
fn read(words: &[u32], dim: usize, bits: usize) -> (Vec<u32>, Vec<u8>) {
    let bit = |at: usize| words[at / 32] >> (at % 32) & 1;
    let code = |i: usize| (0..bits).map(|b| bit(i * bits + b) << b).sum();
    let rest = words[dim * bits / 32..].iter();
    let rest = rest.flat_map(|word| word.to_le_bytes());
    ((0..dim).map(code).collect(), rest.collect())
}

/// Rows in `T`, and what they stand for after packing.
fn check_rows<T: Element>(scales: FloatType, factor: fn(&[u8]) -> (f32, &[u8])) {
    let mut r = Random::new(7);
    for bits in [2, 3, 4, 5, 6, 8] {
        for (dim, size) in [(64, 64), (64, 32), (128, 64), (96, 32), (256, 128)] {
            let row = PackedRow::new(dim, bits, size, scales).unwrap();
            let mut values: Vec<T> = r.floats(dim * 3);
            // A row of zeros, and a group of one value.
            values[..dim].fill(T::from_f32(0.0));
            values[dim..dim + size].fill(T::from_f32(-0.75));
            let mut words = vec![0; 3 * row.words()];
            pack_rows(&mut words, &values, row).unwrap();
            for (values, words) in values.chunks(dim).zip(words.chunks(row.words())) {
                let (codes, factors) = read(words, dim, bits);
                let values: Vec<f32> = values.iter().map(|value| value.to_f32()).collect();
                let (mut scales, mut biases) = (Vec::new(), Vec::new());
                for (i, values) in values.chunks(size).enumerate() {
                    let (expected, scale, bias) = group(values, bits);
                    assert_eq!(codes[i * size..(i + 1) * size], expected);
                    scales.push(scale);
                    biases.push(bias);
                }
                let mut rest = &factors[..];
                for expected in scales.iter().chain(&biases) {
                    let (found, after) = factor(rest);
                    assert_eq!(found, T::from_f32(*expected).to_f32());
                    rest = after;
                }
                assert!(rest.is_empty());
            }
        }
    }
}

#[test]
fn rows_are_packed_as_mlx_packs_them() {
    check_rows::<f32>(FloatType::F32, |bytes| {
        let (first, rest) = bytes.split_at(4);
        (f32::from_le_bytes(first.try_into().unwrap()), rest)
    });
    check_rows::<f16>(FloatType::F16, |bytes| {
        let (first, rest) = bytes.split_at(2);
        (f16::from_le_bytes(first.try_into().unwrap()).to_f32(), rest)
    });
    check_rows::<bf16>(FloatType::Bf16, |bytes| {
        let (first, rest) = bytes.split_at(2);
        (
            bf16::from_le_bytes(first.try_into().unwrap()).to_f32(),
            rest,
        )
    });
}

/// What the words stand for, in `T`.
fn unpacked<T: Element>(values: &[T], dim: usize, size: usize, bits: usize) -> Vec<f32> {
    assert!(values.len().is_multiple_of(dim));
    let groups = values.chunks(size);
    let stand_for = |values: &[T]| {
        let values: Vec<f32> = values.iter().map(|value| value.to_f32()).collect();
        let (codes, scale, bias) = group(&values, bits);
        let [scale, bias] = [scale, bias].map(|factor| T::from_f32(factor).to_f32());
        let value = move |code: u32| code as f32 * scale + bias;
        codes.into_iter().map(value).collect::<Vec<f32>>()
    };
    groups.flat_map(stand_for).collect()
}

fn check_attention<T: Element>(scales: FloatType, shape: AttentionShape, bits: usize, seed: u64) {
    let mut r = Random::new(seed);
    let AttentionShape {
        batch,
        q_heads,
        kv_heads,
        q_len,
        kv_len,
        head_dim: dim,
        ..
    } = shape;
    let size = if dim % 64 == 0 { 64 } else { 32 };
    let row = PackedRow::new(dim, bits, size, scales).unwrap();
    let count = batch * kv_heads * kv_len;
    let q: Vec<T> = r.floats(batch * q_heads * q_len * dim);
    let kv: [Vec<T>; 2] = [r.floats(count * dim), r.floats(count * dim)];
    let packed = kv.each_ref().map(|values| {
        let mut words = vec![0; count * row.words()];
        pack_rows(&mut words, values, row).unwrap();
        words
    });
    let plain = kv
        .each_ref()
        .map(|values| unpacked::<T>(values, dim, size, bits));
    let options = AttentionOptions {
        scale: 0.3,
        mask: Mask::Causal { window: None },
        sinks: None,
        output: OutputOrder::LengthFirst,
    };
    let wide: Vec<f32> = q.iter().map(|value| value.to_f32()).collect();
    let heads = |data| Heads::contiguous(data, kv_heads, kv_len, dim);
    let mut expected = vec![0.0f32; q.len()];
    let queries = Heads::contiguous(&wide[..], q_heads, q_len, dim);
    let [k, v] = plain.each_ref().map(|data| heads(&data[..]));
    attention(&mut expected, queries, k, v, shape, options).unwrap();

    let words = |data| PackedHeads {
        words: Heads::contiguous(data, kv_heads, kv_len, row.words()),
        row,
    };
    let mut found = vec![T::from_f32(0.0); q.len()];
    let queries = Heads::contiguous(&q[..], q_heads, q_len, dim);
    let [k, v] = packed.each_ref().map(|data| words(&data[..]));
    attention_packed(&mut found, queries, k, v, shape, options).unwrap();
    for (found, expected) in found.iter().zip(&expected) {
        let error = f64::from((found.to_f32() - expected).abs());
        assert!(error <= epsilon::<T>() * 4.0 + 2e-5, "{shape:?}: {error}");
    }
}

#[test]
fn attention_is_that_over_what_is_packed() {
    at_every_level(|_| {
        for (q_len, kv_len) in [(1, 1), (1, 300), (3, 130), (40, 40), (70, 200)] {
            for (head_dim, bits) in [(64, 4), (64, 8), (32, 3), (128, 6)] {
                let shape = AttentionShape {
                    batch: 2,
                    q_heads: 6,
                    kv_heads: 2,
                    q_len,
                    kv_len,
                    head_dim,
                    value_dim: head_dim,
                };
                let seed = (q_len * 1000 + kv_len) as u64;
                check_attention::<f32>(FloatType::F32, shape, bits, seed);
                check_attention::<bf16>(FloatType::Bf16, shape, bits, seed);
                check_attention::<f16>(FloatType::F16, shape, bits, seed);
            }
        }
    });
}

#[test]
fn wrong_forms_and_lengths_are_refused() {
    let new = |dim, bits, group| PackedRow::new(dim, bits, group, FloatType::F32);
    for (dim, bits, group) in [
        (64, 7, 64),
        (64, 4, 16),
        (96, 4, 64),
        (0, 4, 64),
        (2048, 4, 64),
    ] {
        assert!(new(dim, bits, group).is_err(), "{dim} {bits} {group}");
    }
    let row = new(64, 4, 64).unwrap();
    assert_eq!(row.words(), 8 + 2);
    assert!(pack_rows(&mut [0; 10], &[0.0f32; 65], row).is_err());
    assert!(pack_rows(&mut [0; 11], &[0.0f32; 64], row).is_err());
}
