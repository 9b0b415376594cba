//! A minimal monitor: starts the husk-vmm binary and uses its API.

use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use command_fds::{CommandFdExt, FdMapping};
use husk_proto::fds::{self, FdSender};
use husk_proto::vmm::v1::vmm_client::VmmClient;
use husk_proto::vmm::v1::{self as pb};
use hyper_util::rt::TokioIo;
use tonic::transport::{Channel, Endpoint};

const TIMEOUT: Duration = Duration::from_secs(20);

#[derive(Debug)]
pub struct Rig {
    pub client: VmmClient<Channel>,
    pub fds: FdSender,
    pub console: UnixStream,
    /// Standard error.
    log: File,
    child: Child,
    console_inside: Option<UnixStream>,
}

impl Rig {
    pub async fn start() -> Self {
        let (control, inherited) = UnixStream::pair().unwrap();
        let (sender, receiver) = fds::socketpair().unwrap();
        let log = tempfile::tempfile().unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_husk-vmm"));
        command
            .args(["--control-fd", "3", "--fd-channel-fd", "4"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log.try_clone().unwrap());
        let mappings = [(OwnedFd::from(inherited), 3), (receiver, 4)];
        command
            .fd_mappings(
                mappings
                    .map(|(parent_fd, child_fd)| FdMapping { parent_fd, child_fd })
                    .into(),
            )
            .unwrap();
        let child = command.spawn().unwrap();
        drop(command);
        control.set_nonblocking(true).unwrap();
        let mut stream = Some(tokio::net::UnixStream::from_std(control).unwrap());
        let channel = Endpoint::from_static("http://vmm")
            .connect_with_connector(tower::service_fn(move |_| {
                let stream = stream.take();
                async move {
                    stream
                        .map(TokioIo::new)
                        .ok_or_else(|| std::io::Error::other("one connection only"))
                }
            }))
            .await
            .unwrap();
        let (console, inside) = UnixStream::pair().unwrap();
        console.set_read_timeout(Some(TIMEOUT)).unwrap();
        let fds = FdSender::new(sender).unwrap();
        Self {
            client: VmmClient::new(channel),
            fds,
            console,
            log,
            child,
            console_inside: Some(inside),
        }
    }

    pub async fn send(&self, fd: impl AsFd) -> pb::Fd {
        self.fds.send_one(fd.as_fd()).await.unwrap().into()
    }

    /// A one-vCPU machine that boots `kernel`.
    pub async fn config(&mut self, kernel: &[u8]) -> pb::VmConfig {
        let kvm = self
            .send(File::options().read(true).write(true).open("/dev/kvm").unwrap())
            .await;
        let inside = self.console_inside.take().unwrap();
        let console = self.send(inside).await;
        let kernel = self.send(file(kernel)).await;
        let source = pb::boot::Source::Kernel(pb::KernelBoot {
            kernel: Some(kernel),
            ..Default::default()
        });
        pb::VmConfig {
            name: "test/payload".into(),
            cpu: Some(pb::Cpu {
                sockets: 1,
                cores: 1,
                threads: 1,
            }),
            memory: Some(pb::Memory {
                bytes: 32 << 20,
                hugepage_bytes: 0,
            }),
            boot: Some(pb::Boot { source: Some(source) }),
            rng: true,
            balloon: true,
            console: Some(console),
            kvm: Some(kvm),
            ..Default::default()
        }
    }

    pub async fn create(&mut self, config: pb::VmConfig) -> Result<(), tonic::Status> {
        self.create_from(config, None).await
    }

    /// Creates a machine, or continues a saved one.
    pub async fn create_from(
        &mut self,
        config: pb::VmConfig,
        saved: Option<pb::SavedMachine>,
    ) -> Result<(), tonic::Status> {
        self.client
            .create(pb::CreateRequest {
                config: Some(config),
                saved,
            })
            .await
            .map(|_| ())
    }

    pub async fn boot(&mut self) -> Result<(), tonic::Status> {
        self.client
            .boot(pb::BootRequest { paused: false })
            .await
            .map(|_| ())
    }

    /// Creates and boots the default machine with `kernel`.
    pub async fn run(&mut self, kernel: &[u8]) {
        let config = self.config(kernel).await;
        self.create(config).await.unwrap();
        self.boot().await.unwrap();
    }

    pub async fn read_console(&self, len: usize) -> String {
        let mut console = self.console.try_clone().unwrap();
        tokio::task::spawn_blocking(move || {
            let mut bytes = vec![0; len];
            console.read_exact(&mut bytes).unwrap();
            String::from_utf8(bytes).unwrap()
        })
        .await
        .unwrap()
    }

    /// The log of the process.
    pub fn log(&self) -> String {
        let mut text = String::new();
        let mut log = self.log.try_clone().unwrap();
        log.rewind().unwrap();
        log.read_to_string(&mut text).unwrap();
        text
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Names of all threads, when each has a seccomp filter and cannot gain privileges. A new thread installs its
    /// filter first.
    pub async fn filtered_threads(&self) -> Vec<String> {
        let start = Instant::now();
        loop {
            let (filtered, bare): (Vec<_>, Vec<_>) = self.threads().into_iter().partition(|(_, status)| {
                ["NoNewPrivs:\t1\n", "Seccomp:\t2\n"]
                    .iter()
                    .all(|line| status.contains(line))
            });
            if bare.is_empty() {
                return filtered.into_iter().map(|(name, _)| name).collect();
            }
            assert!(start.elapsed() < TIMEOUT, "{bare:?}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Name and status of each thread.
    fn threads(&self) -> Vec<(String, String)> {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.pid())).unwrap();
        let read = |task: std::fs::DirEntry| {
            let name = std::fs::read_to_string(task.path().join("comm")).ok()?;
            let status = std::fs::read_to_string(task.path().join("status")).ok()?;
            Some((name.trim().to_owned(), status))
        };
        // Skip threads that end meanwhile.
        tasks.filter_map(|task| read(task.ok()?)).collect()
    }

    /// Closes the control socket.
    pub async fn hang_up(self) -> Child {
        self.child
    }

    pub async fn wait(mut self) -> ExitStatus {
        wait(&mut self.child).await
    }
}

pub async fn wait(child: &mut Child) -> ExitStatus {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        if start.elapsed() > TIMEOUT {
            let _ = child.kill();
            panic!("husk-vmm did not end within {TIMEOUT:?}");
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

pub fn file(content: &[u8]) -> File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(content).unwrap();
    file.rewind().unwrap();
    file
}
