#!/usr/bin/env bash
# Runs the examples that `cargo build --workspace --examples` has built. The argument is a model.
set -euo pipefail
cd "$(dirname "$0")/.."
# Where an installed MLX is linked, Cargo would name its folder to the loader; here nobody else does.
[ -z "${MLEX_MLX_PREFIX:-}" ] ||
    export LD_LIBRARY_PATH="$MLEX_MLX_PREFIX/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
examples="${CARGO_TARGET_DIR:-target}/debug/examples"
for name in arrays safetensors quantized_linear patches features; do
    "$examples/$name"
done
"$examples/logits"
"$examples/tokens"
"$examples/generate" "$1"
