"""What huggingface_hub makes of its cache: mlex-hub/tests/data/cache.json.

    python tools/make_hub_golden.py             needs: pip install -r tools/requirements.txt
    python tools/make_hub_golden.py --mlex target/release/mlex

A server on this machine plays the Hub with the repository that mlex-hub/tests/data/repo.json describes.
huggingface_hub downloads what a model needs of it, by branch, by tag and by commit; the golden file lists
what is in its cache then: texts, and links with what they lead to.

With --mlex nothing is made. Instead a cache that `mlex pull` has filled is given to huggingface_hub, and
one that huggingface_hub has filled to mlex; both must find the model without the Hub, and keep to each
other's locks. Exits with 1 when they do not.
"""

import argparse
import hashlib
import http.server
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from urllib.parse import unquote, urlsplit

from goldens import ROOT, save_json

DATA = ROOT / "mlex-hub/tests/data"
REPO = json.loads((DATA / "repo.json").read_text())
FILES = {name: text.encode() for name, text in REPO["files"].items()}


def etag(name: str) -> str:
    content = FILES[name]
    if name in REPO["large"]:
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Hub(http.server.BaseHTTPRequestHandler):
    """The part of the Hub's API that a download uses."""

    def log_message(self, *_):
        pass

    def answer(self, status: int, body: bytes, headers: dict[str, str]):
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        self.server.count += 1
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        found = self.find(parts)
        self.answer(*found) if found else self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})

    def find(self, parts: list[str]):
        repo, commit = REPO["repo"].split("/"), {"X-Repo-Commit": REPO["commit"]}
        if parts[:5] == ["api", "models", *repo, "revision"]:
            siblings = [{"rfilename": name, "size": len(content)} for name, content in FILES.items()]
            return 200, json.dumps({"id": REPO["repo"], "sha": REPO["commit"], "siblings": siblings}).encode(), {}
        if parts[:5] == ["api", "models", *repo, "tree"]:
            return 200, json.dumps([self.entry(name) for name in FILES]).encode(), {}
        if parts[:3] == [*repo, "resolve"]:
            name = "/".join(parts[4:])
            if name in REPO["large"]:
                host, port = self.server.server_address
                # Another name of this machine is another host.
                location = f"http://localhost:{port}/large/{name}"
                linked = {"X-Linked-Etag": f'"{etag(name)}"', "X-Linked-Size": str(len(FILES[name]))}
                return 302, b"Found", {**commit, **linked, "Location": location}
            return 200, FILES[name], {**commit, "ETag": f'"{etag(name)}"'}
        if parts[0] == "large":
            return 200, FILES["/".join(parts[1:])], {}
        return None

    @staticmethod
    def entry(name: str) -> dict:
        entry = {"type": "file", "path": name, "size": len(FILES[name]), "oid": etag(name)}
        if name in REPO["large"]:
            entry["lfs"] = {"oid": etag(name), "size": len(FILES[name]), "pointerSize": 134}
        return entry


def serve() -> http.server.ThreadingHTTPServer:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.count = 0
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def snapshot_download(cache: Path, patterns=REPO["needed"], **arguments) -> Path:
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(REPO["repo"], cache_dir=cache, allow_patterns=patterns, token=False, **arguments))


def entries(cache: Path) -> dict[str, dict]:
    """What is in the repository's folder."""
    folder = cache / f"models--{REPO['repo'].replace('/', '--')}"
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            found[name] = {"link": os.readlink(path)}
        elif path.is_file():
            found[name] = {"text": path.read_text()}
    return found


def make(endpoint: str, cache: Path):
    import huggingface_hub

    for revision in [REPO["commit"], "main", *REPO["revisions"]]:
        snapshot_download(cache, revision=revision, endpoint=endpoint)
    save_json(DATA / "cache.json", {"huggingface_hub": huggingface_hub.__version__, "entries": entries(cache)})


def check(mlex: str, server, endpoint: str, cache: Path):
    """Each takes what the other has fetched."""

    def pull(cache: Path, **variables) -> Path:
        environment = {**os.environ, "HF_HUB_CACHE": str(cache), "HF_ENDPOINT": endpoint, **variables}
        environment.pop("HF_TOKEN", None)
        command = [mlex, "pull", REPO["repo"]]
        return Path(subprocess.run(command, env=environment, check=True, text=True, capture_output=True).stdout.strip())

    def expect(what: str, found, expected):
        if found != expected:
            sys.exit(f"{what}: expected {expected}, found {found}")
        print(f"{what}: ok")

    def contents(folder: Path) -> dict[str, bytes]:
        files = [path for path in folder.rglob("*") if path.is_file()]
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}

    needed = {name: FILES[name] for name in REPO["needed"]}
    ours = pull(cache / "ours")
    expect("mlex pull", contents(ours), needed)
    theirs = snapshot_download(cache / "ours", patterns=None, local_files_only=True)
    expect("huggingface_hub finds what mlex has pulled", theirs, ours)
    before = server.count
    snapshot_download(cache / "ours", endpoint=endpoint)
    # One for the commit, one for its files: nothing is downloaded again.
    expect("huggingface_hub asks for nothing more", server.count - before, 2)

    theirs = snapshot_download(cache / "theirs", endpoint=endpoint)
    before = server.count
    expect("mlex finds what huggingface_hub has downloaded", pull(cache / "theirs", HF_HUB_OFFLINE="1"), theirs)
    expect("without a request", server.count - before, 0)
    expect("mlex pulls it", pull(cache / "theirs"), theirs)
    expect("with the request for the files only", server.count - before, 1)

    # While a lock of huggingface_hub is held, mlex waits.
    from huggingface_hub.utils import WeakFileLock

    name = REPO["large"][0]
    lock = cache / "locked/.locks" / f"models--{REPO['repo'].replace('/', '--')}" / f"{etag(name)}.lock"
    lock.parent.mkdir(parents=True)
    with WeakFileLock(lock):
        try:
            environment = {**os.environ, "HF_HUB_CACHE": str(cache / "locked"), "HF_ENDPOINT": endpoint}
            subprocess.run([mlex, "pull", REPO["repo"]], env=environment, timeout=4, capture_output=True)
            waited = False
        except subprocess.TimeoutExpired:
            waited = True
    expect("mlex waits for huggingface_hub's lock", waited, True)
    expect("and goes on when it is free", contents(pull(cache / "locked")), needed)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mlex", help="the mlex program, to check instead of making the golden file")
    arguments = parser.parse_args()
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    server = serve()
    endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    cache = Path(tempfile.mkdtemp())
    try:
        if arguments.mlex:
            check(arguments.mlex, server, endpoint, cache)
        else:
            make(endpoint, cache)
    finally:
        shutil.rmtree(cache)


if __name__ == "__main__":
    main()
