//! A small Hub on this machine: its API, its files and, on a port of its own, the server that
//! large files are redirected to. It can be told to misbehave.
// Not every test that includes it uses all of it; the helpers are not in a test function, which
// clippy would let unwrap.
#![allow(dead_code, clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use serde_json::{Value, json};
use sha1::Sha1;
use sha2::{Digest, Sha256};

/// A commit's name.
pub(crate) const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
/// Another commit's name.
pub(crate) const LATER: &str = "89abcdef0123456789abcdef0123456789abcdef";

/// What the Hub has, and how it misbehaves.
#[derive(Clone, Default)]
pub(crate) struct Content {
    /// `organization/name`.
    pub(crate) repo: String,
    /// The repository's name before it was renamed.
    pub(crate) old_name: Option<String>,
    /// What `main` stands for.
    pub(crate) commit: String,
    /// Other names of the commit.
    pub(crate) revisions: Vec<String>,
    /// Every file.
    pub(crate) files: BTreeMap<String, Vec<u8>>,
    /// Those that are kept outside of git.
    pub(crate) large: BTreeSet<String>,
    /// Who does not send it finds no repository.
    pub(crate) private_token: Option<String>,
    /// Who does not send it finds no files.
    pub(crate) gate_token: Option<String>,
    /// Sent in place of a file.
    pub(crate) wrong: BTreeMap<String, Vec<u8>>,
    /// After how many bytes the next answers with a file break off.
    pub(crate) cuts: BTreeMap<String, Vec<usize>>,
    /// How many requests for a file are answered with status 503 first.
    pub(crate) busy: BTreeMap<String, usize>,
    /// Files whose bytes do not come.
    pub(crate) stalled: BTreeSet<String>,
    /// Files are sent from their beginning, whatever was asked for.
    pub(crate) ignores_ranges: bool,
    /// The listing says nothing of lengths.
    pub(crate) no_sizes: bool,
    /// The status of every answer, if not what it should be.
    pub(crate) status: Option<u16>,
    /// The answer to everything, in place of one that makes sense.
    pub(crate) raw: Option<String>,
}

impl Content {
    /// A repository `o/n` with these files; safetensors and GGUF files are large.
    pub(crate) fn new<'a>(files: impl IntoIterator<Item = (&'a str, &'a [u8])>) -> Self {
        let files: BTreeMap<String, Vec<u8>> = files
            .into_iter()
            .map(|(name, bytes)| (name.to_owned(), bytes.to_vec()))
            .collect();
        let is_large = |name: &&String| name.ends_with(".safetensors") || name.ends_with(".gguf");
        Self {
            repo: "o/n".to_owned(),
            commit: COMMIT.to_owned(),
            large: files.keys().filter(is_large).cloned().collect(),
            files,
            ..Self::default()
        }
    }

    /// The Hub's name for a file's content.
    pub(crate) fn etag(&self, file: &str) -> String {
        let bytes = &self.files[file];
        if self.large.contains(file) {
            return hex(&Sha256::digest(bytes));
        }
        let header = format!("blob {}\0", bytes.len());
        hex(&Sha1::new()
            .chain_update(header)
            .chain_update(bytes)
            .finalize())
    }
}

/// A request that came.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Request {
    /// Such as `HEAD /o/n/resolve/main/config.json`; `cdn` for where large files are.
    pub(crate) line: String,
    pub(crate) range: Option<String>,
    pub(crate) token: Option<String>,
}

/// The Hub. It ends when it is dropped.
pub(crate) struct FakeHub {
    shared: Arc<Shared>,
    addresses: [SocketAddr; 2],
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    content: Mutex<Content>,
    requests: Mutex<Vec<Request>>,
    cdn: SocketAddr,
    ended: AtomicBool,
}

impl FakeHub {
    pub(crate) fn start(content: Content) -> Self {
        let [hub, cdn] = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
        let addresses = [hub.local_addr().unwrap(), cdn.local_addr().unwrap()];
        let shared = Arc::new(Shared {
            content: Mutex::new(content),
            requests: Mutex::default(),
            cdn: addresses[1],
            ended: AtomicBool::new(false),
        });
        let threads = [(hub, false), (cdn, true)].map(|(listener, is_cdn)| {
            let shared = Arc::clone(&shared);
            thread::spawn(move || accept(&listener, &shared, is_cdn))
        });
        Self {
            shared,
            addresses,
            threads: threads.into(),
        }
    }

    /// What `HF_ENDPOINT` is set to.
    pub(crate) fn endpoint(&self) -> String {
        format!("http://{}", self.addresses[0])
    }

    /// What it has, to be looked at or changed.
    pub(crate) fn content(&self) -> MutexGuard<'_, Content> {
        self.shared.content.lock().unwrap()
    }

    /// The requests since this was called last.
    pub(crate) fn requests(&self) -> Vec<Request> {
        std::mem::take(&mut *self.shared.requests.lock().unwrap())
    }

    /// The lines of those requests.
    pub(crate) fn lines(&self) -> Vec<String> {
        self.requests().into_iter().map(|r| r.line).collect()
    }
}

