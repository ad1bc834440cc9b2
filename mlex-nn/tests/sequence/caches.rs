//! Attention layers in sequences, and the caches that they write to.

use mlex_core::{Array, Dtype, QuantizationMode, Quantized};
use mlex_nn::{
    AttentionConfig, CacheUpdate, Embedding, KvCache, LayerCache, RmsNorm, Rope, RopeConfig,
    RopeScaling, SelfAttention, Sequence, Value,
};

use crate::{DTYPES, Tensors, assert_close, assert_same, ends, floats, normal, on_cpu, plain};

const HIDDEN: i32 = 64;
const HEADS: i32 = 4;
const KV_HEADS: i32 = 2;
const BATCH: i32 = 2;

/// What differs between the layers.
#[derive(Clone, Copy, Debug)]
struct Form {
    dtype: Dtype,
    layout: Option<Quantized>,
    head_dim: i32,
    bias: bool,
    norms: bool,
    rope: bool,
}

const FORM: Form = Form {
    dtype: Dtype::Float32,
    layout: None,
    head_dim: 16,
    bias: false,
    norms: false,
    rope: true,
};

fn layer(form: Form) -> SelfAttention {
    let Form {
        head_dim: dim,
        bias,
        ..
    } = form;
    let mut tensors = Tensors::new(form.dtype, form.layout)
        .matrix("q_proj", HEADS * dim, HIDDEN, bias)
        .matrix("k_proj", KV_HEADS * dim, HIDDEN, bias)
        .matrix("v_proj", KV_HEADS * dim, HIDDEN, bias)
        .matrix("o_proj", HIDDEN, HEADS * dim, false);
    if form.norms {
        tensors = tensors
            .vector("q_norm.weight", dim)
            .vector("k_norm.weight", dim);
    }
    let config = AttentionConfig {
        hidden_size: HIDDEN,
        num_heads: HEADS,
        num_kv_heads: KV_HEADS,
        head_dim: dim,
        qkv_bias: bias,
        o_bias: false,
        qk_norm_eps: form.norms.then_some(1e-6),
    };
    let rope = form.rope.then(|| {
        Rope::new(&RopeConfig {
            dims: dim,
            base: 10000.0,
            traditional: false,
            scaling: RopeScaling::None,
        })
        .unwrap()
    });
    tensors.load(|w| SelfAttention::load(w, &config, rope))
}

/// A step of the layer in a node of its own.
fn step(layer: &SelfAttention, x: &Array, cache: &mut KvCache) -> Array {
    let mask = cache.mask(x.dim(1).unwrap()).unwrap();
    let (mut sequence, value) = Sequence::start(x).unwrap().unwrap();
    let recorded = layer.record(&mut sequence, value, &mask, cache).unwrap();
    let (output, update) = recorded.unwrap();
    let mut caches = [LayerCache::Attention(std::mem::take(cache))];
    let output = sequence.finish_updating(output, &[update], &mut caches);
    let [LayerCache::Attention(updated)] = caches else {
        unreachable!("the cache of an attention layer");
    };
    *cache = updated;
    output.unwrap()
}

fn forward(layer: &SelfAttention, x: &Array, cache: &mut KvCache) -> Array {
    let mask = cache.mask(x.dim(1).unwrap()).unwrap();
    layer.forward(x, &mask, cache).unwrap()
}

