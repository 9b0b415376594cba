//! Processes that the agent starts in the guest.

use std::fmt;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize, Serializer};

use crate::error::Fault;

/// Arguments of `guest-exec`.
#[derive(Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Exec {
    /// Path, or a name that the agent looks for on its `PATH`.
    pub path: String,
    /// Arguments after the name.
    #[serde(rename = "arg", skip_serializing_if = "Vec::is_empty")]
    pub args: Vec<String>,
    /// The whole environment, as `NAME=VALUE`; empty: the agent's own.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    /// Standard input.
    #[serde(
        rename = "input-data",
        serialize_with = "base64",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub input: Vec<u8>,
    /// Whether the agent keeps the output, of which it keeps at most 16 MiB per stream.
    pub capture_output: bool,
}

/// Arguments, environment and input may be secret.
impl fmt::Debug for Exec {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Exec")
            .field("path", &self.path)
            .finish_non_exhaustive()
    }
}

impl Exec {
    /// A command without input whose output is kept.
    #[must_use]
    pub fn new(path: impl Into<String>, args: impl IntoIterator<Item = impl Into<String>>) -> Exec {
        Exec {
            path: path.into(),
            args: args.into_iter().map(Into::into).collect(),
            capture_output: true,
            ..Exec::default()
        }
    }
}

fn base64<S: Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&STANDARD.encode(bytes))
}

/// `GuestExec`.
#[derive(Deserialize)]
pub(crate) struct Started {
    pub(crate) pid: i64,
}

/// `GuestExecStatus`, as the agent sends it.
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct RawStatus {
    exited: bool,
    exitcode: Option<i64>,
    signal: Option<i64>,
    #[serde(default)]
    out_data: String,
    #[serde(default)]
    err_data: String,
    #[serde(default)]
    out_truncated: bool,
    #[serde(default)]
    err_truncated: bool,
}

/// `GuestExecStatus`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExecStatus {
    Running,
    /// The agent has forgotten the process: a further query fails.
    Exited(ExecOutput),
}

/// How a process ended and what it wrote.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ExecOutput {
    /// Exit code; `None` after a signal.
    pub exit_code: Option<i64>,
    /// Signal, on Windows the code of an exception, that ended the process.
    pub signal: Option<i64>,
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
    /// The agent dropped output beyond its own limit.
    pub stdout_truncated: bool,
    pub stderr_truncated: bool,
}

impl TryFrom<RawStatus> for ExecStatus {
    type Error = Fault;

    fn try_from(raw: RawStatus) -> Result<ExecStatus, Fault> {
        if !raw.exited {
            return Ok(ExecStatus::Running);
        }
        let decode = |text: &str| STANDARD.decode(text).map_err(|_| Fault::Base64);
        Ok(ExecStatus::Exited(ExecOutput {
            exit_code: raw.exitcode,
            signal: raw.signal,
            stdout: decode(&raw.out_data)?,
            stderr: decode(&raw.err_data)?,
            stdout_truncated: raw.out_truncated,
            stderr_truncated: raw.err_truncated,
        }))
    }
}
