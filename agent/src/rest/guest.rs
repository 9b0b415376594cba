//! Answers virt-api's questions to the guest agent with KubeVirt's objects, and freezes and thaws file systems.

use std::time::Duration;

use axum::body::Bytes;
use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderName, StatusCode};
use husk_proto::shim::v1::{
    GuestDisk, GuestFileSystem, GuestFreezeRequest, GuestInfoRequest, GuestInfoResponse, GuestThawRequest,
    GuestUser,
};
use jiff::SignedDuration;
use serde_json::{Value, json};
use tokio::time::timeout;

use super::{CALL_TIMEOUT, Context, Error, NO_ANSWER, Target};
use crate::event::Kind;
use crate::vmi::{RunningVm, os_info};

/// Most users and file systems in `guestosinfo`. The lists of their own have all.
const MAX_LISTED: usize = 10;

/// An object as JSON.
type Object = ([(HeaderName, &'static str); 1], String);

/// `guestosinfo`: a `VirtualMachineInstanceGuestAgentInfo`.
pub(super) async fn os(State(context): State<Context>, target: Target) -> Result<Object, Error> {
    let info = info(&context.find(target).await?).await?;
    let agent = info.agent.as_ref();
    let commands = agent.into_iter().flat_map(|agent| &agent.commands);
    let commands: Vec<_> = commands
        .map(|command| match command.enabled {
            true => json!({"name": command.name, "enabled": true}),
            false => json!({"name": command.name}),
        })
        .collect();
    let zone = info.time_zone.as_ref();
    let zone = zone.map(|zone| format!("{}, {}", zone.zone, zone.offset_seconds));
    let users: Vec<_> = info.users.iter().take(MAX_LISTED).map(user).collect();
    let systems: Vec<_> = info
        .file_systems
        .iter()
        .take(MAX_LISTED)
        .map(file_system)
        .collect();
    let mut answer = json!({
        "os": info.os.as_ref().map_or_else(|| json!({}), os_info),
        "timezone": zone.unwrap_or_else(|| ", 0".to_owned()),
        "fsInfo": {"disks": systems},
    });
    for (field, value, is_reported) in [
        (
            "guestAgentVersion",
            json!(agent.map(|agent| &agent.version)),
            agent.is_some(),
        ),
        ("supportedCommands", json!(commands), !commands.is_empty()),
        ("hostname", json!(info.host_name), info.host_name.is_some()),
        ("userList", json!(users), !users.is_empty()),
        (
            "fsFreezeStatus",
            json!(freeze_status(&info)),
            info.frozen.is_some(),
        ),
    ] {
        if is_reported {
            answer[field] = value;
        }
    }
    Ok(object(&answer))
}

/// `userlist`.
pub(super) async fn users(State(context): State<Context>, target: Target) -> Result<Object, Error> {
    let info = info(&context.find(target).await?).await?;
    Ok(list(info.users.iter().map(user)))
}

/// `filesystemlist`.
pub(super) async fn file_systems(State(context): State<Context>, target: Target) -> Result<Object, Error> {
    let info = info(&context.find(target).await?).await?;
    Ok(list(info.file_systems.iter().map(file_system)))
}

/// `freeze`, with a `FreezeUnfreezeTimeout` as body.
pub(super) async fn freeze(
    State(context): State<Context>,
    target: Target,
    body: Bytes,
) -> Result<StatusCode, Error> {
    let limit = unfreeze_timeout(&body)?;
    let vm = context.find(target).await?;
    // A freeze that takes longer than this is undone by the shim, as its caller has gone.
    let request = GuestFreezeRequest {
        thaw_seconds: Some(limit),
    };
    let mut guest = vm.guest.clone();
    match timeout(CALL_TIMEOUT, guest.freeze(request)).await {
        Ok(Ok(_)) => Ok(StatusCode::ACCEPTED),
        Ok(Err(status)) => Err(not_frozen(&context, &vm, status.message())),
        Err(_) => Err(not_frozen(
            &context,
            &vm,
            "the guest did not freeze its file systems in time",
        )),
    }
}

/// `unfreeze`.
pub(super) async fn unfreeze(State(context): State<Context>, target: Target) -> Result<StatusCode, Error> {
    let mut guest = context.find(target).await?.guest;
    match timeout(CALL_TIMEOUT, guest.thaw(GuestThawRequest {})).await {
        Ok(Ok(_)) => Ok(StatusCode::ACCEPTED),
        Ok(Err(status)) => Err(Error::bad(status.message())),
        Err(_) => Err(Error::bad(NO_ANSWER)),
    }
}

fn not_frozen(context: &Context, vm: &RunningVm, reason: &str) -> Error {
    let (events, vmi) = (context.events.clone(), vm.vmi.clone());
    let message = format!("Failed to freeze VMI: {reason}");
    tokio::spawn(async move { events.send(&vmi, Kind::Warning, "FreezeError", &message).await });
    Error::bad(reason)
}

/// The time after which the shim thaws the file systems, in seconds; 0: it does not, as a VirtualMachineSnapshot with
/// `failureDeadline: 0s` asks.
fn unfreeze_timeout(body: &[u8]) -> Result<u32, Error> {
    let given: Value = serde_json::from_slice(body).unwrap_or_default();
    let Some(text) = given["unfreezeTimeout"].as_str() else {
        return Err(Error::bad("unfreezeTimeout is not set"));
    };
    let parsed: Option<Duration> = text
        .parse()
        .ok()
        .and_then(|duration: SignedDuration| duration.try_into().ok());
    let duration =
        parsed.ok_or_else(|| Error::bad(format!("unfreezeTimeout {text:?} is no duration, such as 5m0s")))?;
    Ok(u32::try_from(duration.as_secs()).unwrap_or(u32::MAX))
}

async fn info(vm: &RunningVm) -> Result<GuestInfoResponse, Error> {
    let mut guest = vm.guest.clone();
    match timeout(CALL_TIMEOUT, guest.info(GuestInfoRequest {})).await {
        Ok(Ok(answer)) => Ok(answer.into_inner()),
        Ok(Err(status)) => Err(Error::failed(status.message())),
        Err(_) => Err(Error::failed(NO_ANSWER)),
    }
}

fn freeze_status(info: &GuestInfoResponse) -> &'static str {
    match info.frozen {
        Some(true) => "frozen",
        _ => "thawed",
    }
}

fn list(items: impl Iterator<Item = Value>) -> Object {
    object(&json!({"metadata": {}, "items": items.collect::<Vec<_>>()}))
}

fn object(object: &Value) -> Object {
    ([(CONTENT_TYPE, "application/json")], object.to_string())
}

/// A `VirtualMachineInstanceGuestOSUser`.
fn user(user: &GuestUser) -> Value {
    let mut object = json!({"userName": user.name});
    if !user.domain.is_empty() {
        object["domain"] = json!(user.domain);
    }
    if user.login_time != 0.0 {
        object["loginTime"] = json!(user.login_time);
    }
    object
}

/// A `VirtualMachineInstanceFileSystem`. Its numbers are signed.
fn file_system(system: &GuestFileSystem) -> Value {
    let bytes = |bytes: Option<u64>| i64::try_from(bytes.unwrap_or_default()).unwrap_or(i64::MAX);
    let mut object = json!({
        "diskName": system.device,
        "mountPoint": system.mountpoint,
        "fileSystemType": system.r#type,
        "usedBytes": bytes(system.used_bytes),
        "totalBytes": bytes(system.total_bytes),
    });
    let disks: Vec<_> = system.disks.iter().map(disk).collect();
    if !disks.is_empty() {
        object["disk"] = json!(disks);
    }
    object
}

/// A `VirtualMachineInstanceFileSystemDisk`.
fn disk(disk: &GuestDisk) -> Value {
    let mut object = json!({"busType": disk.bus});
    if !disk.serial.is_empty() {
        object["serial"] = json!(disk.serial);
    }
    object
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_are_gos_durations() {
        let timeout = |text: &str| unfreeze_timeout(text.as_bytes()).map_err(|error| error.1);
        let given = |text: &str| timeout(&json!({"unfreezeTimeout": text}).to_string());
        assert_eq!(given("5m0s"), Ok(300));
        assert_eq!(given("1h0m1.5s"), Ok(3601));
        assert_eq!(given("300ms"), Ok(0));
        assert_eq!(given("0s"), Ok(0));
        assert_eq!(given("2562047h47m16.854775807s"), Ok(u32::MAX));
        for wrong in ["", "-5s", "five", "5"] {
            assert!(given(wrong).is_err(), "{wrong}");
        }
        for wrong in ["", "{}", "[", "{\"unfreezeTimeout\": 5}"] {
            assert!(timeout(wrong).unwrap_err().contains("not set"), "{wrong}");
        }
    }
}
