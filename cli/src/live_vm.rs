//! Access to running VMs through their monitors.

use std::net::IpAddr;
use std::time::Duration;

use husk_monitor::client::{self, PodClient};
use husk_monitor::state::{RuntimeDir, StateError, VmDir};
use husk_proto::shim::v1::{InfoRequest, InfoResponse, Phase, Status, WatchStatusRequest};

use crate::failure::Failure;
use crate::status::is_final;
use crate::vm_ref::VmRef;

/// Maximum time for an answer of a monitor.
pub(crate) const MONITOR_TIMEOUT: Duration = Duration::from_secs(3);

/// Runs `work` on a tokio runtime. Blocking reads of stdin and writes to stdout do not delay the return.
pub(crate) fn block_on<T>(work: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(Failure::at("start the asynchronous runtime"))?;
    let done = runtime.block_on(work);
    runtime.shutdown_background();
    done
}

/// Finds the running VM of that name.
pub(crate) fn find(vm: &VmRef) -> Result<VmDir, Failure> {
    let runtime = RuntimeDir::locate()?;
    runtime
        .find(&vm.namespace, &vm.name)
        .map_err(|error| match error {
            StateError::NotFound { .. } => {
                let live = runtime.list().unwrap_or_default();
                Failure::Runtime(not_found(vm, live.iter().map(vm_ref)))
            }
            error => error.into(),
        })
}

/// Connects to the monitor of the running VM of that name.
pub(crate) async fn connect(vm: &VmRef) -> Result<PodClient, Failure> {
    Ok(client::connect(&find(vm)?).await?)
}

/// Queries the monitor of a VM.
pub(crate) async fn info(client: &mut PodClient) -> Result<InfoResponse, Failure> {
    Ok(client.info(InfoRequest {}).await?.into_inner())
}

/// IP address of a VM.
pub(crate) fn address(vm: &VmRef, info: &InfoResponse) -> Result<IpAddr, Failure> {
    let addresses = info.interfaces.iter().flat_map(|interface| &interface.addresses);
    let found = addresses.filter_map(|address| address.parse().ok()).next();
    found.ok_or_else(|| {
        Failure::Runtime(match info.interfaces.as_slice() {
            [] => {
                format!("{vm} has no network: the manifest declares none, or the VM was not started as root")
            }
            _ => format!("{vm} has no IP address: none of its networks assigns one"),
        })
    })
}

/// Waits until a VM has ended.
pub(crate) async fn wait_for_end(client: &mut PodClient) -> Result<(), Failure> {
    let mut statuses = client
        .watch_status(WatchStatusRequest::default())
        .await?
        .into_inner();
    // A VM ends with its monitor, so a broken stream counts as the end too.
    while let Ok(Some(status)) = statuses.message().await {
        if is_final(&status) {
            break;
        }
    }
    Ok(())
}

/// The name of a VM found in the runtime directory.
pub(crate) fn vm_ref(dir: &VmDir) -> VmRef {
    VmRef {
        namespace: dir.namespace().into(),
        name: dir.name().into(),
    }
}

/// Name of the phase as in KubeVirt's `status.phase`.
pub(crate) fn phase(status: &Status) -> &'static str {
    match status.phase() {
        Phase::Scheduled => "Scheduled",
        Phase::Running => "Running",
        Phase::Succeeded => "Succeeded",
        Phase::Failed => "Failed",
        Phase::Unspecified => "Unknown",
    }
}

fn not_found(vm: &VmRef, live: impl Iterator<Item = VmRef>) -> String {
    let elsewhere: Vec<_> = live
        .filter(|other| other.name == vm.name)
        .map(|other| other.to_string())
        .collect();
    let text = format!("no VM {vm} is running");
    if elsewhere.is_empty() {
        text
    } else {
        format!("{text}; running: {}", elsewhere.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use husk_proto::shim::v1::Interface;

    use super::*;

    #[test]
    fn the_first_address_is_used() {
        let vm: VmRef = "demo".parse().unwrap();
        let info = |addresses: &[&[&str]]| InfoResponse {
            interfaces: addresses
                .iter()
                .map(|addresses| Interface {
                    addresses: addresses.iter().map(ToString::to_string).collect(),
                    ..Interface::default()
                })
                .collect(),
            ..InfoResponse::default()
        };
        let found = address(&vm, &info(&[&[], &["10.77.0.2", "fd00::2"]])).unwrap();
        assert_eq!(found.to_string(), "10.77.0.2");
        for (info, why) in [(info(&[]), "has no network"), (info(&[&[]]), "has no IP address")] {
            let failure = address(&vm, &info).unwrap_err();
            assert!(matches!(failure, Failure::Runtime(text) if text.starts_with(&format!("demo {why}: "))));
        }
    }

    #[test]
    fn a_vm_of_this_name_in_another_directory_is_named() {
        let vm = |text: &str| text.parse::<VmRef>().unwrap();
        let live = [vm("test/demo"), vm("other")];
        assert_eq!(
            not_found(&vm("demo"), live.iter().cloned()),
            "no VM demo is running; running: test/demo"
        );
        assert_eq!(not_found(&vm("x"), live.iter().cloned()), "no VM x is running");
    }
}
