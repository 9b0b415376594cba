//! The command lines of virt-probe and virt-freezer.

use std::time::Duration;

/// Time limit of a probe that names none.
const PROBE_LIMIT: Duration = Duration::from_secs(1);
/// Seconds after which file systems are thawed, if virt-freezer names none.
const THAW_AFTER: i32 = 300;

/// The task that a command line names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::pod) enum Program {
    /// virt-probe: asks the guest's agent for a sign of life.
    Ping {
        limit: Duration,
    },
    /// virt-probe: runs a program in the guest.
    Run {
        program: String,
        arguments: Vec<String>,
        limit: Duration,
    },
    /// virt-freezer.
    Freeze {
        /// KubeVirt's `unfreezeTimeoutSeconds`.
        thaw_seconds: i32,
    },
    Thaw,
    /// The command line is wrong.
    Invalid(String),
}

/// Reads a command line; `None` if it is of another program.
pub(super) fn program(args: &[String]) -> Option<Program> {
    let (program, args) = args.split_first()?;
    let read = match program.rsplit('/').next()? {
        "virt-probe" => probe,
        "virt-freezer" => freezer,
        _ => return None,
    };
    Some(Flags::read(args).and_then(read).unwrap_or_else(Program::Invalid))
}

fn probe(flags: Flags) -> Result<Program, String> {
    let limit = flags.seconds("timeoutSeconds", PROBE_LIMIT)?;
    match flags.text("command") {
        _ if flags.is_set("guestAgentPing") => Ok(Program::Ping { limit }),
        "" => Err("either --command or --guestAgentPing must be set".to_owned()),
        command => Ok(Program::Run {
            program: command.to_owned(),
            limit,
            arguments: flags.arguments,
        }),
    }
}

fn freezer(flags: Flags) -> Result<Program, String> {
    let (freeze, thaw) = (flags.is_set("freeze"), flags.is_set("unfreeze"));
    if !freeze && !thaw {
        return Err("either --freeze or --unfreeze must be set".to_owned());
    }
    if flags.text("name").is_empty() || flags.text("namespace").is_empty() {
        return Err("both --name and --namespace must be provided".to_owned());
    }
    let flag = "unfreezeTimeoutSeconds";
    let thaw_seconds = match flags.text(flag) {
        "" => THAW_AFTER,
        text => text.parse().map_err(|_| wrong_seconds(flag, text))?,
    };
    Ok(match freeze {
        true => Program::Freeze { thaw_seconds },
        false => Program::Thaw,
    })
}

fn wrong_seconds(flag: &str, text: &str) -> String {
    format!("--{flag}: {text:?} is no number of seconds")
}

/// Flags without a value.
const SWITCHES: [&str; 3] = ["guestAgentPing", "freeze", "unfreeze"];

/// A command line in the form of Go's `pflag` package.
struct Flags {
    flags: Vec<(String, String)>,
    arguments: Vec<String>,
}

impl Flags {
    fn read(args: &[String]) -> Result<Flags, String> {
        let mut read = Flags {
            flags: Vec::new(),
            arguments: Vec::new(),
        };
        let mut args = args.iter();
        while let Some(arg) = args.next() {
            if arg == "--" {
                read.arguments.extend(args.by_ref().cloned());
            } else if let Some(flag) = arg.strip_prefix("--") {
                let (name, value) = match flag.split_once('=') {
                    Some((name, value)) => (name, value.to_owned()),
                    None if SWITCHES.contains(&flag) => (flag, "true".to_owned()),
                    None => {
                        let value = args.next().ok_or_else(|| format!("--{flag} needs a value"))?;
                        (flag, value.clone())
                    }
                };
                read.flags.push((name.to_owned(), value));
            } else {
                read.arguments.push(arg.clone());
            }
        }
        Ok(read)
    }

    /// The last value of a flag; empty if there is none.
    fn text(&self, name: &str) -> &str {
        let value = self.flags.iter().rfind(|(flag, _)| flag == name);
        value.map(|(_, value)| value.as_str()).unwrap_or_default()
    }

    fn is_set(&self, name: &str) -> bool {
        !matches!(self.text(name), "" | "false")
    }

    fn seconds(&self, name: &str, default: Duration) -> Result<Duration, String> {
        match self.text(name) {
            "" | "0" => Ok(default),
            text => {
                let seconds: Result<u32, _> = text.parse();
                let seconds = seconds.map_err(|_| wrong_seconds(name, text))?;
                Ok(Duration::from_secs(seconds.into()))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_lines_of_kubevirt_are_read() {
        let read = |args: &str| {
            let args: Vec<String> = args.split(' ').map(str::to_owned).collect();
            program(&args)
        };
        let seconds = Duration::from_secs;
        let limit = seconds(5);
        assert_eq!(
            read("virt-probe --domainName a_b --timeoutSeconds 5 --guestAgentPing"),
            Some(Program::Ping { limit })
        );
        assert_eq!(
            read("/usr/bin/virt-probe --domainName a_b --timeoutSeconds=5 --command cat -- -v --command /x"),
            Some(Program::Run {
                program: "cat".to_owned(),
                arguments: ["-v", "--command", "/x"].map(str::to_owned).to_vec(),
                limit,
            })
        );
        let freezer = "/usr/bin/virt-freezer --name vm --namespace default";
        for (timeout, thaw_seconds) in [
            ("", 300),
            (" --unfreezeTimeoutSeconds 7", 7),
            (" --unfreezeTimeoutSeconds 0", 0),
            (" --unfreezeTimeoutSeconds=-1", -1),
        ] {
            assert_eq!(
                read(&format!("{freezer} --freeze{timeout}")),
                Some(Program::Freeze { thaw_seconds })
            );
        }
        assert_eq!(read(&format!("{freezer} --unfreeze=true")), Some(Program::Thaw));
        for (wrong, text) in [
            (freezer.to_owned(), "either --freeze or --unfreeze"),
            (
                format!("{freezer} --freeze=false"),
                "either --freeze or --unfreeze",
            ),
            ("virt-freezer --freeze".to_owned(), "both --name and --namespace"),
            ("virt-probe --domainName a".to_owned(), "either --command or"),
            (
                "virt-probe --guestAgentPing --timeoutSeconds -1".to_owned(),
                "no number of seconds",
            ),
            (
                format!("{freezer} --freeze --unfreezeTimeoutSeconds 2147483648"),
                "no number of seconds",
            ),
            ("virt-probe --command".to_owned(), "needs a value"),
        ] {
            match read(&wrong) {
                Some(Program::Invalid(message)) => assert!(message.contains(text), "{wrong}: {message}"),
                other => panic!("{wrong}: {other:?}"),
            }
        }
        assert_eq!(read("/bin/sh -c true"), None);
    }
}
