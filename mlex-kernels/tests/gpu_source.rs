//! The sources of GPU kernels, written out as MLX does for Metal and for CUDA, compiled as C++
//! against a stub of either language, and run with coroutines for lanes: what they compute is
//! compared with the definition in f64. Needs a C++20 compiler, as the build of MLX does (`CXX`,
//! or `c++`).
#![allow(clippy::unwrap_used)]

mod common;

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use common::Random;
use mlex_kernels::gpu::{GATED_DELTA, GpuSource, GpuText, MAMBA2};

const BATCH: usize = 2;
const LENGTH: usize = 5;
const HEADS: usize = 4;
/// Of what a state is read and written by.
const KEY_DIM: usize = 64;
const VALUE_DIM: usize = 12;
const ROWS: usize = 4;
/// Key heads, or groups of heads.
const GROUPS: usize = 2;

/// A kernel, and what it is run on.
struct Case {
    source: &'static GpuSource,
    constants: &'static [(&'static str, usize)],
    flags: Vec<(&'static str, bool)>,
    /// Numbers of the inputs that are floats, which come first.
    inputs: Vec<usize>,
    outputs: [usize; 2],
    /// Those of the others, as C++.
    others: String,
}

impl Case {
    /// The C++ type of an input.
    fn kind(&self, index: usize) -> &'static str {
        match self.source.inputs[index] {
            "length" => "int",
            "mask" => "bool",
            _ => "float",
        }
    }

    /// The function as `metal_kernel` writes it, and how it is called.
    fn metal(&self) -> (String, String) {
        let GpuText { header, source } = self.source.metal();
        let mut text = header.to_owned();
        let flags = self.flags.iter().map(|(name, _)| format!("bool {name}"));
        let constants = self.constants.iter().map(|(name, _)| format!("int {name}"));
        let parameters: Vec<String> = flags.chain(constants).collect();
        let parameters = parameters.join(", ");
        writeln!(text, "template <typename T, {parameters}>").unwrap();
        writeln!(text, "[[kernel]] void kernel_under_test(").unwrap();
        let mut number = 0;
        let mut parameter = |start: String| {
            writeln!(text, "  {start} [[buffer({number})]],").unwrap();
            number += 1;
        };
        for (index, name) in self.source.inputs.iter().enumerate() {
            // Small inputs are in another address space.
            let space = if *name == "length" {
                "constant"
            } else {
                "device"
            };
            parameter(format!("const {space} {}* {name}", self.kind(index)));
        }
        for name in self.source.outputs {
            parameter(format!("device float* {name}"));
        }
        writeln!(
            text,
            "  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],\n  \
             uint3 thread_position_in_grid [[thread_position_in_grid]]) {{\n{source}\n}}"
        )
        .unwrap();
        let flags = self.flags.iter().map(|(_, value)| value.to_string());
        let constants = self.constants.iter().map(|(_, value)| value.to_string());
        let values: Vec<String> = flags.chain(constants).collect();
        let call = format!(
            "kernel_under_test<float, {}>(ARGUMENTS, lane, uint3{{lane, row, plane}});",
            values.join(", ")
        );
        (text, call)
    }

    /// The function as `cuda_kernel` writes it, and how it is called: with blocks of two rows.
    fn cuda(&self) -> (String, String) {
        let GpuText { header, source } = self.source.cuda();
        let mut text = header.to_owned();
        writeln!(text, "__global__ void kernel_under_test(").unwrap();
        for (index, name) in self.source.inputs.iter().enumerate() {
            writeln!(text, "    const {}* {name},", self.kind(index)).unwrap();
        }
        let outputs = self.source.outputs.iter();
        let outputs: Vec<String> = outputs.map(|name| format!("    float* {name}")).collect();
        writeln!(text, "{}) {{", outputs.join(",\n")).unwrap();
        writeln!(text, "  using T = float;").unwrap();
        for (name, value) in &self.flags {
            writeln!(text, "  constexpr bool {name} = {value};").unwrap();
        }
        for (name, value) in self.constants {
            writeln!(text, "  constexpr int {name} = {value};").unwrap();
        }
        writeln!(text, "{source}\n}}").unwrap();
        let call = "threadIdx = {lane, row % 2, 0}; blockIdx = {0, row / 2, plane}; \
                    blockDim = {32, 2, 1}; kernel_under_test(ARGUMENTS);";
        (text, call.to_owned())
    }

    /// A program that reads the inputs, runs the kernel and writes the outputs.
    fn program(&self, text: &str, call: &str) -> String {
        let (inputs, outputs) = (self.source.inputs, self.source.outputs);
        let mut main = String::new();
        for (name, size) in inputs.iter().zip(&self.inputs) {
            writeln!(main, "  auto {name} = stub_read({size});").unwrap();
        }
        for (name, size) in outputs.iter().zip(self.outputs) {
            writeln!(main, "  std::vector<float> {name}({size}, NAN);").unwrap();
        }
        let floats = self.inputs.len();
        let arguments = inputs.iter().enumerate().map(|(index, name)| {
            let data = if index < floats { ".data()" } else { "" };
            format!("{name}{data}")
        });
        let arguments = arguments.chain(outputs.iter().map(|name| format!("{name}.data()")));
        let arguments: Vec<String> = arguments.collect();
        let call = call.replace("ARGUMENTS", &arguments.join(", "));
        // One row more than there are: a grid may be rounded up.
        let rows = VALUE_DIM / ROWS + 1;
        format!(
            "#include \"stub.h\"\n{text}\nint main() {{\n{main}  {}
  stub_run({rows}, {}, [&](uint lane, uint row, uint plane) {{ {call} }});
  stub_write({});\n  stub_write({});\n}}\n",
            self.others,
            BATCH * HEADS,
            outputs[0],
            outputs[1]
        )
    }

    /// Compares both languages with what is expected.
    fn check(&self, name: &str, inputs: &[Vec<f32>], expected: &[f64]) {
        let bytes = inputs.iter().flatten().flat_map(|x| x.to_le_bytes());
        let bytes: Vec<u8> = bytes.collect();
        for (language, (text, call)) in [("metal", self.metal()), ("cuda", self.cuda())] {
            let name = format!("{name}_{language}");
            let found = run(&name, &self.program(&text, &call), &bytes);
            assert_eq!(found.len(), expected.len());
            for (i, (&found, &expected)) in found.iter().zip(expected).enumerate() {
                let error = (f64::from(found) - expected).abs();
                assert!(error < 1e-5, "{name} [{i}]: {found} != {expected}");
            }
        }
    }
}

