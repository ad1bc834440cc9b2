# `make demo` talks to a real model; `make test` runs every test; `make bench` measures the layers.
# docs/backends.md and docs/benchmarks.md have the rest.

CARGO ?= cargo
PROMPT ?= What is the capital of France?
export PROMPT

.PHONY: setup demo test lint bench

# Installs what the build needs and the system lacks.
setup:
	@scripts/setup.sh

# Fetches a small model (93 MB, kept in the user's cache), builds, and streams an answer.
demo: setup
	@model=$$(scripts/smollm2.sh) && \
	$(CARGO) run --release -p mlex-cli --bin mlex -- \
		generate --model "$$model" --prompt "$$PROMPT" --max-tokens 64 --temp 0

# Tests marked `ignore` are those that need the real model or ffmpeg; here they are there. The
# profile is dev: overflow checks are on, and the workspace's dependencies are optimized.
test:
	@scripts/setup.sh --tests
	@model=$$(scripts/smollm2.sh) && export MLEX_TEST_MODEL="$$model" && set -x && \
	$(CARGO) test --workspace --lib --bins --tests --examples -- --include-ignored && \
	$(CARGO) test --workspace --doc && \
	$(CARGO) build --workspace --examples && \
	scripts/examples.sh "$$model"

# Also compiles the benches.
lint: setup
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps

# FILTER runs those whose name it matches: `make bench FILTER=smollm2`.
bench: setup
	$(CARGO) bench -p mlex-benches -- $(FILTER)
