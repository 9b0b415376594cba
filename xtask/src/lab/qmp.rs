//! QEMU's control socket (QMP).

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// Time limit of one reply.
const LIMIT: Duration = Duration::from_secs(20);

/// A QMP connection.
#[derive(Debug)]
pub struct Qmp {
    stream: UnixStream,
    reader: BufReader<UnixStream>,
}

impl Qmp {
    /// Connects to the socket `path`.
    pub fn connect(path: &Path) -> Result<Self> {
        let stream = UnixStream::connect(path).context("QEMU's control socket")?;
        stream.set_read_timeout(Some(LIMIT))?;
        let reader = BufReader::new(stream.try_clone()?);
        let mut qmp = Self { stream, reader };
        qmp.execute("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    /// Executes `command` and returns its result.
    ///
    /// # Errors
    /// Fails with QEMU's description if it refuses the command.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value> {
        writeln!(
            self.stream,
            "{}",
            json!({ "execute": command, "arguments": arguments })
        )?;
        loop {
            let mut line = String::new();
            if self.reader.read_line(&mut line)? == 0 {
                bail!("{command}: QEMU has closed its control socket");
            }
            let mut answer: Value = serde_json::from_str(&line).context("not JSON")?;
            if let Some(error) = answer.get("error") {
                bail!("{command}: {}", error["desc"].as_str().unwrap_or("refused"));
            }
            // The greeting and events arrive in between.
            if let Some(result) = answer.get_mut("return") {
                return Ok(result.take());
            }
        }
    }
}
