//! TLS with virt-api and with others. Certificates and CAs change while the agent runs: KubeVirt's operator rotates them.
//!
//! The certificates have no host names. Agent and virt-api check the chain and the exact common name of the other.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use crate::watching::{WatchError, backoff, stopped, watch_config};
use futures_util::TryStreamExt;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{Event, watcher};
use kube::{Api, Client};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{WantsServerCert, WebPkiClientVerifier};
use rustls::{ConfigBuilder, RootCertStore, ServerConfig, WantsVerifier};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::sleep;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tracing::{info, warn};
use x509_parser::prelude::{FromDer, X509Certificate};

use super::tls_options::TlsOptions;

/// Common name of virt-api's client certificate.
const CLIENT: &str = "kubevirt.io:system:client:virt-handler";
/// ConfigMap of KubeVirt's CAs, and its key.
const CA_CONFIG_MAP: &str = "kubevirt-ca";
const CA_KEY: &str = "ca-bundle";
/// Interval at which the certificate's files are looked at. A kubelet changes them within about a minute.
const FILES_INTERVAL: Duration = Duration::from_secs(10);

/// The settings of new connections.
#[derive(Clone)]
pub struct TlsSettings {
    acceptor: TlsAcceptor,
    clients: Clients,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Clients {
    VirtApi,
    Anyone,
}

impl std::fmt::Debug for TlsSettings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TlsSettings")
            .field("clients", &self.clients)
            .finish_non_exhaustive()
    }
}

impl TlsSettings {
    /// Settings for virt-api as the only client, with a certificate chain, its key and the CAs of clients, as PEM.
    ///
    /// # Errors
    /// One of them is not valid; the text says which.
    pub fn for_virt_api(
        chain: &[u8],
        key: &[u8],
        cas: &[u8],
        options: &TlsOptions,
    ) -> Result<TlsSettings, String> {
        let mut roots = RootCertStore::empty();
        let (_, refused) = roots.add_parsable_certificates(certificates(cas, "the CA bundle")?);
        if roots.is_empty() {
            return Err("the CA bundle: none of its certificates can be used".to_owned());
        }
        if refused > 0 {
            warn!(refused, "the CA bundle has certificates that cannot be used");
        }
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider())
            .build()
            .map_err(|error| format!("the CA bundle: {error}"))?;
        let config = config(options)?.with_client_cert_verifier(verifier);
        TlsSettings::new(config, chain, key, Clients::VirtApi)
    }

    /// Settings for any client. No certificate of a client is asked for.
    ///
    /// # Errors
    /// The certificate chain or its key is not valid; the text says which.
    pub fn for_anyone(chain: &[u8], key: &[u8], options: &TlsOptions) -> Result<TlsSettings, String> {
        let config = config(options)?.with_no_client_auth();
        TlsSettings::new(config, chain, key, Clients::Anyone)
    }

    fn new(
        config: ConfigBuilder<ServerConfig, WantsServerCert>,
        chain: &[u8],
        key: &[u8],
        clients: Clients,
    ) -> Result<TlsSettings, String> {
        let key = PrivateKeyDer::from_pem_slice(key).map_err(|error| format!("the key: {error:?}"))?;
        let config = config
            .with_single_cert(certificates(chain, "the certificate")?, key)
            .map_err(|error| format!("the certificate: {error}"))?;
        let acceptor = TlsAcceptor::from(Arc::new(config));
        Ok(TlsSettings { acceptor, clients })
    }

    /// Accepts a connection of a client.
    ///
    /// # Errors
    /// The handshake fails, or the client has to be virt-api and is not.
    pub async fn accept(&self, stream: TcpStream) -> Result<TlsStream<TcpStream>, String> {
        let stream = self.acceptor.accept(stream).await;
        let stream = stream.map_err(|error| error.to_string())?;
        if self.clients == Clients::Anyone {
            return Ok(stream);
        }
        let certificates = stream.get_ref().1.peer_certificates();
        let client = certificates.and_then(<[_]>::first).and_then(common_name);
        match client {
            Some(name) if name == CLIENT => Ok(stream),
            Some(name) => Err(format!("the client is {name:?}")),
            None => Err("the client's certificate has no name".to_owned()),
        }
    }
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

