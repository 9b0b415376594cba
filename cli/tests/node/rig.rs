//! A node to install on, and the commands.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use super::fake;

/// A directory for the files of a node whose containerd runs.
pub struct Rig {
    dir: tempfile::TempDir,
    /// Programs are too large for some `/tmp`, and are linked from the build where that is possible.
    programs: tempfile::TempDir,
}

impl Rig {
    /// A node with this configuration of containerd.
    pub fn new(config: &str) -> Rig {
        let rig = Rig {
            dir: tempfile::tempdir().unwrap(),
            programs: tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap(),
        };
        fs::create_dir(rig.at("bin")).unwrap();
        for name in ["containerd", "systemctl"] {
            let program = rig.programs.path().join(name);
            link(&std::env::current_exe().unwrap(), &program);
            std::os::unix::fs::symlink(program, rig.at("bin").join(name)).unwrap();
        }
        let config = config.replace("NODE", rig.dir.path().to_str().unwrap());
        fs::write(rig.at("config.toml"), config).unwrap();
        rig.build("one");
        assert!(fake::start(rig.dir.path()));
        rig
    }

    /// A file of the node.
    pub fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The text of a file; empty if there is none.
    pub fn text(&self, name: &str) -> String {
        fs::read_to_string(self.at(name)).unwrap_or_default()
    }

    /// Creates an empty file, which chooses a fault.
    pub fn fault(&self, name: &str) {
        fs::write(self.at(name), "").unwrap();
    }

    pub fn no_fault(&self, name: &str) {
        fs::remove_file(self.at(name)).unwrap();
    }

    /// Makes the programs that are to be installed. Their shim sleeps.
    pub fn build(&self, content: &str) {
        let built = self.programs.path().join("built");
        let _ = fs::remove_dir_all(&built);
        fs::create_dir(&built).unwrap();
        link(Path::new(env!("CARGO_BIN_EXE_husk")), &built.join("husk"));
        let mut shim = fs::read("/bin/sleep").unwrap();
        shim.extend(content.as_bytes());
        fs::write(built.join("containerd-shim-husk-v2"), shim).unwrap();
        for program in ["husk-vmm", "husk-monitor"] {
            fs::write(built.join(program), content).unwrap();
        }
    }

    /// `husk node WHAT --restart`, of the built programs.
    pub fn command(&self, what: &str) -> Command {
        let mut command = Command::new(self.programs.path().join("built/husk"));
        command.args(["node", what, "--restart", "--wait", "3"]);
        for (option, name) in [("--versions", "opt"), ("--socket", "sock")] {
            command.arg(option).arg(self.at(name));
        }
        if rustix::process::geteuid().is_root() {
            command.args(["--host-root", "/"]);
        }
        command
            .env("FAKE_NODE", self.dir.path())
            .env("HUSK_RUNTIME_DIR", self.at("run"))
            .env("XDG_CONFIG_HOME", self.at("home"))
            .env("PATH", self.at("bin"))
            .env_remove("RUST_LOG");
        command
    }

    /// Runs it to its end.
    pub fn run(&self, what: &str) -> Output {
        self.command(what).output().unwrap()
    }

    /// Runs it; returns its output.
    pub fn done(&self, what: &str) -> String {
        let output = self.run(what);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{errors}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Runs it; returns its error.
    pub fn refused(&self, what: &str) -> String {
        let output = self.run(what);
        assert_eq!(output.status.code(), Some(1));
        let errors = String::from_utf8(output.stderr).unwrap();
        assert_eq!(errors.lines().count(), 1, "{errors}");
        errors
    }

    /// Runs it without the socket, as the agent does. Returns its error; empty if it succeeds.
    pub fn without_socket(&self, what: &str) -> String {
        let whole = self.command(what);
        let mut words: Vec<_> = whole.get_args().map(std::ffi::OsStr::to_owned).collect();
        let at = words.iter().position(|word| word == "--socket").unwrap();
        words.drain(at..at + 2);
        let mut command = Command::new(whole.get_program());
        let variables = whole.get_envs().filter_map(|(name, value)| Some((name, value?)));
        let output = command.args(words).envs(variables).output().unwrap();
        String::from_utf8(output.stderr).unwrap()
    }

    /// Starts it, and kills it while systemd restarts containerd.
    pub fn killed(&self, what: &str) {
        self.fault("hang");
        let mut child = self.command(what).stdout(Stdio::null()).spawn().unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        while !self.at("hangs").exists() {
            assert!(Instant::now() < deadline, "no restart");
            std::thread::sleep(Duration::from_millis(10));
        }
        child.kill().unwrap();
        child.wait().unwrap();
        self.no_fault("hang");
        self.no_fault("hangs");
    }

    /// Number of restarts of containerd.
    pub fn restarts(&self) -> usize {
        self.text("calls").lines().count()
    }

    /// The installed versions.
    pub fn versions(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.at("opt")).into_iter().flatten().flatten();
        let mut paths: Vec<_> = entries
            .map(|entry| entry.path())
            .filter(|path| path.is_dir())
            .collect();
        paths.sort();
        paths
    }

    /// Checks that the containerd that runs has the handler with this version, or none.
    pub fn check_loaded(&self, version: Option<&Path>) {
        let loaded = self.text("loaded");
        match version {
            Some(version) => {
                let shim = version.join("containerd-shim-husk-v2");
                assert!(loaded.contains(shim.to_str().unwrap()), "{loaded}");
            }
            None => assert!(!loaded.contains("husk"), "{loaded}"),
        }
        assert!(std::os::unix::net::UnixStream::connect(self.at("sock")).is_ok());
    }

    /// A pod's shim of this version.
    pub fn shim(version: &Path) -> Shim {
        let shim = version.join("containerd-shim-husk-v2");
        Shim(Command::new(shim).arg("100").spawn().unwrap())
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        fake::end(self.dir.path());
    }
}

/// A process of a shim. It ends when this is dropped.
pub struct Shim(Child);

impl Drop for Shim {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn link(from: &Path, to: &Path) {
    if fs::hard_link(from, to).is_err() {
        fs::copy(from, to).unwrap();
    }
}
