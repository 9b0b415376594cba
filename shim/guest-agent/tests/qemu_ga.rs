//! The client against QEMU's own agent. It runs on this machine, so commands that would change it are switched off.

mod relay;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, SystemTime};

use husk_guest_agent::{
    AgentError, Answer, BASIC_COMMANDS, Exec, ExecOutput, ExecStatus, Fault, FsFreezeStatus, GuestAgent,
    Poller, Query, RequiredCommands, check_support,
};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use tokio::net::UnixStream;
use tokio::process::{Child, Command};
use tokio::time::sleep;

const LIMIT: Duration = Duration::from_secs(20);
const SHORT: Duration = Duration::from_millis(300);

/// Commands that the agent refuses.
const BLOCKED: &str = "guest-fsfreeze-freeze,guest-fsfreeze-freeze-list,guest-fsfreeze-thaw,guest-set-time,\
    guest-shutdown,guest-set-user-password,guest-suspend-disk,guest-suspend-ram,guest-suspend-hybrid";

/// A folder with an agent's socket and state.
struct Agent {
    folder: TempDir,
    process: Child,
}

impl Agent {
    fn start() -> Agent {
        let folder = tempfile::tempdir().unwrap();
        let process = spawn(folder.path());
        Agent { folder, process }
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }

    async fn connect(&self) -> GuestAgent<UnixStream> {
        GuestAgent::new(relay::connect(&self.socket()).await)
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.process.id().unwrap().cast_signed()).unwrap();
        kill_process(pid, signal).unwrap();
    }

    async fn kill(&mut self) {
        self.process.kill().await.unwrap();
        fs::remove_file(self.socket()).unwrap();
    }

    fn restart(&mut self) {
        self.process = spawn(self.folder.path());
    }
}

fn spawn(folder: &Path) -> Child {
    let program = ["/usr/sbin/qemu-ga", "/usr/bin/qemu-ga"]
        .into_iter()
        .find(|path| Path::new(path).exists())
        .unwrap_or("qemu-ga");
    Command::new(program)
        .args(["-v", "--method=unix-listen", "-b", BLOCKED])
        .arg("--path")
        .arg(folder.join("socket"))
        .arg("--statedir")
        .arg(folder)
        .arg("--pidfile")
        .arg(folder.join("pid"))
        .arg("--logfile")
        .arg(folder.join("log"))
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .expect("qemu-ga")
}

fn kernel(name: &str) -> String {
    let text = fs::read_to_string(Path::new("/proc/sys/kernel").join(name)).unwrap();
    text.trim_end().to_owned()
}

/// Starts a process and waits for its end.
async fn ended(client: &mut GuestAgent<UnixStream>, exec: &Exec) -> Result<ExecOutput, AgentError> {
    let pid = client.exec_start(exec, LIMIT).await?;
    loop {
        match client.exec_status(pid, LIMIT).await? {
            ExecStatus::Exited(output) => return Ok(output),
            ExecStatus::Running => sleep(Duration::from_millis(20)).await,
        }
    }
}

