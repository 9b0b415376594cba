//! The client of the guest's agent and an agent whose replies are a program: results and errors of any JSON, lines in
//! fragments, sentinels, floods and silence. Asserts the limits of what a reply may hold, that a command takes no longer
//! than its limit, and that the client works again when the agent is honest.
#![no_main]

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use arbitrary::Arbitrary;
use husk_fuzz::host::{Json, with_clock};
use husk_guest_agent::{
    AgentError, Answer, Exec, ExecStatus, FreezeGuard, GuestAgent, Query, RequiredCommands, ShutdownMode,
    check_support,
};
use libfuzzer_sys::fuzz_target;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, DuplexStream};
use tokio::task::LocalSet;
use tokio::time::Instant;

const LIMIT: Duration = Duration::from_secs(5);
const MIB: usize = 1 << 20;
/// Longest reply of the agent. Most commands accept less, even with the noise before a reply.
const LONGEST: usize = MIB + (128 << 10);

const WORDS: &[&str] = &[
    "return",
    "error",
    "class",
    "desc",
    "CommandNotFound",
    "GenericError",
    "pid",
    "exited",
    "exitcode",
    "signal",
    "out-data",
    "err-data",
    "out-truncated",
    "name",
    "mountpoint",
    "type",
    "disk",
    "bus-type",
    "pci-controller",
    "domain",
    "bus",
    "slot",
    "function",
    "target",
    "unit",
    "serial",
    "dev",
    "used-bytes",
    "total-bytes",
    "user",
    "login-time",
    "version",
    "supported_commands",
    "enabled",
    "success-response",
    "hardware-address",
    "ip-addresses",
    "ip-address",
    "ip-address-type",
    "prefix",
    "zone",
    "offset",
    "host-name",
    "keys",
    "load1m",
    "load5m",
    "load15m",
    "kernel-release",
    "kernel-version",
    "machine",
    "id",
    "pretty-name",
    "version-id",
    "ipv4",
    "ipv6",
    "frozen",
    "thawed",
    "QQ==",
    "scsi",
    "10.0.0.1",
    "fe80::1%eth0",
    "guest-ping",
    "guest-info",
    "guest-exec",
    "é",
];

#[derive(Arbitrary, Debug)]
struct Program {
    commands: Vec<u8>,
    replies: Vec<Reply>,
    /// Bytes that are sent at a time.
    part: u8,
}

#[derive(Arbitrary, Debug)]
enum Reply {
    Honest,
    Result(Json),
    Error(Json),
    Json(Json),
    Bytes(Vec<Piece>),
    /// Repeats bytes up to so many KiB.
    Flood(Vec<Piece>, u16),
    /// So many KiB of line ends, none of which ends a reply.
    BlankLines(u16),
    Silence,
    Close,
}

#[derive(Arbitrary, Debug)]
enum Piece {
    Sentinel,
    Line,
    Blank,
    Return,
    Open,
    Quote,
    Id,
    Any(Vec<u8>),
}

fn bytes(pieces: &[Piece], request: &Value) -> Vec<u8> {
    let parts = pieces.iter().take(32).map(|piece| match piece {
        Piece::Sentinel => vec![0xff],
        Piece::Line => b"}\n".to_vec(),
        Piece::Blank => b"\n".to_vec(),
        Piece::Return => b"{\"return\": ".to_vec(),
        Piece::Open => b"[{\"name\": \"x\", ".to_vec(),
        Piece::Quote => b"\"".to_vec(),
        Piece::Id => request["arguments"]["id"].to_string().into_bytes(),
        Piece::Any(bytes) => bytes.clone(),
    });
    parts.collect::<Vec<_>>().concat()
}

/// Bytes of a flood: few, or about as many as the longest reply has.
fn length(flood: u16) -> usize {
    match usize::from(flood) {
        few @ 4096.. => (few & 0xfff) << 4,
        many => (MIB + (many << 5)).min(LONGEST),
    }
}

fn honest(request: &Value) -> Vec<u8> {
    match request["execute"].as_str() {
        // A real agent reports an error for the sentinel of the request.
        Some("guest-sync-delimited") => format!(
            "{{\"error\": {{\"class\": \"GenericError\", \"desc\": \"stray\"}}}}\n\u{0}{{\"return\": {}}}\n",
            request["arguments"]["id"]
        )
        .into_bytes()
        .into_iter()
        .map(|byte| if byte == 0 { 0xff } else { byte })
        .collect(),
        Some("guest-get-time") => b"{\"return\": 1795575069204508000}\n".to_vec(),
        _ => b"{\"return\": {}}\n".to_vec(),
    }
}

