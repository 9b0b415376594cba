//! Copies the VMM's standard error to the monitor's log.
//!
//! A VMM logs JSON lines. Other lines, such as a panic, are logged as they are. A guest may have taken over the VMM, so
//! long lines are cut, control characters replaced, and the rate is limited.

use serde_json::{Map, Value};
use tokio::io::{AsyncRead, AsyncReadExt, BufReader};
use tracing::{debug, error, info, trace, warn};

use crate::log_rate_limiter::LogRateLimiter;

/// Maximum length of a line, in bytes. Longer lines are cut.
const LINE_BYTES: usize = 4096;
/// Lines kept in each 5 s.
const LINES: u32 = 500;

/// Logs lines until the pipe closes. Returns the last error among them.
pub(super) async fn relay(stderr: Option<impl AsyncRead + Unpin>) -> Option<String> {
    let mut stderr = BufReader::new(stderr?);
    let mut lines = Lines::default();
    let mut last_error = None;
    let mut limit = LogRateLimiter::new("the VMM's log", LINES);
    let mut chunk = [0; 4096];
    while let Ok(length @ 1..) = stderr.read(&mut chunk).await {
        for line in lines.split(&chunk[..length]) {
            let line = Line::parse(&line);
            if limit.allow() {
                line.log();
            }
            if line.level == Level::Error {
                last_error = Some(line.text);
            }
        }
    }
    last_error
}

/// Splits a byte stream into lines of bounded length.
#[derive(Debug, Default)]
struct Lines {
    partial: Vec<u8>,
}

impl Lines {
    fn split(&mut self, mut bytes: &[u8]) -> Vec<String> {
        let mut complete = Vec::new();
        while let Some(end) = bytes.iter().position(|byte| *byte == b'\n') {
            self.append(&bytes[..end]);
            complete.push(String::from_utf8_lossy(&std::mem::take(&mut self.partial)).into_owned());
            bytes = &bytes[end + 1..];
        }
        self.append(bytes);
        complete
    }

    fn append(&mut self, bytes: &[u8]) {
        let room = LINE_BYTES - self.partial.len();
        self.partial.extend_from_slice(&bytes[..bytes.len().min(room)]);
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Level {
    Trace,
    Debug,
    Info,
    Warn,
    Error,
}

#[derive(Debug, PartialEq, Eq)]
struct Line {
    level: Level,
    /// The message with its fields.
    text: String,
}

impl Line {
    fn parse(line: &str) -> Line {
        let parsed = serde_json::from_str::<Map<String, Value>>(line)
            .ok()
            .and_then(|line| Line::from_json(&line));
        let mut parsed = parsed.unwrap_or_else(|| Line {
            level: Level::Error,
            text: line.to_owned(),
        });
        parsed.text = parsed
            .text
            .chars()
            .map(|c| if c.is_control() { ' ' } else { c })
            .collect();
        parsed
    }

    /// A line in the JSON format of tracing-subscriber.
    fn from_json(line: &Map<String, Value>) -> Option<Line> {
        let level = match line.get("level")?.as_str()? {
            "TRACE" => Level::Trace,
            "DEBUG" => Level::Debug,
            "INFO" => Level::Info,
            "WARN" => Level::Warn,
            _ => Level::Error,
        };
        let fields = line.get("fields")?.as_object()?;
        let mut text = fields
            .get("message")
            .and_then(Value::as_str)
            .unwrap_or_default()
            .to_owned();
        for (name, value) in fields.iter().filter(|(name, _)| *name != "message") {
            match value.as_str() {
                Some(value) => text.push_str(&format!(" {name}={value}")),
                None => text.push_str(&format!(" {name}={value}")),
            }
        }
        Some(Line { level, text })
    }

    fn log(&self) {
        let text = &self.text;
        match self.level {
            Level::Trace => trace!(target: "husk_vmm", "{text}"),
            Level::Debug => debug!(target: "husk_vmm", "{text}"),
            Level::Info => info!(target: "husk_vmm", "{text}"),
            Level::Warn => warn!(target: "husk_vmm", "{text}"),
            Level::Error => error!(target: "husk_vmm", "{text}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_split_wherever_the_reads_fall_and_cut() {
        let mut lines = Lines::default();
        assert_eq!(lines.split(b"on"), [""; 0]);
        assert_eq!(lines.split(b"e\ntwo\n\nthr"), ["one", "two", ""]);
        assert_eq!(lines.split(b"ee\n"), ["three"]);
        assert_eq!(lines.split(&[b'x'; 3 * LINE_BYTES]), [""; 0]);
        assert_eq!(lines.split(b"y\n"), ["x".repeat(LINE_BYTES)]);
        assert_eq!(lines.split(b"\xff\n"), ["\u{fffd}"]);
    }

    #[test]
    fn json_lines_keep_level_and_fields_and_others_are_errors() {
        let line = r#"{"timestamp":"t","level":"WARN","fields":{"message":"slow","ms":3,"disk":"a\nb"},"target":"x"}"#;
        assert_eq!(
            Line::parse(line),
            Line {
                level: Level::Warn,
                text: "slow disk=a b ms=3".into()
            }
        );
        let panic = "thread 'vcpu0' panicked at \u{1b}[31m";
        assert_eq!(Line::parse(panic).text, "thread 'vcpu0' panicked at  [31m");
        assert_eq!(Line::parse(panic).level, Level::Error);
        for odd in ["{}", "[]", r#"{"level":1}"#, r#"{"level":"INFO","fields":[]}"#] {
            assert_eq!(
                Line::parse(odd),
                Line {
                    level: Level::Error,
                    text: odd.into()
                }
            );
        }
    }
}