#[tokio::test]
#[ignore = "needs qemu-ga"]
async fn it_answers_every_query() {
    let agent = Agent::start();
    let mut client = agent.connect().await;
    client.ping(LIMIT).await.unwrap();
    let info = client.info(LIMIT).await.unwrap();
    assert!(
        info.version.chars().next().unwrap().is_ascii_digit(),
        "{}",
        info.version
    );
    assert_eq!(info.missing(&BASIC_COMMANDS), ["guest-shutdown"]);
    assert!(check_support(&info, RequiredCommands::default()).is_err());
    assert_eq!(client.host_name(LIMIT).await.unwrap(), kernel("hostname"));
    let os = client.os_info(LIMIT).await.unwrap();
    assert_eq!(os.kernel_release, Some(kernel("osrelease")));
    assert_eq!(os.machine.as_deref(), Some(std::env::consts::ARCH));
    assert!(os.id.is_some() && os.pretty_name.is_some());
    assert!(client.time_zone(LIMIT).await.unwrap().offset.abs() <= 14 * 3600);
    client.users(LIMIT).await.unwrap();
    for file_system in client.file_systems(LIMIT).await.unwrap() {
        assert!(file_system.mountpoint.starts_with('/'), "{file_system:?}");
        assert!(
            file_system.used_bytes <= file_system.total_bytes,
            "{file_system:?}"
        );
    }
    let interfaces = client.network_interfaces(LIMIT).await.unwrap();
    let loopback = interfaces
        .iter()
        .find(|interface| interface.name == "lo")
        .unwrap();
    let address = loopback.primary().unwrap();
    assert_eq!(
        (address.parse(), address.prefix),
        (Some("127.0.0.1".parse().unwrap()), 8)
    );
    let now = SystemTime::UNIX_EPOCH.elapsed().unwrap();
    let guest = Duration::from_nanos(client.time(LIMIT).await.unwrap().try_into().unwrap());
    assert!(guest.abs_diff(now) < Duration::from_secs(60));
    assert_eq!(
        client.fsfreeze_status(LIMIT).await.unwrap(),
        FsFreezeStatus::Thawed
    );
}

#[tokio::test]
#[ignore = "needs qemu-ga"]
async fn the_poller_is_fed() {
    let agent = Agent::start();
    let mut client = agent.connect().await;
    let mut poller = Poller::default();
    let now = std::time::Instant::now();
    poller.connected(now);
    while let Some(query) = poller.take_due(now) {
        match client.query(query, LIMIT).await {
            Ok(answer) => {
                let told = matches!(answer, Answer::System(_) | Answer::FsFreezeStatus(_));
                assert_eq!(poller.record(answer), told, "{query:?}");
            }
            // Only QEMU 10.0 and newer have it.
            Err(AgentError::CommandNotFound { .. }) if query == Query::Load => {}
            Err(error) => panic!("{query:?}: {error}"),
        }
    }
    let answers = poller.answers();
    assert!(answers.version.is_some() && answers.users.is_some() && answers.file_systems.is_some());
    let system = &answers.system;
    assert!(system.os.is_some() && system.interfaces.is_some() && system.time_zone.is_some());
}

#[tokio::test]
#[ignore = "needs qemu-ga"]
async fn its_errors_are_told_apart() {
    let agent = Agent::start();
    let mut client = agent.connect().await;
    let blocked = client.fsfreeze_thaw(LIMIT).await.unwrap_err();
    assert!(matches!(blocked, AgentError::CommandNotFound { .. }), "{blocked}");
    let unknown = client
        .ssh_authorized_keys("no-such-user\u{1b}", LIMIT)
        .await
        .unwrap_err();
    assert!(matches!(unknown, AgentError::Agent { .. }), "{unknown}");
    assert!(!unknown.to_string().contains('\u{1b}'));
    let missing = client
        .exec_start(&Exec::new("/no/such/program", [""; 0]), LIMIT)
        .await
        .unwrap_err();
    assert!(matches!(missing, AgentError::Agent { .. }), "{missing}");
    let process = client.exec_status(1, LIMIT).await.unwrap_err();
    assert!(process.is_from_agent(), "{process}");
    client.ping(LIMIT).await.unwrap();
}

