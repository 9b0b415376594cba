//! A registry, as the OCI distribution specification describes it.

use std::future::Future;
use std::time::Duration;

use backon::{ExponentialBuilder, Retryable};
use husk_images::{Event, ImageName, Login};
use oci_client::client::{BlobResponse, ClientConfig, ClientProtocol};
use oci_client::errors::OciDistributionError;
use oci_client::secrets::RegistryAuth;
use oci_client::{Client, RegistryOperation};
use oci_spec::distribution::Reference;

use crate::certificates::Transport;
use crate::credentials;
use crate::error::PullError;

/// Time for a connection, and between two pieces of a reply.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);
const READ_TIMEOUT: Duration = Duration::from_secs(30);
/// Further attempts after a temporary error, and the first delay, which doubles.
const RETRIES: usize = 4;
const FIRST_DELAY: Duration = Duration::from_secs(1);

/// Media types of manifests and indexes: OCI's and Docker's.
const MANIFESTS: [&str; 4] = [
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.docker.distribution.manifest.v2+json",
];

/// Credentials and certificates of a request, in addition to the user's own configuration.
#[derive(Clone, Copy, Default)]
pub struct Access<'a> {
    /// Content of `.dockerconfigjson`.
    pub pull_secret: Option<&'a str>,
    /// Takes precedence over the pull secret.
    pub login: Option<&'a Login>,
    /// Certificates of further authorities, in PEM.
    pub certificates: &'a [String],
}

/// The repository of one image.
pub struct Registry<'a> {
    client: Client,
    auth: RegistryAuth,
    reference: Reference,
    name: String,
    /// Asked without TLS.
    plain: bool,
    say: &'a dyn Fn(&Event),
}

/// A manifest or index.
pub struct Document {
    pub content: Vec<u8>,
    /// Its digest, which was checked.
    pub digest: String,
}

impl<'a> Registry<'a> {
    /// Prepares requests; asks nothing yet.
    ///
    /// # Errors
    /// Credentials or certificates cannot be read.
    pub fn new(
        name: &ImageName,
        access: Access<'_>,
        say: &'a dyn Fn(&Event),
    ) -> Result<Registry<'a>, PullError> {
        let registry = name.registry().to_owned();
        let transport = Transport::find(&registry, access.certificates)?;
        let plain = matches!(transport.protocol, ClientProtocol::Http);
        let variable = |names: [&str; 2]| names.iter().find_map(|name| std::env::var(name).ok());
        let config = ClientConfig {
            protocol: transport.protocol,
            extra_root_certificates: transport.certificates,
            connect_timeout: Some(CONNECT_TIMEOUT),
            read_timeout: Some(READ_TIMEOUT),
            user_agent: concat!("husk/", env!("CARGO_PKG_VERSION")),
            https_proxy: variable(["HTTPS_PROXY", "https_proxy"]),
            http_proxy: variable(["http_proxy", "HTTP_PROXY"]),
            no_proxy: variable(["NO_PROXY", "no_proxy"]),
            ..ClientConfig::default()
        };
        let client = Client::try_from(config).map_err(|error| PullError::of(&registry, &error))?;
        let auth = match access.login {
            Some(login) => RegistryAuth::Basic(login.user.clone(), login.password.clone()),
            None => credentials::find(&registry, name.reference().repository(), access.pull_secret)?,
        };
        Ok(Registry {
            client,
            auth,
            reference: name.reference().clone(),
            name: registry,
            plain,
            say,
        })
    }

    /// Host and port.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The digest that the name refers to now.
    ///
    /// # Errors
    /// The registry does not say.
    pub async fn digest(&self) -> Result<String, PullError> {
        self.ask(|| self.client.fetch_manifest_digest(&self.reference, &self.auth))
            .await
    }

    /// The manifest or index of the name, or of a digest in the same repository.
    ///
    /// # Errors
    /// The registry does not have it, or sends another one.
    pub async fn document(&self, digest: Option<&str>) -> Result<Document, PullError> {
        let reference = match digest {
            Some(digest) => self.reference.clone_with_digest(digest.to_owned()),
            None => self.reference.clone(),
        };
        let pull = || self.client.pull_manifest_raw(&reference, &self.auth, &MANIFESTS);
        let (content, digest) = self.ask(pull).await?;
        Ok(Document {
            content: content.into(),
            digest,
        })
    }

    /// The content of a blob from an offset on. The caller checks its digest and size.
    ///
    /// # Errors
    /// The registry does not have it.
    pub async fn blob(&self, digest: &str, offset: u64) -> Result<BlobResponse, PullError> {
        let pull = || {
            self.client
                .pull_blob_stream_partial(&self.reference, digest, offset, None)
        };
        self.ask(pull).await
    }

    fn error(&self, error: &OciDistributionError) -> PullError {
        match PullError::of(&self.name, error) {
            PullError::Registry { registry, reason } if self.plain => PullError::Registry {
                reason: format!("{reason} (asked by plain HTTP: certs.d has no directory for {registry})"),
                registry,
            },
            error => error,
        }
    }

    async fn ask<T, F>(&self, request: impl Fn() -> F) -> Result<T, PullError>
    where
        F: Future<Output = Result<T, OciDistributionError>>,
    {
        let attempt = || async {
            let answered = request().await.map_err(|error| self.error(&error));
            if !matches!(answered, Err(PullError::Unauthorized { .. })) {
                return answered;
            }
            // The client hides why it got no token: ask for one, and report that error.
            let operation = RegistryOperation::Pull;
            match self.client.auth(&self.reference, &self.auth, operation).await {
                Ok(_) => request().await.map_err(|error| self.error(&error)),
                Err(error) => Err(self.error(&error)),
            }
        };
        let delays = ExponentialBuilder::default()
            .with_min_delay(FIRST_DELAY)
            .with_factor(2.0)
            .with_max_times(RETRIES);
        attempt
            .retry(delays)
            .when(PullError::is_temporary)
            .notify(|error, _| {
                (self.say)(&Event::Retrying {
                    reason: error.to_string(),
                });
            })
            .await
    }
}
