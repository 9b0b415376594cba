//! Forwarding of local TCP ports to a VM.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::str::FromStr;
use std::sync::Once;
use std::time::Duration;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{sleep, timeout};

use crate::failure::{Failure, chain};
use crate::output;
use crate::vm_ref::VmRef;

/// Maximum time for a TCP connection to the guest.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Delay after a failed accept, for example with too many open files.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);

/// Port specification `[tcp/][ADDRESS:]LOCAL[:REMOTE]`, in the syntax of kubectl and virtctl.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PortSpec {
    local: SocketAddr,
    remote: u16,
}

impl FromStr for PortSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.starts_with("udp/") {
            return Err("only TCP ports can be forwarded".into());
        }
        let rest = text.strip_prefix("tcp/").unwrap_or(text);
        let (before, last) = rest.rsplit_once(':').unwrap_or(("", rest));
        let remote = port(last)?;
        let (address, local) = match before.rsplit_once(':') {
            Some((address, local)) => (address, local),
            None => ("", before),
        };
        let local = match local {
            // `:80` means any free local port, `80` means local port 80.
            "" if rest.contains(':') => 0,
            "" => remote,
            local => port(local)?,
        };
        if remote == 0 {
            return Err("the port of the VM must be 1 to 65535".into());
        }
        Ok(Self {
            local: SocketAddr::new(ip(address)?, local),
            remote,
        })
    }
}

fn port(text: &str) -> Result<u16, String> {
    let digits = text.bytes().all(|byte| byte.is_ascii_digit());
    let number = text.parse().ok().filter(|_| digits);
    number.ok_or_else(|| format!("{text:?} is not a port; expected [ADDRESS:]LOCAL:REMOTE"))
}

fn ip(text: &str) -> Result<IpAddr, String> {
    let bare = text.strip_prefix('[').and_then(|text| text.strip_suffix(']'));
    match bare.unwrap_or(text) {
        "" | "localhost" => Ok(Ipv4Addr::LOCALHOST.into()),
        text => text.parse().map_err(|_| format!("{text:?} is not an IP address")),
    }
}

/// A local port in listening state.
#[derive(Debug)]
pub(crate) struct PortListener {
    listener: TcpListener,
    remote: u16,
}

impl PortListener {
    /// Binds the local port.
    pub(crate) async fn on(forward: &PortSpec) -> Result<Self, Failure> {
        let listener = TcpListener::bind(forward.local).await;
        Ok(Self {
            listener: listener.map_err(Failure::at(forward.local))?,
            remote: forward.remote,
        })
    }

    /// Prints the port and forwards connections to it in the background.
    pub(crate) fn serve(self, vm: VmRef, address: IpAddr) -> Result<(), Failure> {
        let local = self.listener.local_addr()?;
        output::print(&format!("Forwarding from {local} -> {}\n", self.remote))?;
        let target = SocketAddr::new(address, self.remote);
        tokio::spawn(async move {
            loop {
                match self.listener.accept().await {
                    Ok((client, _)) => drop(tokio::spawn(proxy(vm.clone(), client, target))),
                    Err(error) => {
                        report_error(&vm, &local, &error);
                        sleep(ACCEPT_RETRY_DELAY).await;
                    }
                }
            }
        });
        Ok(())
    }
}

/// Copies bytes in both directions until both sides have closed.
async fn proxy(vm: VmRef, mut client: TcpStream, target: SocketAddr) {
    let why = match timeout(CONNECT_TIMEOUT, TcpStream::connect(target)).await {
        Ok(Ok(mut guest)) => {
            let _ = (client.set_nodelay(true), guest.set_nodelay(true));
            // The side that breaks the connection knows about it.
            let _ = copy_bidirectional(&mut client, &mut guest).await;
            return;
        }
        Ok(Err(error)) => return report_error(&vm, &target, &error),
        Err(_) => "no answer",
    };
    eprintln!("{vm}: {target}: {why}");
}

/// Prints an error of a connection; the lack of file descriptors is printed only once.
fn report_error(vm: &VmRef, place: &SocketAddr, error: &io::Error) {
    static TOO_MANY: Once = Once::new();
    match error.raw_os_error() {
        Some(libc::EMFILE | libc::ENFILE) => TOO_MANY.call_once(|| {
            eprintln!(
                "{vm}: {place}: {}: further connections wait until others end; raise the limit with `ulimit -n`",
                chain(error)
            );
        }),
        _ => eprintln!("{vm}: {place}: {}", chain(error)),
    }
}

/// Raises the soft limit of open files to the hard limit: each connection takes two.
pub(crate) fn raise_file_limit() {
    let maximum = getrlimit(Resource::Nofile).maximum;
    let limit = Rlimit {
        current: maximum,
        maximum,
    };
    // A failure shows later, when descriptors run out.
    let _ = setrlimit(Resource::Nofile, limit);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_written_as_for_kubectl() {
        let of = |text: &str| {
            let forward = text.parse::<PortSpec>().unwrap();
            format!("{} {}", forward.local, forward.remote)
        };
        for (text, shown) in [
            ("8080:80", "127.0.0.1:8080 80"),
            ("8080", "127.0.0.1:8080 8080"),
            (":80", "127.0.0.1:0 80"),
            ("0:80", "127.0.0.1:0 80"),
            ("tcp/8080:80", "127.0.0.1:8080 80"),
            ("0.0.0.0:8080:80", "0.0.0.0:8080 80"),
            ("localhost:8080:80", "127.0.0.1:8080 80"),
            ("[::1]:8080:80", "[::1]:8080 80"),
            ("::1:8080:80", "[::1]:8080 80"),
        ] {
            assert_eq!(of(text), shown, "{text}");
        }
        for bad in [
            "",
            "x",
            "0",
            "8080:0",
            "65536",
            "80:",
            "-1:80",
            "+1:80",
            "udp/53:53",
            "host:1:2",
            "1:2:3:4",
            "tcp/",
            "::",
        ] {
            assert!(bad.parse::<PortSpec>().is_err(), "{bad}");
        }
    }
}
