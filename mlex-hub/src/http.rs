//! Requests to the Hub, and what its refusals mean.

use std::io::Read;

use ureq::http::{HeaderMap, Response, StatusCode, Uri};
use ureq::tls::{RootCerts, TlsConfig};
use ureq::{Agent, Body};

use crate::settings::{HUB, HUB_SHORT, Settings};
use crate::{Error, ErrorKind, Result};

/// More than the Hub ever needs.
const MAX_REDIRECTS: usize = 8;
/// Far above any list of files, far below what hurts.
const MAX_JSON_BYTES: u64 = 1 << 25;

/// Asks the Hub.
#[derive(Debug)]
pub(crate) struct Http {
    agent: Agent,
    endpoint: String,
    token: Option<String>,
}

/// What is asked for, and so what a refusal is about.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Subject<'a> {
    /// A revision of a repository.
    Revision(&'a str),
    /// A file of a revision.
    File(&'a str, &'a str),
}

/// An answer, and who gave it.
pub(crate) struct Answer {
    /// The address, after redirects.
    pub(crate) url: String,
    response: Response<Body>,
}

impl Http {
    /// A client with these settings.
    ///
    /// # Errors
    /// [`ErrorKind::Value`] for an endpoint or token that cannot be one.
    pub(crate) fn new(settings: &Settings) -> Result<Self> {
        let endpoint = settings.endpoint.trim_end_matches('/');
        let is_url = endpoint.parse::<Uri>().is_ok_and(|uri| {
            matches!(uri.scheme_str(), Some("http" | "https")) && uri.query().is_none()
        });
        if !is_url {
            return Err(Error::new(ErrorKind::Value {
                what: "endpoint",
                expected: "an address such as https://huggingface.co",
                found: endpoint.to_owned(),
            }));
        }
        let token = settings.token.clone();
        let is_word = |token: &String| token.bytes().all(|byte| byte.is_ascii_graphic());
        if !token.as_ref().is_none_or(is_word) {
            return Err(Error::new(ErrorKind::Value {
                what: "token",
                expected: "printable ASCII characters",
                found: "others".to_owned(),
            }));
        }
        // A company's own certificates are among the system's.
        let tls = TlsConfig::builder().root_certs(RootCerts::PlatformVerifier);
        let agent = Agent::config_builder()
            .tls_config(tls.build())
            .http_status_as_error(false)
            // Redirects say something of a file, and the token must not go along.
            .max_redirects(0)
            .max_redirects_will_error(false)
            .timeout_resolve(Some(settings.answer_timeout))
            .timeout_connect(Some(settings.answer_timeout))
            .timeout_recv_response(Some(settings.answer_timeout))
            .timeout_per_read(Some(settings.read_timeout))
            .user_agent(concat!("mlex/", env!("CARGO_PKG_VERSION")))
            // Lengths and ranges are those of the files.
            .accept_encoding("identity")
            .build()
            .new_agent();
        Ok(Self {
            agent,
            endpoint: endpoint.to_owned(),
            token,
        })
    }

    /// The host of the Hub.
    pub(crate) fn host(&self) -> &str {
        host(&self.endpoint)
    }

