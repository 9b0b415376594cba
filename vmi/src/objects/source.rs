//! Where the data of a DataVolume comes from: web servers and registries.

use serde_json::{Map, Value};

use super::{check_name, object, reference, text, texts};
use crate::field::FieldError;

/// `source.http`
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpSource {
    /// URL with the scheme `http` or `https` and a host.
    pub url: String,
    /// Secret with `accessKeyId` (a user's name) and `secretKey` (the password).
    pub secret_ref: Option<String>,
    /// ConfigMap whose values are certificates of additional authorities.
    pub cert_config_map: Option<String>,
    /// Names and values of additional headers.
    pub extra_headers: Vec<(String, String)>,
    /// Secrets whose values are additional headers, `NAME: VALUE`.
    pub secret_extra_headers: Vec<String>,
    /// Checksum of the file as the server sends it.
    pub checksum: Option<Checksum>,
}

/// `source.http.checksum`
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checksum {
    /// Algorithm.
    pub algorithm: ChecksumAlgorithm,
    /// Digest in lower-case hexadecimal digits, as many as the algorithm has.
    pub digest: String,
}

/// Algorithm of a checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChecksumAlgorithm {
    /// `md5`
    Md5,
    /// `sha1`
    Sha1,
    /// `sha256`
    Sha256,
    /// `sha512`
    Sha512,
}

/// `source.registry`: a containerDisk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegistrySource {
    /// The image without the scheme `docker://`, for example `quay.io/containerdisks/debian:13`.
    pub image: String,
    /// `pullMethod`
    pub pull_method: PullMethod,
    /// Secret with `accessKeyId` (a user's name) and `secretKey` (the password).
    pub secret_ref: Option<String>,
    /// ConfigMap whose values are certificates of additional authorities.
    pub cert_config_map: Option<String>,
}

/// Who fetches an image from a registry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PullMethod {
    /// CDI's importer, which is the default.
    Pod,
    /// The node, into its store of images.
    Node,
}

/// Characters of a header's name beside letters and digits: RFC 9110, 5.6.2.
const TOKEN: &[u8] = b"!#$%&'*+-.^_`|~";

impl HttpSource {
    pub(super) fn of(source: &Map<String, Value>, path: &str, errors: &mut Vec<FieldError>) -> Self {
        let url = text(source, "url").unwrap_or_default();
        if let Some(fault) = url_fault(url) {
            errors.push(FieldError::invalid(format!("{path}.url"), fault));
        }
        let mut extra_headers = Vec::new();
        for (i, header) in texts(source, "extraHeaders").iter().enumerate() {
            match parse_header(header) {
                Some(header) => extra_headers.push(header),
                // The header may hold a token.
                None => errors.push(FieldError::invalid(
                    format!("{path}.extraHeaders[{i}]"),
                    "must be one line 'NAME: VALUE'",
                )),
            }
        }
        let secret_extra_headers = texts(source, "secretExtraHeaders");
        for (i, name) in secret_extra_headers.iter().enumerate() {
            check_name(name, &format!("{path}.secretExtraHeaders[{i}]"), errors);
        }
        let checksum = text(source, "checksum").and_then(|given| {
            let checksum = Checksum::parse(given);
            if checksum.is_none() {
                let text = format!(
                    "'{given}' is not ALGORITHM:DIGEST with md5, sha1, sha256 or sha512 and a digest in hexadecimal"
                );
                errors.push(FieldError::invalid(format!("{path}.checksum"), text));
            }
            checksum
        });
        Self {
            url: url.to_owned(),
            secret_ref: reference(source, "secretRef", path, errors),
            cert_config_map: reference(source, "certConfigMap", path, errors),
            extra_headers,
            secret_extra_headers,
            checksum,
        }
    }
}

