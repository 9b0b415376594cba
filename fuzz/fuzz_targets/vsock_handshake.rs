//! The line `CONNECT PORT` of programs on `vsock.sock`, in fragments and with pauses. Asserts that nothing after the line
//! is taken, that a port is the one of the line, and that nobody is waited for longer than the limit.
#![no_main]

use std::time::Duration;

use arbitrary::Arbitrary;
use husk_fuzz::host::with_clock;
use husk_monitor::monitor::testing::vsock_port;
use libfuzzer_sys::fuzz_target;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::{Instant, sleep};

#[derive(Arbitrary, Debug)]
struct Program {
    pieces: Vec<Piece>,
    part: u8,
    pause_ms: u8,
}

#[derive(Arbitrary, Debug)]
enum Piece {
    Connect,
    Blank,
    Port(u32),
    Return,
    Line,
    Bytes(Vec<u8>),
}

fuzz_target!(|program: Program| {
    let pieces = program.pieces.iter().take(16).map(|piece| match piece {
        Piece::Connect => b"CONNECT".to_vec(),
        Piece::Blank => b" ".to_vec(),
        Piece::Port(port) => port.to_string().into_bytes(),
        Piece::Return => b"\r".to_vec(),
        Piece::Line => b"\n".to_vec(),
        Piece::Bytes(bytes) => bytes.clone(),
    });
    let sent = pieces.collect::<Vec<_>>().concat();
    let (part, pause) = (
        usize::from(program.part % 40) + 1,
        Duration::from_millis((program.pause_ms % 64).into()) * 8,
    );
    with_clock(async {
        let (mut program, mut stream) = tokio::io::duplex(1 << 16);
        let bytes = sent.clone();
        let writer = tokio::spawn(async move {
            for part in bytes.chunks(part) {
                if program.write_all(part).await.is_err() {
                    break;
                }
                sleep(pause).await;
            }
        });
        let start = Instant::now();
        let port = vsock_port(&mut stream).await;
        assert!(
            start.elapsed() <= Duration::from_millis(5100),
            "{:?}",
            start.elapsed()
        );
        let _ = writer.await;
        let mut rest = Vec::new();
        stream.read_to_end(&mut rest).await.expect("the rest");
        let taken = &sent[..sent.len() - rest.len()];
        assert!(taken.len() <= 33 && sent.ends_with(&rest));
        if let Some(port) = port {
            let line = std::str::from_utf8(taken).expect("a line");
            let line = line
                .strip_suffix('\n')
                .expect("the end of the line")
                .to_ascii_lowercase();
            let said = line
                .trim()
                .strip_prefix("connect")
                .expect("the word")
                .trim_start();
            assert_eq!(said.trim_start_matches('0').parse().unwrap_or(0), port);
            assert_ne!(port, u32::MAX);
        }
    });
});
