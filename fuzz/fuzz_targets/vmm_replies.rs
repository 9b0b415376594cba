//! The words of a hostile VMM to its monitor: events, answers, errors with details, lines of its log, and its exit.
//! Asserts that the status stays that of a VM, and that no control character gets into the log.
#![no_main]

use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

use arbitrary::Arbitrary;
use husk_fuzz::host::with_clock;
use husk_monitor::monitor::VmError;
use husk_monitor::monitor::testing::{EventListener, metrics_of};
use husk_monitor::snapshot::Snapshot;
use husk_monitor::vmm_process::testing::{exit, relay};
use husk_proto::shim::v1::Phase;
use husk_proto::vmm::v1::event::{Event as Kind, Exit, IoError, PortOpened, Reset, Warning, WatchdogBite};
use husk_proto::vmm::v1::{DiskFault, Event, InfoResponse, SaveProgress, VsockRequest};
use libfuzzer_sys::fuzz_target;
use prost::Message;
use tonic::{Code, Status};

#[derive(Arbitrary, Debug)]
struct Program {
    steps: Vec<Step>,
    /// As of waitpid(2).
    exit: Option<u16>,
}

#[derive(Arbitrary, Debug)]
enum Step {
    State(i8),
    Reset(String),
    Warning(String, bool),
    IoError(String, String),
    Exit(i8, String),
    Watchdog(i8),
    Port(u8, bool),
    /// An event as it is on the wire.
    Event(u64, Vec<u8>),
    Info(Vec<u8>),
    Progress(Vec<u8>),
    Vsock(Vec<u8>),
    Error(u8, String, Vec<u8>),
    Log(Vec<u8>),
    /// A line of JSON.
    Line(u8, String, Vec<(String, String)>),
}

const PORTS: [&str; 3] = ["org.github.vhostmd.1", "org.qemu.guest_agent.0", ""];

fn event(step: &Step) -> Option<Event> {
    let kind = match step {
        Step::State(state) => Kind::State((*state).into()),
        Step::Reset(cause) => Kind::Reset(Reset { cause: cause.clone() }),
        Step::Warning(message, guest_panicked) => Kind::Warning(Warning {
            message: message.clone(),
            guest_panicked: *guest_panicked,
        }),
        Step::IoError(disk, message) => Kind::IoError(IoError {
            disk: disk.clone(),
            message: message.clone(),
        }),
        Step::Exit(reason, detail) => Kind::Exit(Exit {
            reason: (*reason).into(),
            detail: detail.clone(),
        }),
        Step::Watchdog(action) => Kind::Watchdog(WatchdogBite {
            action: (*action).into(),
        }),
        Step::Port(name, open) => Kind::PortOpened(PortOpened {
            name: PORTS[usize::from(*name) % 3].to_owned(),
            open: *open,
        }),
        Step::Event(monotonic_ns, bytes) => {
            let event = Event::decode(&bytes[..]).ok()?;
            return Some(Event {
                monotonic_ns: *monotonic_ns,
                ..event
            });
        }
        _ => return None,
    };
    Some(Event {
        monotonic_ns: 0,
        event: Some(kind),
    })
}

/// A plan, which says nothing of a VMM.
const SNAPSHOT: &str = include_str!("../../shim/monitor/src/snapshot/fixtures/version-1.json");

fuzz_target!(|program: Program| {
    with_clock(run(&program));
});

async fn run(program: &Program) {
    let snapshot: Snapshot = serde_json::from_str(SNAPSHOT).expect("a snapshot");
    let (mut listener, _guest, _serve) =
        EventListener::new(&snapshot.plan, &snapshot.vmi).expect("a listener");
    let mut log = Vec::new();
    for step in program.steps.iter().take(64) {
        if let Some(event) = event(step) {
            listener.handle(&event);
        }
        match step {
            Step::Info(bytes) => {
                if let Ok(info) = InfoResponse::decode(&bytes[..]) {
                    let metrics = metrics_of(&info);
                    assert!(metrics.interfaces.len() <= info.nics.len());
                    assert!(metrics.disks.len() <= info.disks.len());
                }
            }
            Step::Progress(bytes) => drop(SaveProgress::decode(&bytes[..])),
            Step::Vsock(bytes) => drop(VsockRequest::decode(&bytes[..])),
            Step::Error(code, message, details) => {
                let code = Code::from(i32::from(*code % 20));
                let status = Status::with_details(code, message, details.clone().into());
                if let Some(fault) = DiskFault::from_status(&status) {
                    assert!(!fault.disk.is_empty());
                }
                assert_eq!(VmError::from(status).to_string(), *message);
            }
            Step::Log(bytes) => log.extend(bytes),
            Step::Line(level, message, fields) => {
                let level = ["TRACE", "DEBUG", "INFO", "WARN", "ERROR", "?"][usize::from(*level) % 6];
                let mut fields: serde_json::Map<_, _> = fields
                    .iter()
                    .map(|(name, value)| (name.clone(), value.clone().into()))
                    .collect();
                fields.insert("message".to_owned(), message.clone().into());
                log.extend(
                    serde_json::json!({"level": level, "fields": fields})
                        .to_string()
                        .bytes(),
                );
                log.push(b'\n');
            }
            _ => {}
        }
        let status = listener.status();
        assert!(matches!(status.phase(), Phase::Scheduled | Phase::Running));
        assert!(status.phase() == Phase::Running || !status.paused);
    }
    let last_error = relay(&log[..]).await;
    if let Some(error) = &last_error {
        assert!(!error.contains(char::is_control), "{error:?}");
    }
    if let Some(status) = program.exit {
        let status = listener.end(&exit(ExitStatus::from_raw(status.into()), last_error));
        assert!(matches!(status.phase(), Phase::Succeeded | Phase::Failed));
        assert!(
            !status.paused && !status.stopping && !status.reason.is_empty() && !status.message.is_empty()
        );
    }
}