    /// An address on the Hub: `parts` in order, each written so that it stays one.
    pub(crate) fn url(&self, parts: &[&str]) -> String {
        let mut url = self.endpoint.clone();
        for part in parts {
            url.push('/');
            for byte in part.bytes() {
                if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~') {
                    url.push(byte.into());
                } else {
                    url.push_str(&format!("%{byte:02X}"));
                }
            }
        }
        url
    }

    /// Asks for what is at `url`, wherever that is, from the byte `start` on. The answer is a
    /// success.
    ///
    /// # Errors
    /// When there is no answer, or a refusal.
    pub(crate) fn get(&self, url: &str, start: u64, subject: Subject<'_>) -> Result<Answer> {
        self.check(self.send(false, url, start)?, subject)
    }

    /// Asks what the Hub says of a file: the answer may be a redirect to another server.
    ///
    /// # Errors
    /// As [`Self::get`].
    pub(crate) fn head(&self, url: &str, subject: Subject<'_>) -> Result<Answer> {
        self.check(self.send(true, url, 0)?, subject)
    }

    fn send(&self, head: bool, url: &str, start: u64) -> Result<Answer> {
        let mut url = url.to_owned();
        for _ in 0..MAX_REDIRECTS {
            let mut request = if head {
                self.agent.head(&url)
            } else {
                self.agent.get(&url)
            };
            if start > 0 {
                request = request.header("Range", format!("bytes={start}-"));
            }
            if let Some(token) = self.token.as_ref().filter(|_| self.is_hub(&url)) {
                request = request.header("Authorization", format!("Bearer {token}"));
            }
            let response = request.call().map_err(|error| unreachable(&url, &error))?;
            let answer = Answer { url, response };
            if !answer.is_redirect() {
                return Ok(answer);
            }
            let next = answer.location()?;
            // What the Hub says of a file comes with the redirect that leads out of it.
            if head && !self.is_hub(&next) {
                return Ok(answer);
            }
            url = next;
        }
        Err(Error::new(ErrorKind::Response {
            url: without_query(&url),
            expected: "an answer",
            found: "one redirect after the other".to_owned(),
        }))
    }

    /// Whether the token may be shown there.
    fn is_hub(&self, url: &str) -> bool {
        let origin = origin(url);
        origin.eq_ignore_ascii_case(self::origin(&self.endpoint))
            || origin.eq_ignore_ascii_case(HUB)
            || origin.eq_ignore_ascii_case(HUB_SHORT)
    }

    fn check(&self, answer: Answer, subject: Subject<'_>) -> Result<Answer> {
        let status = answer.status();
        if status.is_success() || answer.is_redirect() {
            return Ok(answer);
        }
        let message = answer.header("x-error-message").unwrap_or_default();
        let other = || ErrorKind::Status {
            url: without_query(&answer.url),
            status: status.as_u16(),
            message: message.chars().take(200).collect(),
        };
        if !self.is_hub(&answer.url) {
            return Err(other().into());
        }
        let host = || self.host().to_owned();
        let with_token = self.token.is_some();
        let no_repo = || ErrorKind::RepoNotFound {
            host: host(),
            with_token,
        };
        let (revision, file) = match subject {
            Subject::Revision(revision) => (revision, None),
            Subject::File(revision, file) => (revision, Some(file)),
        };
        let no_file = |file: &str| ErrorKind::FileNotFound {
            file: file.to_owned(),
        };
        let kind = match (answer.header("x-error-code"), status.as_u16(), file) {
            (Some("RevisionNotFound"), ..) => ErrorKind::RevisionNotFound {
                revision: revision.to_owned(),
            },
            (Some("EntryNotFound"), _, Some(file)) => no_file(file),
            (Some("GatedRepo"), ..) => ErrorKind::Gated { with_token },
            (Some("RepoNotFound"), ..) => no_repo(),
            (_, 401, _) if message == "Invalid credentials in Authorization header" => {
                ErrorKind::TokenRefused { host: host() }
            }
            (_, 401, _) => no_repo(),
            (_, 404, Some(file)) => no_file(file),
            (_, 404, None) => no_repo(),
            _ => other(),
        };
        Err(kind.into())
    }
}

impl Answer {
    fn status(&self) -> StatusCode {
        self.response.status()
    }

    /// Whether only the rest of the file comes.
    pub(crate) fn is_partial(&self) -> bool {
        self.status() == StatusCode::PARTIAL_CONTENT
    }

    pub(crate) fn is_redirect(&self) -> bool {
        matches!(self.status().as_u16(), 301 | 302 | 303 | 307 | 308)
    }