fn config(options: &TlsOptions) -> Result<ConfigBuilder<ServerConfig, WantsVerifier>, String> {
    ServerConfig::builder_with_provider(Arc::new(options.provider()))
        .with_protocol_versions(options.versions())
        .map_err(|error| error.to_string())
}

/// The certificates in a PEM text; `name` is that of the text in errors.
fn certificates(pem: &[u8], name: &str) -> Result<Vec<CertificateDer<'static>>, String> {
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    match all {
        Ok(all) if !all.is_empty() => Ok(all),
        Ok(_) => Err(format!("{name} has no certificate")),
        Err(error) => Err(format!("{name}: {error:?}")),
    }
}

fn common_name(certificate: &CertificateDer<'_>) -> Option<String> {
    let (_, certificate) = X509Certificate::from_der(certificate).ok()?;
    let mut names = certificate.subject().iter_common_name();
    let name = names.next()?.as_str().ok()?.to_owned();
    // Of two names, one could be anybody's.
    names.next().is_none().then_some(name)
}

/// Sends the settings of a service, once there are any.
pub type SettingsSender = watch::Sender<Option<Arc<TlsSettings>>>;

/// The agent's certificate and key, which the kubelet keeps up to date.
#[derive(Debug, Clone)]
pub struct CertificateFiles(PathBuf);

impl CertificateFiles {
    /// The files `tls.crt` and `tls.key` in `directory`.
    #[must_use]
    pub fn new(directory: PathBuf) -> CertificateFiles {
        CertificateFiles(directory)
    }

    fn modified(&self) -> Option<SystemTime> {
        std::fs::metadata(self.0.join("tls.crt")).ok()?.modified().ok()
    }

    fn read(&self) -> Result<(Vec<u8>, Vec<u8>), String> {
        let read = |name: &str| {
            let path = self.0.join(name);
            std::fs::read(&path).map_err(|error| format!("{}: {error}", path.display()))
        };
        Ok((read("tls.crt")?, read("tls.key")?))
    }

    fn for_virt_api(&self, cas: &[u8], options: &TlsOptions) -> Result<TlsSettings, String> {
        let (chain, key) = self.read()?;
        TlsSettings::for_virt_api(&chain, &key, cas, options)
    }

    fn for_anyone(&self, options: &TlsOptions) -> Result<TlsSettings, String> {
        let (chain, key) = self.read()?;
        TlsSettings::for_anyone(&chain, &key, options)
    }

    /// Keeps the settings `virt_api` up to date with the files, the options and the CAs in the namespace `namespace`,
    /// and the settings `anyone` with the files and the options. What cannot be used is logged, and the settings before
    /// it stay.
    pub async fn follow(
        self,
        client: Client,
        namespace: String,
        mut options: watch::Receiver<TlsOptions>,
        virt_api: SettingsSender,
        anyone: SettingsSender,
        mut stop: watch::Receiver<bool>,
    ) {
        let api: Api<ConfigMap> = Api::namespaced(client, &namespace);
        let config = watch_config().fields(&format!("metadata.name={CA_CONFIG_MAP}"));
        let mut maps = std::pin::pin!(watcher(api, config).backoff(backoff()));
        let mut failure = WatchError::default();
        let mut modified = self.modified();
        let mut used = options.borrow_and_update().clone();
        if modified.is_some() {
            publish("monitoring", self.for_anyone(&used), &anyone);
        }
        let mut cas: Option<Vec<u8>> = None;
        loop {
            let mut new_cas = false;
            tokio::select! {
                event = maps.try_next() => match event {
                    Ok(Some(Event::Apply(map) | Event::InitApply(map))) => {
                        let bundle = map.data.and_then(|mut data| data.remove(CA_KEY));
                        cas = bundle.map(String::into_bytes);
                        new_cas = true;
                    }
                    Ok(Some(Event::InitDone)) => failure.clear(),
                    Ok(_) => {}
                    Err(error) => failure.log("ConfigMap", &error),
                },
                Ok(()) = options.changed() => {}
                () = sleep(FILES_INTERVAL) => {}
                () = stopped(&mut stop) => return,
            }
            let now = (self.modified(), options.borrow_and_update().clone());
            let is_new = (now.0, &now.1) != (modified, &used);
            if now.1 != used && now.1.lacks_ciphers() {
                warn!(
                    "the agent has no cipher of the KubeVirt object's tlsConfiguration: it serves TLS 1.3 only"
                );
            }
            (modified, used) = now;
            if is_new && modified.is_some() {
                publish("monitoring", self.for_anyone(&used), &anyone);
            }
            if let Some(cas) = cas.as_ref().filter(|_| new_cas || is_new) {
                publish("REST", self.for_virt_api(cas, &used), &virt_api);
            }
        }
    }
}