/// Steps of several lengths, recorded, as `forward` has them, and by MLX's operations.
fn check(form: Form, cache: &KvCache, padding: &[i32]) {
    let layer = layer(form);
    let mut caches = [cache.clone(), cache.clone(), cache.clone()];
    for (index, length) in [5, 1, 1, 3, 1, 300, 1].into_iter().enumerate() {
        let x = normal(50 + index as u64, &[BATCH, length, HIDDEN], form.dtype);
        let before = caches[0].len();
        let found = step(&layer, &x, &mut caches[0]);
        assert_same(&found, &forward(&layer, &x, &mut caches[1]));
        let expected = plain(|| forward(&layer, &x, &mut caches[2]));
        assert_eq!(caches[0].len(), before + length);
        assert_eq!(caches[0].len(), caches[2].len());
        for row in 0..BATCH {
            // What comes of padding does not matter.
            let padding = padding.get(row as usize).copied().unwrap_or(0);
            let first = (padding - before).clamp(0, length);
            let part = |x: &Array| {
                let row = x.slice_axis(0, row, row + 1).unwrap();
                row.slice_axis(1, first, length).unwrap()
            };
            assert_close(&part(&found), &part(&expected));
        }
        assert_eq!(caches[0].nbytes(), caches[1].nbytes());
    }
}

#[test]
fn recorded_attention_is_what_forward_gives() {
    on_cpu(|| {
        let layout = |bits, group_size| {
            Some(Quantized {
                bits,
                group_size,
                mode: QuantizationMode::Affine,
            })
        };
        let empty = KvCache::default();
        for dtype in DTYPES {
            let form = Form { dtype, ..FORM };
            check(form, &empty, &[]);
            let norms = true;
            check(Form { norms, ..form }, &empty, &[]);
            let form = Form {
                layout: layout(4, 32),
                bias: true,
                norms,
                head_dim: 32,
                ..form
            };
            check(form, &empty, &[]);
            check(
                Form {
                    rope: false,
                    ..form
                },
                &empty,
                &[],
            );
        }
        check(
            Form {
                layout: Some(QuantizationMode::Mxfp4.into()),
                ..FORM
            },
            &empty,
            &[],
        );
    });
}

#[test]
fn with_left_padding() {
    on_cpu(|| {
        for padding in [[0, 2], [3, 0], [7, 6]] {
            for norms in [false, true] {
                let mut cache = KvCache::default();
                cache.set_left_padding(&padding).unwrap();
                check(Form { norms, ..FORM }, &cache, &padding);
            }
        }
    });
}

#[test]
fn with_a_window() {
    on_cpu(|| {
        for window in [1, 4, 64, 400] {
            check(FORM, &KvCache::with_window(window).unwrap(), &[]);
        }
    });
}

#[test]
fn a_snapshot_does_not_change() {
    on_cpu(|| {
        let layer = layer(FORM);
        let input = |seed, length| normal(seed, &[BATCH, length, HIDDEN], Dtype::Float32);
        let mut cache = KvCache::default();
        step(&layer, &input(1, 6), &mut cache).eval().unwrap();
        let snapshot = cache.clone();
        let held: Vec<Vec<f32>> = snapshot.arrays().map(floats).collect();

        // Two ways to go on, each from the same state.
        let mut first = Vec::new();
        for round in 0..4 {
            let output = step(&layer, &input(2 + round, 1), &mut cache);
            output.eval().unwrap();
            first.push(output);
        }
        let found: Vec<Vec<f32>> = snapshot.arrays().map(floats).collect();
        assert!(found == held, "the snapshot has changed");
        assert_eq!((snapshot.len(), cache.len()), (6, 10));
        let mut other = snapshot.clone();
        step(&layer, &input(77, 2), &mut other).eval().unwrap();
        let mut again = snapshot.clone();
        for (round, expected) in first.iter().enumerate() {
            let output = step(&layer, &input(2 + round as u64, 1), &mut again);
            assert_same(&output, expected);
        }
        let found: Vec<Vec<f32>> = snapshot.arrays().map(floats).collect();
        assert!(found == held, "the snapshot has changed");
    });
}