impl Drop for FakeHub {
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::Relaxed);
        for address in self.addresses {
            // Wakes the thread that waits for a connection.
            drop(TcpStream::connect(address));
        }
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn accept(listener: &TcpListener, shared: &Arc<Shared>, is_cdn: bool) {
    for stream in listener.incoming() {
        if shared.ended.load(Ordering::Relaxed) {
            return;
        }
        let shared = Arc::clone(shared);
        // Who asked may be gone: that is no failure of the server.
        thread::spawn(move || stream.and_then(|stream| serve(stream, &shared, is_cdn)));
    }
}

fn serve(stream: TcpStream, shared: &Shared, is_cdn: bool) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    let line = lines.next().unwrap_or(Ok(String::new()))?;
    let mut headers = BTreeMap::new();
    for header in lines {
        let header = header?;
        match header.split_once(": ") {
            Some((name, value)) => headers.insert(name.to_lowercase(), value.to_owned()),
            None => break,
        };
    }
    let mut words = line.split(' ');
    let (method, target) = (words.next().unwrap_or(""), words.next().unwrap_or(""));
    let range = headers.get("range").cloned();
    let token = headers.get("authorization");
    let token = token.map(|value| value.trim_start_matches("Bearer ").to_owned());
    let seen = if is_cdn { "GET cdn" } else { method };
    let seen = if is_cdn {
        seen.to_owned()
    } else {
        format!("{seen} {target}")
    };
    shared.requests.lock().unwrap().push(Request {
        line: seen,
        range: range.clone(),
        token: token.clone(),
    });
    let mut content = shared.content.lock().unwrap();
    let mut answer = if let Some(raw) = &content.raw {
        Answer::raw(raw)
    } else if is_cdn {
        cdn(&mut content, target, range.as_deref())
    } else {
        hub(
            &mut content,
            shared.cdn,
            method,
            target,
            range.as_deref(),
            token.as_deref(),
        )
    };
    if let Some(status) = content.status.filter(|_| content.raw.is_none()) {
        answer = Answer::refusal(status, "", "");
    }
    drop(content);
    answer.send(stream, method == "HEAD")
}

struct Answer {
    head: String,
    body: Vec<u8>,
    /// How much of the body is sent before the connection is closed.
    cut: Option<usize>,
    stalled: bool,
}

impl Answer {
    fn new(status: u16, headers: &[(&str, &str)], body: Vec<u8>) -> Self {
        let mut head = format!("HTTP/1.1 {status} S\r\nConnection: close\r\n");
        for (name, value) in headers {
            head += &format!("{name}: {value}\r\n");
        }
        head += &format!("Content-Length: {}\r\n\r\n", body.len());
        Self {
            head,
            body,
            cut: None,
            stalled: false,
        }
    }

    fn raw(text: &str) -> Self {
        Self {
            head: text.to_owned(),
            ..Self::new(200, &[], Vec::new())
        }
    }

    fn refusal(status: u16, code: &str, message: &str) -> Self {
        let headers = [("X-Error-Code", code), ("X-Error-Message", message)];
        let set = headers.into_iter().filter(|(_, value)| !value.is_empty());
        Self::new(status, &set.collect::<Vec<_>>(), b"refused".to_vec())
    }

    fn send(self, mut stream: TcpStream, head_only: bool) -> std::io::Result<()> {
        stream.write_all(self.head.as_bytes())?;
        if self.stalled && !head_only {
            thread::sleep(Duration::from_secs(2));
        } else if !head_only {
            let end = self.cut.unwrap_or(usize::MAX).min(self.body.len());
            stream.write_all(&self.body[..end])?;
        }
        stream.flush()?;
        stream.shutdown(Shutdown::Write)
    }
}

