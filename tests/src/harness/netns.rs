//! Network namespaces of a case, and their content.

use super::context::TestContext;
use super::{met, poll};
use crate::finish::finish;
use anyhow::{Context, Result};
use rustix::thread::{UnshareFlags, unshare_unsafe};
use serde_json::Value;
use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

/// Maximum time of `ip` and similar commands.
const LIMIT: Duration = Duration::from_secs(60);

/// A namespace without a name: the kernel deletes it with the case and its other processes, even if the case is killed.
#[derive(Debug)]
pub struct Netns {
    file: File,
}

impl Netns {
    /// Creates a namespace with a loopback device.
    pub fn create() -> Result<Self> {
        let enter = || -> Result<File> {
            // SAFETY: without FILES, the descriptors stay shared.
            unsafe { unshare_unsafe(UnshareFlags::NEWNET) }.context("cannot make a network namespace")?;
            Ok(File::open("/proc/thread-self/ns/net")?)
        };
        let file = std::thread::spawn(enter)
            .join()
            .map_err(|_| anyhow::anyhow!("a panic"))??;
        let netns = Self { file };
        let up = netns.output("ip", &["link", "set", "dev", "lo", "up"]);
        up.context("no loopback device")?;
        Ok(netns)
    }

    /// The namespace of this process.
    pub fn host() -> Result<Self> {
        let file = File::open("/proc/self/ns/net")?;
        Ok(Self { file })
    }

    /// Path for other processes, valid as long as this process runs.
    pub fn path(&self) -> PathBuf {
        format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd()).into()
    }

    /// A program in the namespace.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        command
            .arg(format!("--net={}", self.path().display()))
            .arg("--")
            .arg(program);
        command
    }

    /// Output of a command in the namespace that must succeed. Its words contain no spaces.
    pub fn run(&self, ctx: &TestContext, words: &str) -> Result<String> {
        let mut parts = words.split_whitespace();
        let mut command = self.command(parts.next().context("no program")?);
        command.args(parts);
        ctx.finish(command, LIMIT)?.ok().with_context(|| words.to_owned())
    }

    /// Configuration: devices, addresses, routes, rules, static neighbours, filters, sysctls.
    pub fn state(&self) -> Result<State> {
        self.wait_for_addresses()?;
        let mut lines = Vec::new();
        for link in self.json(&["-d", "link", "show"])? {
            lines.push(format!("link {}", describe_link(&link)));
        }
        for link in self.json(&["address", "show"])? {
            for address in link["addr_info"].as_array().into_iter().flatten() {
                let (name, local, length) = (&link["ifname"], &address["local"], &address["prefixlen"]);
                lines.push(format!("address {name} {local}/{length} {}", address["scope"]));
            }
        }
        for family in ["-4", "-6"] {
            for mut route in self.json(&[family, "route", "show", "table", "all"])? {
                if let Some(fields) = route.as_object_mut() {
                    fields.retain(|name, _| !matches!(name.as_str(), "flags" | "expires" | "users" | "age"));
                }
                lines.push(format!("route {family} {route}"));
            }
            for rule in self.json(&[family, "rule", "show"])? {
                lines.push(format!("rule {family} {rule}"));
            }
        }
        for entry in self.json(&["neigh", "show", "nud", "permanent"])? {
            lines.push(format!(
                "neighbour {} {} {}",
                entry["dst"], entry["lladdr"], entry["dev"]
            ));
        }
        let tables = self.output("nft", &["list", "tables"])?;
        lines.extend(tables.lines().map(|table| format!("nft {table}")));
        lines.extend(self.output("sh", &["-c", SWITCHES])?.lines().map(str::to_owned));
        lines.sort();
        Ok(State { lines })
    }

    /// Waits until IPv6 addresses are no longer tentative: for a second or two they have no routes.
    fn wait_for_addresses(&self) -> Result<()> {
        // Addresses of a device without a carrier stay tentative.
        for _ in 0..30 {
            if self
                .output("ip", &["-6", "-o", "address", "show", "tentative"])?
                .is_empty()
            {
                break;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }

    /// Waits until the configuration is as it was.
    ///
    /// # Errors
    /// With the lines that differ, if they still do after `limit`.
    pub fn returns_to(&self, before: &State, limit: Duration) -> Result<()> {
        poll(limit, Duration::from_millis(200), || {
            let changes = before.changes(&self.state()?);
            met(changes.is_empty(), || {
                format!("not as before:\n{}", changes.join("\n"))
            })
        })
    }

    fn json(&self, words: &[&str]) -> Result<Vec<Value>> {
        let text = self.output("ip", &[&["-j"], words].concat())?;
        if text.trim().is_empty() {
            return Ok(Vec::new());
        }
        let entries: Vec<Value> =
            serde_json::from_str(&text).with_context(|| format!("ip -j {words:?}: {text}"))?;
        // Old versions print an empty object for items that they do not show.
        Ok(entries
            .into_iter()
            .filter(|entry| entry.as_object().is_some_and(|fields| !fields.is_empty()))
            .collect())
    }

    fn output(&self, program: &str, words: &[&str]) -> Result<String> {
        finish(self.command(program).args(words))
    }
}

/// Prints the sysctls that the preparation of pods changes.
const SWITCHES: &str = "cd /proc/sys/net && for switch in ipv4/ip_forward ipv4/conf/*/arp_ignore ipv4/conf/*/proxy_arp \
    ipv4/conf/*/route_localnet ipv6/conf/*/forwarding ipv6/conf/*/disable_ipv6; do \
    [ ! -e $switch ] || echo \"$switch $(cat $switch)\"; done";

/// A device's properties that traffic and peers do not change.
fn describe_link(link: &Value) -> String {
    let mut flags: Vec<&str> = link["flags"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .filter(|flag| !matches!(*flag, "LOWER_UP" | "NO-CARRIER"))
        .collect();
    flags.sort_unstable();
    let kind = link["linkinfo"]["info_kind"].as_str().unwrap_or("none");
    format!(
        "{} {kind} {} mtu {} master {} {flags:?}",
        link["ifname"], link["address"], link["mtu"], link["master"]
    )
}

/// Configuration of a namespace at one time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct State {
    lines: Vec<String>,
}

impl State {
    /// Removed lines after `-` and added lines after `+`.
    pub fn changes(&self, later: &Self) -> Vec<String> {
        let missing = |from: &[String], lines: &[String], sign| -> Vec<String> {
            let new = lines.iter().filter(|line| !from.contains(line));
            new.map(|line| format!("{sign} {line}")).collect()
        };
        let mut changes = missing(&later.lines, &self.lines, '-');
        changes.extend(missing(&self.lines, &later.lines, '+'));
        changes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_are_told() {
        let state = |lines: &[&str]| State {
            lines: lines.iter().map(|&line| line.to_owned()).collect(),
        };
        let changes = state(&["link a", "link b"]).changes(&state(&["link b", "route c"]));
        assert_eq!(changes, ["- link a", "+ route c"]);
    }

    #[test]
    fn a_link_is_described_without_its_carrier() {
        let link = serde_json::json!({
            "ifname": "eth0", "address": "02:00:00:00:00:01", "mtu": 1450, "operstate": "UP",
            "flags": ["UP", "BROADCAST", "LOWER_UP"], "linkinfo": {"info_kind": "veth"},
        });
        let wanted = r#""eth0" veth "02:00:00:00:00:01" mtu 1450 master null ["BROADCAST", "UP"]"#;
        assert_eq!(describe_link(&link), wanted);
    }
}
