//! The agent's answers as messages.

use std::time::Instant;

use husk_guest_agent::{
    AgentInfo, BASIC_COMMANDS, DiskAddress, FileSystem, FsFreezeStatus, IpAddress, NetworkInterface, OsInfo,
    User,
};
use husk_proto::shim::v1 as shim;

use super::handle::AgentView;

pub(super) fn info(view: &AgentView, now: Instant) -> shim::GuestInfoResponse {
    let answers = &view.answers;
    let system = &answers.system;
    let frozen = answers
        .fs_freeze_status
        .map(|status| status == FsFreezeStatus::Frozen);
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
        interfaces: system.interfaces.iter().flatten().map(interface).collect(),
        frozen,
        thaw_seconds: thaw.map(|time| time.saturating_duration_since(now).as_secs()),
        load: answers
            .load
            .map(|load| vec![load.load1m, load.load5m, load.load15m])
            .unwrap_or_default(),
    }
}

fn agent(info: &AgentInfo) -> shim::GuestAgentInfo {
    let missing = info.missing(&BASIC_COMMANDS);
    shim::GuestAgentInfo {
        version: info.version.clone(),
        missing_commands: missing.into_iter().map(str::to_owned).collect(),
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
