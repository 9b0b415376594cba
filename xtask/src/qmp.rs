//! QEMU's monitor (QMP): one JSON value per line in each direction.

use anyhow::{Context, Result, anyhow, bail, ensure};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// Time limit of a command.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A QMP connection.
#[derive(Debug)]
pub struct Qmp {
    stream: UnixStream,
    lines: BufReader<UnixStream>,
    /// Events that nothing has waited for yet.
    events: Vec<Value>,
}

impl Qmp {
    /// Connects, and negotiates the capabilities.
    pub fn connect(socket: &Path) -> Result<Self> {
        let stream = UnixStream::connect(socket)
            .with_context(|| format!("QEMU's control socket {}", socket.display()))?;
        Self::greet(stream)
    }

    fn greet(stream: UnixStream) -> Result<Self> {
        stream.set_read_timeout(Some(TIMEOUT))?;
        let mut qmp = Self {
            lines: BufReader::new(stream.try_clone()?),
            stream,
            events: Vec::new(),
        };
        let greeting = qmp.read()?;
        ensure!(greeting.get("QMP").is_some(), "no greeting: {greeting}");
        qmp.execute("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    /// Executes a command; returns its result.
    ///
    /// # Errors
    /// With QEMU's description, if it refuses the command.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value> {
        let request = json!({"execute": command, "arguments": arguments});
        self.stream.write_all(format!("{request}\n").as_bytes())?;
        loop {
            let mut answer = self.read()?;
            if let Some(error) = answer.get("error") {
                bail!("{command}: {}", error["desc"].as_str().unwrap_or("refused"));
            }
            if let Some(result) = answer.get_mut("return") {
                return Ok(result.take());
            }
            self.events.push(answer);
        }
    }

    /// Waits until `device` is removed.
    pub fn deleted(&mut self, device: &str) -> Result<()> {
        self.event("DEVICE_DELETED", |data| {
            (data["device"] == device).then_some(Ok(()))
        })
    }

    /// Waits until a migration is completed. Needs the capability `events`.
    ///
    /// # Errors
    /// If it fails.
    pub fn migrated(&mut self) -> Result<()> {
        self.event("MIGRATION", |data| match data["status"].as_str() {
            Some("completed") => Some(Ok(())),
            Some("failed") => Some(Err(anyhow!("the migration has failed"))),
            _ => None,
        })
    }

    /// Waits for an event of this name of whose data `done` tells the outcome, and forgets those before it.
    fn event(&mut self, name: &str, done: impl Fn(&Value) -> Option<Result<()>>) -> Result<()> {
        loop {
            let of_name = |event: &Value| (event["event"] == name).then(|| done(&event["data"]));
            let mut found = self.events.iter().enumerate();
            let found = found.find_map(|(place, event)| Some((place, of_name(event).flatten()?)));
            if let Some((place, outcome)) = found {
                self.events.remove(place);
                return outcome;
            }
            let event = self.read()?;
            self.events.push(event);
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

    #[test]
    fn a_migration_ends_well_or_not() {
        let (ours, mut theirs) = UnixStream::pair().expect("a pair");
        let event = |status| json!({"event": "MIGRATION", "data": {"status": status}});
        let says = [
            json!({"QMP": {}}),
            json!({"return": {}}),
            event("setup"),
            json!({"return": [{"capability": "events"}]}),
            event("active"),
            event("completed"),
            event("active"),
            event("failed"),
        ];
        theirs
            .write_all(says.map(|line| format!("{line}\n")).concat().as_bytes())
            .expect("written");
        let mut qmp = Qmp::greet(ours).expect("a greeting");
        let answer = qmp
            .execute("query-migrate-capabilities", json!({}))
            .expect("done");
        assert_eq!(answer[0]["capability"], "events");
        qmp.migrated().expect("completed");
        assert!(qmp.migrated().is_err());
    }
}
