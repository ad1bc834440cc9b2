//! What a repository has, and what the Hub says of a file.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::Result;
use crate::http::{Answer, Http, Subject};
use crate::layout::{is_commit, is_safe_path};

/// Files by their paths in the repository, with their lengths where they are known.
pub(crate) type Files = BTreeMap<String, Option<u64>>;

/// A revision of a repository.
pub(crate) struct Listing {
    /// The commit that the revision stands for.
    pub(crate) commit: String,
    pub(crate) files: Files,
}

/// A file as the Hub describes it.
pub(crate) struct Remote {
    /// The Hub's name for its content.
    pub(crate) etag: String,
    pub(crate) size: u64,
}

#[derive(Deserialize)]
struct RepoInfo {
    sha: String,
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
}

/// The files of a revision. Files whose names would leave their folder are left out.
///
/// # Errors
/// When the Hub cannot be reached, refuses, or answers with something else.
pub(crate) fn list(http: &Http, repo: &str, revision: &str) -> Result<Listing> {
    let mut parts = vec!["api", "models"];
    parts.extend(repo.split('/'));
    parts.extend(["revision", revision]);
    let url = http.url(&parts) + "?blobs=true";
    let answer = http.get(&url, 0, Subject::Revision(revision))?;
    let not_json = |found: String| answer_error(&url, found);
    let json = answer.json()?;
    let info: RepoInfo =
        serde_json::from_slice(&json).map_err(|error| not_json(error.to_string()))?;
    if !is_commit(&info.sha) {
        return Err(not_json(format!("sha {:?}", info.sha)));
    }
    let files = info.siblings.into_iter();
    let files = files
        .filter(|file| is_safe_path(&file.rfilename))
        .map(|file| (file.rfilename, file.size));
    Ok(Listing {
        commit: info.sha,
        files: files.collect(),
    })
}

/// Where a file of a commit is.
pub(crate) fn file_url(http: &Http, repo: &str, commit: &str, file: &str) -> String {
    let parts = repo.split('/').chain(["resolve", commit]);
    http.url(&parts.chain(file.split('/')).collect::<Vec<_>>())
}

/// What the Hub says of a file, whose length may be known from the listing.
///
/// # Errors
/// As [`list`].
pub(crate) fn describe(
    http: &Http,
    repo: &str,
    commit: &str,
    file: &str,
    listed_size: Option<u64>,
) -> Result<Remote> {
    let url = file_url(http, repo, commit, file);
    let answer = http.head(&url, Subject::File(commit, file))?;
    let etag = answer.header("x-linked-etag").or(answer.header("etag"));
    let etag = etag.map(plain_etag).unwrap_or_default();
    if !is_file_name(etag) {
        let expected = "an ETag of letters and digits";
        return Err(answer.unexpected(expected, format!("{etag:?}")));
    }
    let Some(size) = size(&answer).or(listed_size) else {
        return Err(answer.unexpected("the length of the file", "none"));
    };
    Ok(Remote {
        etag: etag.to_owned(),
        size,
    })
}

fn size(answer: &Answer) -> Option<u64> {
    // The length of a redirect is not that of the file.
    let own = answer
        .header("content-length")
        .filter(|_| !answer.is_redirect());
    let size = answer.header("x-linked-size").or(own)?;
    size.trim().parse().ok()
}

/// `W/"abc"` and `"abc"` are `abc`.
fn plain_etag(etag: &str) -> &str {
    etag.strip_prefix("W/").unwrap_or(etag).trim_matches('"')
}

/// It becomes the name of a file in the cache.
fn is_file_name(etag: &str) -> bool {
    (1..=128).contains(&etag.len())
        && !etag.starts_with('.')
        && etag
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.'))
}

fn answer_error(url: &str, found: String) -> crate::Error {
    crate::Error::new(crate::ErrorKind::Response {
        url: url.to_owned(),
        expected: "the description of a repository",
        found,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn etags() {
        assert_eq!(plain_etag("\"a1\""), "a1");
        assert_eq!(plain_etag("W/\"a1\""), "a1");
        assert_eq!(plain_etag("a1"), "a1");
        for wrong in [
            "",
            ".",
            "..",
            "../a",
            "a/b",
            "a\\b",
            "a b",
            "a:b",
            &"a".repeat(129),
        ] {
            assert!(!is_file_name(wrong), "{wrong}");
        }
    }
}
