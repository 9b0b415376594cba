use serde_json::json;

use super::*;
use crate::poller::{Answer, Query};
use crate::types::{Exec, ExecOutput, ExecStatus, FsFreezeStatus, IpAddressType, PciAddress, ShutdownMode};

/// Replies of QEMU's agent 7.2 on Debian 12, shortened.
const FILE_SYSTEMS: &str = r#"[{"name": "vda", "total-bytes": 97793294336, "mountpoint": "/", "disk": [
    {"serial": "root", "bus-type": "virtio", "bus": 0, "unit": 0,
    "pci-controller": {"bus": 0, "slot": 2, "domain": 0, "function": 0},
    "dev": "/dev/vda", "target": 0}], "used-bytes": 25548836864, "type": "ext4"},
    {"name": "tmpfs", "mountpoint": "/x", "type": "tmpfs", "disk": []}]"#;
const INTERFACES: &str = r#"[{"name": "eth0", "ip-addresses": [{"ip-address-type": "ipv4", "ip-address": "192.0.2.2",
    "prefix": 24}, {"ip-address-type": "ipv6", "ip-address": "fd00::2", "prefix": 64}], "statistics": {"tx-packets": 7},
    "hardware-address": "02:fc:00:00:00:01"}, {"name": "ifb0"}]"#;
const OS: &str = r##"{"name": "Debian GNU/Linux", "kernel-release": "6.1.0-18-amd64", "version": "12 (bookworm)",
    "pretty-name": "Debian GNU/Linux 12 (bookworm)", "version-id": "12", "kernel-version": "#1 SMP",
    "machine": "x86_64", "id": "debian"}"##;
const INFO: &str = r#"{"version": "7.2.22", "supported_commands": [{"enabled": false, "name": "guest-get-devices",
    "success-response": true}, {"enabled": true, "name": "guest-shutdown", "success-response": false}]}"#;

/// A line of its own: the constants are wrapped.
fn one_line(json: &str) -> Reaction {
    result(&json.replace('\n', " "))
}

