use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio::time::{Instant, timeout};

use super::*;
use crate::monitor::guest_channel::{GuestPort, guest_channel};

const REQUEST: &[u8] = b"GET /metrics/XML\r\n\r\n";

/// A source, and the sender of the VMM that it asks.
pub(super) fn source() -> (watch::Sender<Option<RunningVmm>>, MetricsSource) {
    let (sender, vmm) = watch::channel(None);
    let source = MetricsSource {
        host_name: "node".into(),
        vmm,
        vcpus: 2,
        memory_bytes: 256 << 20,
    };
    (sender, source)
}

/// A port that is served, and the guest's end of it.
fn served() -> (UnixStream, GuestPort, tokio::task::JoinHandle<()>) {
    let (channel, port) = guest_channel(METRICS_PORT).unwrap();
    let guest = std::os::unix::net::UnixStream::from(port.stream.try_clone().unwrap());
    let guest = UnixStream::from_std(guest).unwrap();
    (guest, port, tokio::spawn(serve(channel, source().1)))
}

/// Reads to the empty line.
async fn answer(guest: &mut UnixStream) -> String {
    let mut text = String::new();
    while !text.ends_with("\n\n") {
        let mut bytes = [0; 4096];
        let read = timeout(Duration::from_secs(20), guest.read(&mut bytes));
        let count = read.await.unwrap().unwrap();
        assert!(count > 0, "{text}");
        text += std::str::from_utf8(&bytes[..count]).unwrap();
    }
    text
}

#[tokio::test]
async fn requests_are_answered_one_a_second() {
    let (mut guest, _port, _task) = served();
    let start = Instant::now();
    guest.write_all(&[REQUEST, REQUEST].concat()).await.unwrap();
    let text = answer(&mut guest).await;
    assert!(
        text.starts_with("<metrics>\n") && text.ends_with("</metrics>\n\n"),
        "{text}"
    );
    assert!(
        text.contains("<name>HostName</name>\n    <value>node</value>"),
        "{text}"
    );
    assert!(text.contains("context=\"host\" unit=\"KiB\""), "{text}");
    answer(&mut guest).await;
    assert!(start.elapsed() >= Duration::from_secs(1));
}

#[tokio::test(start_paused = true)]
async fn an_invalid_request_gets_an_error_and_the_next_is_answered() {
    let (mut guest, _port, _task) = served();
    for wrong in [&b"HELLO\n\n"[..], &[b'x'; request::MOST_BYTES]] {
        guest.write_all(wrong).await.unwrap();
        assert_eq!(answer(&mut guest).await, "INVALID REQUEST\n\n");
        guest.write_all(REQUEST).await.unwrap();
        assert!(answer(&mut guest).await.starts_with("<metrics>"));
    }
}

#[tokio::test(start_paused = true)]
async fn part_of_a_request_ends_with_the_process_that_sent_it() {
    let (mut guest, port, _task) = served();
    let opened = async |open| {
        port.open.handle_event(&husk_proto::vmm::v1::event::PortOpened {
            name: METRICS_PORT.into(),
            open,
        });
        tokio::time::sleep(Duration::from_millis(10)).await;
    };
    // The word of the opening may be late.
    guest.write_all(b"GET /met").await.unwrap();
    tokio::time::sleep(Duration::from_millis(10)).await;
    opened(true).await;
    guest.write_all(b"rics/XML\n\nGET /met").await.unwrap();
    assert!(answer(&mut guest).await.starts_with("<metrics>"));
    tokio::time::sleep(Duration::from_secs(2)).await;
    opened(false).await;
    opened(true).await;
    guest.write_all(REQUEST).await.unwrap();
    assert!(answer(&mut guest).await.starts_with("<metrics>"));
}

#[tokio::test]
async fn it_ends_with_the_vm() {
    let (guest, port, task) = served();
    drop(port);
    timeout(Duration::from_secs(20), task).await.unwrap().unwrap();
    drop(guest);
}

#[test]
fn the_vm_is_described_by_its_plan_and_its_vmm() {
    let vmm_info = InfoResponse {
        balloon_bytes: Some(6 << 20),
        ..InfoResponse::default()
    };
    let values = |vmm_info| {
        let found = source().1.vm_metrics(u32::MAX, vmm_info);
        found
            .into_iter()
            .map(|metric| (metric.name, metric.value))
            .collect::<Vec<_>>()
    };
    let expected = |kib| {
        vec![
            ("TotalCPUTime", Value::Real(0.0)),
            ("ResourceProcessorLimit", Value::Int(2)),
            ("PhysicalMemoryAllocatedToVirtualSystem", Value::UInt(kib)),
            ("ResourceMemoryLimit", Value::UInt(kib)),
        ]
    };
    assert_eq!(values(None), expected(256 << 10));
    assert_eq!(values(Some(&vmm_info)), expected(250 << 10));
}
