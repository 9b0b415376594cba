//! Which commands KubeVirt expects of an agent.

use crate::types::AgentInfo;

/// Commands without which KubeVirt sets the condition `AgentVersionNotSupported`.
pub const BASIC_COMMANDS: [&str; 10] = [
    "guest-ping",
    "guest-get-time",
    "guest-info",
    "guest-shutdown",
    "guest-network-get-interfaces",
    "guest-get-fsinfo",
    "guest-get-host-name",
    "guest-get-users",
    "guest-get-timezone",
    "guest-get-osinfo",
];

/// Commands for access credentials with public keys.
pub const SSH_COMMANDS: [&str; 3] = [
    "guest-ssh-get-authorized-keys",
    "guest-ssh-add-authorized-keys",
    "guest-ssh-remove-authorized-keys",
];

/// Commands for access credentials with passwords.
pub const PASSWORD_COMMANDS: [&str; 1] = ["guest-set-user-password"];

/// Commands of the agent that a VMI's access credentials need.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RequiredCommands {
    /// Public keys with the propagation method `qemuGuestAgent`.
    pub ssh: bool,
    /// Passwords with the same.
    pub password: bool,
}

/// Why an agent is not supported: the commands that are missing or switched off.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unsupported {
    #[error("the guest agent lacks the basic commands {}", .0.join(", "))]
    Basic(Vec<&'static str>),
    /// The commands of [`SSH_COMMANDS`].
    #[error("the guest agent lacks {} for public keys", .0.join(", "))]
    Ssh(Vec<&'static str>),
    #[error("the guest agent lacks {} for passwords", .0.join(", "))]
    Password(Vec<&'static str>),
}

/// Checks an agent by KubeVirt's rules, but that public keys need [`SSH_COMMANDS`]: KubeVirt can also write them by
/// `guest-exec` and `guest-file-write`.
///
/// # Errors
/// The first set of which a command is missing or switched off: basic, public keys, passwords.
pub fn check_support(info: &AgentInfo, needs: RequiredCommands) -> Result<(), Unsupported> {
    let basic = info.missing(&BASIC_COMMANDS);
    if !basic.is_empty() {
        return Err(Unsupported::Basic(basic));
    }
    let ssh = info.missing(&SSH_COMMANDS);
    if needs.ssh && !ssh.is_empty() {
        return Err(Unsupported::Ssh(ssh));
    }
    let password = info.missing(&PASSWORD_COMMANDS);
    if needs.password && !password.is_empty() {
        return Err(Unsupported::Password(password));
    }
    Ok(())
}

impl AgentInfo {
    /// True if the agent has the command and it is switched on.
    #[must_use]
    pub fn supports(&self, command: &str) -> bool {
        self.supported_commands
            .iter()
            // KubeVirt lets the last of several entries count.
            .rfind(|known| known.name == command)
            .is_some_and(|known| known.enabled)
    }

    /// The commands among `commands` that the agent lacks or has disabled.
    #[must_use]
    pub fn missing(&self, commands: &[&'static str]) -> Vec<&'static str> {
        let lacks = |command: &&&'static str| !self.supports(command);
        commands.iter().filter(lacks).copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::CommandInfo;

    fn info<'a>(commands: impl IntoIterator<Item = &'a &'static str>) -> AgentInfo {
        let command = |name: &&str| CommandInfo {
            name: (*name).to_owned(),
            enabled: true,
            success_response: true,
        };
        AgentInfo {
            version: "9.2.0".to_owned(),
            supported_commands: commands.into_iter().map(command).collect(),
        }
    }

    #[test]
    fn a_basic_command_that_is_missing_or_off_is_named() {
        let mut agent = info(&BASIC_COMMANDS);
        assert_eq!(check_support(&agent, RequiredCommands::default()), Ok(()));
        agent.supported_commands[8].enabled = false;
        agent.supported_commands.remove(0);
        assert_eq!(
            check_support(&agent, RequiredCommands::default()),
            Err(Unsupported::Basic(vec!["guest-ping", "guest-get-timezone"]))
        );
    }

    #[test]
    fn credentials_need_more() {
        let needs = RequiredCommands {
            ssh: true,
            password: true,
        };
        let basic = info(&BASIC_COMMANDS);
        assert_eq!(
            check_support(&basic, needs),
            Err(Unsupported::Ssh(SSH_COMMANDS.to_vec()))
        );
        // As qemu-ga before 5.2.
        let by_file = [
            "guest-exec-status",
            "guest-exec",
            "guest-file-open",
            "guest-file-write",
        ];
        assert_eq!(
            check_support(&info(BASIC_COMMANDS.iter().chain(&by_file)), needs),
            Err(Unsupported::Ssh(SSH_COMMANDS.to_vec()))
        );
        let ssh = info(BASIC_COMMANDS.iter().chain(&SSH_COMMANDS));
        assert_eq!(
            check_support(&ssh, needs),
            Err(Unsupported::Password(PASSWORD_COMMANDS.to_vec()))
        );
        let all = info(
            BASIC_COMMANDS
                .iter()
                .chain(&SSH_COMMANDS)
                .chain(&PASSWORD_COMMANDS),
        );
        assert_eq!(check_support(&all, needs), Ok(()));
    }
}
