//! VMs that were begun, and shall not be.

use std::process;
use std::time::Duration;

use husk_monitor::client;
use husk_monitor::state::{RuntimeDir, VmDir};
use husk_proto::shim::v1::KillRequest;
use tokio::time::{Instant, sleep, timeout};

use crate::live_vm;
use crate::vm_ref::VmRef;

/// A VMM that does not end is killed before, and the monitor then puts its network back.
const CLEANUP_TIMEOUT: Duration = Duration::from_secs(10);
/// How often those that are left are looked at.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// A monitor that is told so twice hears it once.
const KILL_TIMEOUT: Duration = Duration::from_secs(1);

/// Ends those of `vms` whose monitors this process started, waits until nothing is left of them, and gives those of
/// which something is.
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
        // A monitor that has no directory yet is about to make one, or to fail.
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

/// The processes that this one started and that have not ended: monitors, and nothing else.
fn child_monitors() -> Vec<u32> {
    let all = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(|pid| is_child(*pid).unwrap_or(false)).collect()
}

fn is_child(pid: u32) -> Option<bool> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // Whatever the program is called, its state and its parent follow the last parenthesis.
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
