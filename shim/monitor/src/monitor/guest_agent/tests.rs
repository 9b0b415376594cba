use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use husk_guest_agent::Exec;
use husk_proto::shim::v1::guest_server::Guest as _;
use husk_proto::shim::v1::{GuestFreezeRequest, GuestState};
use husk_proto::vmm::v1::event::PortOpened;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::time::timeout;
use tonic::Request;

use super::*;
use crate::monitor::guest_channel::{AGENT_PORT, GuestPort, guest_channel};

/// An agent of a guest, which notes the commands that it gets.
pub(super) struct Guest {
    pub(super) agent: AgentHandle,
    port: GuestPort,
    status: watch::Sender<VmStatus>,
    commands: Arc<Mutex<Vec<String>>>,
    frozen: Arc<Mutex<bool>>,
    /// A thaw fails.
    stuck: Arc<AtomicBool>,
}

impl Guest {
    pub(super) fn start() -> Guest {
        Guest::begin(false)
    }

    /// The guest of a VM that goes on from a snapshot, which was made while file systems were frozen.
    fn restored() -> Guest {
        let guest = Guest::begin(true);
        *guest.frozen.lock().unwrap() = true;
        guest
    }

    fn begin(restored: bool) -> Guest {
        let (actor, guest) = Guest::prepare(restored);
        tokio::spawn(actor.run());
        guest
    }

    fn prepare(restored: bool) -> (AgentActor, Guest) {
        let (channel, mut port) = guest_channel(AGENT_PORT).unwrap();
        let (status, watched) = watch::channel(VmStatus::default());
        let (actor, agent) = AgentActor::new(channel, watched, RequiredCommands::default(), restored);
        // The test keeps the rest of the port.
        let (spare, _) = std::os::unix::net::UnixStream::pair().unwrap();
        let stream = std::mem::replace(&mut port.stream, spare.into());
        let stream = std::os::unix::net::UnixStream::from(stream);
        stream.set_nonblocking(true).unwrap();
        let (commands, frozen, stuck) = (Arc::default(), Arc::default(), Arc::default());
        let guest = Guest {
            agent,
            port,
            status,
            commands: Arc::clone(&commands),
            frozen: Arc::clone(&frozen),
            stuck: Arc::clone(&stuck),
        };
        let stream = UnixStream::from_std(stream).unwrap();
        tokio::spawn(serve(stream, commands, frozen, stuck));
        (actor, guest)
    }

    pub(super) fn open(&self, open: bool) {
        self.port.open.handle_event(&PortOpened {
            name: AGENT_PORT.into(),
            open,
        });
    }

