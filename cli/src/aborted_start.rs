//! Cleans up VMs whose start was aborted.

use std::process;
use std::time::Duration;

use husk_monitor::client;
use husk_monitor::state::{RuntimeDir, VmDir};
use husk_proto::shim::v1::KillRequest;
use tokio::time::{Instant, sleep, timeout};

use crate::live_vm;
use crate::vm_ref::VmRef;

/// Maximum time for monitors to exit. A monitor kills its VMM and restores the network within this time.
const CLEANUP_TIMEOUT: Duration = Duration::from_secs(10);
/// Interval between two checks for remaining monitors.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Maximum time for one kill request; repeating the request is harmless.
const KILL_TIMEOUT: Duration = Duration::from_secs(1);

/// Kills those of `vms` whose monitors this process started and waits until they are gone. Returns the VMs that are
/// still there after [`CLEANUP_TIMEOUT`].
pub(crate) async fn clean_up(vms: &[VmRef]) -> Vec<VmRef> {
    let Ok(runtime) = RuntimeDir::locate() else {
        return Vec::new();
    };
    let deadline = Instant::now() + CLEANUP_TIMEOUT;
    loop {
        let monitors = child_monitors();
        let owned = |dir: &VmDir| dir.monitor_pid().is_some_and(|pid| monitors.contains(&pid));
        let live = runtime.list().unwrap_or_default();
        let left: Vec<_> = live
            .iter()
            .filter(|dir| vms.contains(&live_vm::vm_ref(dir)) && owned(dir))
            .collect();
        // A monitor without a directory is about to create one, or to fail.
        if (left.is_empty() && monitors.is_empty()) || Instant::now() > deadline {
            return left.into_iter().map(live_vm::vm_ref).collect();
        }
        for dir in left {
            let kill = async {
                if let Ok(mut client) = client::connect(dir).await {
                    let _ = client.kill(KillRequest {}).await;
                }
            };
            let _ = timeout(KILL_TIMEOUT, kill).await;
        }
        sleep(POLL_INTERVAL).await;
    }
}

/// PIDs of the live child processes of this process, which are all monitors.
fn child_monitors() -> Vec<u32> {
    let all = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(|pid| is_child(*pid).unwrap_or(false)).collect()
}

fn is_child(pid: u32) -> Option<bool> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The state and the parent PID follow the last parenthesis, since the program name may contain any character.
    let mut words = stat.rsplit_once(") ")?.1.split_whitespace();
    let (state, parent) = (words.next()?, words.next()?);
    Some(parent.parse() == Ok(process::id()) && !matches!(state, "Z" | "X"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_is_one_until_it_ends() {
        let mut child = process::Command::new("sleep").arg("60").spawn().unwrap();
        assert!(child_monitors().contains(&child.id()));
        assert!(!child_monitors().contains(&1));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!child_monitors().contains(&child.id()));
    }
}