    /// A header, by its name in lower case.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let headers: &HeaderMap = self.response.headers();
        headers.get(name).and_then(|value| value.to_str().ok())
    }

    /// The answer is not what the Hub would give.
    pub(crate) fn unexpected(&self, expected: &'static str, found: impl Into<String>) -> Error {
        Error::new(ErrorKind::Response {
            url: without_query(&self.url),
            expected,
            found: found.into(),
        })
    }

    fn location(&self) -> Result<String> {
        let location = self.header("location").unwrap_or_default();
        if location.starts_with("http://") || location.starts_with("https://") {
            Ok(location.to_owned())
        } else if location.starts_with('/') && !location.starts_with("//") {
            Ok(format!("{}{location}", origin(&self.url)))
        } else {
            Err(self.unexpected("a redirect to an address", format!("{location:?}")))
        }
    }

    /// The body of a JSON answer.
    pub(crate) fn json(mut self) -> Result<Vec<u8>> {
        let body = self.response.body_mut().with_config();
        match body.limit(MAX_JSON_BYTES).read_to_vec() {
            Ok(json) => Ok(json),
            Err(ureq::Error::BodyExceedsLimit(limit)) => {
                Err(self.unexpected("JSON", format!("more than {limit} bytes")))
            }
            Err(error) => Err(unreachable(&self.url, &error)),
        }
    }

    /// The body as it comes.
    pub(crate) fn reader(self) -> impl Read {
        self.response.into_body().into_reader()
    }
}

fn unreachable(url: &str, error: &ureq::Error) -> Error {
    let cause = match error {
        ureq::Error::Io(error) => error.to_string(),
        ureq::Error::Timeout(phase) => format!("no answer in time ({phase})"),
        other => other.to_string(),
    };
    Error::new(ErrorKind::Unreachable {
        host: host(url).to_owned(),
        cause,
    })
}

/// Scheme, host and port.
fn origin(url: &str) -> &str {
    let after_scheme = url.find("://").map_or(0, |at| at + 3);
    let end = url[after_scheme..].find(['/', '?', '#']);
    end.map_or(url, |end| &url[..after_scheme + end])
}

/// Host and port.
pub(crate) fn host(url: &str) -> &str {
    let origin = origin(url);
    origin.split_once("://").map_or(origin, |(_, host)| host)
}

/// What follows the question mark may be a signature, which is a secret.
fn without_query(url: &str) -> String {
    url.split(['?', '#']).next().unwrap_or(url).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn http(endpoint: &str) -> Result<Http> {
        let mut settings = Settings::new("/c");
        settings.endpoint = endpoint.to_owned();
        Http::new(&settings)
    }

    #[test]
    fn addresses() {
        let mirror = http("http://h:80/p/").unwrap();
        assert_eq!(
            mirror.url(&["o", "n", "resolve", "a/b", "x y#?%.json"]),
            "http://h:80/p/o/n/resolve/a%2Fb/x%20y%23%3F%25.json"
        );
        assert_eq!(mirror.host(), "h:80");
        assert_eq!(without_query("http://h/a?sig=1#x"), "http://h/a");
    }

    #[test]
    fn who_sees_the_token() {
        let mirror = http("http://h:80/p").unwrap();
        for url in [
            "http://h:80/x",
            "http://H:80?x",
            "https://huggingface.co/a",
            "https://hf.co",
        ] {
            assert!(mirror.is_hub(url), "{url}");
        }
        for url in [
            "https://h:80/x",
            "http://h/x",
            "http://h:80.evil/x",
            "http://huggingface.co/a",
            "https://huggingface.co.evil/a",
            "https://huggingface.co@evil/a",
            "https://evil/https://huggingface.co/",
        ] {
            assert!(!mirror.is_hub(url), "{url}");
        }
    }

    #[test]
    fn wrong_settings() {
        for endpoint in ["", "huggingface.co", "ftp://h", "http://", "http://a b"] {
            let error = http(endpoint).unwrap_err();
            assert!(
                matches!(error.kind(), ErrorKind::Value { .. }),
                "{endpoint}"
            );
        }
        let mut settings = Settings::new("/c");
        settings.token = Some("hf_\n".to_owned());
        let error = Http::new(&settings).unwrap_err();
        assert!(!error.to_string().contains("hf_"));
    }
}
