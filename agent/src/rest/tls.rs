//! Mutual TLS with virt-api. Certificates and CAs change while the agent runs: KubeVirt's operator rotates them.
//!
//! The certificates have no host names. Each side checks the chain and the exact common name of the other.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use crate::watching::{WatchError, backoff, stopped};
use futures_util::TryStreamExt;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client};
use rustls::RootCertStore;
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::sleep;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tracing::{info, warn};
use x509_parser::prelude::{FromDer, X509Certificate};

/// Common name of virt-api's client certificate.
const CLIENT: &str = "kubevirt.io:system:client:virt-handler";
/// ConfigMap of KubeVirt's CAs, and its key.
const CA_CONFIG_MAP: &str = "kubevirt-ca";
const CA_KEY: &str = "ca-bundle";
/// Interval at which the certificate's files are looked at. A kubelet changes them within about a minute.
const FILES_INTERVAL: Duration = Duration::from_secs(10);

/// The settings of new connections.
#[derive(Clone)]
pub struct TlsSettings(TlsAcceptor);

impl std::fmt::Debug for TlsSettings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("TlsSettings")
    }
}

impl TlsSettings {
    /// Settings with a certificate chain, its key and the CAs of clients, as PEM.
    ///
    /// # Errors
    /// One of them is not valid; the text says which.
    pub fn new(chain: &[u8], key: &[u8], cas: &[u8]) -> Result<TlsSettings, String> {
        let certificates = |pem: &[u8], name: &str| -> Result<Vec<CertificateDer<'static>>, String> {
            let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
            match all {
                Ok(all) if !all.is_empty() => Ok(all),
                Ok(_) => Err(format!("{name} has no certificate")),
                Err(error) => Err(format!("{name}: {error:?}")),
            }
        };
        let mut roots = RootCertStore::empty();
        for ca in certificates(cas, "the CA bundle")? {
            roots.add(ca).map_err(|error| format!("the CA bundle: {error}"))?;
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider))
            .build()
            .map_err(|error| format!("the CA bundle: {error}"))?;
        let key = PrivateKeyDer::from_pem_slice(key).map_err(|error| format!("the key: {error:?}"))?;
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| error.to_string())?
            .with_client_cert_verifier(verifier)
            .with_single_cert(certificates(chain, "the certificate")?, key)
            .map_err(|error| format!("the certificate: {error}"))?;
        Ok(TlsSettings(TlsAcceptor::from(Arc::new(config))))
    }

    /// Accepts a connection of virt-api.
    ///
    /// # Errors
    /// The handshake fails, or the client is not virt-api.
    pub async fn accept(&self, stream: TcpStream) -> Result<TlsStream<TcpStream>, String> {
        let stream = self.0.accept(stream).await.map_err(|error| error.to_string())?;
        let certificates = stream.get_ref().1.peer_certificates();
        let client = certificates.and_then(<[_]>::first).and_then(common_name);
        match client {
            Some(name) if name == CLIENT => Ok(stream),
            Some(name) => Err(format!("the client is {name:?}")),
            None => Err("the client's certificate has no name".to_owned()),
        }
    }
}

fn common_name(certificate: &CertificateDer<'_>) -> Option<String> {
    let (_, certificate) = X509Certificate::from_der(certificate).ok()?;
    let mut names = certificate.subject().iter_common_name();
    let name = names.next()?.as_str().ok()?.to_owned();
    // Of two names, one could be anybody's.
    names.next().is_none().then_some(name)
}

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

    fn settings(&self, cas: &[u8]) -> Result<TlsSettings, String> {
        let read = |name: &str| {
            let path = self.0.join(name);
            std::fs::read(&path).map_err(|error| format!("{}: {error}", path.display()))
        };
        TlsSettings::new(&read("tls.crt")?, &read("tls.key")?, cas)
    }

    /// Keeps `settings` up to date with the files and the CAs in the namespace `namespace`. What cannot be used is
    /// logged, and the settings before it stay.
    pub async fn follow(
        self,
        client: Client,
        namespace: String,
        settings: watch::Sender<Option<Arc<TlsSettings>>>,
        mut stop: watch::Receiver<bool>,
    ) {
        let api: Api<ConfigMap> = Api::namespaced(client, &namespace);
        let config = watcher::Config::default().fields(&format!("metadata.name={CA_CONFIG_MAP}"));
        let mut maps = std::pin::pin!(watcher(api, config).backoff(backoff()));
        let mut failure = WatchError::default();
        let (mut cas, mut modified): (Option<Vec<u8>>, _) = (None, None);
        loop {
            let mut changed = false;
            tokio::select! {
                event = maps.try_next() => match event {
                    Ok(Some(Event::Apply(map) | Event::InitApply(map))) => {
                        let bundle = map.data.and_then(|mut data| data.remove(CA_KEY));
                        cas = bundle.map(String::into_bytes);
                        changed = true;
                    }
                    Ok(Some(Event::InitDone)) => failure.clear(),
                    Ok(_) => {}
                    Err(error) => failure.log("ConfigMap", &error),
                },
                () = sleep(FILES_INTERVAL) => {}
                () = stopped(&mut stop) => return,
            }
            let now = self.modified();
            let Some(cas) = cas.as_ref().filter(|_| changed || now != modified) else {
                continue;
            };
            modified = now;
            match self.settings(cas) {
                Ok(new) => {
                    info!("the REST service has its certificates");
                    settings.send_replace(Some(Arc::new(new)));
                }
                Err(error) => warn!(error, "the REST service cannot use its certificates"),
            }
        }
    }
}
