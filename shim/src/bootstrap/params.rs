//! The parameters of `start`, and the form of its reply.
//!
//! containerd 2.3 and later write a message to standard input and expect one in reply. Earlier versions use flags and
//! the environment, and expect JSON. 1.7 refuses an API newer than 2. 2.0 to 2.2, which cannot be told apart from it,
//! accept 2 as well: the services of 2 and 3 differ only in name.

use std::env;
use std::io::{self, IsTerminal, Read};

use containerd_shim_protos::bootstrap_api::{BootstrapParams, BootstrapResult};
use containerd_shim_protos::protobuf::Message;
use serde_json::json;

use super::flags::Flags;

/// The variable that holds the address of containerd's event service.
pub(crate) const TTRPC_ADDRESS: &str = "TTRPC_ADDRESS";

/// Maximum size of the input, in bytes, as in containerd's own shim.
const MOST: u64 = 10 << 20;

/// The parameters of `start`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Params {
    /// Address of containerd's event service.
    pub(crate) ttrpc_address: String,
    /// Directory for the shim's socket.
    pub(crate) socket_dir: Option<String>,
    pub(crate) debug: bool,
    /// True if the reply is a message.
    messages: bool,
}

impl Params {
    pub(crate) fn read(flags: &Flags) -> Result<Params, String> {
        let mut input = Vec::new();
        if !io::stdin().is_terminal() {
            let read = io::stdin().lock().take(MOST).read_to_end(&mut input);
            read.map_err(|error| format!("standard input: {error}"))?;
        }
        Params::parse(&input, flags, env::var(TTRPC_ADDRESS).ok())
    }

    pub(super) fn parse(
        input: &[u8],
        flags: &Flags,
        ttrpc_address: Option<String>,
    ) -> Result<Params, String> {
        let message = BootstrapParams::parse_from_bytes(input).ok();
        // Older versions send the runtime's options, which also parse as such a message, but with other names.
        let message =
            message.filter(|message| message.instance_id == flags.id && message.namespace == flags.namespace);
        let params = match message {
            Some(message) => Params {
                debug: flags.debug || message.log_level.value() < 0,
                ttrpc_address: message.containerd_ttrpc_address,
                socket_dir: message.socket_dir.filter(|directory| !directory.is_empty()),
                messages: true,
            },
            None => Params {
                debug: flags.debug,
                ttrpc_address: ttrpc_address.unwrap_or_default(),
                socket_dir: None,
                messages: false,
            },
        };
        if params.ttrpc_address.is_empty() {
            return Err(format!("{TTRPC_ADDRESS} is not set: cannot send events"));
        }
        Ok(params)
    }

    pub(crate) fn reply(&self, address: &str) -> Result<Vec<u8>, String> {
        if !self.messages {
            let reply = json!({"version": 2, "address": address, "protocol": "ttrpc"});
            return Ok(reply.to_string().into_bytes());
        }
        let reply = BootstrapResult {
            version: 3,
            address: address.to_owned(),
            protocol: "ttrpc".to_owned(),
            ..BootstrapResult::default()
        };
        reply.write_to_bytes().map_err(|error| error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flags() -> Flags {
        let line = "-namespace k8s.io -address /run/c.sock -id abc start";
        Flags::parse(line.split(' ').map(str::to_owned)).unwrap()
    }

    #[test]
    fn both_forms_are_read_and_answered_in_kind() {
        let message = BootstrapParams {
            instance_id: "abc".into(),
            namespace: "k8s.io".into(),
            containerd_ttrpc_address: "/run/new.ttrpc".into(),
            socket_dir: Some("/run/x".into()),
            ..BootstrapParams::default()
        };
        let new = Params::parse(&message.write_to_bytes().unwrap(), &flags(), Some("/old".into())).unwrap();
        assert_eq!(
            (new.ttrpc_address.as_str(), new.socket_dir.as_deref()),
            ("/run/new.ttrpc", Some("/run/x"))
        );
        let reply = BootstrapResult::parse_from_bytes(&new.reply("unix:///s").unwrap()).unwrap();
        assert_eq!((reply.version, reply.address.as_str()), (3, "unix:///s"));

        let old = Params::parse(&[], &flags(), Some("/old".into())).unwrap();
        assert_eq!(
            (old.ttrpc_address.as_str(), old.socket_dir.as_deref()),
            ("/old", None)
        );
        let reply: serde_json::Value = serde_json::from_slice(&old.reply("unix:///s").unwrap()).unwrap();
        assert_eq!(
            reply,
            json!({"version": 2, "address": "unix:///s", "protocol": "ttrpc"})
        );
    }

    #[test]
    fn other_input_selects_the_older_form() {
        for input in [&b"\xff\xfe\x01"[..], b"\x0a\x1acontainerd.runc.v1.Options"] {
            let params = Params::parse(input, &flags(), Some("/old".into())).unwrap();
            assert!(!params.messages && params.ttrpc_address == "/old");
        }
        Params::parse(&[], &flags(), None).unwrap_err();
    }
}
