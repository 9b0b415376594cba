//! The command line, in the form of Go's `flag` package.

/// The action of the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Action {
    Start,
    Delete,
    Info,
    Version,
    /// Without an action: the process that `start` started.
    Serve,
}

/// The command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Flags {
    pub(crate) action: Action,
    /// containerd's namespace of the container.
    pub(crate) namespace: String,
    /// Id or name of the container.
    pub(crate) id: String,
    /// Path of containerd's socket.
    pub(crate) address: String,
    /// Directory of the container's configuration. Empty for the working directory.
    pub(crate) bundle: String,
    /// Path of the socket of a process that serves.
    pub(crate) socket: String,
    pub(crate) debug: bool,
}

const USAGE: &str =
    "it is started by containerd, for the runtime io.containerd.husk.v2 (`husk node install`)";

impl Flags {
    pub(crate) fn parse(arguments: impl Iterator<Item = String>) -> Result<Flags, String> {
        let mut flags = Flags {
            action: Action::Serve,
            namespace: String::new(),
            id: String::new(),
            address: String::new(),
            bundle: String::new(),
            socket: String::new(),
            debug: false,
        };
        let mut arguments = arguments;
        let mut info = None;
        let action = loop {
            let Some(argument) = arguments.next() else {
                break None;
            };
            let Some(name) = argument.strip_prefix("--").or_else(|| argument.strip_prefix('-')) else {
                break Some(argument);
            };
            let (name, mut value) = match name.split_once('=') {
                Some((name, value)) => (name, Some(value.to_owned())),
                None => (name, None),
            };
            let mut text = || {
                value
                    .take()
                    .or_else(|| arguments.next())
                    .ok_or_else(|| format!("-{name} needs a value"))
            };
            match name {
                "namespace" => flags.namespace = text()?,
                "id" => flags.id = text()?,
                "address" => flags.address = text()?,
                "bundle" => flags.bundle = text()?,
                "socket" => flags.socket = text()?,
                // Events are sent over ttrpc.
                "publish-binary" => drop(text()?),
                "debug" => flags.debug = value.is_none_or(|value| value != "false"),
                "v" | "version" => info = Some(Action::Version),
                "info" => info = Some(Action::Info),
                _ => return Err(format!("unknown flag -{name}: {USAGE}")),
            }
        };
        flags.action = match (info, action.as_deref()) {
            (Some(action), _) => return Ok(Flags { action, ..flags }),
            (None, Some("start")) => Action::Start,
            (None, Some("delete")) => Action::Delete,
            (None, None) => Action::Serve,
            (None, Some(other)) => return Err(format!("unknown action {other:?}: {USAGE}")),
        };
        for (name, value) in [("namespace", &flags.namespace), ("id", &flags.id)] {
            if value.is_empty() || value.contains('/') || value.starts_with('.') {
                return Err(format!("-{name} {value:?} is not a name: {USAGE}"));
            }
        }
        Ok(flags)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Flags, String> {
        Flags::parse(line.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn containerds_command_lines_are_understood() {
        let start = "-namespace k8s.io -address /run/c.sock -publish-binary /bin/c -id abc -debug start";
        let wanted = Flags {
            action: Action::Start,
            namespace: "k8s.io".into(),
            id: "abc".into(),
            address: "/run/c.sock".into(),
            bundle: String::new(),
            socket: String::new(),
            debug: true,
        };
        assert_eq!(parse(start).unwrap(), wanted);
        let delete = parse("--namespace=default --id=a --bundle=/b delete").unwrap();
        assert_eq!((delete.action, delete.bundle.as_str()), (Action::Delete, "/b"));
        assert_eq!(parse("-info").unwrap().action, Action::Info);
        assert_eq!(parse("-v").unwrap().action, Action::Version);
        assert_eq!(parse("-namespace n -id a").unwrap().action, Action::Serve);
    }

    #[test]
    fn missing_container_name_is_refused() {
        for line in [
            "",
            "start",
            "-id a start",
            "-namespace n -id ../a start",
            "-namespace n -id a stop",
            "-x",
        ] {
            parse(line).unwrap_err();
        }
    }
}
