//! Preferred devices.

use serde_json::{Map, Value, json};

use super::json::{Object, append, each, edit, has_items, is_given, set, set_absent, set_empty, text};

/// Preferences of devices that are attached unless the VM says otherwise.
const ATTACH: &[(&str, &str)] = &[
    ("preferredAutoattachGraphicsDevice", "autoattachGraphicsDevice"),
    ("preferredAutoattachMemBalloon", "autoattachMemBalloon"),
    ("preferredAutoattachPodInterface", "autoattachPodInterface"),
    ("preferredAutoattachSerialConsole", "autoattachSerialConsole"),
    ("preferredAutoattachInputDevice", "autoattachInputDevice"),
];

/// Other preferences whose value is that of a field.
const FIELDS: &[(&str, &str)] = &[
    ("preferredUseVirtioTransitional", "useVirtioTransitional"),
    ("preferredBlockMultiQueue", "blockMultiQueue"),
    (
        "preferredNetworkInterfaceMultiQueue",
        "networkInterfaceMultiqueue",
    ),
    ("preferredRng", "rng"),
    ("preferredTPM", "tpm"),
];

/// Ways of connecting an interface.
const BINDINGS: &[&str] = &[
    "bridge",
    "slirp",
    "masquerade",
    "sriov",
    "macvtap",
    "passt",
    "passtBinding",
    "binding",
];

pub(super) fn attach(devices: &mut Object, preferred: &Map<String, Value>) {
    for (preference, field) in ATTACH {
        set_absent(devices, field, preferred.get(*preference).cloned());
    }
}

/// Applies preferences; `on_pod` has the names of the pod's networks.
pub(super) fn apply(devices: &mut Object, preferred: &Map<String, Value>, on_pod: &[String]) {
    for (preference, field) in FIELDS {
        set_absent(devices, field, preferred.get(*preference).cloned());
    }
    // KubeVirt cannot tell whether the VM gives this one.
    set(
        devices,
        "disableHotplug",
        preferred.get("preferredDisableHotplug").cloned(),
    );
    if is_given(devices, "sound") {
        edit(devices, "sound", |sound| {
            set_empty(sound, "model", text(preferred, "preferredSoundModel"))
        });
    }
    edit(devices, "video", |video| {
        set_empty(video, "type", text(preferred, "preferredVideoType"))
    });
    attach(devices, preferred);
    if !preferred.is_empty() {
        each(devices, "disks", |target| disk(target, preferred));
    }
    each(devices, "interfaces", |target| {
        interface(target, preferred, on_pod)
    });
    each(devices, "inputs", |input| {
        set_empty(input, "bus", text(preferred, "preferredInputBus"));
        set_empty(input, "type", text(preferred, "preferredInputType"));
    });
    if let Some(model) = preferred.get("preferredPanicDeviceModel") {
        if !has_items(devices, "panicDevices") {
            devices.remove("panicDevices");
            append(devices, "panicDevices", vec![json!({})]);
        }
        each(devices, "panicDevices", |device| {
            set_absent(device, "model", Some(model.clone()))
        });
    }
}

fn disk(disk: &mut Object, preferred: &Map<String, Value>) {
    if !["disk", "cdrom", "lun"]
        .iter()
        .any(|target| is_given(disk, target))
    {
        disk.insert("disk".to_owned(), json!({}));
    }
    if !is_given(disk, "disk") {
        let (target, bus) = match is_given(disk, "cdrom") {
            true => ("cdrom", "preferredCdromBus"),
            false => ("lun", "preferredLunBus"),
        };
        edit(disk, target, |target| {
            set_empty(target, "bus", text(preferred, bus))
        });
        return;
    }
    let virtio = edit(disk, "disk", |target| {
        set_empty(target, "bus", text(preferred, "preferredDiskBus"));
        text(target, "bus") == Some("virtio")
    });
    set_absent(
        disk,
        "blockSize",
        preferred.get("preferredDiskBlockSize").cloned(),
    );
    set_empty(disk, "cache", text(preferred, "preferredDiskCache"));
    set_empty(disk, "io", text(preferred, "preferredDiskIO"));
    if virtio {
        let thread = preferred.get("preferredDiskDedicatedIoThread");
        set_absent(disk, "dedicatedIOThread", thread.cloned());
    }
}

fn interface(interface: &mut Object, preferred: &Map<String, Value>, on_pod: &[String]) {
    set_empty(interface, "model", text(preferred, "preferredInterfaceModel"));
    let unbound = !BINDINGS.iter().any(|binding| is_given(interface, binding));
    let on_pod = text(interface, "name").is_some_and(|name| on_pod.iter().any(|network| network == name));
    if unbound && on_pod {
        set(
            interface,
            "masquerade",
            preferred.get("preferredInterfaceMasquerade").cloned(),
        );
    }
}
