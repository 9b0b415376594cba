//! Rules for firmware, names, policies, probes, and for the object around the spec.

use super::common::{faults, refused, with};
use super::{INVALID, REQUIRED};
use serde_json::{Value, json};

#[test]
fn firmware() {
    let text =
        "spec.domain has EFI SecureBoot enabled. SecureBoot requires SMM, which is currently disabled.";
    refused(
        &[("domain/firmware/bootloader/efi", json!({}))],
        INVALID,
        "spec.domain",
        text,
    );
    let field = "spec.domain.firmware.bootloader";
    let text = format!("{field} has both EFI and BIOS configured, but they are mutually exclusive.");
    let changes = [(
        "domain/firmware/bootloader",
        json!({"efi": {"secureBoot": false}, "bios": {}}),
    )];
    refused(&changes, INVALID, field, &text);
    let field = "spec.domain.firmware.serial";
    let serial = |serial: &str| [("domain/firmware/serial", json!(serial))];
    let text = format!("{field} must have at most 256 characters, none of them a control character");
    for bad in [&"a".repeat(257), "a\0", "a\nb", "\u{85}"] {
        refused(&serial(bad), INVALID, field, &text);
    }
    for good in ["VMware-42 1a bf 00", "$$$$", &"ä".repeat(256)] {
        assert_eq!(faults(&with(&serial(good))), [], "{good}");
    }
    let field = "spec.domain.firmware.uuid";
    refused(
        &[("domain/firmware/uuid", json!("nope"))],
        INVALID,
        field,
        &format!("{field} 'nope' is not a UUID"),
    );
}

#[test]
fn kernel_boot() {
    let boot = |boot: Value| [("domain/firmware/kernelBoot", boot)];
    let path = "spec.domain.firmware.kernelBoot";
    let text = "kernel arguments cannot be provided without an external kernel";
    refused(
        &boot(json!({"kernelArgs": "a"})),
        INVALID,
        &format!("{path}.kernelArgs"),
        text,
    );
    let path = format!("{path}.container");
    let text = format!("{path} must be defined with an image");
    refused(
        &boot(json!({"container": {"kernelPath": "/k"}})),
        REQUIRED,
        &format!("{path}.image"),
        &text,
    );
    let text = format!("{path} must be defined with at least one of the following: kernelPath, initrdPath");
    refused(
        &boot(json!({"container": {"image": "i"}})),
        REQUIRED,
        &path,
        &text,
    );
    for name in ["kernelPath", "initrdPath"] {
        let field = format!("{path}.{name}");
        let text = format!("{field} must be an absolute path to a file without relative components");
        refused(
            &boot(json!({"container": {"image": "i", name: "/a/../k"}})),
            INVALID,
            &field,
            &text,
        );
        let text = format!("{field} must not point to root");
        refused(
            &boot(json!({"container": {"image": "i", name: "/"}})),
            INVALID,
            &field,
            &text,
        );
    }
}

#[test]
fn names() {
    let field = "spec.domain.machine.type";
    let text = format!("{field} is not supported: pc-i440fx (allowed values: [q35* pc-q35*])");
    refused(
        &[("domain/machine/type", json!("pc-i440fx"))],
        INVALID,
        field,
        &text,
    );
    let text = "spec.hostname does not conform to the kubernetes DNS_LABEL rules : must be no more than 63 characters";
    refused(
        &[("hostname", json!("a".repeat(64)))],
        INVALID,
        "spec.hostname",
        text,
    );
    let faults = faults(&with(&[("subdomain", json!("bad_name"))]));
    assert_eq!(faults[0].field, "spec.subdomain");
    assert!(
        faults[0].message.starts_with(
            "spec.subdomain does not conform to the kubernetes DNS_SUBDOMAIN rules : a lowercase"
        )
    );
}

