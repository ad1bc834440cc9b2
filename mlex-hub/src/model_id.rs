//! How a model on the Hub is named.

use std::fmt;
use std::str::FromStr;

use crate::{Error, ErrorKind};

/// The longest name of a repository.
const MAX_LENGTH: usize = 96;

/// A model on the Hub: `organization/name`, and for a repository with several GGUF files
/// `organization/name:CHOICE`, where the choice is the name of a file or the quantization that
/// its name ends with (`Q4_K_M`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelId {
    repo: String,
    choice: Option<String>,
}

impl ModelId {
    /// The repository, `organization/name`.
    pub fn repo(&self) -> &str {
        &self.repo
    }

    /// Which GGUF file is meant.
    pub fn choice(&self) -> Option<&str> {
        self.choice.as_deref()
    }
}

impl FromStr for ModelId {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let (repo, choice) = match text.split_once(':') {
            Some((repo, choice)) => (repo, Some(choice)),
            None => (text, None),
        };
        if !is_repo(repo) || choice.is_some_and(str::is_empty) {
            return Err(Error::new(ErrorKind::Value {
                what: "model",
                expected: "organization/name, or organization/name:CHOICE for a GGUF file",
                found: text.to_owned(),
            }));
        }
        Ok(Self {
            repo: repo.to_owned(),
            choice: choice.map(str::to_owned),
        })
    }
}

impl fmt::Display for ModelId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.repo)?;
        match &self.choice {
            Some(choice) => write!(f, ":{choice}"),
            None => Ok(()),
        }
    }
}

/// Whether the Hub could have a repository of this name. `--` stands for the slash in the names
/// of the cache's folders.
fn is_repo(text: &str) -> bool {
    let is_name = |name: &str| {
        name.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_')
            && !name.ends_with(['-', '.'])
            && name
                .chars()
                .all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
    };
    text.len() <= MAX_LENGTH
        && !text.contains("--")
        && !text.contains("..")
        && !text.ends_with(".git")
        && text
            .split_once('/')
            .is_some_and(|(organization, name)| is_name(organization) && is_name(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        let id: ModelId = "mlx-community/Qwen3-0.6B-4bit".parse().unwrap();
        assert_eq!(id.repo(), "mlx-community/Qwen3-0.6B-4bit");
        assert_eq!(id.choice(), None);
        let id: ModelId = "a/b_c.d:sub/x-Q4_K_M.gguf".parse().unwrap();
        assert_eq!(
            (id.repo(), id.choice()),
            ("a/b_c.d", Some("sub/x-Q4_K_M.gguf"))
        );
        assert_eq!(id.to_string(), "a/b_c.d:sub/x-Q4_K_M.gguf");
    }

    #[test]
    fn what_is_no_name() {
        let long = format!("a/{}", "b".repeat(95));
        for text in [
            "", "model", "a/", "/a", "./a", "../a", "a/b/c", "a/.b", "a/b.", "a--b/c", "a/b..c",
            "a/b.git", "a/b:", "a/b c", "a/b\n", "a/-b", &long,
        ] {
            let error = text.parse::<ModelId>().unwrap_err();
            assert!(matches!(error.kind(), ErrorKind::Value { .. }), "{text}");
        }
    }
}
