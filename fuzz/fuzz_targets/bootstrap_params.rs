//! The start of a shim by containerd: flags, and the bootstrap message on standard input. Asserts that names of
//! containers cannot leave a directory, and that the reply has the form that was asked for.
#![no_main]

#[allow(dead_code)]
#[path = "../../shim/src/bootstrap/flags.rs"]
mod flags;
#[allow(dead_code)]
#[path = "../../shim/src/bootstrap/params.rs"]
mod params;

use arbitrary::Arbitrary;
use containerd_shim_protos::bootstrap_api::{BootstrapParams, BootstrapResult};
use containerd_shim_protos::protobuf::{EnumOrUnknown, Message};
use flags::{Action, Flags};
use husk_fuzz::host::{Splice, splice};
use libfuzzer_sys::fuzz_target;
use params::Params;

const ADDRESS: &str = "unix:///run/containerd/s/0";

#[derive(Arbitrary, Debug)]
struct Program {
    arguments: Vec<Argument>,
    input: Input,
    environment: Option<String>,
}

#[derive(Arbitrary, Debug)]
enum Argument {
    Namespace,
    Id,
    Flag(u8, bool, Text),
    Action(u8),
    Any(String),
}

#[derive(Arbitrary, Debug)]
enum Text {
    Name,
    Up,
    Any(String),
}

impl Text {
    fn text(&self) -> &str {
        match self {
            Text::Name => "abc",
            Text::Up => "../x",
            Text::Any(text) => text,
        }
    }
}

#[derive(Arbitrary, Debug)]
enum Input {
    Message {
        id: Text,
        namespace: Text,
        log_level: i32,
        ttrpc: String,
        socket_dir: Option<String>,
        damage: Vec<Splice>,
    },
    Bytes(Vec<u8>),
}

fn arguments(program: &Program) -> Vec<String> {
    let flags = [
        "namespace",
        "id",
        "address",
        "bundle",
        "socket",
        "publish-binary",
        "debug",
        "v",
        "version",
        "info",
        "x",
    ];
    let mut arguments = Vec::new();
    for argument in program.arguments.iter().take(16) {
        match argument {
            Argument::Namespace => arguments.extend(["-namespace".to_owned(), "abc".to_owned()]),
            Argument::Id => arguments.extend(["--id".to_owned(), "abc".to_owned()]),
            Argument::Flag(flag, joined, text) => {
                let (flag, text) = (flags[usize::from(*flag) % flags.len()], text.text());
                match joined {
                    true => arguments.push(format!("-{flag}={text}")),
                    false => arguments.extend([format!("--{flag}"), text.to_owned()]),
                }
            }
            Argument::Action(action) => {
                arguments.push(["start", "delete", "stop"][usize::from(*action) % 3].to_owned())
            }
            Argument::Any(text) => arguments.push(text.clone()),
        }
    }
    arguments
}

fuzz_target!(|program: Program| {
    let Ok(flags) = Flags::parse(arguments(&program).into_iter()) else {
        return;
    };
    if matches!(flags.action, Action::Info | Action::Version) {
        return;
    }
    for name in [&flags.namespace, &flags.id] {
        assert!(
            !name.is_empty() && !name.contains('/') && name != ".." && name != ".",
            "{name:?}"
        );
    }
    let input = match &program.input {
        Input::Message {
            id,
            namespace,
            log_level,
            ttrpc,
            socket_dir,
            damage,
        } => {
            let message = BootstrapParams {
                instance_id: id.text().to_owned(),
                namespace: namespace.text().to_owned(),
                log_level: EnumOrUnknown::from_i32(*log_level),
                containerd_ttrpc_address: ttrpc.clone(),
                socket_dir: socket_dir.clone(),
                ..BootstrapParams::default()
            };
            let mut bytes = message.write_to_bytes().expect("a message");
            splice(&mut bytes, damage);
            bytes
        }
        Input::Bytes(bytes) => bytes.clone(),
    };
    let Ok(params) = Params::parse(&input, &flags, program.environment.clone()) else {
        return;
    };
    assert!(!params.ttrpc_address.is_empty());
    assert!(
        params
            .socket_dir
            .as_ref()
            .is_none_or(|directory| !directory.is_empty())
    );
    let reply = params.reply(ADDRESS).expect("a reply");
    match serde_json::from_slice::<serde_json::Value>(&reply) {
        Ok(reply) => assert_eq!(
            (&reply["version"], &reply["address"]),
            (&2.into(), &ADDRESS.into())
        ),
        Err(_) => {
            let reply = BootstrapResult::parse_from_bytes(&reply).expect("a message");
            assert_eq!((reply.version, reply.address.as_str()), (3, ADDRESS));
        }
    }
});
