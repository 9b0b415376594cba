//! Listens for the agent's services.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};

use rustix::net::sockopt;
use tokio::net::{TcpListener, TcpSocket};

/// Connections that wait to be accepted.
const BACKLOG: u32 = 1024;

/// Listens on an address. `[::]` also gets connections by IPv4, whatever the host's `net.ipv6.bindv6only` is, and stands
/// for `0.0.0.0` on a host without IPv6.
///
/// # Errors
/// The address cannot be used.
pub fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = match address {
        SocketAddr::V4(_) => TcpSocket::new_v4()?,
        SocketAddr::V6(v6) => match TcpSocket::new_v6() {
            Ok(socket) => {
                sockopt::set_ipv6_v6only(&socket, !v6.ip().is_unspecified())?;
                socket
            }
            Err(_) if v6.ip().is_unspecified() => {
                return listen((Ipv4Addr::UNSPECIFIED, v6.port()).into());
            }
            Err(error) => return Err(error),
        },
    };
    // Else an agent that starts again has to wait for the end of old connections.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

#[cfg(test)]
mod tests {
    use super::*;
    use husk_network::Netns;
    use tokio::net::TcpStream;

    #[tokio::test]
    async fn the_address_of_ipv6_is_that_of_ipv4_too() {
        let any = listen("[::]:0".parse().unwrap()).unwrap();
        let port = any.local_addr().unwrap().port();
        TcpStream::connect(("127.0.0.1", port)).await.unwrap();
        if any.local_addr().unwrap().is_ipv6() && std::net::TcpListener::bind("[::1]:0").is_ok() {
            TcpStream::connect(("::1", port)).await.unwrap();
        }
        let v4 = listen("127.0.0.1:0".parse().unwrap()).unwrap();
        TcpStream::connect(v4.local_addr().unwrap()).await.unwrap();
    }

    #[test]
    #[ignore = "needs root"]
    fn hosts_that_keep_ipv6_apart_are_overridden() {
        let is_apart = Netns::create().unwrap().run(|| {
            std::fs::write("/proc/sys/net/ipv6/bindv6only", "1").unwrap();
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.unwrap().block_on(async {
                let listener = listen("[::]:0".parse().unwrap()).unwrap();
                sockopt::ipv6_v6only(&listener).unwrap()
            })
        });
        assert!(!is_apart.unwrap());
    }
}
