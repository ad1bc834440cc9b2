#!/usr/bin/env bash
# Installs what building mlex needs and the system lacks; with --tests also what its tests call.
# Does nothing, and needs no network, when everything is there.
set -euo pipefail

say() { printf 'setup: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }
have() { command -v "$1" >/dev/null 2>&1; }

check_rust() {
    have cargo || fail 'Rust not found. Install it from https://rustup.rs, then run this again.'
}

setup_debian() {
    local packages=(cmake g++ liblapacke-dev libclang-dev libfmt-dev libopenblas-dev ninja-build
        nlohmann-json3-dev)
    [ -z "$tests" ] || have ffmpeg || packages+=(ffmpeg)
    local missing=() package
    for package in "${packages[@]}"; do
        # The third word of the status is "installed" once the package is unpacked and configured.
        if ! dpkg-query -W -f='${Status}\n' "$package" 2>/dev/null | grep -q ' installed$'; then
            missing+=("$package")
        fi
    done
    [ ${#missing[@]} -gt 0 ] || return 0

    local root=()
    if [ "$(id -u)" -ne 0 ]; then
        have sudo || fail "not root and no sudo. As root: apt-get install ${missing[*]}"
        root=(sudo)
    fi
    say "installing ${missing[*]}"
    ${root[@]+"${root[@]}"} apt-get update -q >&2
    ${root[@]+"${root[@]}"} env DEBIAN_FRONTEND=noninteractive \
        apt-get install -q -y --no-install-recommends "${missing[@]}" </dev/null >&2
}

setup_macos() {
    have xcrun || fail 'Xcode not found. Install it from the App Store, then run this again.'
    xcrun -sdk macosx metal --version >/dev/null 2>&1 ||
        fail 'no Metal compiler. Run: xcodebuild -downloadComponent MetalToolchain'
    have brew || fail 'Homebrew not found. Install it from https://brew.sh, then run this again.'
    local missing=() formula
    for formula in cmake fmt ninja nlohmann-json ${tests:+ffmpeg}; do
        brew list --versions "$formula" >/dev/null 2>&1 || missing+=("$formula")
    done
    [ ${#missing[@]} -gt 0 ] || return 0
    say "installing ${missing[*]}"
    brew install "${missing[@]}" </dev/null >&2
}

tests=
case "${1-}" in
'') ;;
--tests) tests=1 ;;
*) fail "unknown option $1" ;;
esac
case "$(uname -s)" in
Darwin) setup_macos ;;
Linux)
    have dpkg-query ||
        fail 'only Debian and Ubuntu are set up automatically; docs/backends.md lists what is needed.'
    setup_debian
    ;;
*) fail "$(uname -s) is not supported." ;;
esac
check_rust
