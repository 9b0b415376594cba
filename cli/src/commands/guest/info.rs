//! `husk guest info`, `users` and `fs`.

use husk_proto::shim::v1::{GuestInfoRequest, GuestInfoResponse, GuestTimeZone};
use serde_json::{Value, json};

use crate::failure::{Failure, visible};
use crate::vm_ref::VmRef;
use crate::{live_vm, output};

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// The VM: NAME or NAMESPACE/NAME
    vm: VmRef,

    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: Format,
}

#[derive(Debug, Clone, Copy, Default, clap::ValueEnum)]
enum Format {
    /// For people
    #[default]
    Text,
    /// With KubeVirt's names, where it has them
    Json,
}

/// Part of the agent's answers that the command prints.
#[derive(Debug, Clone, Copy)]
pub(super) enum Part {
    All,
    Users,
    FileSystems,
}

pub(super) fn run(args: &Args, part: Part) -> Result<(), Failure> {
    let info = live_vm::block_on(async {
        let mut client = super::connect(&args.vm).await?;
        Ok(client.info(GuestInfoRequest {}).await?.into_inner())
    })?;
    let known = info.agent.is_some() || info.os.is_some();
    if !info.connected && !known {
        return Err(Failure::Runtime(format!(
            "{}: no guest agent is connected: the guest needs a running qemu-guest-agent",
            args.vm
        )));
    }
    if !info.connected {
        crate::failure::print_warning("the guest agent is no longer connected: this is its last report");
    }
    let text = match (args.output, part) {
        (Format::Json, Part::All) => output::json(&all(&info))?,
        (Format::Json, Part::Users) => output::json(&users(&info))?,
        (Format::Json, Part::FileSystems) => output::json(&file_systems(&info))?,
        (Format::Text, Part::All) => summary(&info),
        (Format::Text, Part::Users) => table(&["USER", "DOMAIN", "LOGIN"], user_rows(&info)),
        (Format::Text, Part::FileSystems) => {
            let heads = ["DEVICE", "TYPE", "SIZE", "USED", "SERIAL", "MOUNTPOINT"];
            table(&heads, file_system_rows(&info))
        }
    };
    output::print(&text)
}

/// With the names of KubeVirt's `VirtualMachineInstanceGuestAgentInfo`.
pub(in crate::commands) fn all(info: &GuestInfoResponse) -> Value {
    let os = info.os.clone().unwrap_or_default();
    let agent = info.agent.clone().unwrap_or_default();
    json!({
        "connected": info.connected,
        "guestAgentVersion": agent.version,
        "missingCommands": agent.missing_commands,
        "hostname": info.host_name,
        "timezone": info.time_zone.as_ref().map(|zone| format!("{}, {}", zone.zone, zone.offset_seconds)),
        "os": {
            "id": os.id,
            "name": os.name,
            "prettyName": os.pretty_name,
            "version": os.version,
            "versionId": os.version_id,
            "kernelRelease": os.kernel_release,
            "kernelVersion": os.kernel_version,
            "machine": os.machine,
        },
        "fsFreezeStatus": info.frozen.map(|frozen| if frozen { "frozen" } else { "thawed" }),
        "thawSeconds": info.thaw_seconds,
        "load": info.load,
        "interfaces": info.interfaces.iter().map(|interface| json!({
            "interfaceName": interface.name,
            "mac": interface.mac,
            "ipAddresses": interface.addresses,
        })).collect::<Vec<_>>(),
        "userList": users(info),
        "fsInfo": file_systems(info),
    })
}

fn users(info: &GuestInfoResponse) -> Vec<Value> {
    let user = |user: &husk_proto::shim::v1::GuestUser| json!({"userName": user.name, "domain": user.domain, "loginTime": user.login_time});
    info.users.iter().map(user).collect()
}

fn file_systems(info: &GuestInfoResponse) -> Vec<Value> {
    let disk = |disk: &husk_proto::shim::v1::GuestDisk| json!({"busType": disk.bus, "serial": disk.serial, "device": disk.device});
    let file_system = |fs: &husk_proto::shim::v1::GuestFileSystem| {
        json!({
            "diskName": fs.device,
            "mountPoint": fs.mountpoint,
            "fileSystemType": fs.r#type,
            "usedBytes": fs.used_bytes,
            "totalBytes": fs.total_bytes,
            "disk": fs.disks.iter().map(disk).collect::<Vec<_>>(),
        })
    };
    info.file_systems.iter().map(file_system).collect()
}

/// Such as `CET, +01:00`.
fn zone(zone: &GuestTimeZone) -> String {
    let minutes = zone.offset_seconds / 60;
    let sign = if minutes < 0 { '-' } else { '+' };
    let minutes = minutes.unsigned_abs();
    format!("{}, {sign}{:02}:{:02}", zone.zone, minutes / 60, minutes % 60)
}