fn debian() -> (GuestAgent<DuplexStream>, JoinHandle<Vec<Value>>) {
    answering(|name, _| match name {
        "guest-get-fsinfo" => one_line(FILE_SYSTEMS),
        "guest-network-get-interfaces" => one_line(INTERFACES),
        "guest-get-osinfo" => one_line(OS),
        "guest-info" => one_line(INFO),
        "guest-get-host-name" => result(r#"{"host-name": "vm"}"#),
        "guest-get-timezone" => result(r#"{"zone": "CET", "offset": 3600}"#),
        "guest-get-users" => result(r#"[{"user": "root", "login-time": 1515975891.567572, "domain": "D"}]"#),
        "guest-get-load" => result(r#"{"load1m": 0.5, "load5m": 1, "load15m": 2.25}"#),
        "guest-fsfreeze-status" => result("\"frozen\""),
        "guest-fsfreeze-freeze" => result("2"),
        "guest-fsfreeze-thaw" => result("2"),
        _ => Reaction::Honest,
    })
}

#[tokio::test]
async fn queries_have_typed_results() {
    let (mut client, _agent) = debian();
    let info = client.info(SECOND).await.unwrap();
    assert_eq!(info.version, "7.2.22");
    assert!(info.supports("guest-shutdown") && !info.supports("guest-get-devices"));
    assert!(!info.supported_commands[1].success_response);
    let file_systems = client.file_systems(SECOND).await.unwrap();
    let root = &file_systems[0];
    assert_eq!(
        (root.used_bytes, root.total_bytes),
        (Some(25_548_836_864), Some(97_793_294_336))
    );
    assert_eq!((root.fs_type.as_str(), root.mountpoint.as_str()), ("ext4", "/"));
    let disk = &root.disk[0];
    assert_eq!(
        (disk.bus_type.as_str(), disk.serial.as_deref()),
        ("virtio", Some("root"))
    );
    let slot = PciAddress {
        domain: 0,
        bus: 0,
        slot: 2,
        function: 0,
    };
    assert_eq!(disk.pci_controller, Some(slot));
    assert_eq!(file_systems[1].used_bytes, None);
    let interfaces = client.network_interfaces(SECOND).await.unwrap();
    assert_eq!(interfaces[0].ip_addresses[1].ip_address_type, IpAddressType::Ipv6);
    assert_eq!(interfaces[0].primary().unwrap().prefix, 24);
    assert_eq!(interfaces[1].hardware_address, None);
    let users = client.users(SECOND).await.unwrap();
    assert_eq!(
        (users[0].domain.as_deref(), users[0].login_time),
        (Some("D"), 1_515_975_891.567_572)
    );
    assert_eq!(client.load(SECOND).await.unwrap().load15m, 2.25);
    assert_eq!(client.time_zone(SECOND).await.unwrap().offset, 3600);
}

#[tokio::test]
async fn file_systems_are_frozen_and_thawed() {
    let (mut client, agent) = debian();
    assert_eq!(client.fsfreeze_freeze(SECOND).await.unwrap(), 2);
    assert_eq!(
        client.fsfreeze_status(SECOND).await.unwrap(),
        FsFreezeStatus::Frozen
    );
    assert_eq!(client.fsfreeze_thaw(SECOND).await.unwrap(), 2);
    assert_eq!(
        names(client, agent).await,
        [
            "sync-delimited",
            "fsfreeze-freeze",
            "fsfreeze-status",
            "fsfreeze-thaw"
        ]
    );
}

#[tokio::test]
async fn a_part_that_is_refused_is_left_out() {
    let (mut client, _agent) = debian();
    let Answer::System(system) = client.query(Query::System, SECOND).await.unwrap() else {
        panic!("not the system");
    };
    assert_eq!(system.os.unwrap().id.as_deref(), Some("debian"));
    assert_eq!(system.interfaces.unwrap().len(), 2);
    let (mut client, _agent) = answering(|name, _| match name {
        "guest-get-host-name" => result(r#"{"host-name": "vm"}"#),
        _ => Reaction::Send(
            b"{\"error\": {\"class\": \"CommandNotFound\", \"desc\": \"disabled\"}}\n".to_vec(),
        ),
    });
    let Answer::System(system) = client.query(Query::System, SECOND).await.unwrap() else {
        panic!("not the system");
    };
    assert_eq!(system.host_name.as_deref(), Some("vm"));
    assert_eq!(
        (system.os, system.interfaces, system.time_zone),
        (None, None, None)
    );
}

#[tokio::test(start_paused = true)]
async fn a_part_with_a_late_or_invalid_reply_is_left_out() {
    let long = format!("{{\"return\": \"{}\"}}\n", "x".repeat(MAX_REPLY));
    let replies = ["", "nonsense\n", "{\"return\": 7}\n", &long].map(|reply| reply.as_bytes().to_vec());
    for bad in ["guest-network-get-interfaces", "guest-get-osinfo"] {
        for reply in replies.clone() {
            let (mut client, _agent) = answering(move |name, _| match name {
                name if name == bad => Reaction::Send(reply.clone()),
                "guest-get-host-name" => result(r#"{"host-name": "vm"}"#),
                "guest-get-osinfo" => result(r#"{"id": "debian"}"#),
                "guest-network-get-interfaces" => result("[]"),
                _ => result(r#"{"offset": 60}"#),
            });
            let Answer::System(system) = client.query(Query::System, SECOND).await.unwrap() else {
                panic!("not the system");
            };
            assert_eq!(system.host_name.as_deref(), Some("vm"));
            assert_eq!(system.os.is_none(), bad == "guest-get-osinfo");
            assert_eq!(system.interfaces.is_none(), bad == "guest-network-get-interfaces");
            assert_eq!(system.time_zone.unwrap().offset, 60);
        }
    }
}

/// The arguments that the agent saw with a command.
async fn arguments(client: GuestAgent<DuplexStream>, agent: JoinHandle<Vec<Value>>) -> Vec<Value> {
    drop(client);
    let requests = agent.await.unwrap().into_iter();
    requests
        .skip(1)
        .map(|mut request| request["arguments"].take())
        .collect()
}

#[tokio::test]
async fn changes_have_arguments() {
    let (mut client, agent) = answering(|name, _| match name {
        "guest-ssh-get-authorized-keys" => result("{\"keys\": [\"ssh-ed25519 A\"]}"),
        _ => result("{}"),
    });
    let keys = ["ssh-ed25519 A\"\n".to_owned()];
    client
        .set_user_password("root", b"secret", false, SECOND)
        .await
        .unwrap();
    client
        .ssh_add_authorized_keys("u", &keys, true, SECOND)
        .await
        .unwrap();
    client
        .ssh_remove_authorized_keys("u", &keys, SECOND)
        .await
        .unwrap();
    assert_eq!(
        client.ssh_authorized_keys("u", SECOND).await.unwrap(),
        ["ssh-ed25519 A"]
    );
    client.set_time(Some(5), SECOND).await.unwrap();
    client.set_time(None, SECOND).await.unwrap();
    let expected = [
        json!({"username": "root", "password": "c2VjcmV0", "crypted": false}),
        json!({"username": "u", "keys": keys, "reset": true}),
        json!({"username": "u", "keys": keys}),
        json!({"username": "u"}),
        json!({"time": 5}),
        Value::Null,
    ];
    assert_eq!(arguments(client, agent).await, expected);
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_succeeds_without_a_reply() {
    let (mut client, agent) = answering(|_, _| silence());
    client.shutdown(ShutdownMode::Reboot, SECOND).await.unwrap();
    assert_eq!(arguments(client, agent).await, [json!({"mode": "reboot"})]);
    let (mut client, _agent) = answering(|_, _| Reaction::Close);
    client.shutdown(ShutdownMode::Halt, SECOND).await.unwrap();
    assert!(client.is_closed());
    let error = client
        .shutdown(ShutdownMode::Powerdown, SECOND)
        .await
        .unwrap_err();
    assert!(matches!(error, AgentError::Disconnected(None)));
    let (mut client, _agent) = answering(|_, _| {
        Reaction::Send(b"{\"error\": {\"class\": \"GenericError\", \"desc\": \"no\"}}\n".to_vec())
    });
    assert!(
        client
            .shutdown(ShutdownMode::Powerdown, SECOND)
            .await
            .unwrap_err()
            .is_from_agent()
    );
    let (mut client, _agent) = scripted(|_| silence());
    let error = client
        .shutdown(ShutdownMode::Powerdown, SECOND)
        .await
        .unwrap_err();
    assert!(matches!(error, AgentError::Unresponsive { .. }));
}

#[tokio::test]
async fn a_process_runs_and_then_has_ended() {
    let mut polls = 0;
    let (mut client, agent) = answering(move |name, _| match name {
        "guest-exec" => result("{\"pid\": 7}"),
        _ if polls < 1 => {
            polls += 1;
            result("{\"exited\": false}")
        }
        _ => result(
            r#"{"exited": true, "exitcode": 3, "out-data": "aGkK", "err-data": "/w==", "out-truncated": true}"#,
        ),
    });
    let exec = Exec {
        env: vec!["A=1".to_owned()],
        input: b"in".to_vec(),
        ..Exec::new("/bin/sh", ["-c", "exit 3"])
    };
    let expected = ExecOutput {
        exit_code: Some(3),
        signal: None,
        stdout: b"hi\n".to_vec(),
        stderr: vec![0xff],
        stdout_truncated: true,
        stderr_truncated: false,
    };
    let pid = client.exec_start(&exec, SECOND).await.unwrap();
    assert_eq!(
        client.exec_status(pid, SECOND).await.unwrap(),
        ExecStatus::Running
    );
    assert_eq!(
        client.exec_status(pid, SECOND).await.unwrap(),
        ExecStatus::Exited(expected)
    );
    let seen = arguments(client, agent).await;
    assert_eq!(
        seen[0],
        json!({
            "path": "/bin/sh", "arg": ["-c", "exit 3"], "env": ["A=1"], "input-data": "aW4=", "capture-output": true
        })
    );
    assert_eq!(seen[1..], vec![json!({"pid": 7}); 2]);
    assert!(!format!("{exec:?}").contains("exit 3"));
}

#[tokio::test]
async fn replies_about_processes_are_checked() {
    let (mut client, _agent) = answering(|_, _| result("{\"pid\": 0}"));
    let error = client
        .exec_start(&Exec::new("x", [""; 0]), SECOND)
        .await
        .unwrap_err();
    assert!(
        matches!(
            error,
            AgentError::Protocol {
                fault: Fault::Pid(0),
                ..
            }
        ),
        "{error}"
    );
    let (mut client, _agent) = answering(|_, _| result("{\"exited\": true, \"out-data\": \"?\"}"));
    let error = client.exec_status(7, SECOND).await.unwrap_err();
    assert!(
        matches!(
            error,
            AgentError::Protocol {
                fault: Fault::Base64,
                ..
            }
        ),
        "{error}"
    );
}