fn widened(inputs: &[Vec<f32>]) -> Vec<Vec<f64>> {
    let wide = |values: &Vec<f32>| values.iter().map(|&x| f64::from(x)).collect();
    inputs.iter().map(wide).collect()
}

/// Compiles and runs a program.
fn run(name: &str, program: &str, input: &[u8]) -> Vec<f32> {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let stub = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/gpu");
    let (source, binary) = (folder.join(format!("{name}.cpp")), folder.join(name));
    std::fs::write(&source, program).unwrap();
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
    let output = Command::new(&compiler)
        .args(["-std=c++20", "-O0", "-Wall", "-Wno-attributes", "-Werror"])
        .arg("-I")
        .arg(stub)
        .arg(&source)
        .arg("-o")
        .arg(&binary)
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{name}: {errors}");
    let mut child = Command::new(&binary)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(input).unwrap();
    drop(stdin);
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{name}: {}", output.status);
    let floats = output.stdout.chunks_exact(4);
    floats
        .map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()))
        .collect()
}

/// The outputs of the gated delta rule by the definition, in f64.
fn gated_delta(inputs: &[Vec<f32>], padding: &[usize]) -> Vec<f64> {
    let inputs = widened(inputs);
    let [q, k, v, log_decay, beta, state] = &inputs[..] else {
        unreachable!()
    };
    let (mut y, mut state) = (vec![0.0; v.len()], state.clone());
    for (b, &start) in padding.iter().enumerate() {
        for h in 0..HEADS {
            let size = VALUE_DIM * KEY_DIM;
            let state = &mut state[(b * HEADS + h) * size..][..size];
            for t in start..LENGTH {
                let at = b * LENGTH + t;
                let key = (at * GROUPS + h / (HEADS / GROUPS)) * KEY_DIM;
                let gate = at * HEADS + h;
                for row in 0..VALUE_DIM {
                    let s = &mut state[row * KEY_DIM..][..KEY_DIM];
                    s.iter_mut().for_each(|s| *s *= log_decay[gate].exp());
                    let known: f64 = s.iter().zip(&k[key..]).map(|(s, k)| s * k).sum();
                    let value = gate * VALUE_DIM + row;
                    let u = beta[gate] * (v[value] - known);
                    s.iter_mut().zip(&k[key..]).for_each(|(s, k)| *s += u * k);
                    y[value] = s.iter().zip(&q[key..]).map(|(s, q)| s * q).sum();
                }
            }
        }
    }
    [y, state].concat()
}

