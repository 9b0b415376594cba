//! The small guest with a network, and commands for it.

use crate::harness::context::TestContext;
use crate::harness::guest::Shell;
use crate::harness::images::{self, Small};
use crate::harness::vm::Vm;
use crate::harness::{flow, initrd};
use anyhow::{Context, Result, ensure};
use std::collections::BTreeMap;
use std::time::Duration;

/// udhcpc's script: records the lease and applies it.
const LEASE: &str = include_str!("lease.sh");

/// For the guest's shell: programs that replace its own commands of those names, and a wait for a command to succeed.
const FUNCTIONS: &str = "\
ip() { /bin/ip \"$@\"; }; ping() { /bin/ping \"$@\"; }; \
comes() { tries=0; until eval \"$1\"; do [ $tries -lt 200 ] || return 1; tries=$((tries + 1)); sleep 0.1; done; }";

/// Time limit of a stream that must arrive.
pub const STREAM: Duration = Duration::from_secs(300);

/// The image, with `husk-flow` and the script of its DHCP client.
pub fn image(ctx: &TestContext) -> Result<Small> {
    let binary = flow::binary();
    let binary = std::fs::read(&binary).with_context(|| format!("no {}", binary.display()))?;
    let files = [
        ("bin/husk-flow", binary.as_slice()),
        ("bin/lease", LEASE.as_bytes()),
    ];
    initrd::with_files(ctx, &images::small("6.12-network")?, &files)
}

/// The shell of a guest with `net,shell` on its command line.
pub fn shell<'v>(vm: &'v Vm<'v>) -> Result<Shell<'v>> {
    let shell = Shell::small(vm)?;
    settle(&shell)?;
    Ok(shell)
}

fn settle(shell: &Shell<'_>) -> Result<()> {
    // The kernel's messages would mix with the replies.
    shell.ok("dmesg -n 1")?;
    shell.ok(FUNCTIONS)?;
    Ok(())
}

/// Requests a lease for `eth0` of a guest with this shell.
pub fn configured(shell: &Shell<'_>) -> Result<Lease> {
    settle(shell)?;
    lease(shell, "eth0")
}

/// The same with a lease for `eth0`, and a server of `husk-flow`.
pub fn ready<'v>(vm: &'v Vm<'v>) -> Result<(Shell<'v>, Lease)> {
    let shell = shell(vm)?;
    let lease = lease(&shell, "eth0")?;
    serve(&shell, flow::PORT)?;
    Ok((shell, lease))
}

/// Starts a server of `husk-flow` in the guest, for both families.
pub fn serve(shell: &Shell<'_>, port: u16) -> Result<()> {
    shell.ok(&format!(
        "husk-flow serve '[::]:{port}' >/flow.{port} 2>&1 & \
         comes 'grep -q listening /flow.{port}'"
    ))?;
    Ok(())
}

/// A DHCP lease: the environment of udhcpc's script.
#[derive(Debug)]
pub struct Lease {
    told: BTreeMap<String, String>,
}

impl Lease {
    /// Checks that `name` has the value `value`.
    pub fn is(&self, name: &str, value: &str) -> Result<()> {
        let seen = self.told.get(name).map_or("", String::as_str);
        ensure!(
            seen == value,
            "{name} is {seen:?} instead of {value:?} in {:?}",
            self.told
        );
        Ok(())
    }
}

/// Requests a lease for `device`. The client keeps running, and renews it on request.
pub fn lease(shell: &Shell<'_>, device: &str) -> Result<Lease> {
    shell.ok(&format!(
        "rm -f /lease.{device}; ip link set dev {device} up && udhcpc -i {device} -n -t 30 -T 1 -p /udhcpc.{device} \
         -s /bin/lease -O mtu -O staticroutes -O search -O lease"
    ))?;
    leased(shell, device)
}

/// The last lease of `device`.
pub fn leased(shell: &Shell<'_>, device: &str) -> Result<Lease> {
    let text = shell.ok(&format!("cat /lease.{device}"))?;
    let told = text
        .lines()
        .filter_map(|line| line.split_once('='))
        .map(|(name, value)| (name.to_owned(), value.trim().to_owned()))
        .collect();
    Ok(Lease { told })
}

/// Checks that the guest can reach `address`.
pub fn pings(shell: &Shell<'_>, address: &str) -> Result<()> {
    shell.ok(&format!("ping -n -c 2 -i 0.3 -W 5 {address}"))?;
    Ok(())
}

/// Moves bytes between the guest and a server outside: `words` are arguments of `husk-flow`.
pub fn request(shell: &Shell<'_>, words: &str) -> Result<String> {
    shell.ok_within(&format!("husk-flow {words}"), STREAM)
}
