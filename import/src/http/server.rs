//! A web server: its certificates, the login, redirects and refusals.

use std::time::{Duration, SystemTime};

use husk_images::HttpSource;
use reqwest::header::{
    ACCEPT_ENCODING, HeaderMap, HeaderName, HeaderValue, IF_RANGE, LOCATION, RANGE, RETRY_AFTER,
};
use reqwest::redirect::Policy;
use reqwest::{Certificate, Client, Response, StatusCode, Url};

use crate::error::{innermost, shown};
use crate::volume::VolumeError;

/// Time for a connection, and between two pieces of a reply.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);
const READ_TIMEOUT: Duration = Duration::from_secs(30);
/// Redirects that are followed.
const MAX_REDIRECTS: usize = 10;

/// The server of a file.
pub struct Server<'a> {
    client: Client,
    source: &'a HttpSource,
    url: Url,
    headers: HeaderMap,
}

/// The rest of a file that is wanted.
pub struct Rest<'a> {
    pub offset: u64,
    pub if_range: Option<&'a str>,
}

impl<'a> Server<'a> {
    /// Prepares requests; asks nothing yet.
    ///
    /// # Errors
    /// URL, header or certificate are invalid.
    pub fn new(source: &'a HttpSource) -> Result<Server<'a>, VolumeError> {
        let invalid = |reason: String| VolumeError::Url {
            url: source.shown_url(),
            reason,
        };
        let url = Url::parse(&source.url).map_err(|error| invalid(error.to_string()))?;
        if !is_http(&url) {
            return Err(invalid("its scheme is neither http nor https".into()));
        }
        let mut headers = HeaderMap::new();
        for (name, value) in &source.headers {
            let parsed = name
                .parse::<HeaderName>()
                .ok()
                .zip(value.parse::<HeaderValue>().ok());
            let (header, mut value) = parsed.ok_or_else(|| VolumeError::Header(shown(name)))?;
            value.set_sensitive(true);
            headers.append(header, value);
        }
        let mut certificates = Vec::new();
        for pem in &source.certificates {
            let found = Certificate::from_pem_bundle(pem.as_bytes())
                .map_err(|error| VolumeError::Pem(innermost(&error)))?;
            certificates.extend(found);
        }
        // Redirects are followed here, since the client would send the additional headers to any server.
        let client = Client::builder()
            .connect_timeout(CONNECT_TIMEOUT)
            .read_timeout(READ_TIMEOUT)
            .redirect(Policy::none())
            .user_agent(concat!("husk/", env!("CARGO_PKG_VERSION")))
            .tls_certs_merge(certificates)
            .build()
            .map_err(|error| VolumeError::Pem(innermost(&error)))?;
        Ok(Server {
            client,
            source,
            url,
            headers,
        })
    }

    /// The URL as it may be shown.
    pub fn shown_url(&self) -> String {
        self.source.shown_url()
    }

    /// Asks for the file, or for the rest of it.
    ///
    /// # Errors
    /// The server refuses, or cannot be reached.
    pub async fn get(&self, rest: Option<Rest<'_>>) -> Result<Response, VolumeError> {
        let mut url = self.url.clone();
        for _ in 0..=MAX_REDIRECTS {
            // The file is wanted as it is stored.
            let mut request = self.client.get(url.clone()).header(ACCEPT_ENCODING, "identity");
            if self.may_know_secrets(&url) {
                request = request.headers(self.headers.clone());
                if let Some(login) = &self.source.login {
                    request = request.basic_auth(&login.user, Some(&login.password));
                }
            }
            if let Some(rest) = &rest {
                request = request.header(RANGE, format!("bytes={}-", rest.offset));
                if let Some(validator) = rest.if_range {
                    request = request.header(IF_RANGE, validator);
                }
            }
            let response = request.send().await.map_err(|error| of_client(&url, &error))?;
            if !response.status().is_redirection() || response.status() == StatusCode::NOT_MODIFIED {
                return self.accept(response);
            }
            url = self.redirected(&url, &response)?;
        }
        Err(self.redirect(format!("there are more than {MAX_REDIRECTS} redirects")))
    }

    /// True for the server of the URL, also if it leads from HTTP to HTTPS.
    fn may_know_secrets(&self, url: &Url) -> bool {
        let place = |url: &Url| (url.scheme().to_owned(), url.port_or_known_default());
        let (own, other) = (place(&self.url), place(url));
        let upgraded = own == ("http".into(), Some(80)) && other == ("https".into(), Some(443));
        url.host() == self.url.host() && (own == other || upgraded)
    }

    fn redirected(&self, url: &Url, response: &Response) -> Result<Url, VolumeError> {
        let location = response
            .headers()
            .get(LOCATION)
            .and_then(|value| value.to_str().ok())
            .ok_or_else(|| self.redirect("it has no target".into()))?;
        let next = url
            .join(location)
            .map_err(|error| self.redirect(error.to_string()))?;
        match (url.scheme(), next.scheme()) {
            ("https", "http") => Err(self.redirect("it leads from https to http".into())),
            _ if is_http(&next) => Ok(next),
            _ => Err(self.redirect("its target is neither http nor https".into())),
        }
    }

    fn redirect(&self, reason: String) -> VolumeError {
        VolumeError::Redirect {
            url: self.shown_url(),
            reason,
        }
    }

    /// Turns a refusal into an error.
    fn accept(&self, response: Response) -> Result<Response, VolumeError> {
        let (url, status) = (self.shown_url(), response.status().as_u16());
        Err(match status {
            200 | 206 | 416 => return Ok(response),
            401 | 403 | 407 => VolumeError::Unauthorized { url, status },
            404 | 410 => VolumeError::NotFound { url, status },
            408 | 429 | 500 | 502..=504 => VolumeError::Unavailable {
                url,
                status,
                after: retry_after(response.headers(), SystemTime::now()),
            },
            _ => VolumeError::Status { url, status },
        })
    }
}

fn is_http(url: &Url) -> bool {
    matches!(url.scheme(), "http" | "https")
}

/// An error of the client for a request to `url`.
fn of_client(url: &Url, error: &reqwest::Error) -> VolumeError {
    let host = url.host_str().unwrap_or_default();
    let server = match url.port() {
        Some(port) => format!("{host}:{port}"),
        None => host.to_owned(),
    };
    let reason = innermost(error);
    // The texts are those of rustls and hickory, whose errors reqwest does not let through as types.
    match () {
        () if reason.contains("CaUsedAsEndEntity") => VolumeError::CaCertificate { server },
        () if reason.contains("certificate") => VolumeError::Certificate { server, reason },
        () if reason.contains("no records found") => VolumeError::UnknownHost { server },
        () => VolumeError::Unreachable { server, reason },
    }
}

/// `Retry-After`: seconds, or a date (RFC 9110, 10.2.3).
fn retry_after(headers: &HeaderMap, now: SystemTime) -> Option<Duration> {
    let text = headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
    if let Ok(seconds) = text.parse() {
        return Some(Duration::from_secs(seconds));
    }
    let date = httpdate::parse_http_date(text).ok()?;
    Some(date.duration_since(now).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server(url: &str) -> HttpSource {
        HttpSource {
            url: url.into(),
            checksum: None,
            certificates: Vec::new(),
            login: None,
            headers: Vec::new(),
        }
    }

    #[test]
    fn secrets_go_to_the_server_of_the_url_only() {
        let _ = rustls::crypto::ring::default_provider().install_default();
        for (own, other, may) in [
            ("https://a.example/x", "https://a.example/y", true),
            ("https://a.example/x", "https://a.example:443/y", true),
            ("https://a.example/x", "https://a.example:444/y", false),
            ("https://a.example/x", "https://b.example/x", false),
            ("https://a.example/x", "https://b.a.example/x", false),
            ("http://a.example/x", "https://a.example/x", true),
            ("http://a.example:8080/x", "https://a.example/x", false),
        ] {
            let source = server(own);
            let found = Server::new(&source)
                .unwrap()
                .may_know_secrets(&Url::parse(other).unwrap());
            assert_eq!(found, may, "{own} {other}");
        }
    }

    #[test]
    fn time_to_wait_is_in_seconds_or_a_date() {
        let now = httpdate::parse_http_date("Sun, 06 Nov 1994 08:49:37 GMT").unwrap();
        for (text, seconds) in [
            ("120", Some(120)),
            ("Sun, 06 Nov 1994 08:49:47 GMT", Some(10)),
            ("Sun, 06 Nov 1994 08:49:27 GMT", Some(0)),
            ("99999999999999999999999", None),
            ("-1", None),
            ("soon", None),
        ] {
            let headers = HeaderMap::from_iter([(RETRY_AFTER, text.parse().unwrap())]);
            assert_eq!(
                retry_after(&headers, now),
                seconds.map(Duration::from_secs),
                "{text}"
            );
        }
    }

    #[test]
    fn other_schemes_headers_and_certificates_are_refused() {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let refused = |source: HttpSource| Server::new(&source).err().unwrap().to_string();
        assert!(refused(server("ftp://a/b")).ends_with("neither http nor https"));
        let mut source = server("http://a/b");
        source.headers = vec![("x".into(), "SECRET\n".into())];
        let text = refused(source.clone());
        assert!(
            text.starts_with("the header \"x\" is invalid") && !text.contains("SECRET"),
            "{text}"
        );
        source.headers.clear();
        source.certificates = vec!["-----BEGIN CERTIFICATE-----\n%%%\n-----END CERTIFICATE-----\n".into()];
        assert!(refused(source).contains("certConfigMap"));
    }
}
