//! TLS with a server in the guest, as virt-handler does it: the server may have any certificate, and is shown one of
//! KubeVirt, by which it knows that the host connects.

use std::io;
use std::path::Path;
use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, SignatureScheme};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

/// Accepts every certificate, since nobody could say which is the guest's. The server must have its key.
#[derive(Debug)]
struct AnyServer(Arc<CryptoProvider>);

impl ServerCertVerifier for AnyServer {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(rustls::Error::General("only TLS 1.3 is spoken".into()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.0.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

/// Connects, and shows the server the certificate in `directory`, if there is one. Reads it for each connection,
/// because the kubelet replaces it.
pub(super) async fn connect<S>(stream: S, directory: &Path) -> io::Result<TlsStream<S>>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider.clone())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(io::Error::other)?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AnyServer(provider)));
    let mut config = match identity(directory)? {
        Some((chain, key)) => builder
            .with_client_auth_cert(chain, key)
            .map_err(io::Error::other)?,
        None => builder.with_no_client_auth(),
    };
    config.enable_sni = false;
    let name = ServerName::try_from("guest").map_err(io::Error::other)?;
    TlsConnector::from(Arc::new(config)).connect(name, stream).await
}

type Identity = (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>);

/// The certificate chain and its key; `None` if there is no file of one.
fn identity(directory: &Path) -> io::Result<Option<Identity>> {
    let (chain, key) = (directory.join("tls.crt"), directory.join("tls.key"));
    let text = match std::fs::read(&chain) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        text => text?,
    };
    let wrong =
        |path: &Path, error: &dyn std::fmt::Debug| io::Error::other(format!("{}: {error:?}", path.display()));
    let certificates = CertificateDer::pem_slice_iter(&text).collect::<Result<Vec<_>, _>>();
    let certificates = certificates.map_err(|error| wrong(&chain, &error))?;
    let private =
        PrivateKeyDer::from_pem_slice(&std::fs::read(&key)?).map_err(|error| wrong(&key, &error))?;
    Ok(Some((certificates, private)))
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    use super::*;
    use crate::testing::authority::Authority;

    /// A guest's server that wants a client of `authority`.
    async fn serve(stream: tokio::io::DuplexStream, authority: &Authority) -> io::Result<Vec<u8>> {
        let mut stream = authority.guest_acceptor().accept(stream).await?;
        let mut received = vec![0; 4];
        stream.read_exact(&mut received).await?;
        stream.write_all(b"pong").await?;
        stream.flush().await?;
        Ok(received)
    }

    #[tokio::test]
    async fn the_guest_sees_kubevirts_certificate_and_has_any_of_its_own() {
        let (dir, kubevirt) = (tempfile::tempdir().unwrap(), Authority::new());
        let client = kubevirt.client("kubevirt.io:system:client:vsock");
        std::fs::write(dir.path().join("tls.crt"), client.certificate).unwrap();
        std::fs::write(dir.path().join("tls.key"), client.key).unwrap();
        let (ours, theirs) = duplex(4096);
        let talk = async {
            let mut stream = connect(ours, dir.path()).await?;
            stream.write_all(b"ping").await?;
            let mut answer = vec![0; 4];
            stream.read_exact(&mut answer).await?;
            io::Result::Ok(answer)
        };
        let (answer, received) = tokio::join!(talk, serve(theirs, &kubevirt));
        assert_eq!(
            (&answer.unwrap()[..], &received.unwrap()[..]),
            (&b"pong"[..], &b"ping"[..])
        );
    }

    #[tokio::test]
    async fn a_guest_with_mutual_tls_refuses_a_client_without_certificate() {
        let (dir, kubevirt) = (tempfile::tempdir().unwrap(), Authority::new());
        let (ours, theirs) = duplex(4096);
        let talk = async {
            // In TLS 1.3 the client is through before the server has seen its certificate.
            let mut stream = connect(ours, dir.path()).await?;
            stream.read_u8().await
        };
        let (answer, received) = tokio::join!(talk, serve(theirs, &kubevirt));
        assert!(answer.is_err() && received.is_err(), "{answer:?} {received:?}");
    }
}
