//! HTTP/1.1 over TLS for the agent's services: bounded connections, handshakes and headers.

mod places;
mod tls;

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::time::{sleep, timeout};
use tracing::{debug, warn};

use crate::watching::stopped;
pub use places::{Place, Places};
pub use tls::{CertificateFiles, TlsSettings};

/// Maximum time of a TLS handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum time for the header of a request, which includes the time between two requests of a connection.
const HEADER_TIMEOUT: Duration = match cfg!(test) {
    true => Duration::from_secs(3),
    false => Duration::from_secs(10),
};
/// Time to finish the current request after a connection's maximum lifetime.
const LAST_REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// A service on one address.
#[derive(Debug)]
pub struct Service {
    /// Its name in logs.
    pub name: &'static str,
    /// Its handlers.
    pub router: Router,
    /// Connections at the same time. Others wait.
    pub connections: usize,
    /// Connections of one address at the same time. Others are closed.
    pub connections_per_peer: usize,
    /// Maximum time of a connection, for a service without long requests.
    pub lifetime: Option<Duration>,
}

impl Service {
    /// Serves connections with the present settings until `stop` is true.
    pub async fn serve(
        self,
        listener: TcpListener,
        tls: watch::Receiver<Option<Arc<TlsSettings>>>,
        mut stop: watch::Receiver<bool>,
    ) {
        let places = Arc::new(Semaphore::new(self.connections));
        let peers = Places::new(self.connections_per_peer);
        let (service, lifetime) = (self.name, self.lifetime);
        loop {
            let place = tokio::select! {
                place = Arc::clone(&places).acquire_owned() => place,
                () = stopped(&mut stop) => return,
            };
            let Ok(place) = place else {
                return;
            };
            let connection = tokio::select! {
                accepted = listener.accept() => accepted,
                () = stopped(&mut stop) => return,
            };
            match connection {
                Ok((stream, peer)) => {
                    let Some(peer_place) = peers.take(address(peer)) else {
                        debug!(service, %peer, "the peer has too many connections");
                        continue;
                    };
                    let (router, settings) = (self.router.clone(), tls.borrow().clone());
                    tokio::spawn(async move {
                        if let Err(error) = connected(stream, settings, router, lifetime).await {
                            debug!(service, %peer, error, "a connection failed");
                        }
                        drop((place, peer_place));
                    });
                }
                Err(error) => {
                    // The process has no descriptor left, for example.
                    warn!(service, %error, "no connection can be accepted");
                    sleep(Duration::from_secs(1)).await;
                }
            }
        }
    }
}

/// The peer's address, by which its connections are counted. A socket for IPv6 has IPv4 addresses mapped.
fn address(peer: SocketAddr) -> IpAddr {
    peer.ip().to_canonical()
}

async fn connected(
    stream: TcpStream,
    settings: Option<Arc<TlsSettings>>,
    router: Router,
    lifetime: Option<Duration>,
) -> Result<(), String> {
    let settings = settings.ok_or("there are no certificates yet")?;
    let _ = stream.set_nodelay(true);
    let stream = timeout(HANDSHAKE_TIMEOUT, settings.accept(stream))
        .await
        .map_err(|_| "the TLS handshake takes too long".to_owned())??;
    let service = TowerToHyperService::new(router);
    let mut builder = http1::Builder::new();
    // Without a timer hyper waits for a header for ever.
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT);
    let served = builder.serve_connection(TokioIo::new(stream), service);
    let mut served = std::pin::pin!(served.with_upgrades());
    let ended = match lifetime {
        None => served.await,
        Some(lifetime) => match timeout(lifetime, served.as_mut()).await {
            Ok(ended) => ended,
            Err(_) => {
                served.as_mut().graceful_shutdown();
                timeout(LAST_REQUEST_TIMEOUT, served)
                    .await
                    .map_err(|_| "it takes too long".to_owned())?
            }
        },
    };
    ended.map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mapped_address_counts_as_the_address_itself() {
        let of = |peer: &str| address(peer.parse().unwrap());
        assert_eq!(of("[::ffff:10.0.0.1]:80"), of("10.0.0.1:81"));
        assert_ne!(of("10.0.0.1:80"), of("10.0.0.2:80"));
    }
}