#[test]
fn policies_and_inputs() {
    let changes = [("domain/ioThreadsPolicy", json!("bogus"))];
    refused(
        &changes,
        INVALID,
        "spec.domain.ioThreadsPolicy",
        "Invalid IOThreadsPolicy (bogus)",
    );
    let inputs = |input: Value| [("domain/devices/inputs", json!([input]))];
    let path = "spec.domain.devices.inputs[0]";
    let text = "Input device can have only virtio or usb bus.";
    refused(
        &inputs(json!({"name": "a", "type": "tablet", "bus": "ps2"})),
        INVALID,
        &format!("{path}.bus"),
        text,
    );
    let text = "Input device can have only tablet type.";
    refused(
        &inputs(json!({"name": "a", "type": "keyboard"})),
        INVALID,
        &format!("{path}.type"),
        text,
    );
}

#[test]
fn strategies() {
    let text = "spec.evictionStrategy is set with an unrecognized option: fantasy";
    refused(
        &[("evictionStrategy", json!("fantasy"))],
        INVALID,
        "spec.evictionStrategy",
        text,
    );
    let text = "spec.startStrategy is set with an unrecognized option: invalid";
    refused(
        &[("startStrategy", json!("invalid"))],
        INVALID,
        "spec.startStrategy",
        text,
    );
    let changes = [
        ("startStrategy", json!("Paused")),
        ("livenessProbe", json!({"exec": {"command": ["true"]}})),
    ];
    let text = "either spec.startStrategy or spec.livenessProbe should be provided.Pausing VMI with LivenessProbe is \
                not supported";
    refused(&changes, INVALID, "spec.startStrategy", text);
}

#[test]
fn probes() {
    for name in ["livenessProbe", "readinessProbe"] {
        let field = format!("spec.{name}");
        let probe = json!({"exec": {"command": []}, "tcpSocket": {"port": 1}});
        refused(
            &[(name, probe)],
            INVALID,
            &field,
            &format!("{field} must have exactly one probe type set"),
        );
        let text = format!(
            "either {field}.tcpSocket, {field}.exec or {field}.httpGet must be set if a {field} is specified"
        );
        refused(&[(name, json!({"periodSeconds": 3}))], REQUIRED, &field, &text);
        for kind in ["httpGet", "tcpSocket"] {
            let changes = [
                (name, json!({kind: {"port": 80}})),
                ("domain/devices/autoattachPodInterface", json!(false)),
            ];
            let field = format!("{field}.{kind}");
            refused(
                &changes,
                INVALID,
                &field,
                &format!("{field} is only allowed if the Pod Network is attached"),
            );
        }
    }
}

#[test]
fn annotations() {
    let mut manifest = with(&[]);
    manifest["metadata"]["annotations"] = json!({"hooks.kubevirt.io/hookSidecars": "[]"});
    let faults = faults(&manifest);
    assert_eq!(faults[0].field, "metadata.annotations");
    assert_eq!(
        faults[0].message,
        "sidecar feature gate is not enabled in kubevirt-config, invalid entry \
         metadata.annotations.hooks.kubevirt.io/hookSidecars"
    );
}

#[test]
fn run_strategies() {
    let vm = |spec: Value| {
        let mut spec = spec;
        spec["template"] = json!({"spec": with(&[])["spec"]});
        faults(&json!({"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": {"name": "a"}, "spec": spec}))
            .into_iter()
            .map(|fault| fault.message)
            .collect::<Vec<_>>()
    };
    assert_eq!(
        vm(json!({"running": true, "runStrategy": "Always"})),
        ["Running and RunStrategy are mutually exclusive"]
    );
    assert_eq!(vm(json!({})), ["One of Running or RunStrategy must be specified"]);
    assert_eq!(
        vm(json!({"runStrategy": "Sometimes"})),
        ["Invalid RunStrategy (Sometimes)"]
    );
    assert_eq!(vm(json!({"runStrategy": "Halted"})), Vec::<String>::new());
}
