//! Captures the packets on a device with tcpdump.

use super::context::TestContext;
use super::netns::Netns;
use super::program::Session;
use super::{TIMEOUT, poll};
use anyhow::{Context, Result};
use std::time::Duration;

/// A capture that runs until it is dropped.
#[derive(Debug)]
pub struct Capture {
    device: String,
    session: Session,
}

impl Capture {
    /// Captures packets that match `filter`, in tcpdump's syntax.
    pub fn start(ctx: &TestContext, netns: &Netns, device: &str, filter: &str) -> Result<Self> {
        let mut command = netns.command("tcpdump");
        command.args(["-e", "-n", "-t", "-l", "--immediate-mode", "-i", device, filter]);
        let session = Session::piped(command, &ctx.log(&format!("tcpdump.{device}.log")))?;
        session
            .expect(r"listening on [^\n]*\n", TIMEOUT)
            .with_context(|| format!("no capture on {device}"))?;
        Ok(Self {
            device: device.to_owned(),
            session,
        })
    }

    /// The frames so far, one line each, Ethernet addresses first.
    pub fn lines(&self) -> Vec<String> {
        self.session.output().all().lines().map(str::to_owned).collect()
    }

    /// Waits for a frame whose line has all of `words`.
    pub fn sees(&self, words: &[&str]) -> Result<String> {
        poll(Duration::from_secs(10), Duration::from_millis(50), || {
            let lines = self.lines();
            let found = lines
                .iter()
                .find(|line| words.iter().all(|word| line.contains(word)));
            Ok(found.cloned().ok_or_else(|| {
                let last = lines[lines.len().saturating_sub(5)..].join("\n");
                format!("nothing with {words:?} on {}; the last:\n{last}", self.device)
            }))
        })
    }
}