fn summary(info: &GuestInfoResponse) -> String {
    let mut rows: Vec<[String; 2]> = Vec::new();
    let mut row = |name: &str, text: String| {
        if !text.is_empty() {
            rows.push([name.to_owned(), visible(&text)]);
        }
    };
    let agent = info.agent.clone().unwrap_or_default();
    let os = info.os.clone().unwrap_or_default();
    row("Agent", agent.version);
    row("Missing", agent.missing_commands.join(", "));
    row("System", os.pretty_name);
    row("Kernel", os.kernel_release);
    row("Host name", info.host_name.clone().unwrap_or_default());
    row("Time zone", info.time_zone.as_ref().map(zone).unwrap_or_default());
    row(
        "Load",
        info.load
            .iter()
            .map(|load| format!("{load:.2}"))
            .collect::<Vec<_>>()
            .join(" "),
    );
    let frozen = match (info.frozen, info.thaw_seconds) {
        (Some(true), Some(seconds)) => format!("frozen; thawed in {seconds} s"),
        (Some(true), None) => "frozen".to_owned(),
        _ => String::new(),
    };
    row("Filesystems", frozen);
    for interface in &info.interfaces {
        let addresses = interface.addresses.join(", ");
        row(&format!("Interface {}", visible(&interface.name)), addresses);
    }
    for user in &info.users {
        row("User", user.name.clone());
    }
    for fs in &info.file_systems {
        row(
            &format!("Mounted {}", visible(&fs.mountpoint)),
            size(fs.used_bytes, fs.total_bytes),
        );
    }
    output::table(&rows)
}

/// Such as `1.2 of 9.8 GiB used`.
fn size(used: Option<u64>, total: Option<u64>) -> String {
    match (used, total) {
        (Some(used), Some(total)) => format!("{} of {} GiB used", gib(used), gib(total)),
        _ => "size unknown".to_owned(),
    }
}

fn gib(bytes: u64) -> String {
    format!("{:.1}", bytes as f64 / f64::from(1 << 30))
}

fn user_rows(info: &GuestInfoResponse) -> Vec<Vec<String>> {
    let login = |seconds: f64| {
        let time = jiff::Timestamp::from_second(seconds as i64);
        time.map(|time| time.to_string()).unwrap_or_default()
    };
    let row = |user: &husk_proto::shim::v1::GuestUser| {
        vec![user.name.clone(), user.domain.clone(), login(user.login_time)]
    };
    info.users.iter().map(row).collect()
}

fn file_system_rows(info: &GuestInfoResponse) -> Vec<Vec<String>> {
    let bytes = |bytes: Option<u64>| {
        bytes
            .map(|bytes| format!("{} GiB", gib(bytes)))
            .unwrap_or_default()
    };
    let row = |fs: &husk_proto::shim::v1::GuestFileSystem| {
        let serials = fs.disks.iter().map(|disk| disk.serial.clone());
        vec![
            fs.device.clone(),
            fs.r#type.clone(),
            bytes(fs.total_bytes),
            bytes(fs.used_bytes),
            serials
                .filter(|serial| !serial.is_empty())
                .collect::<Vec<_>>()
                .join(","),
            fs.mountpoint.clone(),
        ]
    };
    info.file_systems.iter().map(row).collect()
}

fn table(heads: &[&str], rows: Vec<Vec<String>>) -> String {
    let mut all = vec![heads.iter().map(ToString::to_string).collect::<Vec<_>>()];
    all.extend(
        rows.into_iter()
            .map(|row| row.iter().map(|cell| visible(cell)).collect()),
    );
    output::table(&all)
}

#[cfg(test)]
mod tests {
    use husk_proto::shim::v1::{GuestAgentInfo, GuestFileSystem, GuestInterface, GuestOs, GuestUser};

    use super::*;

    fn response() -> GuestInfoResponse {
        GuestInfoResponse {
            connected: true,
            agent: Some(GuestAgentInfo {
                version: "9.2".into(),
                missing_commands: vec!["guest-ping".into()],
                commands: Vec::new(),
            }),
            os: Some(GuestOs {
                pretty_name: "Debian\u{1b}[2J".into(),
                ..GuestOs::default()
            }),
            time_zone: Some(GuestTimeZone {
                zone: "NST".into(),
                offset_seconds: -12_600,
            }),
            users: vec![GuestUser {
                name: "dolly".into(),
                domain: String::new(),
                login_time: 86_400.9,
            }],
            interfaces: vec![GuestInterface {
                name: "eth0".into(),
                mac: String::new(),
                addresses: vec!["10.0.0.1/24".into()],
            }],
            file_systems: vec![GuestFileSystem {
                device: "vda1".into(),
                mountpoint: "/".into(),
                r#type: "ext4".into(),
                used_bytes: Some(1 << 29),
                total_bytes: Some(1 << 30),
                disks: Vec::new(),
            }],
            frozen: Some(true),
            thaw_seconds: Some(9),
            ..GuestInfoResponse::default()
        }
    }

    #[test]
    fn a_summary_cannot_control_the_terminal() {
        let text = summary(&response());
        assert!(!text.contains('\u{1b}'), "{text:?}");
        for line in [
            "Agent           9.2",
            "Missing         guest-ping",
            "Time zone       NST, -03:30",
            "Filesystems     frozen; thawed in 9 s",
            "Interface eth0  10.0.0.1/24",
            "Mounted /       0.5 of 1.0 GiB used",
        ] {
            assert!(
                text.lines().any(|found| found == line),
                "{line:?} is not in\n{text}"
            );
        }
    }

    #[test]
    fn users_and_file_systems_are_tables() {
        let users = table(&["USER", "DOMAIN", "LOGIN"], user_rows(&response()));
        assert_eq!(users.lines().nth(1), Some("dolly          1970-01-02T00:00:00Z"));
        let rows = file_system_rows(&response());
        assert_eq!(rows[0], ["vda1", "ext4", "1.0 GiB", "0.5 GiB", "", "/"]);
        let response = all(&response());
        assert_eq!(
            (
                response["fsFreezeStatus"].as_str(),
                response["fsInfo"][0]["mountPoint"].as_str()
            ),
            (Some("frozen"), Some("/"))
        );
    }
}
