//! HTTP/1.1 over TLS for the agent's services: bounded connections, handshakes and headers.

mod listen;
mod open;
mod owner_limits;
mod tls;
mod tls_options;

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::http::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use rustix::net::sockopt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tower::ServiceExt;
use tracing::{debug, warn};

use crate::watching::stopped;
pub use listen::listen;
use open::{OpenConnections, Requests};
pub use owner_limits::{OwnerLimits, Permit};
pub use tls::{CertificateFiles, TlsSettings};
pub use tls_options::TlsOptions;

/// Maximum time of a TLS handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum time for the header of a request, which includes the time between two requests of a connection.
const HEADER_TIMEOUT: Duration = match cfg!(test) {
    true => Duration::from_secs(3),
    false => Duration::from_secs(10),
};
/// Longest header of a request, in bytes.
const MAX_BUFFER: usize = 16 << 10;
/// Time to finish the current request after a connection's maximum lifetime.
const LAST_REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// Silence after which TCP probes a peer, the interval of probes, and the number without an answer that ends the
/// connection.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(30);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
const KEEPALIVE_PROBES: u32 = 3;

/// A service on one address.
#[derive(Debug)]
pub struct Service {
    /// Its name in logs.
    pub name: &'static str,
    /// Its handlers.
    pub router: Router,
    /// Connections at the same time. The oldest one without a request makes way for another.
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
        let mut open = OpenConnections::new(self.connections);
        let peers = OwnerLimits::new(self.connections_per_peer);
        let (service, lifetime) = (self.name, self.lifetime);
        loop {
            let connection = tokio::select! {
                accepted = listener.accept() => accepted,
                () = stopped(&mut stop) => return,
            };
            match connection {
                Ok((stream, peer)) => {
                    let Some(peer_permit) = peers.take(address(peer)) else {
                        debug!(service, %peer, "the peer has too many connections");
                        continue;
                    };
                    tokio::select! {
                        () = open.make_room() => {}
                        () = stopped(&mut stop) => return,
                    }
                    let (router, settings) = (self.router.clone(), tls.borrow().clone());
                    let requests = open.requests();
                    let connection = connected(stream, settings, router, requests.clone(), lifetime);
                    let task = tokio::spawn(async move {
                        if let Err(error) = connection.await {
                            debug!(service, %peer, error, "a connection failed");
                        }
                        drop(peer_permit);
                    });
                    open.add(requests, task.abort_handle());
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

/// Ends connections of peers that vanish. A console may have nothing to send for days.
fn keep_alive(stream: &TcpStream) -> std::io::Result<()> {
    sockopt::set_tcp_keepidle(stream, KEEPALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(stream, KEEPALIVE_INTERVAL)?;
    sockopt::set_tcp_keepcnt(stream, KEEPALIVE_PROBES)?;
    sockopt::set_socket_keepalive(stream, true)?;
    Ok(())
}

async fn connected(
    stream: TcpStream,
    settings: Option<Arc<TlsSettings>>,
    router: Router,
    requests: Requests,
    lifetime: Option<Duration>,
) -> Result<(), String> {
    let settings = settings.ok_or("there are no certificates yet")?;
    let _ = stream.set_nodelay(true);
    let _ = keep_alive(&stream);
    let stream = timeout(HANDSHAKE_TIMEOUT, settings.accept(stream))
        .await
        .map_err(|_| "the TLS handshake takes too long".to_owned())??;
    let service = service_fn(move |request: Request<Incoming>| {
        let (router, unanswered) = (router.clone(), requests.begin());
        async move {
            let answer = router.oneshot(request).await;
            drop(unanswered);
            answer
        }
    });
    let mut builder = http1::Builder::new();
    // Without a timer hyper waits for a header for ever.
    builder
        .timer(TokioTimer::new())
        .max_buf_size(MAX_BUFFER)
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
    use crate::testing::authority::Authority;

    /// State of the timer of a connection to `port` on 127.0.0.1, as /proc/net/tcp shows it: kind, and hundredths of a
    /// second.
    fn timer(port: u16, client: u16) -> Option<(String, u64)> {
        let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
        let ends = format!("0100007F:{port:04X} 0100007F:{client:04X}");
        let line = table.lines().find(|line| line.contains(&ends))?;
        let (kind, rest) = line.split_whitespace().nth(5)?.split_once(':')?;
        Some((kind.to_owned(), u64::from_str_radix(rest, 16).unwrap()))
    }

    #[tokio::test]
    async fn silent_peers_are_probed() {
        let authority = Authority::new();
        let (_, tls) = watch::channel(Some(Arc::new(authority.settings())));
        let (_stop, stopped) = watch::channel(false);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let service = Service {
            name: "test",
            router: Router::new(),
            connections: 1,
            connections_per_peer: 1,
            lifetime: None,
        };
        tokio::spawn(service.serve(listener, tls, stopped));
        let client = TcpStream::connect(address).await.unwrap();
        let client = client.local_addr().unwrap();
        let probed = async {
            loop {
                // Kind 2 is the probe.
                match timer(address.port(), client.port()) {
                    Some((kind, rest)) if kind == "02" => return rest,
                    _ => sleep(Duration::from_millis(5)).await,
                }
            }
        };
        let rest = timeout(Duration::from_secs(5), probed).await.unwrap();
        assert!(rest <= 3000, "{rest}");
    }

    #[test]
    fn a_mapped_address_counts_as_the_address_itself() {
        let of = |peer: &str| address(peer.parse().unwrap());
        assert_eq!(of("[::ffff:10.0.0.1]:80"), of("10.0.0.1:81"));
        assert_ne!(of("10.0.0.1:80"), of("10.0.0.2:80"));
    }
}
