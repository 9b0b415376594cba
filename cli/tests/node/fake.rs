//! A node's `containerd` and `systemctl`, played by this program under their names. `FAKE_NODE` is their directory:
//!
//! ```text
//! config.toml conf.d/   containerd's configuration
//! sock pid              of the containerd that runs
//! loaded                its settings
//! calls                 the units that were restarted
//! ```
//!
//! Empty files choose faults: `reject` (a dump with the handler fails), `no-start` (containerd ends at once with the
//! handler), `mute` (its CRI plugin does not run with the handler), `lose` (the handler replaces runc), `old` (a
//! containerd that does not merge files), `hang` (a restart ends containerd and goes no further), `shared` (containerd
//! is not the main process of the unit).

use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::body::Body;
use tonic::codegen::{BoxFuture, Service, http};
use tonic::server::{Grpc, NamedService};
use tonic_prost::ProstCodec;

/// Time after which a containerd that no test has ended goes.
const LIFE: Duration = Duration::from_secs(180);

/// Plays the program of this name.
pub fn play(name: &str, arguments: &[String]) -> Option<ExitCode> {
    let node = || PathBuf::from(std::env::var_os("FAKE_NODE").unwrap());
    match name {
        "systemctl" => Some(systemctl(&node(), arguments)),
        "containerd" if arguments.last().is_some_and(|word| word == "dump") => Some(dump(&node())),
        "containerd" => Some(serve(&node())),
        _ => None,
    }
}

fn systemctl(node: &Path, arguments: &[String]) -> ExitCode {
    let pid = std::fs::read_to_string(node.join("pid")).unwrap_or_default();
    match arguments[0].as_str() {
        "show" => {
            let pid = if node.join("shared").exists() { "1" } else { &pid };
            println!("KillMode=process\nMainPID={pid}");
            ExitCode::SUCCESS
        }
        "restart" => {
            let calls = std::fs::read_to_string(node.join("calls")).unwrap_or_default();
            std::fs::write(node.join("calls"), format!("{calls}{}\n", arguments[1])).unwrap();
            end(node);
            if node.join("hang").exists() {
                std::fs::write(node.join("hangs"), "").unwrap();
                std::thread::sleep(LIFE);
            }
            match start(node) {
                true => ExitCode::SUCCESS,
                false => ExitCode::FAILURE,
            }
        }
        other => panic!("systemctl {other}"),
    }
}

/// Starts containerd. Returns false if it ends instead of listening.
pub fn start(node: &Path) -> bool {
    let mut child = Command::new(node.join("bin/containerd"))
        .arg("--config")
        .arg(node.join("config.toml"))
        .env("FAKE_NODE", node)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    std::fs::write(node.join("pid"), child.id().to_string()).unwrap();
    loop {
        if child.try_wait().unwrap().is_some() {
            return false;
        }
        if std::os::unix::net::UnixStream::connect(node.join("sock")).is_ok() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Ends containerd.
pub fn end(node: &Path) {
    let pid = std::fs::read_to_string(node.join("pid")).ok();
    let pid = pid.and_then(|pid| rustix::process::Pid::from_raw(pid.parse().ok()?));
    if let Some(pid) = pid {
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
    }
    let _ = std::fs::remove_file(node.join("pid"));
    let _ = std::fs::remove_file(node.join("sock"));
}

/// The settings: those of all files, and runc's handler.
fn settings(node: &Path) -> String {
    let old = node.join("old").exists();
    let mut files = vec![node.join("config.toml")];
    let imported = std::fs::read_dir(node.join("conf.d"))
        .into_iter()
        .flatten()
        .flatten();
    files.extend(imported.map(|entry| entry.path()));
    let mut tables = String::new();
    for file in files {
        let text = std::fs::read_to_string(file).unwrap_or_default();
        let own = ["version", "imports", "#"];
        for line in text
            .lines()
            .filter(|line| !own.iter().any(|key| line.starts_with(key)))
        {
            tables.push_str(line);
            tables.push('\n');
        }
    }
    let husk = tables.contains("runtimes.husk]");
    let lost = husk && node.join("lose").exists();
    if !tables.contains("runtimes.runc]") && !lost {
        tables.push_str("[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]\n");
        tables.push_str("  runtime_type = 'io.containerd.runc.v2'\n");
    }
    let version = if old { 2 } else { 4 };
    let state = node.join("state");
    format!("version = {version}\nstate = '{}'\n{tables}", state.display())
}

fn dump(node: &Path) -> ExitCode {
    let settings = settings(node);
    if settings.contains("runtimes.husk]") && node.join("reject").exists() {
        eprintln!("time=\"now\" level=warning msg=\"this is not the reason\"\ncontainerd: invalid handler");
        return ExitCode::FAILURE;
    }
    print!("{settings}");
    ExitCode::SUCCESS
}

fn serve(node: &Path) -> ExitCode {
    let settings = settings(node);
    let husk = settings.contains("runtimes.husk]");
    if husk && node.join("no-start").exists() {
        return ExitCode::FAILURE;
    }
    std::fs::write(node.join("loaded"), &settings).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let cri = Cri {
        mute: husk && node.join("mute").exists(),
    };
    runtime.block_on(async {
        let listener = UnixListener::bind(node.join("sock")).unwrap();
        let incoming = UnixListenerStream::new(listener);
        let server = tonic::transport::Server::builder().serve_with_incoming(cri, incoming);
        let _ = tokio::time::timeout(LIFE, server).await;
    });
    ExitCode::SUCCESS
}

/// A runtime service that answers every call with an empty message.
#[derive(Clone)]
struct Cri {
    mute: bool,
}

impl NamedService for Cri {
    const NAME: &'static str = "runtime.v1.RuntimeService";
}

impl Service<http::Request<Body>> for Cri {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<http::Response<Body>, Infallible>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let mute = self.mute;
        Box::pin(async move {
            let answer = tower::service_fn(move |_: tonic::Request<()>| async move {
                match mute {
                    true => Err(tonic::Status::unimplemented("unknown service")),
                    false => Ok(tonic::Response::new(())),
                }
            });
            let mut grpc = Grpc::new(ProstCodec::<(), ()>::default());
            Ok(grpc.unary(answer, request).await)
        })
    }
}
