//! Ways to an agent's socket.

use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio::net::UnixStream;
use tokio::time::sleep;

/// Time between two attempts to connect.
const RETRY: Duration = Duration::from_millis(20);

/// Connects once the agent listens.
pub async fn connect(socket: &Path) -> UnixStream {
    for _ in 0..500 {
        if let Ok(stream) = UnixStream::connect(socket).await {
            return stream;
        }
        sleep(RETRY).await;
    }
    panic!("qemu-ga does not listen on {}", socket.display());
}

/// A stream that does not end when the agent does, as a virtio-serial port: what is sent meanwhile is lost.
pub fn port(socket: PathBuf) -> DuplexStream {
    let (ours, mut theirs) = tokio::io::duplex(64 << 10);
    tokio::spawn(async move {
        let mut agent: Option<UnixStream> = None;
        let (mut down, mut up) = (vec![0; 4096], vec![0; 4096]);
        loop {
            let Some(stream) = &mut agent else {
                agent = UnixStream::connect(&socket).await.ok();
                tokio::select! {
                    read = theirs.read(&mut down), if agent.is_none() => {
                        if matches!(read, Ok(0) | Err(_)) {
                            return;
                        }
                    }
                    () = sleep(RETRY), if agent.is_none() => {}
                    else => {}
                }
                continue;
            };
            let open = tokio::select! {
                read = theirs.read(&mut down) => match read {
                    Ok(0) | Err(_) => return,
                    Ok(count) => stream.write_all(&down[..count]).await.is_ok(),
                },
                read = stream.read(&mut up) => match read {
                    Ok(0) | Err(_) => false,
                    Ok(count) => theirs.write_all(&up[..count]).await.is_ok(),
                },
            };
            if !open {
                agent = None;
            }
        }
    });
    ours
}
