//! Calls of `kubectl` and `virtctl` as the cluster's administrator.

use crate::finish::finish;
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Interval of [`Kubectl::until`].
const INTERVAL: Duration = Duration::from_millis(500);

/// The client of one cluster.
#[derive(Debug)]
pub struct Kubectl {
    folder: PathBuf,
}

impl Kubectl {
    /// The client of the cluster in `folder`.
    pub fn new(folder: &Path) -> Self {
        Self {
            folder: folder.to_owned(),
        }
    }

    /// A call of `kubectl`.
    pub fn command(&self, words: &[&str]) -> Command {
        self.client("kubectl", words)
    }

    /// A call of `virtctl`.
    pub fn virtctl(&self, words: &[&str]) -> Command {
        self.client("virtctl", words)
    }

    /// A call of the client `name`, with the administrator's account.
    pub(super) fn client(&self, name: &str, words: &[&str]) -> Command {
        let mut command = Command::new(self.folder.join(name));
        command.args(words);
        self.as_client(&mut command);
        command
    }

    /// Gives a program the administrator's account.
    pub fn as_client<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        command.env("KUBECONFIG", self.folder.join("certificates/admin.kubeconfig"))
    }

    /// Runs a command; returns its output.
    pub fn run(&self, words: &[&str]) -> Result<String> {
        finish(&mut self.command(words))
    }

    /// `kubectl get`, as JSON.
    pub fn get(&self, words: &[&str]) -> Result<Value> {
        let answer = self.run(&[&["get", "-o", "json"], words].concat())?;
        Ok(serde_json::from_str(&answer)?)
    }

    /// `kubectl apply` of objects in YAML or JSON.
    pub fn apply(&self, objects: &str) -> Result<()> {
        let mut child = self
            .command(&["apply", "--server-side", "--force-conflicts", "-f", "-"])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()?;
        child
            .stdin
            .take()
            .context("no pipe")?
            .write_all(objects.as_bytes())?;
        let output = child.wait_with_output()?;
        if !output.status.success() {
            bail!(
                "kubectl apply: {}",
                String::from_utf8_lossy(&output.stderr).trim()
            );
        }
        Ok(())
    }

    /// Waits until `done` returns a value. Its errors are repeated until `limit` has passed.
    pub fn until<T>(
        &self,
        what: &str,
        limit: Duration,
        mut done: impl FnMut(&Self) -> Result<Option<T>>,
    ) -> Result<T> {
        let deadline = Instant::now() + limit;
        loop {
            let error = match done(self) {
                Ok(Some(value)) => return Ok(value),
                Ok(None) => None,
                Err(error) => Some(error),
            };
            if Instant::now() > deadline {
                let error = error.map(|error| format!(": {error:#}")).unwrap_or_default();
                bail!("{what}: not within {} s{error}", limit.as_secs());
            }
            std::thread::sleep(INTERVAL);
        }
    }
}
