//! A recorded VMI, and devices.

use std::path::Path;

use serde_json::{Value, json};

/// The node of the VMIs.
pub const NODE: &str = "node1";

/// A VMI as virt-controller leaves it to the agent, with the pod `NAME-pod`.
pub fn scheduled(name: &str) -> Value {
    let recorded = include_str!("../../../tests/manifests/vmi-scheduled.json");
    let mut vmi: Value = serde_json::from_str(recorded).unwrap();
    vmi["metadata"]["name"] = json!(name);
    vmi["metadata"]["uid"] = json!(format!("{name}-uid"));
    vmi["status"]["activePods"] = json!({format!("{name}-pod"): NODE});
    vmi
}

/// Makes a node of any block device of the machine. It is only opened for reading.
pub fn block_device(path: &Path) {
    let devices = std::fs::read_dir("/sys/block").unwrap();
    let numbers = devices
        .flatten()
        .find_map(|device| std::fs::read_to_string(device.path().join("dev")).ok());
    let numbers = numbers.expect("a block device in /sys/block");
    let (major, minor) = numbers.trim().split_once(':').unwrap();
    let device = rustix::fs::makedev(major.parse().unwrap(), minor.parse().unwrap());
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    let mode = rustix::fs::Mode::RUSR;
    rustix::fs::mknodat(
        rustix::fs::CWD,
        path,
        rustix::fs::FileType::BlockDevice,
        mode,
        device,
    )
    .unwrap();
}
