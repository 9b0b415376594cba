//! Certificates as virt-operator makes them.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig, SupportedProtocolVersion};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;
use tokio_rustls::{TlsAcceptor, TlsConnector};

use crate::service::{TlsOptions, TlsSettings};

/// A certificate authority.
pub struct Authority(CertifiedIssuer<'static, KeyPair>);

/// A certificate and its key, as PEM.
pub struct Identity {
    pub certificate: String,
    pub key: String,
}

impl Authority {
    pub fn new() -> Authority {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, "kubevirt.io");
        Authority(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    /// A certificate for `name`, which is also valid for the host `agent`.
    pub fn issue(&self, name: &str, usage: ExtendedKeyUsagePurpose) -> Identity {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.extended_key_usages = vec![usage];
        // KubeVirt's clients check no host name. The client of the tests does.
        params.subject_alt_names = vec![rcgen::SanType::DnsName("agent".try_into().unwrap())];
        let key = KeyPair::generate().unwrap();
        Identity {
            certificate: params.signed_by(&key, &self.0).unwrap().pem(),
            key: key.serialize_pem(),
        }
    }

    /// A client's certificate.
    pub fn client(&self, name: &str) -> Identity {
        self.issue(name, ExtendedKeyUsagePurpose::ClientAuth)
    }

    /// The agent's certificate.
    pub fn server(&self) -> Identity {
        self.issue(
            "kubevirt.io:system:node:virt-handler",
            ExtendedKeyUsagePurpose::ServerAuth,
        )
    }

    /// Its certificate.
    pub fn pem(&self) -> String {
        self.0.pem()
    }

    /// Settings of the service for virt-api.
    pub fn settings(&self) -> TlsSettings {
        let Identity { certificate, key } = self.server();
        let cas = self.0.pem();
        let (certificate, key) = (certificate.as_bytes(), key.as_bytes());
        TlsSettings::for_virt_api(certificate, key, cas.as_bytes(), &TlsOptions::default()).unwrap()
    }

    /// A server in a guest, with a certificate of its own, that wants a client of this authority.
    pub fn guest_acceptor(&self) -> TlsAcceptor {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut roots = RootCertStore::empty();
        roots
            .add(CertificateDer::from_pem_slice(self.0.pem().as_bytes()).unwrap())
            .unwrap();
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider.clone());
        let Identity { certificate, key } = Authority::new().server();
        let config = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .unwrap()
            .with_client_cert_verifier(verifier.build().unwrap())
            .with_single_cert(
                vec![CertificateDer::from_pem_slice(certificate.as_bytes()).unwrap()],
                PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap(),
            );
        TlsAcceptor::from(Arc::new(config.unwrap()))
    }

    /// Connects as a client that trusts this authority.
    pub async fn connect(
        &self,
        address: SocketAddr,
        identity: Option<&Identity>,
    ) -> io::Result<TlsStream<TcpStream>> {
        self.handshake(TcpStream::connect(address).await?, identity).await
    }

    /// A TLS connection over `stream`.
    pub async fn handshake(
        &self,
        stream: TcpStream,
        identity: Option<&Identity>,
    ) -> io::Result<TlsStream<TcpStream>> {
        self.handshake_in(rustls::DEFAULT_VERSIONS, stream, identity)
            .await
    }

    /// A TLS connection over `stream` in one of these versions.
    pub async fn handshake_in(
        &self,
        versions: &[&'static SupportedProtocolVersion],
        stream: TcpStream,
        identity: Option<&Identity>,
    ) -> io::Result<TlsStream<TcpStream>> {
        let mut roots = RootCertStore::empty();
        let ca = CertificateDer::from_pem_slice(self.0.pem().as_bytes()).unwrap();
        roots.add(ca).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(versions)
            .unwrap()
            .with_root_certificates(roots);
        let config = match identity {
            Some(identity) => {
                let certificate = CertificateDer::from_pem_slice(identity.certificate.as_bytes()).unwrap();
                let key = PrivateKeyDer::from_pem_slice(identity.key.as_bytes()).unwrap();
                builder.with_client_auth_cert(vec![certificate], key).unwrap()
            }
            None => builder.with_no_client_auth(),
        };
        TlsConnector::from(Arc::new(config))
            .connect(ServerName::try_from("agent").unwrap(), stream)
            .await
    }
}
