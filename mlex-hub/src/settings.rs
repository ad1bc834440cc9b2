//! Where the Hub and its cache are, and who asks.

use std::fmt;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use crate::{Error, ErrorKind, Result};

/// The Hub itself.
pub(crate) const HUB: &str = "https://huggingface.co";

/// Another name of it.
pub(crate) const HUB_SHORT: &str = "https://hf.co";

/// Where the Hub and its cache are, who asks, and how patiently.
#[derive(Clone)]
#[non_exhaustive]
pub struct Settings {
    /// The address of the Hub, without a slash at the end.
    pub endpoint: String,
    /// The folder that programs share, with a folder for each repository.
    pub cache_dir: PathBuf,
    /// What proves who asks; sent to the Hub only, not to where it redirects to.
    pub token: Option<String>,
    /// Nothing is asked; what is in the cache is used.
    pub offline: bool,
    /// How long an answer may take to begin.
    pub answer_timeout: Duration,
    /// How long a download may stand still.
    pub read_timeout: Duration,
    /// How long to wait before the first retry of a download that broke off; doubles each time.
    pub retry_delay: Duration,
}

impl Settings {
    /// The Hub with this cache, nobody in particular asking.
    pub fn new(cache_dir: impl Into<PathBuf>) -> Self {
        Self {
            endpoint: HUB.to_owned(),
            cache_dir: cache_dir.into(),
            token: None,
            offline: false,
            answer_timeout: Duration::from_secs(10),
            read_timeout: Duration::from_secs(10),
            retry_delay: Duration::from_secs(1),
        }
    }

    /// What environment variables say, as `huggingface_hub` reads them: `HF_ENDPOINT`,
    /// `HF_HUB_CACHE`, `HF_HOME`, `HF_TOKEN`, `HF_TOKEN_PATH`, `HF_HUB_DISABLE_IMPLICIT_TOKEN`,
    /// `HF_HUB_OFFLINE`, `HF_HUB_ETAG_TIMEOUT`, `HF_HUB_DOWNLOAD_TIMEOUT` and their older names.
    /// `variable` gives the value of a variable; an empty one counts as unset. The token is
    /// also looked for in its file.
    ///
    /// # Errors
    /// [`ErrorKind::NoCacheDir`] when no variable says where the user's files are;
    /// [`ErrorKind::Value`] for a timeout that is not a number.
    pub fn from_vars(variable: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let vars = Vars(&variable);
        let home = vars.hugging_face_home();
        let cache_dir = vars
            .path(&["HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"])
            .or_else(|| Some(home.as_ref()?.join("hub")))
            .ok_or(ErrorKind::NoCacheDir)?;
        let mut settings = Self::new(cache_dir);
        if let Some(endpoint) = vars.text(&["HF_ENDPOINT"]) {
            settings.endpoint = endpoint.trim_end_matches('/').to_owned();
        }
        if !vars.is_true(&["HF_HUB_DISABLE_IMPLICIT_TOKEN"]) {
            settings.token = vars.token(home);
        }
        settings.offline = vars.is_true(&["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"]);
        if let Some(seconds) = vars.seconds("HF_HUB_ETAG_TIMEOUT")? {
            settings.answer_timeout = seconds;
        }
        if let Some(seconds) = vars.seconds("HF_HUB_DOWNLOAD_TIMEOUT")? {
            settings.read_timeout = seconds;
        }
        Ok(settings)
    }
}

// The token is a secret.
impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Settings")
            .field("endpoint", &self.endpoint)
            .field("cache_dir", &self.cache_dir)
            .field("has_token", &self.token.is_some())
            .field("offline", &self.offline)
            .finish_non_exhaustive()
    }
}

struct Vars<'a>(&'a dyn Fn(&str) -> Option<String>);

