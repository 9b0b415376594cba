//! The first line of a program on `vsock.sock`: `CONNECT PORT\n`, as Firecracker's users know it.

use std::io;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::time::timeout;

/// Time for a program to send its line.
pub(super) const LINE_TIMEOUT: Duration = Duration::from_secs(5);
/// Most bytes of a line.
const LINE_BYTES: usize = 32;

/// Reason why a program is not connected.
#[derive(Debug, thiserror::Error)]
pub(super) enum HandshakeError {
    #[error("the line has not arrived within {LINE_TIMEOUT:?}")]
    Timeout,
    #[error("the line is longer than {LINE_BYTES} bytes")]
    TooLong,
    #[error("the line is not CONNECT PORT, with a port from 0 to 4294967294")]
    Line,
    #[error("the connection has ended: {0}")]
    Ended(#[from] io::Error),
}

/// Reads the line and returns the port of the guest. Takes no byte after it.
pub(super) async fn requested_port(stream: &mut (impl AsyncRead + Unpin)) -> Result<u32, HandshakeError> {
    timeout(LINE_TIMEOUT, async {
        let mut line = Vec::new();
        loop {
            // One byte at a time: what follows the line is for the guest.
            match stream.read_u8().await? {
                b'\n' => return parse(&line).ok_or(HandshakeError::Line),
                _ if line.len() == LINE_BYTES => return Err(HandshakeError::TooLong),
                byte => line.push(byte),
            }
        }
    })
    .await
    .unwrap_or(Err(HandshakeError::Timeout))
}

fn parse(line: &[u8]) -> Option<u32> {
    let mut words = std::str::from_utf8(line).ok()?.split_ascii_whitespace();
    let (command, port) = (words.next()?, words.next()?);
    let is_connect = command.eq_ignore_ascii_case("connect") && words.next().is_none();
    // Digits only: a number may have a sign otherwise.
    let digits = port.bytes().all(|byte| byte.is_ascii_digit());
    // The highest is VMADDR_PORT_ANY.
    let port = port.parse().ok().filter(|port| *port != u32::MAX)?;
    (is_connect && digits).then_some(port)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tokio::io::AsyncWriteExt;
    use tokio::net::UnixStream;

    use super::*;

    async fn said(bytes: &[u8]) -> Result<u32, HandshakeError> {
        requested_port(&mut &bytes[..]).await
    }

    #[tokio::test]
    async fn a_port_is_read_and_nothing_after_it() {
        let mut bytes = &b"CONNECT 1234\nfor the guest"[..];
        assert_eq!(requested_port(&mut bytes).await.unwrap(), 1234);
        assert_eq!(bytes, b"for the guest");
        for line in ["connect 0\n", " CONNECT  0 \r\n", "Connect 0000000\n"] {
            assert_eq!(said(line.as_bytes()).await.unwrap(), 0);
        }
        assert_eq!(said(b"CONNECT 4294967294\n").await.unwrap(), u32::MAX - 1);
    }

    #[tokio::test]
    async fn another_line_is_refused() {
        for line in [
            "\n",
            "CONNECT\n",
            "CONNECT \n",
            "CONNECT x\n",
            "CONNECT -1\n",
            "CONNECT +1\n",
            "CONNECT 1 2\n",
            "CONNECT 4294967295\n",
            "CONNECT 4294967296\n",
            "LISTEN 1\n",
            "CONNECT1\n",
            "CONNECT \u{661}\n",
        ] {
            assert!(
                matches!(said(line.as_bytes()).await, Err(HandshakeError::Line)),
                "{line:?}"
            );
        }
        assert!(matches!(said(&[0xff, b'\n']).await, Err(HandshakeError::Line)));
        assert!(matches!(said(&[b'C'; 100]).await, Err(HandshakeError::TooLong)));
        assert!(matches!(said(b"CONNECT 1").await, Err(HandshakeError::Ended(_))));
    }

    #[tokio::test(start_paused = true)]
    async fn a_program_that_says_nothing_is_not_waited_for() {
        let (mut program, mut stream) = UnixStream::pair().unwrap();
        program.write_all(b"CONNECT 1").await.unwrap();
        let refused = requested_port(&mut stream).await;
        assert!(matches!(refused, Err(HandshakeError::Timeout)), "{refused:?}");
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..60)) {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
            let mut rest = &bytes[..];
            let read = runtime.block_on(requested_port(&mut rest));
            let taken = bytes.len() - rest.len();
            prop_assert!(taken <= LINE_BYTES + 1);
            if read.is_ok() {
                prop_assert_eq!(bytes[taken - 1], b'\n');
            }
        }
    }
}
