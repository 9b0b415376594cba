//! Requests to the API server, from its audit log.

use anyhow::{Context, Result};
use jiff::Timestamp;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

/// The program of the agent's account.
pub const AGENT: &str = "husk-agent";
/// Service accounts of KubeVirt's namespace, and the programs that run with them.
const ACCOUNTS: [(&str, &str); 3] = [
    ("kubevirt-handler", AGENT),
    ("kubevirt-controller", "virt-controller"),
    ("kubevirt-apiserver", "virt-api"),
];
/// Programs that run with the administrator's account.
const PROGRAMS: [&str; 3] = ["kube-scheduler", "kube-controller-manager", "kubectl"];
const WRITES: [&str; 5] = ["create", "update", "patch", "delete", "deletecollection"];

/// A request, as audit.k8s.io/v1 has it.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Entry {
    stage: String,
    verb: String,
    user: User,
    #[serde(default)]
    user_agent: String,
    object_ref: Option<Object>,
    request_received_timestamp: String,
}

#[derive(Debug, Deserialize)]
struct User {
    username: String,
}

#[derive(Debug, Deserialize)]
struct Object {
    resource: String,
    name: Option<String>,
}

/// Numbers of requests.
#[derive(Debug, Default, PartialEq)]
pub struct Requests {
    /// By program and verb. Heartbeats of nodes, leases and events of others are among them.
    pub by_verb: BTreeMap<(String, String), u32>,
    /// The agents' writes by resource.
    pub agent_writes: BTreeMap<String, u32>,
    /// The agents' writes of each VMI's status, by name.
    pub status_writes: BTreeMap<String, u32>,
}

impl Requests {
    /// Counts the requests in the file `log` that came between two times.
    ///
    /// # Errors
    /// The file cannot be read, or is not an audit log.
    pub fn read(log: &Path, from: Timestamp, to: Timestamp) -> Result<Self> {
        let file = File::open(log).with_context(|| format!("cannot read {}", log.display()))?;
        let mut requests = Self::default();
        for line in BufReader::new(file).lines() {
            let line = line?;
            let entry: Entry =
                serde_json::from_str(&line).with_context(|| format!("not a request: {line}"))?;
            // A request that goes on, such as a watch, has another line at its end.
            let is_new = entry.stage == "ResponseComplete" && entry.verb != "watch"
                || entry.stage == "ResponseStarted" && entry.verb == "watch";
            let received: Timestamp = entry.request_received_timestamp.parse()?;
            if is_new && (from..to).contains(&received) {
                requests.count(entry);
            }
        }
        Ok(requests)
    }

    fn count(&mut self, entry: Entry) {
        let program = entry.program();
        if program == AGENT
            && WRITES.contains(&entry.verb.as_str())
            && let Some(object) = entry.object_ref
        {
            if object.resource == "virtualmachineinstances" {
                *self
                    .status_writes
                    .entry(object.name.unwrap_or_default())
                    .or_default() += 1;
            }
            *self.agent_writes.entry(object.resource).or_default() += 1;
        }
        *self.by_verb.entry((program, entry.verb)).or_default() += 1;
    }

    /// The agents' writes for VMIs: status and events, but not what they write of their nodes.
    pub fn agent_writes_for_vmis(&self) -> u32 {
        let all = self.agent_writes.iter();
        all.filter(|(resource, _)| *resource != "nodes")
            .map(|(_, count)| count)
            .sum()
    }
}

impl Entry {
    fn program(&self) -> String {
        let account = self.user.username.rsplit(':').next().unwrap_or_default();
        if let Some((_, program)) = ACCOUNTS.iter().find(|(name, _)| *name == account) {
            return (*program).to_owned();
        }
        let program = self.user_agent.split('/').next().unwrap_or_default();
        if PROGRAMS.contains(&program) {
            return program.to_owned();
        }
        match self.user.username.as_str() {
            // kube-rs sends no name.
            "admin" if program.is_empty() => "played kubelets".to_owned(),
            _ => "others".to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(account: &str, agent: &str, verb: &str, stage: &str, object: &str, second: u32) -> String {
        format!(
            r#"{{"kind":"Event","stage":"{stage}","verb":"{verb}","user":{{"username":"{account}"}},"userAgent":"{agent}","objectRef":{object},"requestReceivedTimestamp":"2026-11-24T10:00:{second:02}.5Z"}}"#
        )
    }

    #[test]
    fn requests_are_counted_once_by_program_and_verb() {
        const HANDLER: &str = "system:serviceaccount:kubevirt:kubevirt-handler";
        let vmi = r#"{"resource":"virtualmachineinstances","name":"a"}"#;
        let event = r#"{"resource":"events"}"#;
        let node = r#"{"resource":"nodes","name":"played-1"}"#;
        let done = "ResponseComplete";
        let lines = [
            line(HANDLER, "", "update", done, vmi, 1),
            line(HANDLER, "", "update", done, vmi, 2),
            line(HANDLER, "", "create", done, event, 3),
            line(HANDLER, "", "patch", done, node, 3),
            line(HANDLER, "", "watch", "ResponseStarted", vmi, 4),
            line(HANDLER, "", "watch", done, vmi, 5),
            line("admin", "kube-scheduler/v1.36", "create", done, event, 5),
            line("admin", "", "patch", done, node, 6),
            line("system:apiserver", "kube-apiserver/v1.36", "get", done, node, 6),
            // Too early and too late.
            line(HANDLER, "", "update", done, vmi, 0),
            line(HANDLER, "", "update", done, vmi, 30),
        ];
        let dir = tempfile::tempdir().expect("a directory");
        let log = dir.path().join("audit.log");
        std::fs::write(&log, lines.join("\n")).expect("written");
        let at = |text: &str| text.parse().expect("a time");
        let requests = Requests::read(&log, at("2026-11-24T10:00:01Z"), at("2026-11-24T10:00:30Z"));
        let requests = requests.expect("requests");
        let of = |program: &str, verb: &str| {
            let key = (program.to_owned(), verb.to_owned());
            requests.by_verb.get(&key).copied()
        };
        assert_eq!(of(AGENT, "update"), Some(2));
        assert_eq!(of(AGENT, "watch"), Some(1));
        assert_eq!(of("kube-scheduler", "create"), Some(1));
        assert_eq!(of("played kubelets", "patch"), Some(1));
        assert_eq!(of("others", "get"), Some(1));
        assert_eq!(requests.agent_writes_for_vmis(), 3);
        assert_eq!(requests.status_writes.get("a"), Some(&2));
    }
}