    pub(super) async fn until(&self, is: impl Fn(&Guest) -> bool) {
        let waiting = async {
            while !is(self) {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        timeout(Duration::from_secs(20), waiting).await.expect("in time");
    }

    pub(super) fn had(&self, command: &str) -> bool {
        self.commands.lock().unwrap().iter().any(|had| had == command)
    }
}

async fn serve(
    stream: UnixStream,
    commands: Arc<Mutex<Vec<String>>>,
    frozen: Arc<Mutex<bool>>,
    stuck: Arc<AtomicBool>,
) {
    let (reading, mut writing) = stream.into_split();
    let mut lines = BufReader::new(reading).split(b'\n');
    let mut polls = 0;
    while let Ok(Some(line)) = lines.next_segment().await {
        let line = line.strip_prefix(&[0xff]).unwrap_or(&line);
        let request: Value = serde_json::from_slice(line).unwrap();
        let command = request["execute"].as_str().unwrap().to_owned();
        commands.lock().unwrap().push(command.clone());
        let answer = match command.as_str() {
            "guest-sync-delimited" => {
                writing.write_all(&[0xff]).await.unwrap();
                request["arguments"]["id"].clone()
            }
            "guest-info" => json!({"version": "9.9", "supported_commands": []}),
            "guest-get-host-name" => json!({"host-name": "sheep"}),
            "guest-get-users" => json!([{"user": "dolly", "login-time": 12.5}]),
            "guest-fsfreeze-status" => {
                let frozen = *frozen.lock().unwrap();
                json!(if frozen { "frozen" } else { "thawed" })
            }
            "guest-fsfreeze-freeze" | "guest-fsfreeze-thaw"
                if command.ends_with("freeze") || !stuck.load(Ordering::Relaxed) =>
            {
                *frozen.lock().unwrap() = command.ends_with("freeze");
                json!(1)
            }
            "guest-set-time" if !*frozen.lock().unwrap() => json!({}),
            "guest-ping" | "guest-ssh-add-authorized-keys" => json!({}),
            "guest-exec" => json!({"pid": 7}),
            "guest-exec-status" if *frozen.lock().unwrap() => {
                let error = json!({"error": {"class": "CommandNotFound", "desc": "disabled"}});
                writing.write_all(format!("{error}\n").as_bytes()).await.unwrap();
                continue;
            }
            "guest-exec-status" => {
                polls += 1;
                match polls {
                    3 => json!({"exited": true, "exitcode": 4, "out-data": "aGk="}),
                    _ => json!({"exited": false}),
                }
            }
            _ => {
                let error = json!({"error": {"class": "GenericError", "desc": "no"}});
                writing.write_all(format!("{error}\n").as_bytes()).await.unwrap();
                continue;
            }
        };
        let reply = json!({ "return": answer });
        writing.write_all(format!("{reply}\n").as_bytes()).await.unwrap();
    }
}

#[tokio::test]
async fn it_is_asked_while_it_is_connected() {
    let guest = Guest::start();
    let refused = guest.agent.thaw().await.unwrap_err();
    assert!(
        refused.to_string().starts_with("no guest agent is connected"),
        "{refused}"
    );
    assert!(guest.commands.lock().unwrap().is_empty());
    guest.open(true);
    guest.until(|guest| !guest.agent.info().users.is_empty()).await;
    let info = guest.agent.info();
    assert!(info.connected);
    assert_eq!(info.host_name.as_deref(), Some("sheep"));
    let agent = info.agent.unwrap();
    assert_eq!(
        (agent.version.as_str(), agent.missing_commands.len()),
        ("9.9", BASIC)
    );
    assert_eq!((info.users[0].name.as_str(), info.frozen), ("dolly", Some(false)));
    guest.open(false);
    guest.until(|guest| !guest.agent.info().connected).await;
}

#[tokio::test]
async fn the_published_state_changes_only_with_what_a_status_shows() {
    let guest = Guest::start();
    let mut state = guest.agent.watch();
    assert_eq!(*state.borrow_and_update(), GuestState::default());
    guest.open(true);
    guest
        .until(|guest| guest.agent.watch().borrow().frozen.is_some())
        .await;
    let unsupported = "This guest agent doesn't support required basic commands";
    guest
        .until(|guest| guest.agent.watch().borrow().unsupported == unsupported)
        .await;
    guest.until(|guest| !guest.agent.info().users.is_empty()).await;
    let shown = state.borrow_and_update().clone();
    assert!(shown.connected && shown.os.is_none(), "{shown:?}");
    guest.commands.lock().unwrap().clear();
    guest.until(|guest| guest.had("guest-fsfreeze-status")).await;
    assert!(!state.has_changed().unwrap());
}

#[tokio::test]
async fn orders_reach_the_agent() {
    let guest = Guest::start();
    guest.open(true);
    guest.until(|guest| guest.agent.info().frozen.is_some()).await;
    guest.agent.ping().await.unwrap();
    guest
        .agent
        .set_keys("root", vec!["ssh-ed25519 A".into()])
        .await
        .unwrap();
    let refused = guest.agent.set_password("root", b"secret".to_vec()).await;
    assert!(refused.unwrap_err().to_string().contains("no"));
    assert!(guest.had("guest-ssh-add-authorized-keys") && guest.had("guest-set-user-password"));
    guest.open(false);
    guest.until(|guest| !guest.agent.info().connected).await;
    assert!(guest.agent.ping().await.is_err());
}

const BASIC: usize = husk_guest_agent::BASIC_COMMANDS.len();

#[tokio::test]
async fn a_forgotten_freeze_is_thawed() {
    let guest = Guest::start();
    guest.open(true);
    guest
        .until(|guest| guest.agent.info().frozen == Some(false))
        .await;
    guest.agent.freeze(Some(Duration::from_secs(1))).await.unwrap();
    let info = guest.agent.info();
    assert_eq!((info.frozen, info.thaw_seconds.is_some()), (Some(true), true));
    assert!(*guest.frozen.lock().unwrap());
    guest
        .until(|guest| guest.agent.info().frozen == Some(false))
        .await;
    assert!(!*guest.frozen.lock().unwrap());
    assert!(guest.had("guest-fsfreeze-thaw"));
}

#[tokio::test]
async fn a_freeze_without_a_time_lasts() {
    let guest = Guest::start();
    guest.open(true);
    guest
        .until(|guest| guest.agent.info().frozen == Some(false))
        .await;
    let service = GuestService::new(guest.agent.clone());
    let without = GuestFreezeRequest {
        thaw_seconds: Some(0),
    };
    let frozen = service.freeze(Request::new(without)).await.unwrap().into_inner();
    assert_eq!((frozen.already_frozen, frozen.thaw_seconds), (false, None));
    guest.commands.lock().unwrap().clear();
    guest.until(|guest| guest.had("guest-fsfreeze-status")).await;
    assert!(*guest.frozen.lock().unwrap() && !guest.had("guest-fsfreeze-thaw"));
    assert!(guest.agent.thaw().await.unwrap());
}

#[tokio::test]
async fn a_freeze_whose_caller_has_gone_is_thawed() {
    let (mut actor, guest) = Guest::prepare(false);
    guest.open(true);
    actor.follow();
    guest.stuck.store(true, Ordering::Relaxed);
    let (reply, answer) = tokio::sync::oneshot::channel();
    // The caller goes while the agent is asked.
    let gone = async { drop(answer) };
    tokio::join!(actor.handle(AgentCommand::Freeze(None, reply)), gone);
    assert!(guest.had("guest-fsfreeze-thaw") && *guest.frozen.lock().unwrap());
    assert!(actor.guard.thaw_at().is_some(), "the thaw is tried again");
}

#[tokio::test]
async fn a_freeze_is_thawed_once_the_agent_is_back() {
    let guest = Guest::start();
    guest.open(true);
    guest
        .until(|guest| guest.agent.info().frozen == Some(false))
        .await;
    guest.agent.freeze(Some(Duration::from_secs(1))).await.unwrap();
    guest.open(false);
    tokio::time::sleep(Duration::from_millis(1200)).await;
    assert!(*guest.frozen.lock().unwrap());
    guest.open(true);
    guest.until(|guest| !*guest.frozen.lock().unwrap()).await;
}

#[tokio::test]
async fn a_vm_that_was_saved_frozen_is_thawed_and_gets_the_time() {
    let guest = Guest::restored();
    guest.open(true);
    guest
        .until(|guest| guest.agent.info().frozen == Some(false))
        .await;
    assert!(!*guest.frozen.lock().unwrap());
    let after_thaw = |guest: &Guest| {
        let commands = guest.commands.lock().unwrap();
        let thaw = commands.iter().position(|had| had == "guest-fsfreeze-thaw");
        commands[thaw.unwrap()..]
            .iter()
            .any(|had| had == "guest-set-time")
    };
    guest.until(after_thaw).await;
    // A freeze since then is not touched.
    guest.agent.freeze(Some(Duration::from_secs(60))).await.unwrap();
    guest.open(false);
    guest.until(|guest| !guest.agent.info().connected).await;
    guest.commands.lock().unwrap().clear();
    guest.open(true);
    guest.until(|guest| guest.had("guest-fsfreeze-status")).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(*guest.frozen.lock().unwrap());
}

#[tokio::test]
async fn the_clock_is_set_once_the_agent_is_there_and_does_it() {
    let (mut actor, guest) = Guest::prepare(false);
    for paused in [true, false] {
        guest.status.send_modify(|status| status.paused = paused);
        actor.follow();
    }
    actor.work().await;
    assert!(guest.commands.lock().unwrap().is_empty());
    guest.open(true);
    actor.follow();
    // It refuses.
    *guest.frozen.lock().unwrap() = true;
    actor.work().await;
    *guest.frozen.lock().unwrap() = false;
    tokio::spawn(actor.run());
    let attempts = |guest: &Guest| {
        let commands = guest.commands.lock().unwrap();
        commands.iter().filter(|had| *had == "guest-set-time").count()
    };
    guest.until(|guest| attempts(guest) == 2).await;
    guest.until(|guest| !guest.agent.info().users.is_empty()).await;
    assert_eq!(attempts(&guest), 2);
}

#[tokio::test]
async fn a_freeze_of_a_vm_that_was_saved_frozen_has_its_own_time() {
    let (mut actor, guest) = Guest::prepare(true);
    *guest.frozen.lock().unwrap() = true;
    guest.open(true);
    actor.follow();
    let frozen = actor.freeze(Some(Duration::from_secs(60))).await.unwrap();
    assert!(frozen.already && frozen.thaw_at.is_some(), "{frozen:?}");
    actor.ask(Query::FsFreezeStatus).await;
    assert_eq!(actor.guard.thaw_at(), frozen.thaw_at);
}

#[tokio::test]
async fn a_reboot_ends_a_freeze() {
    let (mut actor, guest) = Guest::prepare(false);
    guest.open(true);
    actor.follow();
    actor.freeze(Some(Duration::from_secs(60))).await.unwrap();
    assert!(actor.may_be_frozen());
    guest.status.send_modify(|status| status.reboots = 1);
    actor.follow();
    assert!(!actor.may_be_frozen() && actor.guard.thaw_at().is_none());
}

#[tokio::test]
async fn a_process_is_waited_for_beside_other_commands() {
    let guest = Guest::start();
    guest.open(true);
    guest.until(|guest| guest.agent.info().frozen.is_some()).await;
    let exec = |limit| guest.agent.exec(Exec::new("/bin/echo", ["hi"]), limit);
    let frozen = async {
        guest.agent.freeze(Some(Duration::from_secs(60))).await.unwrap();
        tokio::time::sleep(Duration::from_millis(300)).await;
        guest.agent.thaw().await.unwrap()
    };
    let (output, was_frozen) = tokio::join!(exec(Duration::from_secs(20)), frozen);
    assert!(was_frozen);
    let output = output.unwrap();
    assert_eq!(
        (output.exit_code, output.stdout.as_slice()),
        (Some(4), b"hi".as_slice())
    );
}

#[tokio::test]
async fn nothing_is_asked_of_a_paused_vm() {
    let guest = Guest::start();
    guest.status.send_modify(|status| status.paused = true);
    guest.open(true);
    guest.until(|guest| guest.agent.info().connected).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(guest.commands.lock().unwrap().is_empty());
    let refused = guest
        .agent
        .exec(Exec::new("/bin/true", [""; 0]), Duration::from_secs(1));
    assert!(refused.await.unwrap_err().to_string().contains("paused"));
    guest.status.send_modify(|status| status.paused = false);
    guest.until(|guest| guest.agent.info().host_name.is_some()).await;
    assert!(guest.had("guest-set-time"));
    // A pause does not keep a caller waiting for ever.
    let exec = guest
        .agent
        .exec(Exec::new("/bin/true", [""; 0]), Duration::from_millis(500));
    let pause = async {
        guest.until(|guest| guest.had("guest-exec")).await;
        guest.status.send_modify(|status| status.paused = true);
    };
    let (late, ()) = tokio::join!(exec, pause);
    assert!(late.unwrap_err().to_string().contains("did not end within 500ms"));
    guest.status.send_modify(|status| status.paused = false);
    guest.until(|guest| guest.agent.info().host_name.is_some()).await;
    // A reboot makes old answers worthless.
    guest.open(false);
    guest.status.send_modify(|status| status.reboots = 1);
    guest.until(|guest| guest.agent.info().host_name.is_none()).await;
}
