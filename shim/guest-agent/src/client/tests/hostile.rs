use proptest::prelude::*;
use tokio::runtime::Builder;

use super::*;
use crate::poller::Query;
use crate::types::Exec;

/// An agent that sends `bytes` without end after `start`.
fn endless(start: &'static [u8], bytes: &'static [u8], syncs: usize) -> GuestAgent<DuplexStream> {
    let (ours, theirs) = tokio::io::duplex(64 << 10);
    tokio::spawn(async move {
        let (reader, mut writer) = tokio::io::split(theirs);
        let mut reader = BufReader::new(reader);
        for _ in 0..syncs {
            let mut line = Vec::new();
            reader.read_until(b'\n', &mut line).await.unwrap();
            let request = serde_json::from_slice(&line[1..]).unwrap();
            writer.write_all(&synced(&request)).await.unwrap();
        }
        let mut line = Vec::new();
        reader.read_until(b'\n', &mut line).await.unwrap();
        writer.write_all(start).await.unwrap();
        while writer.write_all(bytes).await.is_ok() {}
    });
    GuestAgent::new(ours)
}

#[tokio::test]
async fn an_endless_line_ends_at_the_limit() {
    let mut client = endless(b"{\"return\": {\"host-name\": \"", &[b'x'; 4096], 1);
    let error = client.host_name(60 * SECOND).await.unwrap_err();
    assert!(
        matches!(
            error,
            AgentError::Protocol {
                fault: Fault::TooLong(MAX_REPLY),
                ..
            }
        ),
        "{error}"
    );
    assert!(client.decoder.capacity() <= 2 * MAX_REPLY);
    // The rest of the line is skipped without being kept.
    let error = client.ping(60 * SECOND).await.unwrap_err();
    assert!(
        matches!(
            error,
            AgentError::Protocol {
                fault: Fault::Flood(MAX_SKIPPED),
                ..
            }
        ),
        "{error}"
    );
    assert_eq!(client.decoder.capacity(), 0);
}

#[tokio::test]
async fn endless_blank_lines_are_no_reply() {
    let mut client = endless(b"", &[b'\n'; 4096], 1);
    let error = client.ping(60 * SECOND).await.unwrap_err();
    assert!(
        matches!(
            error,
            AgentError::Protocol {
                fault: Fault::Flood(_),
                ..
            }
        ),
        "{error}"
    );
}

#[tokio::test]
async fn endless_sentinels_are_no_synchronisation() {
    let mut client = endless(b"", b"\xff{\"return\": 1}\n", 0);
    let error = client.ping(60 * SECOND).await.unwrap_err();
    assert!(
        matches!(
            error,
            AgentError::Protocol {
                fault: Fault::StaleReplies(_),
                ..
            }
        ),
        "{error}"
    );
}

#[tokio::test]
async fn a_long_output_is_refused_and_the_stream_recovers() {
    let (mut client, _agent) = answering(|name, _| match name {
        "guest-exec-status" => result(&format!(
            "{{\"exited\": true, \"exitcode\": 0, \"out-data\": \"{}\"}}",
            "A".repeat(MAX_EXEC_REPLY)
        )),
        _ => Reaction::Honest,
    });
    let error = client.exec_status(7, 60 * SECOND).await.unwrap_err();
    assert!(
        matches!(
            error,
            AgentError::Protocol {
                fault: Fault::TooLong(MAX_EXEC_REPLY),
                ..
            }
        ),
        "{error}"
    );
    client.ping(60 * SECOND).await.unwrap();
}

#[tokio::test]
async fn lists_are_cut() {
    let (mut client, _agent) = answering(|_, _| {
        let user = "{\"user\": \"u\", \"login-time\": 0}";
        result(&format!("[{}]", vec![user; 5000].join(",")))
    });
    assert_eq!(client.users(60 * SECOND).await.unwrap().len(), 1024);
}

/// Sends every kind of query, whose results are of no interest.
async fn ask_everything(client: &mut GuestAgent<DuplexStream>) {
    let queries = [
        Query::Version,
        Query::FileSystems,
        Query::FsFreezeStatus,
        Query::System,
        Query::Users,
        Query::Load,
    ];
    for query in queries {
        let _ = client.query(query, SECOND).await;
    }
    let _ = client.exec_start(&Exec::new("true", [""; 0]), SECOND).await;
    let _ = client.exec_status(1, SECOND).await;
    let _ = client.ssh_authorized_keys("root", SECOND).await;
    let _ = client.ping(SECOND).await;
}