fn publish(service: &str, settings: Result<TlsSettings, String>, sender: &SettingsSender) {
    match settings {
        Ok(new) => {
            info!(service, "the service has its certificates");
            sender.send_replace(Some(Arc::new(new)));
        }
        Err(error) => warn!(service, error, "the service cannot use its certificates"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::api_server::ApiServer;
    use crate::testing::authority::{Authority, Identity};
    use rustls::ProtocolVersion;

    #[test]
    fn a_ca_that_cannot_be_used_does_not_cost_the_others() {
        let authority = Authority::new();
        let Identity { certificate, key } = authority.server();
        let settings = |cas: &str| {
            let (certificate, key) = (certificate.as_bytes(), key.as_bytes());
            TlsSettings::for_virt_api(certificate, key, cas.as_bytes(), &TlsOptions::default())
        };
        let broken = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
        settings(&format!("{broken}{}", authority.pem())).unwrap();
        let error = settings(broken).unwrap_err();
        assert_eq!(error, "the CA bundle: none of its certificates can be used");
    }

    #[tokio::test]
    async fn certificate_is_there_although_the_api_server_hangs() {
        let dir = tempfile::tempdir().unwrap();
        let Identity { certificate, key } = Authority::new().server();
        std::fs::write(dir.path().join("tls.crt"), certificate).unwrap();
        std::fs::write(dir.path().join("tls.key"), key).unwrap();
        let api = ApiServer::default();
        api.hang();
        let (virt_api, for_virt_api) = watch::channel(None);
        let (anyone, mut for_anyone) = watch::channel(None);
        let (_stop, stopped) = watch::channel(false);
        let files = CertificateFiles::new(dir.path().to_owned());
        let (options, for_files) = watch::channel(TlsOptions::default());
        let namespace = "kubevirt".to_owned();
        tokio::spawn(files.follow(api.client(), namespace, for_files, virt_api, anyone, stopped));
        let settings = for_anyone.wait_for(Option::is_some).await.unwrap().clone();
        assert_eq!(settings.unwrap().clients, Clients::Anyone);
        assert!(for_virt_api.borrow().is_none());
        for_anyone.borrow_and_update();
        options.send_replace(tls13());
        for_anyone.changed().await.unwrap();
    }

    fn tls13() -> TlsOptions {
        let object = serde_json::json!({
            "apiVersion": "kubevirt.io/v1", "kind": "KubeVirt", "metadata": {"name": "kubevirt"},
            "spec": {"configuration": {"tlsConfiguration": {"minTLSVersion": "VersionTLS13"}}},
        });
        TlsOptions::of(&serde_json::from_value(object).unwrap())
    }

    #[tokio::test]
    async fn only_the_versions_of_the_options_are_served() {
        let authority = Authority::new();
        let Identity { certificate, key } = authority.server();
        let version = async |options: &TlsOptions, of_client| {
            let settings = TlsSettings::for_anyone(certificate.as_bytes(), key.as_bytes(), options).unwrap();
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
            let (server, _) = listener.accept().await.unwrap();
            let client = authority.handshake_in(of_client, client, None);
            let (served, client) = tokio::join!(settings.accept(server), client);
            assert_eq!(served.is_ok(), client.is_ok());
            client.ok()?.get_ref().1.protocol_version()
        };
        let (old, new) = (&[&rustls::version::TLS12][..], rustls::ALL_VERSIONS);
        let (any, only) = (TlsOptions::default(), tls13());
        assert_eq!(version(&any, old).await, Some(ProtocolVersion::TLSv1_2));
        assert_eq!(version(&any, new).await, Some(ProtocolVersion::TLSv1_3));
        assert_eq!(version(&only, old).await, None);
        assert_eq!(version(&only, new).await, Some(ProtocolVersion::TLSv1_3));
    }
}