/// Numbers of the values and the gates of all positions, of what keys have, and of the states.
const VALUES: usize = BATCH * LENGTH * HEADS * VALUE_DIM;
const GATES: usize = BATCH * LENGTH * HEADS;
const KEYS: usize = BATCH * LENGTH * GROUPS * KEY_DIM;
const STATES: usize = BATCH * HEADS * VALUE_DIM * KEY_DIM;

#[test]
fn gated_delta_computes_the_rule() {
    let mut random = Random::new(3);
    let sizes = vec![KEYS, KEYS, VALUES, GATES, GATES, STATES];
    let mut inputs: Vec<Vec<f32>> = sizes.iter().map(|&size| random.floats(size)).collect();
    for x in inputs[..2].iter_mut().flatten() {
        *x *= 0.2;
    }
    inputs[3].iter_mut().for_each(|x| *x = -2.0 * x.abs());
    inputs[4].iter_mut().for_each(|x| *x = x.abs());
    for padding in [[0, 0], [0, 3]] {
        let masked = padding != [0, 0];
        let mask = padding
            .iter()
            .flat_map(|&count| (0..LENGTH).map(move |t| (t >= count).to_string()));
        let mask = mask.collect::<Vec<_>>().join(", ");
        let case = Case {
            source: &GATED_DELTA,
            constants: &[
                ("KEY_HEADS", GROUPS),
                ("VALUE_HEADS", HEADS),
                ("KEY_DIM", KEY_DIM),
                ("VALUE_DIM", VALUE_DIM),
                ("ROWS", ROWS),
            ],
            flags: vec![("MASKED", masked)],
            inputs: sizes.clone(),
            outputs: [VALUES, STATES],
            others: format!("const int length[1] = {{{LENGTH}}}; const bool mask[] = {{{mask}}};"),
        };
        let expected = gated_delta(&inputs, &padding);
        case.check(&format!("gated_delta_{masked}"), &inputs, &expected);
    }
}

/// The outputs of Mamba 2's recurrence by the definition, in f64.
fn mamba2(inputs: &[Vec<f32>]) -> Vec<f64> {
    let inputs = widened(inputs);
    let [x, dt, rate, b, c, d, state] = &inputs[..] else {
        unreachable!()
    };
    let (mut y, mut state) = (vec![0.0; x.len()], state.clone());
    for batch in 0..BATCH {
        for h in 0..HEADS {
            for t in 0..LENGTH {
                let at = batch * LENGTH + t;
                let shared = (at * GROUPS + h / (HEADS / GROUPS)) * KEY_DIM;
                let gate = at * HEADS + h;
                for p in 0..VALUE_DIM {
                    let value = gate * VALUE_DIM + p;
                    let row = ((batch * HEADS + h) * VALUE_DIM + p) * KEY_DIM;
                    y[value] = d[h] * x[value];
                    for i in 0..KEY_DIM {
                        let s = &mut state[row + i];
                        *s = (rate[h] * dt[gate]).exp() * *s + dt[gate] * x[value] * b[shared + i];
                        y[value] += *s * c[shared + i];
                    }
                }
            }
        }
    }
    [y, state].concat()
}

#[test]
fn mamba2_computes_the_recurrence() {
    let mut random = Random::new(5);
    let sizes = vec![VALUES, GATES, HEADS, KEYS, KEYS, HEADS, STATES];
    let mut inputs: Vec<Vec<f32>> = sizes.iter().map(|&size| random.floats(size)).collect();
    for x in inputs[3..5].iter_mut().flatten() {
        *x *= 0.2;
    }
    // A step of 0, as at padding, leaves no trace.
    inputs[1].iter_mut().for_each(|x| *x = x.max(0.0));
    inputs[2].iter_mut().for_each(|x| *x = -2.0 * x.abs());
    let case = Case {
        source: &MAMBA2,
        constants: &[
            ("HEADS", HEADS),
            ("GROUPS", GROUPS),
            ("HEAD_DIM", VALUE_DIM),
            ("STATE", KEY_DIM),
            ("ROWS", ROWS),
        ],
        flags: Vec::new(),
        inputs: sizes,
        outputs: [VALUES, STATES],
        others: format!("const int length[1] = {{{LENGTH}}};"),
    };
    case.check("mamba2", &inputs, &mamba2(&inputs));
}
