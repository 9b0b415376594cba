//! Writes the guest's operating system and its freeze status, which the guest agent reports.

use husk_proto::shim::v1::{GuestOs, GuestState};
use serde_json::{Map, Value, json};

/// Writes `guestOSInfo` and `fsFreezeStatus`. A value that the agent has not reported yet stays as it was.
pub fn update(status: &mut Value, guest: &GuestState) {
    if let Some(os) = &guest.os {
        status["guestOSInfo"] = os_info(os);
    }
    match guest.frozen {
        Some(true) => status["fsFreezeStatus"] = json!("frozen"),
        Some(false) => {
            if let Some(status) = status.as_object_mut() {
                status.remove("fsFreezeStatus");
            }
        }
        None => {}
    }
}

/// `VirtualMachineInstanceGuestOSInfo`, without empty fields.
pub fn os_info(os: &GuestOs) -> Value {
    let fields = [
        ("name", &os.name),
        ("kernelRelease", &os.kernel_release),
        ("version", &os.version),
        ("prettyName", &os.pretty_name),
        ("versionId", &os.version_id),
        ("kernelVersion", &os.kernel_version),
        ("machine", &os.machine),
        ("id", &os.id),
    ];
    let present = fields.into_iter().filter(|(_, text)| !text.is_empty());
    let info: Map<String, Value> = present
        .map(|(field, text)| (field.to_owned(), json!(text)))
        .collect();
    Value::Object(info)
}
