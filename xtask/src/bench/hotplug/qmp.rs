//! QEMU's monitor (QMP): one JSON value per line in each direction.

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// Time limit of a command.
const PATIENCE: Duration = Duration::from_secs(60);

/// A QMP connection.
#[derive(Debug)]
pub struct Qmp {
    stream: UnixStream,
    lines: BufReader<UnixStream>,
    /// Removed devices that nothing has waited for yet.
    gone: Vec<String>,
}

impl Qmp {
    /// Connects, and negotiates the capabilities.
    pub fn connect(socket: &Path) -> Result<Self> {
        let stream =
            UnixStream::connect(socket).with_context(|| format!("cannot reach {}", socket.display()))?;
        Self::greet(stream)
    }

    fn greet(stream: UnixStream) -> Result<Self> {
        stream.set_read_timeout(Some(PATIENCE))?;
        let mut qmp = Self {
            lines: BufReader::new(stream.try_clone()?),
            stream,
            gone: Vec::new(),
        };
        let greeting = qmp.read()?;
        ensure!(greeting.get("QMP").is_some(), "no greeting: {greeting}");
        qmp.execute("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    /// Executes a command.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<()> {
        let request = json!({"execute": command, "arguments": arguments});
        self.stream.write_all(format!("{request}\n").as_bytes())?;
        loop {
            let answer = self.read()?;
            if let Some(error) = answer.get("error") {
                bail!("{command}: {}", error["desc"].as_str().unwrap_or_default());
            }
            if answer.get("return").is_some() {
                return Ok(());
            }
            self.note(&answer);
        }
    }

    /// Waits until `device` is removed.
    pub fn deleted(&mut self, device: &str) -> Result<()> {
        loop {
            if let Some(place) = self.gone.iter().position(|gone| gone == device) {
                self.gone.remove(place);
                return Ok(());
            }
            let event = self.read()?;
            self.note(&event);
        }
    }

    fn note(&mut self, event: &Value) {
        if event["event"] == "DEVICE_DELETED"
            && let Some(device) = event["data"]["device"].as_str()
        {
            self.gone.push(device.to_owned());
        }
    }

    fn read(&mut self) -> Result<Value> {
        let mut line = String::new();
        let count = self.lines.read_line(&mut line).context("QEMU does not answer")?;
        ensure!(count > 0, "QEMU has closed the connection");
        serde_json::from_str(&line).with_context(|| format!("not QMP: {line}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_may_come_before_answers() {
        let (ours, mut theirs) = UnixStream::pair().expect("a pair");
        let says = [
            r#"{"QMP": {"version": {}}}"#,
            r#"{"return": {}}"#,
            r#"{"event": "DEVICE_DELETED", "data": {"path": "/machine/peripheral/a/b"}}"#,
            r#"{"event": "DEVICE_DELETED", "data": {"device": "a", "path": "/machine/peripheral/a"}}"#,
            r#"{"return": {}}"#,
            r#"{"error": {"class": "GenericError", "desc": "no such device"}}"#,
        ];
        theirs
            .write_all(says.map(|line| line.to_owned() + "\n").concat().as_bytes())
            .expect("written");
        let mut qmp = Qmp::greet(ours).expect("a greeting");
        qmp.execute("device_del", json!({"id": "a"})).expect("done");
        qmp.deleted("a").expect("gone");
        let error = qmp.execute("device_del", json!({"id": "a"}));
        assert_eq!(
            error.expect_err("twice").to_string(),
            "device_del: no such device"
        );
        drop(theirs);
        assert!(qmp.deleted("b").is_err());
    }
}