/// CDI's error of a URL, if it is invalid.
fn url_fault(url: &str) -> Option<String> {
    if url.is_empty() {
        return Some("source URL is empty".to_owned());
    }
    let plain = url.bytes().all(|b| b.is_ascii_graphic());
    let (scheme, rest) = url.split_once("://").unwrap_or_default();
    if !plain || scheme.is_empty() {
        return Some(format!("Invalid source URL: {url}"));
    }
    if !["http", "https"]
        .iter()
        .any(|known| scheme.eq_ignore_ascii_case(known))
    {
        return Some(format!("Invalid source URL scheme: {url}"));
    }
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    let host = authority.rsplit('@').next().unwrap_or_default();
    (host.is_empty() || host.starts_with(':')).then(|| format!("Invalid source URL: {url}"))
}

fn parse_header(header: &str) -> Option<(String, String)> {
    let (name, value) = header.split_once(':')?;
    let is_name = !name.is_empty()
        && name
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || TOKEN.contains(&b));
    let is_value = !value.chars().any(char::is_control);
    (is_name && is_value).then(|| (name.to_owned(), value.trim().to_owned()))
}

impl Checksum {
    fn parse(text: &str) -> Option<Self> {
        let (algorithm, digest) = text.split_once(':')?;
        let (algorithm, digits) = match algorithm {
            "md5" => (ChecksumAlgorithm::Md5, 32),
            "sha1" => (ChecksumAlgorithm::Sha1, 40),
            "sha256" => (ChecksumAlgorithm::Sha256, 64),
            "sha512" => (ChecksumAlgorithm::Sha512, 128),
            _ => return None,
        };
        let is_hex = digest.len() == digits && digest.bytes().all(|b| b.is_ascii_hexdigit());
        is_hex.then(|| Self {
            algorithm,
            digest: digest.to_ascii_lowercase(),
        })
    }
}

impl RegistrySource {
    pub(super) fn of(source: &Map<String, Value>, path: &str, errors: &mut Vec<FieldError>) -> Self {
        let image = match source.get("url").and_then(Value::as_str) {
            Some(url) => image(url, path, errors),
            // An image stream is refused by the schema.
            None if text(source, "imageStream").is_some() => String::new(),
            None => {
                let text = "Source registry should have either URL or ImageStream";
                errors.push(FieldError::invalid(path, text));
                String::new()
            }
        };
        let pull_method = match text(source, "pullMethod") {
            None | Some("pod") => PullMethod::Pod,
            Some("node") => PullMethod::Node,
            Some(other) => {
                let text = format!("ImportMethod {other} is neither pod, node or \"\"");
                errors.push(FieldError::invalid(format!("{path}.pullMethod"), text));
                PullMethod::Pod
            }
        };
        let platform = object(source, "platform");
        if let Some(other) = platform
            .and_then(|p| text(p, "architecture"))
            .filter(|a| *a != "amd64")
        {
            let text = format!("'{other}' is not supported; use amd64");
            errors.push(FieldError::unsupported(
                format!("{path}.platform.architecture"),
                text,
            ));
        }
        Self {
            image,
            pull_method,
            secret_ref: reference(source, "secretRef", path, errors),
            cert_config_map: reference(source, "certConfigMap", path, errors),
        }
    }
}

/// The image that a URL names.
fn image(url: &str, path: &str, errors: &mut Vec<FieldError>) -> String {
    let path = format!("{path}.url");
    let image = url.strip_prefix("docker://").unwrap_or_default();
    if url.starts_with("oci-archive:") {
        let text = "oci-archive names a file of CDI's importer; use docker://";
        errors.push(FieldError::unsupported(path, text));
    } else if !url.starts_with("docker:") {
        errors.push(FieldError::invalid(
            path,
            format!("Illegal registry source URL scheme {url}"),
        ));
    } else if image.is_empty() || !image.bytes().all(|b| b.is_ascii_graphic()) {
        errors.push(FieldError::invalid(
            path,
            format!("Illegal registry source URL {url}"),
        ));
    }
    image.to_owned()
}