fn hub(
    content: &mut Content,
    cdn: SocketAddr,
    method: &str,
    target: &str,
    range: Option<&str>,
    token: Option<&str>,
) -> Answer {
    let path = target.split('?').next().unwrap_or("");
    if let Some(old) = &content.old_name
        && path.contains(&format!("/{old}/"))
    {
        let new = target.replacen(old.as_str(), &content.repo, 1);
        return Answer::new(307, &[("Location", &new)], Vec::new());
    }
    if token == Some("hf_bad") {
        let message = "Invalid credentials in Authorization header";
        return Answer::refusal(401, "", message);
    }
    let api = format!("/api/models/{}/revision/", content.repo);
    let files = format!("/{}/resolve/", content.repo);
    let small = format!("/api/resolve-cache/models/{}/", content.repo);
    let is_shown = content.private_token.is_none() || content.private_token.as_deref() == token;
    let mut routes = [&api, &files, &small].into_iter();
    let rest = routes.find_map(|route| path.strip_prefix(route.as_str()));
    let Some(rest) = rest.filter(|_| is_shown) else {
        let status = if token.is_some() { 404 } else { 401 };
        return Answer::refusal(status, "RepoNotFound", "Repository not found");
    };
    let (revision, file) = rest.split_once('/').unwrap_or((rest, ""));
    let revision = decoded(revision);
    let names = content.revisions.iter().map(String::as_str);
    if !names
        .chain(["main", &content.commit])
        .any(|name| name == revision)
    {
        return Answer::refusal(404, "RevisionNotFound", "Invalid rev id");
    }
    if file.is_empty() {
        return Answer::new(200, &[], listing(content).to_string().into_bytes());
    }
    if content.gate_token.is_some() && content.gate_token.as_deref() != token {
        let status = if token.is_some() { 403 } else { 401 };
        return Answer::refusal(status, "GatedRepo", "Access to this model is restricted");
    }
    let file = decoded(file);
    if !content.files.contains_key(&file) {
        return Answer::refusal(404, "EntryNotFound", "Entry not found");
    }
    if let Some(left) = content.busy.get_mut(&file).filter(|left| **left > 0) {
        *left -= 1;
        return Answer::refusal(503, "", "busy");
    }
    let etag = content.etag(&file);
    let quoted = format!("\"{etag}\"");
    let commit = content.commit.clone();
    if content.large.contains(&file) {
        let size = content.files[&file].len().to_string();
        let headers = [
            ("X-Repo-Commit", commit.as_str()),
            ("X-Linked-Etag", &quoted),
            ("X-Linked-Size", &size),
            ("ETag", "\"of-the-redirect\""),
            ("Location", &format!("http://{cdn}/{etag}?signature=secret")),
        ];
        return Answer::new(302, &headers, b"Found. Redirecting".to_vec());
    }
    let headers = [("X-Repo-Commit", commit.as_str()), ("ETag", &quoted)];
    if path.starts_with(&files) {
        // As the Hub does for files in git itself.
        let to = path.replacen("/resolve/", "/", 1);
        let location = format!("/api/resolve-cache/models{to}?etag=%22{etag}%22");
        let location = ("Location", location.as_str());
        return Answer::new(307, &[headers[0], location], Vec::new());
    }
    file_answer(content, &file, &headers, range, method == "HEAD")
}

fn cdn(content: &mut Content, target: &str, range: Option<&str>) -> Answer {
    let etag = target
        .trim_start_matches('/')
        .split('?')
        .next()
        .unwrap_or("");
    let mut large = content.large.iter();
    let Some(file) = large.find(|file| content.etag(file) == etag).cloned() else {
        return Answer::refusal(403, "", "no such signature");
    };
    file_answer(content, &file, &[], range, false)
}

fn file_answer(
    content: &mut Content,
    file: &str,
    headers: &[(&str, &str)],
    range: Option<&str>,
    head_only: bool,
) -> Answer {
    let bytes = if head_only {
        None
    } else {
        content.wrong.get(file)
    };
    let bytes = bytes.unwrap_or(&content.files[file]).clone();
    let start = range.and_then(|range| range.strip_prefix("bytes=")?.strip_suffix('-'));
    let start: usize = start.map_or(0, |start| start.parse().unwrap());
    let mut answer = if range.is_some() && !content.ignores_ranges {
        let range = format!("bytes {start}-{}/{}", bytes.len() - 1, bytes.len());
        let headers = [headers, &[("Content-Range", &range)]].concat();
        Answer::new(206, &headers, bytes[start..].to_vec())
    } else {
        Answer::new(200, headers, bytes)
    };
    if !head_only {
        answer.stalled = content.stalled.contains(file);
        if let Some(cuts) = content.cuts.get_mut(file).filter(|cuts| !cuts.is_empty()) {
            answer.cut = Some(cuts.remove(0));
        }
    }
    answer
}

fn listing(content: &Content) -> Value {
    let sibling = |(name, bytes): (&String, &Vec<u8>)| {
        if content.no_sizes {
            return json!({"rfilename": name});
        }
        let etag = content.etag(name);
        if content.large.contains(name) {
            let lfs = json!({"sha256": etag, "size": bytes.len(), "pointerSize": 134});
            json!({"rfilename": name, "size": bytes.len(), "blobId": "1", "lfs": lfs})
        } else {
            json!({"rfilename": name, "size": bytes.len(), "blobId": etag})
        }
    };
    json!({
        "id": content.repo,
        "sha": content.commit,
        "private": false,
        "gated": false,
        "siblings": content.files.iter().map(sibling).collect::<Value>(),
    })
}

fn decoded(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        if let (b'%', [high, low, tail @ ..]) = (first, tail) {
            let digits = [*high, *low];
            let digits = std::str::from_utf8(&digits).unwrap();
            bytes.push(u8::from_str_radix(digits, 16).unwrap());
            rest = tail;
        } else {
            bytes.push(*first);
            rest = tail;
        }
    }
    String::from_utf8(bytes).unwrap()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
