//! `delete`: cleans up after a container whose shim was killed.

use std::path::Path;
use std::time::{Duration, SystemTime};

use containerd_shim_protos::api::{DeleteRequest, DeleteResponse, KillRequest, ShutdownRequest, WaitRequest};
use containerd_shim_protos::protobuf::{Message, MessageField};
use containerd_shim_protos::shim_async::{Client, TaskClient};
use containerd_shim_protos::ttrpc::context;
use husk_monitor::state::RuntimeDir;
use tokio::time::timeout;

use crate::bootstrap::{self, Address, Flags};
use crate::bundle;
use crate::mount;
use crate::pod::{cgroup_of, rootfs_of};
use crate::publisher::timestamp;
use crate::spec;

/// Maximum time for a shim to answer.
const WITHIN: Duration = Duration::from_secs(2);
/// Maximum time to have a shim release its container. containerd ends `delete` after 5 s.
const RELEASE_WITHIN: Duration = Duration::from_millis(2500);
/// Maximum time to wait for systemd. A process in the cgroup takes at most a second more.
const SYSTEMD_WITHIN: Duration = Duration::from_secs(1);

const SIGKILL: u32 = 9;
/// The exit status of SIGKILL.
const KILLED: u32 = 137;

/// Cleans up and returns the exit of the container. The VMM died with the shim, and its scratch files with the VMM.
pub(crate) fn delete(flags: &Flags) -> Result<Vec<u8>, String> {
    let bundle = bundle::directory(&flags.bundle)?;
    mount::unmount(&rootfs_of(&bundle));
    // Without its configuration nothing is known about the container. containerd removes the rest of the bundle.
    let spec = bundle::spec(&bundle).ok();
    let cgroup = spec.as_ref().and_then(|spec| cgroup_of(spec).ok().flatten());
    if let Some(cgroup) = &cgroup {
        cgroup.kill();
    }
    if spec.is_some_and(|spec| spec::role(&spec, None).is_ok()) {
        release(flags, &bundle);
    }
    remove_abandoned();
    // A large VMM takes its time to end, so this comes last: containerd does not call again.
    if let Some(cgroup) = cgroup {
        if let Err(error) = cgroup.remove_within(SYSTEMD_WITHIN) {
            eprintln!("the cgroup stays: {error}");
        }
        // The VMM may have held its network until now.
        remove_abandoned();
    }
    let response = DeleteResponse {
        exit_status: KILLED,
        exited_at: MessageField::some(timestamp(SystemTime::now())),
        ..DeleteResponse::default()
    };
    response.write_to_bytes().map_err(|error| error.to_string())
}

fn remove_abandoned() {
    if let Ok(runtime) = RuntimeDir::locate()
        && let Err(error) = runtime.remove_abandoned()
    {
        eprintln!("what VMs left stays: {error}");
    }
}

/// Has the shim of a bundle release its container, or removes the socket of a shim that is dead.
fn release(flags: &Flags, bundle: &Path) {
    let group = bundle::group(bundle).ok().flatten();
    let group = group.unwrap_or_else(|| flags.id.clone());
    let computed = || Address::of(None, &flags.address, &flags.namespace, &group);
    let address = bootstrap::address_in(bundle).unwrap_or_else(computed);
    if address.is_served() {
        // containerd has given up this container, and if it is the sandbox, the pod.
        release_container(&address.to_string(), &flags.id, group == flags.id);
    }
    // A shim in the cgroup of the sandbox was killed just now.
    if !address.is_served() {
        address.remove();
    }
}

/// Makes a running shim delete a container, and exit if it has no other or if `now` is set.
fn release_container(address: &str, id: &str, now: bool) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let Ok(runtime) = runtime else { return };
    let (kill, delete, shutdown) = (
        KillRequest {
            id: id.to_owned(),
            signal: SIGKILL,
            ..KillRequest::default()
        },
        DeleteRequest {
            id: id.to_owned(),
            ..DeleteRequest::default()
        },
        ShutdownRequest {
            id: id.to_owned(),
            now,
            ..ShutdownRequest::default()
        },
    );
    let wait = WaitRequest {
        id: id.to_owned(),
        ..WaitRequest::default()
    };
    let asked = async {
        let shim = TaskClient::new(Client::connect(address).await?);
        let within = || context::with_duration(WITHIN);
        if !now {
            // It fails if the VM has ended, whose exit may not be recorded yet.
            let _ = shim.kill(within(), &kill).await;
            let _ = shim.wait(within(), &wait).await;
            let _ = shim.delete(within(), &delete).await;
        }
        shim.shutdown(within(), &shutdown).await
    };
    // The answer does not matter: without containers the shim exits soon.
    let _ = runtime.block_on(async { timeout(RELEASE_WITHIN, asked).await });
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::net::UnixListener;
    use std::time::Instant;

    use super::*;
    use crate::bootstrap::Action;

    #[test]
    fn the_socket_of_a_dead_shim_is_removed_where_its_bundle_says() {
        let bundle = tempfile::tempdir().unwrap();
        let socket = bundle.path().join("socket");
        drop(UnixListener::bind(&socket).unwrap());
        fs::write(
            bundle.path().join("address"),
            format!("unix://{}", socket.display()),
        )
        .unwrap();
        let flags = Flags {
            action: Action::Delete,
            namespace: "default".into(),
            id: "a".into(),
            address: "/run/c.sock".into(),
            bundle: String::new(),
            socket: String::new(),
            debug: false,
        };
        release(&flags, bundle.path());
        assert!(!socket.exists());
    }

    #[test]
    fn a_shim_that_does_not_answer_leaves_time_for_the_rest() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("socket");
        let _silent = UnixListener::bind(&socket).unwrap();
        let begun = Instant::now();
        release_container(&format!("unix://{}", socket.display()), "a", false);
        let cgroup = SYSTEMD_WITHIN + Duration::from_secs(1);
        assert!(begun.elapsed() + cgroup < Duration::from_secs(5));
    }
}
