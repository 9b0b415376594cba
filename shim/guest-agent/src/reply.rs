//! The object around each reply: QEMU Machine Protocol, 2.4 "Commands Responses".

use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::bounded;
use crate::error::{AgentError, Fault};
use crate::visible::visible;

#[derive(Deserialize)]
struct Reply<T> {
    #[serde(rename = "return")]
    value: Option<T>,
    error: Option<ErrorBody>,
}

#[derive(Deserialize)]
struct ErrorBody {
    #[serde(default, deserialize_with = "bounded::text")]
    class: String,
    #[serde(default, deserialize_with = "bounded::text")]
    desc: String,
}

/// Reads the reply to `command`. Members that the type does not name are ignored.
///
/// # Errors
/// The agent's own; the line is not a reply of this type.
pub(crate) fn parse<T: DeserializeOwned>(command: &'static str, line: &[u8]) -> Result<T, AgentError> {
    let fault = |fault| AgentError::Protocol { command, fault };
    let reply: Reply<T> = serde_json::from_slice(line)
        // serde_json quotes what it did not expect.
        .map_err(|error| fault(Fault::Malformed(visible(&error.to_string()))))?;
    match (reply.error, reply.value) {
        (Some(error), _) if error.class == "CommandNotFound" => Err(AgentError::CommandNotFound {
            command,
            desc: visible(&error.desc),
        }),
        (Some(error), _) => Err(AgentError::Agent {
            command,
            class: visible(&error.class),
            desc: visible(&error.desc),
        }),
        (None, Some(value)) => Ok(value),
        (None, None) => Err(fault(Fault::Empty)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_the_agent_are_visible_and_short() {
        let line = br#"{"error": {"class": "GenericError", "desc": "no\u001b[2J\u0000"}}"#;
        let error = parse::<u8>("guest-ping", line).unwrap_err();
        assert!(error.is_from_agent());
        assert_eq!(
            error.to_string(),
            "guest-ping failed in the guest: no\\u{1b}[2J\\0 (GenericError)"
        );
        let long = format!(
            r#"{{"error": {{"class": "CommandNotFound", "desc": "{}"}}}}"#,
            "x".repeat(100_000)
        );
        let error = parse::<u8>("guest-ping", long.as_bytes()).unwrap_err();
        assert!(matches!(error, AgentError::CommandNotFound { .. }));
        assert!(error.to_string().len() < 600);
    }

    #[test]
    fn what_is_not_a_reply_is_refused() {
        for line in [
            "",
            "{}",
            "[]",
            "7",
            "{\"return\": null}",
            "{\"return\": \"\\u001b\"}",
            "{\"return\": 7",
            "\u{0}",
        ] {
            let error = parse::<u8>("guest-ping", line.as_bytes()).unwrap_err();
            assert!(matches!(error, AgentError::Protocol { .. }), "{line}: {error}");
            assert!(!error.to_string().contains('\u{1b}'));
        }
        let deep = format!("{{\"return\": {}", "[".repeat(1 << 20));
        assert!(parse::<serde::de::IgnoredAny>("guest-ping", deep.as_bytes()).is_err());
    }
}