#[test]
fn a_cache_changes_when_the_update_is_applied() {
    on_cpu(|| {
        let layer = layer(FORM);
        let x = normal(1, &[BATCH, 3, HIDDEN], Dtype::Float32);
        let mut cache = KvCache::default();
        step(&layer, &x, &mut cache).eval().unwrap();
        let held: Vec<Vec<f32>> = cache.arrays().map(floats).collect();
        {
            let mask = cache.mask(3).unwrap();
            let (mut sequence, value) = Sequence::start(&x).unwrap().unwrap();
            let recorded = layer.record(&mut sequence, value, &mask, &cache).unwrap();
            let (output, update) = recorded.unwrap();
            let outputs = sequence.finish(&[output]).unwrap();
            outputs[0].eval().unwrap();
            drop(update);
        }
        let found: Vec<Vec<f32>> = cache.arrays().map(floats).collect();
        assert!(found == held && cache.len() == 3, "the cache has changed");
    });
}

#[test]
fn what_the_kernels_do_not_have_is_not_recorded() {
    on_cpu(|| {
        // Heads of a width that is not whole vectors.
        let form = Form {
            head_dim: 8,
            ..FORM
        };
        let x = normal(1, &[BATCH, 3, HIDDEN], Dtype::Float32);
        let recorded = |layer: &SelfAttention, x: &Array, cache: &KvCache| {
            let mask = cache.mask(x.dim(1).unwrap()).unwrap();
            let (mut sequence, value) = Sequence::start(x).unwrap().unwrap();
            let recorded = layer.record(&mut sequence, value, &mask, cache).unwrap();
            recorded.is_some()
        };
        assert!(!recorded(&layer(form), &x, &KvCache::default()));
        let layer = layer(FORM);
        assert!(recorded(&layer, &x, &KvCache::default()));
        // A cache of another batch.
        let mut other = KvCache::default();
        let one = x.slice_axis(0, 0, 1).unwrap();
        step(&layer, &one, &mut other).eval().unwrap();
        assert!(!recorded(&layer, &x, &other));
        assert!(!recorded(
            &layer,
            &x.slice_axis(2, 0, 32).unwrap(),
            &KvCache::default()
        ));
    });
}

#[test]
fn blocks_with_caches_are_one_node() {
    on_cpu(|| {
        let layers = [
            layer(FORM),
            layer(Form {
                norms: true,
                ..FORM
            }),
        ];
        let norms = [1, 2].map(|_| {
            let tensors = Tensors::new(Dtype::Float32, None).vector("weight", HIDDEN);
            tensors.load(|w| RmsNorm::load(w, HIDDEN, 1e-5))
        });
        let mut caches = [KvCache::default(), KvCache::default()];
        let mut expected_caches = caches.clone();
        for (index, length) in [4, 1, 2, 1].into_iter().enumerate() {
            let x = normal(index as u64, &[BATCH, length, HIDDEN], Dtype::Float32);
            let mask = caches[0].mask(length).unwrap();
            let (mut sequence, mut value) = Sequence::start(&x).unwrap().unwrap();
            let mut updates = Vec::new();
            for ((layer, norm), cache) in layers.iter().zip(&norms).zip(&caches) {
                let recorded = layer.record(&mut sequence, value, &mask, cache).unwrap();
                let (output, update) = recorded.unwrap();
                let outputs = norm.record_sum(&mut sequence, value, output, 1.0);
                value = outputs.unwrap().unwrap().1;
                updates.push(update);
            }
            let mut layers_of = caches.map(LayerCache::Attention);
            let found = sequence.finish_updating(value, &updates, &mut layers_of);
            let found = found.unwrap();
            caches = layers_of.map(|cache| match cache {
                LayerCache::Attention(cache) => cache,
                other => unreachable!("{other:?}"),
            });

            let mut h = x;
            for ((layer, norm), cache) in layers.iter().zip(&norms).zip(&mut expected_caches) {
                let output = forward(layer, &h, cache);
                h = norm.forward_sum(&h, &output).unwrap().1;
            }
            assert_same(&found, &h);
        }
    });
}

/// Finishes a sequence of one layer, whose cache is `cache`.
fn finish(sequence: Sequence, output: Value, update: CacheUpdate, cache: &mut KvCache) -> Array {
    let mut caches = [LayerCache::Attention(std::mem::take(cache))];
    let output = sequence.finish_updating(output, &[update], &mut caches);
    let [LayerCache::Attention(updated)] = caches else {
        unreachable!("made above");
    };
    *cache = updated;
    output.unwrap()
}