/// Runs a test's future on a runtime whose clock goes on as soon as everybody waits.
fn with_clock(test: impl Future<Output = ()>) {
    let runtime = Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .unwrap();
    runtime.block_on(test);
}

fn json() -> impl Strategy<Value = Value> {
    let names = prop::sample::select(vec![
        "return",
        "error",
        "class",
        "desc",
        "pid",
        "exited",
        "exitcode",
        "out-data",
        "err-data",
        "name",
        "mountpoint",
        "type",
        "disk",
        "bus-type",
        "pci-controller",
        "user",
        "login-time",
        "version",
        "supported_commands",
        "enabled",
        "ip-addresses",
        "ip-address",
        "ip-address-type",
        "prefix",
        "zone",
        "offset",
        "host-name",
        "keys",
        "load1m",
    ]);
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        prop::sample::select(vec!["ipv4", "ipv6", "frozen", "thawed", "QQ==", "scsi"]).prop_map(Value::from),
        any::<String>().prop_map(Value::from),
    ];
    leaf.prop_recursive(5, 64, 8, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..8).prop_map(Value::from),
            prop::collection::vec((names.clone(), inner), 0..8).prop_map(|members| members
                .into_iter()
                .map(|(name, value)| (name.to_owned(), value))
                .collect()),
        ]
    })
}

/// Bytes that look like the protocol now and then.
fn bytes() -> impl Strategy<Value = Vec<u8>> {
    let piece = prop_oneof![
        prop::collection::vec(any::<u8>(), 0..40),
        prop::sample::select(vec![
            "\n",
            "{\"return\": ",
            "{\"error\": {",
            "{}",
            "}\n",
            "[",
            "\\u0000",
            "\"",
            "1e999"
        ])
        .prop_map(|text| text.as_bytes().to_vec()),
        Just(vec![SENTINEL]),
    ];
    prop::collection::vec(piece, 0..12).prop_map(|pieces| pieces.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    /// Whatever comes, in whatever parts, the client does not panic, and works again once the agent is honest.
    #[test]
    fn garbage_costs_nothing_but_its_command(replies in prop::collection::vec(bytes(), 1..8), part in 1usize..64) {
        with_clock(async move {
            let (ours, theirs) = tokio::io::duplex(64 << 10);
            let mut client = GuestAgent::new(ours);
            let mut commands = 0;
            let honest_from = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
            let is_honest = honest_from.clone();
            tokio::spawn(async move {
                let (reader, mut writer) = tokio::io::split(theirs);
                let mut reader = BufReader::new(reader);
                let mut line = Vec::new();
                while reader.read_until(b'\n', &mut line).await.unwrap() > 0 {
                    let start = line.iter().rposition(|byte| *byte == SENTINEL).map_or(0, |at| at + 1);
                    let request: Value = serde_json::from_slice(&line[start..]).unwrap();
                    let honest_now = is_honest.load(std::sync::atomic::Ordering::Relaxed);
                    // Now and then a synchronisation succeeds, so that garbage also comes as the reply to a command.
                    commands += 1;
                    let sync = request["execute"] == "guest-sync-delimited";
                    let reply = if honest_now || sync && commands % 3 != 0 {
                        honest(&request)
                    } else {
                        replies[commands % replies.len()].clone()
                    };
                    for part in reply.chunks(part) {
                        writer.write_all(part).await.unwrap();
                        tokio::task::yield_now().await;
                    }
                    line.clear();
                }
            });
            ask_everything(&mut client).await;
            assert!(client.decoder.capacity() <= 2 * MAX_REPLY);
            honest_from.store(true, std::sync::atomic::Ordering::Relaxed);
            client.ping(SECOND).await.unwrap();
            client.time(SECOND).await.unwrap();
        });
    }

    /// Results and errors of any shape.
    #[test]
    fn any_json_is_a_result_or_an_error(value in json(), kind in 0..3) {
        with_clock(async move {
            let reply = match kind {
                0 => serde_json::json!({"return": value}),
                1 => serde_json::json!({"error": value}),
                _ => value,
            };
            let line = format!("{reply}\n").into_bytes();
            let (mut client, _agent) = answering(move |name, _| match name {
                "guest-get-time" => Reaction::Honest,
                _ => Reaction::Send(line.clone()),
            });
            ask_everything(&mut client).await;
            client.time(SECOND).await.unwrap();
        });
    }
}