impl Vars<'_> {
    /// The first of these variables that is set.
    fn text(&self, names: &[&str]) -> Option<String> {
        names
            .iter()
            .find_map(|name| (self.0)(name).filter(|value| !value.is_empty()))
    }

    /// The same as a path; `~` is the user's home.
    fn path(&self, names: &[&str]) -> Option<PathBuf> {
        let text = self.text(names)?;
        let below_home = match text.strip_prefix('~') {
            Some("") => Some(""),
            Some(rest) => rest.strip_prefix('/'),
            None => None,
        };
        match (below_home, self.user_home()) {
            (Some(rest), Some(home)) => Some(home.join(rest)),
            _ => Some(text.into()),
        }
    }

    fn user_home(&self) -> Option<PathBuf> {
        self.text(&["HOME", "USERPROFILE"]).map(PathBuf::from)
    }

    fn hugging_face_home(&self) -> Option<PathBuf> {
        self.path(&["HF_HOME"]).or_else(|| {
            let caches = self
                .path(&["XDG_CACHE_HOME"])
                .or_else(|| Some(self.user_home()?.join(".cache")))?;
            Some(caches.join("huggingface"))
        })
    }

    fn token(&self, home: Option<PathBuf>) -> Option<String> {
        let given = self.text(&["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"]);
        let given = given.or_else(|| {
            let path = self.path(&["HF_TOKEN_PATH"]);
            // No file is no token; one that cannot be read is as good as none.
            fs::read_to_string(path.or_else(|| Some(home?.join("token")))?).ok()
        })?;
        let token: String = given.split(['\r', '\n']).collect();
        Some(token.trim().to_owned()).filter(|token| !token.is_empty())
    }

    fn is_true(&self, names: &[&str]) -> bool {
        self.text(names).is_some_and(|value| {
            matches!(
                value.to_ascii_uppercase().as_str(),
                "1" | "ON" | "YES" | "TRUE"
            )
        })
    }

    fn seconds(&self, name: &'static str) -> Result<Option<Duration>> {
        let Some(text) = self.text(&[name]) else {
            return Ok(None);
        };
        match text.trim().parse::<u32>() {
            // As in huggingface_hub, 0 is no setting.
            Ok(0) => Ok(None),
            Ok(seconds) => Ok(Some(Duration::from_secs(seconds.into()))),
            Err(_) => Err(Error::new(ErrorKind::Value {
                what: name,
                expected: "a number of seconds",
                found: text,
            })),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// Variables and their values.
    type Set<'a> = &'a [(&'a str, &'a str)];

    fn settings(vars: Set<'_>) -> Result<Settings> {
        Settings::from_vars(|name| {
            let found = vars.iter().find(|(key, _)| *key == name);
            found.map(|(_, value)| (*value).to_owned())
        })
    }

    /// The places are those of huggingface_hub's constants.py.
    #[test]
    fn where_the_cache_is() {
        let cases: &[(Set<'_>, &str)] = &[
            (&[("HOME", "/h")], "/h/.cache/huggingface/hub"),
            (
                &[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")],
                "/x/huggingface/hub",
            ),
            (&[("HOME", "/h"), ("HF_HOME", "/f")], "/f/hub"),
            (&[("HOME", "/h"), ("HF_HOME", "~/f")], "/h/f/hub"),
            (
                &[("HOME", "/h"), ("HF_HOME", "")],
                "/h/.cache/huggingface/hub",
            ),
            (&[("HF_HOME", "/f"), ("HUGGINGFACE_HUB_CACHE", "/o")], "/o"),
            (
                &[("HUGGINGFACE_HUB_CACHE", "/o"), ("HF_HUB_CACHE", "/c")],
                "/c",
            ),
        ];
        for (vars, expected) in cases {
            assert_eq!(settings(vars).unwrap().cache_dir, Path::new(expected));
        }
        let error = settings(&[]).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::NoCacheDir));
    }

    #[test]
    fn the_token_comes_from_the_environment_or_its_file() {
        let dir = tempfile::tempdir().unwrap();
        let home = dir.path().to_str().unwrap();
        assert_eq!(settings(&[("HF_HOME", home)]).unwrap().token, None);
        fs::write(dir.path().join("token"), "hf_file\r\n").unwrap();
        fs::write(dir.path().join("other"), " hf_other ").unwrap();
        let other = dir.path().join("other");
        let cases: &[(Set<'_>, Option<&str>)] = &[
            (&[], Some("hf_file")),
            (&[("HF_TOKEN", " hf_env\n")], Some("hf_env")),
            (
                &[("HF_TOKEN", ""), ("HUGGING_FACE_HUB_TOKEN", "hf_old")],
                Some("hf_old"),
            ),
            (
                &[("HF_TOKEN_PATH", other.to_str().unwrap())],
                Some("hf_other"),
            ),
            (
                &[
                    ("HF_TOKEN", "hf_env"),
                    ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "yes"),
                ],
                None,
            ),
        ];
        for (vars, expected) in cases {
            let vars: Vec<_> = vars.iter().copied().chain([("HF_HOME", home)]).collect();
            let settings = settings(&vars).unwrap();
            assert_eq!(settings.token.as_deref(), *expected, "{vars:?}");
            assert!(!format!("{settings:?}").contains("hf_"));
        }
    }

    #[test]
    fn other_settings() {
        let home = ("HF_HOME", "/f");
        let plain = settings(&[home]).unwrap();
        assert_eq!(plain.endpoint, "https://huggingface.co");
        assert!(!plain.offline);
        let set = settings(&[
            home,
            ("HF_ENDPOINT", "http://h:1/p/"),
            ("TRANSFORMERS_OFFLINE", "True"),
            ("HF_HUB_ETAG_TIMEOUT", "3"),
            ("HF_HUB_DOWNLOAD_TIMEOUT", "0"),
        ]);
        let set = set.unwrap();
        assert_eq!(set.endpoint, "http://h:1/p");
        assert!(set.offline);
        assert_eq!(set.answer_timeout, Duration::from_secs(3));
        assert_eq!(set.read_timeout, plain.read_timeout);
        assert!(!settings(&[home, ("HF_HUB_OFFLINE", "0")]).unwrap().offline);
        let error = settings(&[home, ("HF_HUB_ETAG_TIMEOUT", "soon")]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "HF_HUB_ETAG_TIMEOUT: expected a number of seconds, found \"soon\""
        );
    }
}
