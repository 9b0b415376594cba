//! The place of the demonstration on the machine: a folder with a registry, and with all that `husk` keeps.

use super::show::Message;
use crate::finish::finish;
use crate::serial::plain;
use anyhow::{Context, Result, ensure};
use std::io::{BufRead, BufReader};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const FOLDER: &str = "/var/lib/husk-demo";
/// State of the VMs that run.
const RUNTIME: &str = "/run/husk-demo";
/// What `husk apply` installs. There is one on a machine, for one store of objects.
const UNIT: &str = "/etc/systemd/system/husk@.service";
/// Address of the registry, as the manifest has it.
const REGISTRY: &str = "localhost:5443";

const TO_LISTEN: Duration = Duration::from_secs(30);

/// A certificate of the registry, which the user of the folder trusts, and a password.
const SECRETS: &str = "\
    openssl req -x509 -newkey rsa:2048 -nodes -keyout tls.key -out tls.crt -days 2 -subj /CN=localhost \
        -addext subjectAltName=DNS:localhost -addext basicConstraints=critical,CA:FALSE 2>/dev/null
    mkdir -p home/.config/containers/certs.d/localhost:5443
    cp tls.crt home/.config/containers/certs.d/localhost:5443/ca.crt
    htpasswd -nbB demo husk >htpasswd";

const CONFIGURATION: &str = r#"{
    "version": "0.1",
    "log": {"level": "error"},
    "storage": {"filesystem": {"rootdirectory": "/var/lib/husk-demo/registry"}},
    "http": {"addr": "localhost:5443", "tls": {"certificate": "tls.crt", "key": "tls.key"}},
    "auth": {"htpasswd": {"realm": "husk-demo", "path": "htpasswd"}}
}"#;

/// Why the demonstration cannot run on this machine itself, if so.
pub fn obstacle() -> Option<&'static str> {
    if !rustix::process::geteuid().is_root() {
        Some("this user is not root")
    } else if !Path::new("/run/systemd/system").is_dir() {
        Some("systemd is not this machine's init")
    } else if Path::new(UNIT).exists() && !Path::new(FOLDER).exists() {
        Some("husk apply keeps VMs on this machine already")
    } else {
        None
    }
}

/// The folder and the registry. Both go when this is dropped.
#[derive(Debug)]
pub struct Place {
    registry: Option<Child>,
}

impl Place {
    /// Removes what an earlier demonstration has left, and makes the folder with a `manifest` and the link `archive`.
    pub fn make(manifest: &Path, archive: &Path) -> Result<Self> {
        let place = Self { registry: None };
        place.remove();
        ensure!(
            !Path::new(UNIT).exists(),
            "husk apply keeps VMs on this machine already: {UNIT}"
        );
        std::fs::create_dir(FOLDER).context(FOLDER)?;
        let file = |name: &str| Path::new(FOLDER).join(name);
        std::fs::copy(manifest, file("demo-apply.yaml"))?;
        std::os::unix::fs::symlink(archive, file("debian.tar"))?;
        std::fs::write(file("registry.json"), CONFIGURATION)?;
        let made = place.command("sh").args(["-euc", SECRETS]).status()?;
        ensure!(
            made.success(),
            "no certificate or password of the registry: {made}"
        );
        Ok(place)
    }

    /// Starts the registry.
    pub fn start_registry(&mut self) -> Result<()> {
        Message::Command("docker-registry serve registry.json &".to_owned()).tell();
        let mut registry = self.command("docker-registry");
        registry.args(["serve", "registry.json"]).stdout(Stdio::null());
        let child = self.registry.insert(registry.stderr(Stdio::null()).spawn()?);
        let deadline = Instant::now() + TO_LISTEN;
        while TcpStream::connect(REGISTRY).is_err() {
            let ended = child.try_wait()?;
            ensure!(
                ended.is_none() && Instant::now() < deadline,
                "docker-registry does not listen at {REGISTRY}"
            );
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }

    /// A program with the folder as its home.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command
            .current_dir(FOLDER)
            .env("HOME", Path::new(FOLDER).join("home"))
            .env("HUSK_DATA_DIR", Path::new(FOLDER).join("data"))
            .env("HUSK_RUNTIME_DIR", RUNTIME)
            .env("SYSTEMD_PAGER", "")
            .env("SYSTEMD_COLORS", "0")
            .stdin(Stdio::null());
        command
    }

    /// Shows a line of shell and its output, as on a terminal: of progress, the first line of each step stays. Returns
    /// the output without progress.
    pub fn shows(&self, line: &str) -> Result<String> {
        Message::Command(line.to_owned()).tell();
        let mut script = self.command("script");
        script.args(["--quiet", "--return", "--flush", "--command", line, "/dev/null"]);
        let mut script = script
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start script, of Debian's package bsdutils")?;
        let output = script.stdout.take().context("no pipe")?;
        let (mut said, mut before) = (String::new(), String::new());
        for text in BufReader::new(output).split(b'\n') {
            let text = plain(&String::from_utf8_lossy(&text?));
            let step = text.trim_end_matches(|c: char| c.is_ascii_digit() || " .%".contains(c));
            let step = step.trim_end_matches([' ', ',', ':']);
            match text.contains('%') {
                true if step == before => Message::News(text.clone()).tell(),
                true => Message::Line(step.to_owned()).tell(),
                false if text.is_empty() => {}
                false => {
                    said += &format!("{text}\n");
                    Message::Line(text.clone()).tell();
                }
            }
            before = step.to_owned();
        }
        let status = script.wait()?;
        ensure!(status.success(), "{line}: {status}");
        Ok(said)
    }

    /// Output of `husk` with these arguments.
    pub fn husk(&self, arguments: &[&str]) -> Result<String> {
        finish(self.command("husk").args(arguments))
    }

    /// Socket of the monitor of a VM, which exists as long as the monitor.
    pub fn socket(name: &str) -> PathBuf {
        Path::new(RUNTIME).join("default").join(name).join("pod.sock")
    }

    fn remove(&self) {
        if !Path::new(FOLDER).exists() {
            return;
        }
        let mut delete = self.command("husk");
        delete.args(["delete", "--ignore-not-found", "-f", "demo-apply.yaml"]);
        let _ = delete.output();
        for folder in [FOLDER, RUNTIME] {
            match std::fs::remove_dir_all(folder) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    Message::Line(format!("{folder} is left: {error}")).tell();
                }
                _ => {}
            }
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Some(mut registry) = self.registry.take() {
            let _ = registry.kill();
            let _ = registry.wait();
        }
        self.remove();
    }
}
