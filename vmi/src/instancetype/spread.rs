//! Preferred topologies of vCPUs.

use crate::field::FieldError;
use crate::types::PreferenceSpec;

/// Values of `spec.cpu.spreadOptions.across`.
pub(crate) const ACROSS: &[&str] = &["SocketsCores", "CoresThreads", "SocketsCoresThreads"];
/// Threads of a core across which vCPUs are spread.
pub(super) const THREADS: u32 = 2;

/// The topology that a preference wants; without one it is sockets.
pub(super) fn topology(preference: Option<&PreferenceSpec>) -> &str {
    let topology = preference.and_then(|p| p.cpu.preferred_cpu_topology.as_deref());
    match topology.unwrap_or("sockets") {
        "preferSockets" => "sockets",
        "preferCores" => "cores",
        "preferThreads" => "threads",
        "preferSpread" => "spread",
        "preferAny" => "any",
        topology => topology,
    }
}

pub(crate) fn is_preferred(preference: &PreferenceSpec) -> bool {
    topology(Some(preference)) == "spread"
}

/// The ratio, and what to spread across.
pub(crate) fn options(preference: &PreferenceSpec) -> (u32, &str) {
    let ratio = match preference.prefer_spread_socket_to_core_ratio {
        0 => 2,
        ratio => ratio,
    };
    let options = &preference.cpu.spread_options;
    let across = options.across.as_deref().unwrap_or("SocketsCores");
    (options.ratio.unwrap_or(ratio), across)
}

/// Checks that the vCPUs of an instance type can be spread.
pub(super) fn check(vcpus: u32, preference: &PreferenceSpec) -> Result<(), FieldError> {
    if !is_preferred(preference) {
        return Ok(());
    }
    let (ratio, across) = options(preference);
    let divides = |vcpus: u32, by: u32| vcpus.checked_rem(by) == Some(0);
    let start = format!("{vcpus} vCPUs provided by the instance type are not divisible by the");
    let ratios =
        format!("Spec.PreferSpreadSocketToCoreRatio or Spec.CPU.PreferSpreadOptions.Ratio of {ratio}");
    let text = match across {
        "SocketsCores" if !divides(vcpus, ratio) => format!("{start} {ratios} provided by the preference"),
        "CoresThreads" if !divides(vcpus, ratio) => format!("{start} number of threads per core {ratio}"),
        "SocketsCoresThreads" if !divides(vcpus, THREADS) || !divides(vcpus / THREADS, ratio) => {
            format!("{start} number of threads per core {THREADS} and {ratios}")
        }
        _ => return Ok(()),
    };
    Err(FieldError::invalid("instancetype.spec.cpu.guest", text))
}
