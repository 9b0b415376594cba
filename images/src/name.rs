//! Names of images, as `containerDisk.image` has them, and when they are pulled.

use std::fmt;
use std::str::FromStr;

use oci_spec::distribution::Reference;
use serde::{Deserialize, Serialize};

/// Name of an image in a registry: `[HOST[:PORT]/]REPOSITORY[:TAG][@DIGEST]`, normalised as containerd and Docker do:
/// `alpine` is `docker.io/library/alpine:latest`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageName {
    reference: Reference,
    /// A tag other than `latest`, or a digest, was given.
    fixed: bool,
}

/// A text that is no image name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not the name of an image: {reason}")]
pub struct InvalidName {
    pub text: String,
    pub reason: String,
}

impl ImageName {
    /// The parsed name.
    #[must_use]
    pub fn reference(&self) -> &Reference {
        &self.reference
    }

    /// Host and port of the registry, as written: `docker.io` for Docker's.
    #[must_use]
    pub fn registry(&self) -> &str {
        self.reference.registry()
    }

    /// When a name without a policy is pulled: always with the tag `latest` or without one, as KubeVirt's webhook
    /// defaults `imagePullPolicy`.
    #[must_use]
    pub fn default_policy(&self) -> PullPolicy {
        match self.fixed {
            true => PullPolicy::IfNotPresent,
            false => PullPolicy::Always,
        }
    }
}

impl FromStr for ImageName {
    type Err = InvalidName;

    fn from_str(text: &str) -> Result<ImageName, InvalidName> {
        let invalid = |reason: String| InvalidName {
            text: text.to_owned(),
            reason,
        };
        // KubeVirt's users write containerDisks without a scheme, but DataVolumes with this one.
        let plain = text.strip_prefix("docker://").unwrap_or(text);
        let parse = |text: &str| Reference::from_str(text).map_err(|error| invalid(error.to_string()));
        let reference = parse(plain)?;
        // A first part with capital letters, such as `Team/disk`, passes as a host, but becomes part of a repository,
        // which cannot have any.
        parse(&reference.to_string())?;
        let fixed = reference.digest().is_some() || reference.tag().is_some_and(|tag| tag != "latest");
        Ok(ImageName { reference, fixed })
    }
}

impl fmt::Display for ImageName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.reference.fmt(f)
    }
}

/// `imagePullPolicy`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum PullPolicy {
    /// Ask the registry each time; what is there already is not read again.
    Always,
    /// Ask only for an image that the store does not have.
    IfNotPresent,
    /// Never ask.
    Never,
}

impl FromStr for PullPolicy {
    type Err = ();

    fn from_str(text: &str) -> Result<PullPolicy, ()> {
        match text {
            "Always" => Ok(PullPolicy::Always),
            "IfNotPresent" => Ok(PullPolicy::IfNotPresent),
            "Never" => Ok(PullPolicy::Never),
            _ => Err(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_normalised_and_have_a_policy() {
        let digest = format!("sha256:{}", "a".repeat(64));
        for (text, full, policy) in [
            ("alpine", "docker.io/library/alpine:latest", PullPolicy::Always),
            ("quay.io/a/b:latest", "quay.io/a/b:latest", PullPolicy::Always),
            (
                "docker://quay.io/a/b:1",
                "quay.io/a/b:1",
                PullPolicy::IfNotPresent,
            ),
            (
                "localhost:5000/a:1",
                "localhost:5000/a:1",
                PullPolicy::IfNotPresent,
            ),
            (
                &format!("a/b@{digest}"),
                &format!("docker.io/a/b@{digest}"),
                PullPolicy::IfNotPresent,
            ),
        ] {
            let name: ImageName = text.parse().unwrap();
            assert_eq!((name.to_string().as_str(), name.default_policy()), (full, policy));
        }
        for bad in [
            "",
            "A",
            "a b",
            "a:b:c",
            "a@sha256:1",
            "-",
            "Team/disk",
            &"a/".repeat(200),
        ] {
            assert!(bad.parse::<ImageName>().is_err(), "{bad}");
        }
    }
}
