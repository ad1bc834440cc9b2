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
use mlex_kernels::gpu::{GATED_DELTA, GpuText};

const BATCH: usize = 2;
const LENGTH: usize = 5;
const KEY_HEADS: usize = 2;
const HEADS: usize = 4;
const KEY_DIM: usize = 64;
const VALUE_DIM: usize = 12;
const ROWS: usize = 4;

/// The constants, `MASKED` apart.
const CONSTANTS: [(&str, usize); 5] = [
    ("KEY_HEADS", KEY_HEADS),
    ("VALUE_HEADS", HEADS),
    ("KEY_DIM", KEY_DIM),
    ("VALUE_DIM", VALUE_DIM),
    ("ROWS", ROWS),
];

/// The C++ types of the inputs.
const TYPES: [&str; 8] = [
    "float", "float", "float", "float", "float", "float", "int", "bool",
];

/// The function as `metal_kernel` writes it, and how it is called.
fn metal(masked: bool) -> (String, String) {
    let GpuText { header, source } = GATED_DELTA.metal();
    let mut text = header.to_owned();
    let constants = CONSTANTS.map(|(name, _)| format!("int {name}")).join(", ");
    writeln!(text, "template <typename T, bool MASKED, {constants}>").unwrap();
    writeln!(text, "[[kernel]] void kernel_under_test(").unwrap();
    let mut index = 0;
    let mut parameter = |start: String| {
        writeln!(text, "  {start} [[buffer({index})]],").unwrap();
        index += 1;
    };
    for (name, kind) in GATED_DELTA.inputs.iter().zip(TYPES) {
        // Small inputs are in another address space.
        let space = if *name == "length" {
            "constant"
        } else {
            "device"
        };
        parameter(format!("const {space} {kind}* {name}"));
    }
    for name in GATED_DELTA.outputs {
        parameter(format!("device float* {name}"));
    }
    writeln!(
        text,
        "  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],\n  \
         uint3 thread_position_in_grid [[thread_position_in_grid]]) {{\n{source}\n}}"
    )
    .unwrap();
    let values = CONSTANTS.map(|(_, value)| value.to_string()).join(", ");
    let call = format!(
        "kernel_under_test<float, {masked}, {values}>(ARGUMENTS, lane, uint3{{lane, row, plane}});"
    );
    (text, call)
}

/// The function as `cuda_kernel` writes it, and how it is called: with blocks of two rows.
fn cuda(masked: bool) -> (String, String) {
    let GpuText { header, source } = GATED_DELTA.cuda();
    let mut text = header.to_owned();
    writeln!(text, "__global__ void kernel_under_test(").unwrap();
    for (name, kind) in GATED_DELTA.inputs.iter().zip(TYPES) {
        writeln!(text, "    const {kind}* {name},").unwrap();
    }
    let outputs = GATED_DELTA.outputs.iter();
    let outputs: Vec<String> = outputs.map(|name| format!("    float* {name}")).collect();
    writeln!(text, "{}) {{", outputs.join(",\n")).unwrap();
    writeln!(
        text,
        "  using T = float;\n  constexpr bool MASKED = {masked};"
    )
    .unwrap();
    for (name, value) in CONSTANTS {
        writeln!(text, "  constexpr int {name} = {value};").unwrap();
    }
    writeln!(text, "{source}\n}}").unwrap();
    let call = "threadIdx = {lane, row % 2, 0}; blockIdx = {0, row / 2, plane}; \
                blockDim = {32, 2, 1}; kernel_under_test(ARGUMENTS);";
    (text, call.to_owned())
}

/// Numbers of the inputs that are floats, and of the outputs.
fn sizes() -> ([usize; 6], [usize; 2]) {
    let rows = BATCH * LENGTH;
    let keys = rows * KEY_HEADS * KEY_DIM;
    let (values, states) = (
        rows * HEADS * VALUE_DIM,
        BATCH * HEADS * VALUE_DIM * KEY_DIM,
    );
    let gates = rows * HEADS;
    ([keys, keys, values, gates, gates, states], [values, states])
}

/// A program that reads the inputs, runs the kernel and writes the outputs.
fn program(text: &str, call: &str, padding: &[usize]) -> String {
    let (inputs, outputs) = sizes();
    let mut main = String::new();
    for (name, size) in GATED_DELTA.inputs.iter().zip(inputs) {
        writeln!(main, "  auto {name} = stub_read({size});").unwrap();
    }
    for (name, size) in GATED_DELTA.outputs.iter().zip(outputs) {
        writeln!(main, "  std::vector<float> {name}({size}, NAN);").unwrap();
    }
    let mask: Vec<String> = padding
        .iter()
        .flat_map(|&count| (0..LENGTH).map(move |t| (t >= count).to_string()))
        .collect();
    let mask = mask.join(", ");
    let arguments = "queries.data(), keys.data(), values.data(), log_decay.data(), beta.data(), \
                     state.data(), length, mask, y.data(), state_after.data()";
    let call = call.replace("ARGUMENTS", arguments);
    // One row more than there are: a grid may be rounded up.
    let rows = VALUE_DIM / ROWS + 1;
    format!(
        "#include \"stub.h\"\n{text}\nint main() {{\n{main}  const int length[1] = {{{LENGTH}}};
  const bool mask[] = {{{mask}}};
  stub_run({rows}, {}, [&](uint lane, uint row, uint plane) {{ {call} }});
  stub_write(y);\n  stub_write(state_after);\n}}\n",
        BATCH * HEADS
    )
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

/// The outputs by the definition, in f64.
fn truth(inputs: &[Vec<f32>; 6], padding: &[usize]) -> (Vec<f64>, Vec<f64>) {
    let [q, k, v, log_decay, beta, state] = inputs
        .each_ref()
        .map(|values| values.iter().map(|&x| f64::from(x)).collect::<Vec<_>>());
    let (mut y, mut state) = (vec![0.0; v.len()], state);
    for (b, &start) in padding.iter().enumerate() {
        for h in 0..HEADS {
            let size = VALUE_DIM * KEY_DIM;
            let state = &mut state[(b * HEADS + h) * size..][..size];
            for t in start..LENGTH {
                let at = b * LENGTH + t;
                let key = (at * KEY_HEADS + h / (HEADS / KEY_HEADS)) * KEY_DIM;
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
    (y, state)
}

#[test]
fn gated_delta_computes_the_rule() {
    let mut random = Random::new(3);
    let (sizes, _) = sizes();
    let mut inputs = sizes.map(|size| random.floats::<f32>(size));
    for x in inputs[..2].iter_mut().flatten() {
        *x *= 0.2;
    }
    inputs[3].iter_mut().for_each(|x| *x = -2.0 * x.abs());
    inputs[4].iter_mut().for_each(|x| *x = x.abs());
    let bytes: Vec<u8> = inputs
        .iter()
        .flatten()
        .flat_map(|x| x.to_le_bytes())
        .collect();
    for padding in [[0, 0], [0, 3]] {
        let masked = padding != [0, 0];
        let (y, state) = truth(&inputs, &padding);
        for (language, (text, call)) in [("metal", metal(masked)), ("cuda", cuda(masked))] {
            let name = format!("gated_delta_{language}_{masked}");
            let found = run(&name, &program(&text, &call, &padding), &bytes);
            let expected = y.iter().chain(&state);
            assert_eq!(found.len(), y.len() + state.len());
            for (i, (&found, &expected)) in found.iter().zip(expected).enumerate() {
                let error = (f64::from(found) - expected).abs();
                assert!(error < 1e-5, "{name} [{i}]: {found} != {expected}");
            }
        }
    }
}
