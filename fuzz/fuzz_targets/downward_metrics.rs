//! The bytes of a guest on the port of downward metrics, with openings and closings of the port between them. Asserts
//! that every answer is a document of metrics or a refusal, and that no more come than requests were sent.
#![no_main]

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use arbitrary::Arbitrary;
use husk_fuzz::host::{settle, with_clock};
use husk_monitor::monitor::testing::EventListener;
use husk_monitor::snapshot::Snapshot;
use libfuzzer_sys::fuzz_target;

#[derive(Arbitrary, Debug)]
struct Program {
    node: String,
    steps: Vec<Step>,
}

#[derive(Arbitrary, Debug)]
enum Step {
    Request,
    Get,
    Line(bool),
    Bytes(Vec<u8>),
    Fill(u8, u16),
    Port(bool),
    Wait,
    Read,
}

const REQUEST: &[u8] = b"GET /metrics/XML";
/// Requests for metrics, each of which reads the host's files.
const REQUESTS: usize = 2;
const MOST_BYTES: usize = 8192;

const SNAPSHOT: &str = include_str!("../../shim/monitor/src/snapshot/fixtures/version-1.json");

fuzz_target!(|program: Program| {
    with_clock(run(&program));
});

async fn run(program: &Program) {
    let snapshot: Snapshot = serde_json::from_str(SNAPSHOT).expect("a snapshot");
    let vmi = serde_json::json!({"status": {"nodeName": program.node}});
    let (mut listener, guest, serve) = EventListener::new(&snapshot.plan, &vmi).expect("a listener");
    let served = tokio::spawn(serve);
    let mut guest = UnixStream::from(guest);
    guest.set_nonblocking(true).expect("nonblocking");
    let (mut sent, mut answers, mut asked) = (Vec::new(), Vec::new(), 0);
    for step in program.steps.iter().take(48) {
        let bytes = match step {
            Step::Request if asked == REQUESTS => continue,
            Step::Request => [REQUEST, b"\r\n\r\n"].concat(),
            Step::Get if asked == REQUESTS => continue,
            Step::Get => REQUEST.to_vec(),
            Step::Line(true) => b"\r\n".to_vec(),
            Step::Line(false) => b"\n".to_vec(),
            Step::Bytes(bytes) => bytes.clone(),
            Step::Fill(byte, count) => vec![*byte; usize::from(*count) % 2048],
            Step::Port(open) => {
                listener.open_metrics_port(*open);
                settle().await;
                continue;
            }
            Step::Wait => {
                tokio::time::sleep(Duration::from_secs(1)).await;
                continue;
            }
            Step::Read => {
                read(&mut guest, &mut answers);
                continue;
            }
        };
        if matches!(step, Step::Request | Step::Get) {
            asked += 1;
        }
        if sent.len() + bytes.len() > MOST_BYTES {
            break;
        }
        guest.write_all(&bytes).expect("written");
        sent.extend(bytes);
        settle().await;
    }
    // One answer a second: as many as can be due.
    for _ in 0..=sent.len() / 1000 {
        tokio::time::sleep(Duration::from_secs(502)).await;
        read(&mut guest, &mut answers);
    }
    drop(listener);
    served.await.expect("the end of the VM ends the service");
    read(&mut guest, &mut answers);
    let text = String::from_utf8(answers).expect("UTF-8");
    let mut documents = 0;
    for answer in text.split_terminator("\n\n") {
        if answer != "INVALID REQUEST" {
            assert!(
                answer.starts_with("<metrics>\n") && answer.ends_with("</metrics>"),
                "{answer}"
            );
            documents += 1;
        }
    }
    let requests = sent
        .windows(REQUEST.len())
        .filter(|part| *part == REQUEST)
        .count();
    assert!(
        documents <= requests,
        "{documents} documents for {requests} requests"
    );
}

fn read(guest: &mut UnixStream, answers: &mut Vec<u8>) {
    let mut buffer = [0; 1 << 14];
    while let Ok(count @ 1..) = guest.read(&mut buffer) {
        answers.extend(&buffer[..count]);
    }
}