#[test]
fn a_cache_that_was_never_written_is_not_read() {
    on_cpu(|| {
        let layer = layer(FORM);
        let table = Tensors::new(Dtype::Float32, None).matrix("", 4, HIDDEN, false);
        let table = table.load(|w| Embedding::load(w, 4, HIDDEN));
        let ids = Array::from_slice(&[1i32, 9, 2, 3], &[BATCH, 2]).unwrap();
        let mut cache = KvCache::default();
        let mask = cache.mask(2).unwrap();
        let (mut sequence, value) = Sequence::start_with_ids(&ids).unwrap().unwrap();
        let rows = table.record(&mut sequence, value).unwrap().unwrap();
        let recorded = layer.record(&mut sequence, rows, &mask, &cache).unwrap();
        let (output, update) = recorded.unwrap();
        let output = finish(sequence, output, update, &mut cache);
        assert!(output.eval().is_err());
        // Behind it, and in other memory with what it should hold.
        for length in [1, 300] {
            let x = normal(1, &[BATCH, length, HIDDEN], Dtype::Float32);
            let error = step(&layer, &x, &mut cache.clone()).eval().unwrap_err();
            assert!(!error.to_string().contains("panicked"), "{error}");
        }
        let keys = normal(2, &[BATCH, KV_HEADS, 1, 16], Dtype::Float32);
        assert!(cache.update(&keys, &keys).is_err());
    });
}

/// A cache, and the inputs `[BATCH, n, HIDDEN]` of the tokens that it has seen.
#[derive(Clone)]
struct Branch {
    cache: KvCache,
    seen: Vec<Array>,
    /// For each of `seen`, the number of tokens.
    lengths: Vec<i32>,
}

/// An output that is not computed yet, and what it has to be.
struct Pending {
    output: Array,
    expected: Array,
}

impl Pending {
    #[track_caller]
    fn check(self) {
        assert_close(&self.output, &self.expected);
    }
}

/// A generator of small numbers.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % bound
    }
}

impl Branch {
    fn new(window: Option<i32>) -> Self {
        let cache = match window {
            Some(window) => KvCache::with_window(window).unwrap(),
            None => KvCache::default(),
        };
        Self {
            cache,
            seen: vec![],
            lengths: vec![],
        }
    }

    /// The next tokens, by a cache that has seen all of them at once.
    fn step(&mut self, layer: &SelfAttention, length: i32, window: Option<i32>) -> Pending {
        static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1000);
        let seed = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let x = normal(seed, &[BATCH, length, HIDDEN], Dtype::Float32);
        x.eval().unwrap();
        let output = step(layer, &x, &mut self.cache);
        self.seen.push(x);
        self.lengths.push(length);
        let all = Array::concatenate(&self.seen, 1).unwrap();
        let total: i32 = self.lengths.iter().sum();
        let expected = step(layer, &all, &mut Self::new(window).cache);
        let expected = expected.slice_axis(1, total - length, total).unwrap();
        expected.eval().unwrap();
        Pending { output, expected }
    }

    /// Takes back the last step.
    fn trim(&mut self) {
        let Some(&length) = self.lengths.last() else {
            return;
        };
        if self.cache.can_trim(length) {
            self.cache.trim(length).unwrap();
            self.lengths.pop();
            self.seen.pop();
        }
    }
}