#[tokio::test]
#[ignore = "needs qemu-ga"]
async fn it_runs_processes() {
    let agent = Agent::start();
    let mut client = agent.connect().await;
    let echo = ended(&mut client, &Exec::new("/bin/echo", ["a \"b\"", "ü"]))
        .await
        .unwrap();
    assert_eq!((echo.exit_code, echo.signal), (Some(0), None));
    assert_eq!(String::from_utf8(echo.stdout).unwrap(), "a \"b\" ü\n");
    let shell = |script: &str| Exec::new("/bin/sh", ["-c", script]);
    let failed = ended(&mut client, &shell("sleep 0.1; echo no >&2; exit 3"))
        .await
        .unwrap();
    assert_eq!(
        (failed.exit_code, failed.stderr.as_slice()),
        (Some(3), &b"no\n"[..])
    );
    let killed = ended(&mut client, &shell("kill -9 $$")).await.unwrap();
    assert_eq!((killed.exit_code, killed.signal), (None, Some(9)));
    let input = Exec {
        input: vec![0, 0xff, b'\n'],
        env: vec!["PATH=/usr/bin:/bin".to_owned()],
        ..shell("cat; echo $PATH")
    };
    let output = ended(&mut client, &input).await.unwrap().stdout;
    assert_eq!(output, b"\0\xff\n/usr/bin:/bin\n");
    let unseen = Exec {
        capture_output: false,
        ..shell("echo x")
    };
    assert_eq!(ended(&mut client, &unseen).await.unwrap().stdout, b"");
    let pid = client.exec_start(&shell("sleep 2"), LIMIT).await.unwrap();
    assert_eq!(client.exec_status(pid, LIMIT).await.unwrap(), ExecStatus::Running);
}

#[tokio::test]
#[ignore = "needs qemu-ga"]
async fn a_long_output_costs_one_command() {
    let agent = Agent::start();
    let mut client = agent.connect().await;
    let zeros = |count: &str| Exec::new("/usr/bin/head", ["-c", count, "/dev/zero"]);
    let whole = ended(&mut client, &zeros("3000000")).await.unwrap();
    assert_eq!(whole.stdout.len(), 3_000_000);
    let error = ended(&mut client, &zeros("9000000")).await.unwrap_err();
    let too_long = matches!(
        error,
        AgentError::Protocol {
            fault: Fault::TooLong(_),
            ..
        }
    );
    assert!(too_long, "{error}");
    client.ping(LIMIT).await.unwrap();
}

#[tokio::test]
#[ignore = "needs qemu-ga"]
async fn late_replies_are_skipped() {
    let agent = Agent::start();
    let mut client = agent.connect().await;
    client.ping(LIMIT).await.unwrap();
    agent.signal(Signal::STOP);
    let error = client.info(SHORT).await.unwrap_err();
    assert!(matches!(error, AgentError::Timeout { .. }), "{error}");
    for _ in 0..3 {
        let error = client.users(SHORT).await.unwrap_err();
        assert!(matches!(error, AgentError::Unresponsive { .. }), "{error}");
    }
    agent.signal(Signal::CONT);
    // Its reply would not be one if those of the commands before came first.
    assert_eq!(client.host_name(LIMIT).await.unwrap(), kernel("hostname"));
    client.users(LIMIT).await.unwrap();
}

#[tokio::test]
#[ignore = "needs qemu-ga"]
async fn its_end_ends_the_stream_of_a_socket() {
    let mut agent = Agent::start();
    let mut client = agent.connect().await;
    client.ping(LIMIT).await.unwrap();
    agent.signal(Signal::STOP);
    let (error, ()) = tokio::join!(client.info(LIMIT), async {
        sleep(SHORT).await;
        agent.kill().await;
    });
    let error = error.unwrap_err();
    assert!(matches!(error, AgentError::Disconnected(_)), "{error}");
    assert!(client.is_closed());
    agent.restart();
    agent.connect().await.ping(LIMIT).await.unwrap();
}

/// As on a virtio-serial port, which stays while the agent is away.
#[tokio::test]
#[ignore = "needs qemu-ga"]
async fn a_restart_in_the_middle_of_a_command_is_survived() {
    let mut agent = Agent::start();
    let mut client = GuestAgent::new(relay::port(agent.socket()));
    client.ping(LIMIT).await.unwrap();
    agent.signal(Signal::STOP);
    let (error, ()) = tokio::join!(client.info(SHORT * 3), async {
        sleep(SHORT).await;
        agent.kill().await;
    });
    let error = error.unwrap_err();
    assert!(matches!(error, AgentError::Timeout { .. }), "{error}");
    let error = client.ping(SHORT).await.unwrap_err();
    assert!(matches!(error, AgentError::Unresponsive { .. }), "{error}");
    agent.restart();
    assert_eq!(client.host_name(LIMIT).await.unwrap(), kernel("hostname"));
}
