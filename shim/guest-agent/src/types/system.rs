//! The agent, the operating system and its users.

use serde::{Deserialize, Serialize};

use super::NetworkInterface;
use crate::bounded;

/// `GuestAgentInfo`: version and commands of the agent.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentInfo {
    #[serde(deserialize_with = "bounded::text")]
    pub version: String,
    #[serde(rename = "supported_commands", default, deserialize_with = "bounded::list")]
    pub supported_commands: Vec<CommandInfo>,
}

/// `GuestAgentCommandInfo`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct CommandInfo {
    #[serde(deserialize_with = "bounded::text")]
    pub name: String,
    /// False if the guest's administrator has switched the command off, or a freeze has.
    #[serde(default)]
    pub enabled: bool,
    /// Whether the command has a reply when it succeeds.
    #[serde(default = "yes")]
    pub success_response: bool,
}

fn yes() -> bool {
    true
}

/// `GuestOSInfo`. On Linux from os-release(5) and uname(2); each field may be missing.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct OsInfo {
    #[serde(deserialize_with = "bounded::optional_text")]
    pub id: Option<String>,
    #[serde(deserialize_with = "bounded::optional_text")]
    pub name: Option<String>,
    #[serde(deserialize_with = "bounded::optional_text")]
    pub pretty_name: Option<String>,
    #[serde(deserialize_with = "bounded::optional_text")]
    pub version: Option<String>,
    #[serde(deserialize_with = "bounded::optional_text")]
    pub version_id: Option<String>,
    #[serde(deserialize_with = "bounded::optional_text")]
    pub variant: Option<String>,
    #[serde(deserialize_with = "bounded::optional_text")]
    pub variant_id: Option<String>,
    #[serde(deserialize_with = "bounded::optional_text")]
    pub kernel_release: Option<String>,
    #[serde(deserialize_with = "bounded::optional_text")]
    pub kernel_version: Option<String>,
    #[serde(deserialize_with = "bounded::optional_text")]
    pub machine: Option<String>,
}

/// `GuestTimezone`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TimeZone {
    /// Name, for people only: it differs between operating systems.
    #[serde(default, deserialize_with = "bounded::optional_text")]
    pub zone: Option<String>,
    /// Seconds east of UTC.
    pub offset: i64,
}

/// `GuestUser`: somebody who is logged in.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct User {
    #[serde(deserialize_with = "bounded::text")]
    pub user: String,
    /// Domain of the account, on Windows.
    #[serde(default, deserialize_with = "bounded::optional_text")]
    pub domain: Option<String>,
    /// Seconds since 1970-01-01 UTC; the earliest of the user's logins.
    pub login_time: f64,
}

/// `GuestLoadAverage` (QEMU 10.0): processes that run or wait to.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LoadAverage {
    pub load1m: f64,
    pub load5m: f64,
    pub load15m: f64,
}

/// The information that KubeVirt asks for together. A part that the agent refused is `None`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct System {
    pub os: Option<OsInfo>,
    pub host_name: Option<String>,
    pub time_zone: Option<TimeZone>,
    pub interfaces: Option<Vec<NetworkInterface>>,
}

/// `mode` of `guest-shutdown`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ShutdownMode {
    Powerdown,
    Reboot,
    Halt,
}

/// `GuestHostName`.
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct HostName {
    #[serde(deserialize_with = "bounded::text")]
    pub(crate) host_name: String,
}

/// `GuestAuthorizedKeys`.
#[derive(Deserialize)]
pub(crate) struct AuthorizedKeys {
    #[serde(deserialize_with = "bounded::texts")]
    pub(crate) keys: Vec<String>,
}
