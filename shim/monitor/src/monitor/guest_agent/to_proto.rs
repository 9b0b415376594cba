//! The agent's answers as messages.

use std::time::Instant;

use husk_guest_agent::{
    AgentInfo, Answers, BASIC_COMMANDS, CommandInfo, DiskAddress, FileSystem, FsFreezeStatus, IpAddress,
    NetworkInterface, OsInfo, RequiredCommands, Unsupported, User, check_support, visible,
};
use husk_proto::shim::v1 as shim;

use super::handle::AgentView;

pub(super) fn info(view: &AgentView, now: Instant) -> shim::GuestInfoResponse {
    let answers = &view.answers;
    let system = &answers.system;
    let frozen = frozen(answers);
    let thaw = view.thaw_at.filter(|_| frozen == Some(true));
    shim::GuestInfoResponse {
        connected: view.connected,
        agent: answers.version.as_ref().map(agent),
        os: system.os.as_ref().map(os),
        host_name: system.host_name.clone(),
        time_zone: system.time_zone.as_ref().map(|zone| shim::GuestTimeZone {
            zone: zone.zone.clone().unwrap_or_default(),
            offset_seconds: zone.offset,
        }),
        users: answers.users.iter().flatten().map(user).collect(),
        file_systems: answers.file_systems.iter().flatten().map(file_system).collect(),
        interfaces: interfaces(answers).collect(),
        frozen,
        thaw_seconds: thaw.map(|time| time.saturating_duration_since(now).as_secs()),
        load: answers
            .load
            .map(|load| vec![load.load1m, load.load5m, load.load15m])
            .unwrap_or_default(),
    }
}

/// Most interfaces in a VMI's status, and addresses of one. Further ones are left out.
const STATUS_INTERFACES: usize = 64;
const STATUS_ADDRESSES: usize = 32;

/// Returns the state that a VMI's status shows. A cluster stores it, so lists are short and control characters are
/// escaped.
pub(super) fn state(connected: bool, answers: &Answers, needs: RequiredCommands) -> shim::GuestState {
    let unsupported = answers
        .version
        .as_ref()
        .and_then(|info| check_support(info, needs).err());
    shim::GuestState {
        connected,
        unsupported: unsupported.as_ref().map(reason).unwrap_or_default().to_owned(),
        os: answers.system.os.as_ref().map(os).map(visible_os),
        interfaces: interfaces(answers)
            .take(STATUS_INTERFACES)
            .map(|interface| shim::GuestInterface {
                name: visible(&interface.name),
                mac: visible(&interface.mac),
                addresses: interface.addresses.into_iter().take(STATUS_ADDRESSES).collect(),
            })
            .collect(),
        frozen: frozen(answers),
        credentials: None,
    }
}

fn visible_os(mut os: shim::GuestOs) -> shim::GuestOs {
    for text in [
        &mut os.id,
        &mut os.name,
        &mut os.pretty_name,
        &mut os.version,
        &mut os.version_id,
        &mut os.variant,
        &mut os.variant_id,
        &mut os.kernel_release,
        &mut os.kernel_version,
        &mut os.machine,
    ] {
        *text = visible(text);
    }
    os
}

/// KubeVirt's words for an agent that it does not support.
fn reason(unsupported: &Unsupported) -> &'static str {
    match unsupported {
        Unsupported::Basic(_) => "This guest agent doesn't support required basic commands",
        Unsupported::Ssh(_) => "This guest agent doesn't support required public key commands",
        Unsupported::Password(_) => "This guest agent doesn't support required password commands",
    }
}

fn frozen(answers: &Answers) -> Option<bool> {
    let status = answers.fs_freeze_status;
    status.map(|status| status == FsFreezeStatus::Frozen)
}

fn interfaces(answers: &Answers) -> impl Iterator<Item = shim::GuestInterface> {
    answers.system.interfaces.iter().flatten().map(interface)
}

fn agent(info: &AgentInfo) -> shim::GuestAgentInfo {
    let missing = info.missing(&BASIC_COMMANDS);
    let command = |command: &CommandInfo| shim::GuestAgentCommand {
        name: command.name.clone(),
        enabled: command.enabled,
    };
    shim::GuestAgentInfo {
        version: info.version.clone(),
        missing_commands: missing.into_iter().map(str::to_owned).collect(),
        commands: info.supported_commands.iter().map(command).collect(),
    }
}

fn os(os: &OsInfo) -> shim::GuestOs {
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    shim::GuestOs {
        id: text(&os.id),
        name: text(&os.name),
        pretty_name: text(&os.pretty_name),
        version: text(&os.version),
        version_id: text(&os.version_id),
        variant: text(&os.variant),
        variant_id: text(&os.variant_id),
        kernel_release: text(&os.kernel_release),
        kernel_version: text(&os.kernel_version),
        machine: text(&os.machine),
    }
}

fn user(user: &User) -> shim::GuestUser {
    shim::GuestUser {
        name: user.user.clone(),
        domain: user.domain.clone().unwrap_or_default(),
        login_time: user.login_time,
    }
}

fn file_system(system: &FileSystem) -> shim::GuestFileSystem {
    let disk = |disk: &DiskAddress| shim::GuestDisk {
        bus: disk.bus_type.clone(),
        serial: disk.serial.clone().unwrap_or_default(),
        device: disk.dev.clone().unwrap_or_default(),
    };
    shim::GuestFileSystem {
        device: system.name.clone(),
        mountpoint: system.mountpoint.clone(),
        r#type: system.fs_type.clone(),
        used_bytes: system.used_bytes,
        total_bytes: system.total_bytes,
        disks: system.disk.iter().map(disk).collect(),
    }
}

/// Without what is no address.
fn interface(interface: &NetworkInterface) -> shim::GuestInterface {
    let address = |address: &IpAddress| Some(format!("{}/{}", address.parse()?, address.prefix));
    shim::GuestInterface {
        name: interface.name.clone(),
        mac: interface.hardware_address.clone().unwrap_or_default(),
        addresses: interface.ip_addresses.iter().filter_map(address).collect(),
    }
}