async fn agent(stream: DuplexStream, program: Rc<Program>, is_honest: Rc<Cell<bool>>) {
    let (reader, mut writer) = tokio::io::split(stream);
    let mut reader = BufReader::new(reader);
    let (mut line, mut next) = (Vec::new(), 0);
    while reader
        .read_until(b'\n', &mut line)
        .await
        .is_ok_and(|read| read > 0)
    {
        let start = line.iter().rposition(|byte| *byte == 0xff).map_or(0, |at| at + 1);
        let request: Value = serde_json::from_slice(&line[start..]).expect("a request is JSON");
        line.clear();
        let reply = match program.replies.get(next % program.replies.len().max(1)) {
            Some(reply) if !is_honest.get() => reply,
            _ => &Reply::Honest,
        };
        next += 1;
        let sent = match reply {
            Reply::Honest => honest(&request),
            Reply::Result(json) => format!("{}\n", json!({"return": json.value(WORDS)})).into_bytes(),
            Reply::Error(json) => format!("{}\n", json!({"error": json.value(WORDS)})).into_bytes(),
            Reply::Json(json) => format!("{}\n", json.value(WORDS)).into_bytes(),
            Reply::Bytes(pieces) => bytes(pieces, &request),
            Reply::Flood(pieces, kib) => {
                let part = bytes(pieces, &request);
                part.repeat(length(*kib) / part.len().max(1))
            }
            Reply::BlankLines(kib) => vec![b'\n'; length(*kib)],
            Reply::Silence => continue,
            Reply::Close => return,
        };
        let part = if sent.len() > 1 << 10 {
            1 << 14
        } else {
            usize::from(program.part).max(1)
        };
        for part in sent.chunks(part) {
            if writer.write_all(part).await.is_err() {
                return;
            }
            tokio::task::yield_now().await;
        }
    }
}

fuzz_target!(|program: Program| {
    with_clock(LocalSet::new().run_until(async {
        let program = Rc::new(program);
        let (ours, theirs) = tokio::io::duplex(64 << 10);
        let is_honest = Rc::new(Cell::new(false));
        tokio::task::spawn_local(agent(theirs, program.clone(), is_honest.clone()));
        let mut client = GuestAgent::new(ours);
        for command in program.commands.iter().take(12) {
            let start = Instant::now();
            let was_closed = client.is_closed();
            let failed = send(&mut client, *command).await;
            // Of a group of four each has its own limit, and freezing asks for the status first.
            assert!(
                start.elapsed() <= 4 * LIMIT + Duration::from_secs(1),
                "{:?}",
                start.elapsed()
            );
            if was_closed {
                assert!(matches!(failed, Some(AgentError::Disconnected(_))), "{failed:?}");
            }
            if let Some(error) = failed {
                assert!(error.to_string().len() < 8192);
            }
        }
        is_honest.set(true);
        // What a flood has left costs a command each time that the client gives it up.
        for _ in 0..2000 {
            match client.ping(Duration::from_secs(60)).await {
                Err(AgentError::Protocol { .. }) => {}
                Err(AgentError::Disconnected(_)) => return,
                done => {
                    assert!(done.is_ok(), "an honest agent, but {done:?}");
                    assert!(client.time(LIMIT).await.is_ok());
                    return;
                }
            }
        }
        panic!("the client does not recover");
    }));
});

/// Sends a command, and checks its result.
async fn send(client: &mut GuestAgent<DuplexStream>, command: u8) -> Option<AgentError> {
    let mut guard = FreezeGuard::default();
    let done = match command % 16 {
        n @ 0..=5 => {
            let queries = [
                Query::Version,
                Query::FileSystems,
                Query::FsFreezeStatus,
                Query::System,
                Query::Users,
                Query::Load,
            ];
            client
                .query(queries[usize::from(n)], LIMIT)
                .await
                .map(|answer| check(&answer))
        }
        6 => client
            .exec_start(&Exec::new("true", [""; 0]), LIMIT)
            .await
            .map(|pid| assert!(pid > 0)),
        7 => client.exec_status(1, LIMIT).await.map(|status| {
            if let ExecStatus::Exited(output) = status {
                assert!(output.stdout.len() + output.stderr.len() <= 3 * MIB);
            }
        }),
        8 => client.ssh_authorized_keys("root", LIMIT).await.map(|keys| {
            assert!(keys.len() <= 1024 && keys.iter().all(|key| key.len() <= 4096));
        }),
        9 => client.ping(LIMIT).await,
        10 => client.freeze(&mut guard, Some(LIMIT), LIMIT).await.map(drop),
        11 => client.thaw(&mut guard, LIMIT).await.map(drop),
        12 => client.shutdown(ShutdownMode::Powerdown, LIMIT).await,
        13 => client.set_time(None, LIMIT).await,
        14 => client.sync(LIMIT).await,
        _ => client.set_user_password("root", b"x", false, LIMIT).await,
    };
    done.err()
}

fn check(answer: &Answer) {
    let short = |text: &str| assert!(text.len() <= 4096);
    match answer {
        Answer::Version(info) => {
            short(&info.version);
            assert!(info.supported_commands.len() <= 1024);
            let _ = check_support(
                info,
                RequiredCommands {
                    ssh: true,
                    password: true,
                },
            );
        }
        Answer::FileSystems(systems) => {
            assert!(systems.len() <= 1024);
            systems.iter().for_each(|system| short(&system.mountpoint));
        }
        Answer::Users(users) => assert!(users.len() <= 1024),
        Answer::System(system) => {
            for interface in system.interfaces.iter().flatten() {
                short(&interface.name);
                assert!(interface.ip_addresses.len() <= 256);
                let _ = interface.primary().and_then(|address| address.parse());
            }
        }
        Answer::FsFreezeStatus(_) | Answer::Load(_) => {}
    }
}