/// Caches that are cloned, go on, take back and are dropped, while their steps are computed at
/// any later time: each is a value of its own.
fn check_branches(seed: u64, window: Option<i32>) {
    let layer = layer(FORM);
    let mut r = Random(seed);
    let mut branches = vec![Branch::new(window)];
    let mut pending: Vec<Pending> = Vec::new();
    for _ in 0..24 {
        let index = r.below(branches.len());
        match r.below(10) {
            0..4 => {
                let length = [1, 1, 1, 2, 5, 130][r.below(6)];
                pending.push(branches[index].step(&layer, length, window));
            }
            4..6 => branches.push(branches[index].clone()),
            6 => branches[index].trim(),
            7 if branches.len() > 1 => {
                branches.swap_remove(index);
            }
            8 => {
                // Recorded and not gone on with.
                let cache = &branches[index].cache;
                let x = normal(seed, &[BATCH, 1, HIDDEN], Dtype::Float32);
                let mask = cache.mask(1).unwrap();
                let (mut sequence, value) = Sequence::start(&x).unwrap().unwrap();
                let recorded = layer.record(&mut sequence, value, &mask, cache).unwrap();
                let output = recorded.unwrap().0;
                if r.below(2) == 0 {
                    let output = sequence.finish(&[output]).unwrap().remove(0);
                    output.eval().unwrap();
                }
            }
            _ if !pending.is_empty() => pending.swap_remove(r.below(pending.len())).check(),
            _ => {}
        }
    }
    for branch in &mut branches {
        pending.push(branch.step(&layer, 1, window));
    }
    while !pending.is_empty() {
        pending.swap_remove(r.below(pending.len())).check();
    }
    for branch in &mut branches {
        branch.step(&layer, 1, window).check();
    }
}

#[test]
fn branches_of_a_cache_do_not_meet() {
    on_cpu(|| {
        for seed in 0..60 {
            check_branches(seed, None);
        }
    });
}

#[test]
fn branches_with_a_window_do_not_meet() {
    on_cpu(|| {
        for seed in 0..40 {
            check_branches(100 + seed, Some([1, 3, 100][seed as usize % 3]));
        }
    });
}

#[test]
fn updates_of_clones_that_were_recorded_together() {
    on_cpu(|| {
        let layer = layer(FORM);
        let mut first = Branch::new(None);
        first.step(&layer, 4, None).check();
        let mut second = first.clone();
        let record = |branch: &Branch, seed| {
            let x = normal(seed, &[BATCH, 1, HIDDEN], Dtype::Float32);
            let mask = branch.cache.mask(1).unwrap();
            let (mut sequence, value) = Sequence::start(&x).unwrap().unwrap();
            let recorded = layer.record(&mut sequence, value, &mask, &branch.cache);
            let (output, update) = recorded.unwrap().unwrap();
            (x, sequence, output, update)
        };
        let recorded = [record(&first, 1), record(&second, 2)];
        for (branch, recorded) in [&mut first, &mut second].into_iter().zip(recorded) {
            let (x, sequence, output, update) = recorded;
            finish(sequence, output, update, &mut branch.cache);
            branch.seen.push(x);
            branch.lengths.push(1);
        }
        // Each writes before the other one reads again.
        for _ in 0..2 {
            first.step(&layer, 1, None).check();
            second.step(&layer, 1, None).check();
        }
    });
}

#[test]
fn a_clone_leaves_for_arrays_on_another_thread() {
    ends(|| {
        let layer = layer(FORM);
        let mut cache = KvCache::default();
        let x = normal(1, &[BATCH, 3, HIDDEN], Dtype::Float32);
        step(&layer, &x, &mut cache).eval().unwrap();
        let snapshot = cache.clone();
        let other = std::thread::spawn(move || {
            let cpu = mlex_core::Stream::default_of(mlex_core::Device::Cpu).unwrap();
            cpu.scope(|| {
                let keys = normal(2, &[BATCH, KV_HEADS, 1, 16], Dtype::Float32);
                for _ in 0..300 {
                    let mut cache = snapshot.clone();
                    let (keys, values) = cache.update(&keys, &keys).unwrap();
                    mlex_core::eval([&keys, &values]).unwrap();
                }
            });
        });
        let x = normal(3, &[BATCH, 1, HIDDEN], Dtype::Float32);
        while !other.is_finished() && cache.len() < 250 {
            step(&layer, &x, &mut cache).eval().unwrap();
        }
        other.join().unwrap();
    });
}
