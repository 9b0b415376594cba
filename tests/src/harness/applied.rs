//! VMs that are applied, by a user who has logged in to the registry.

use super::context::{CommandResult, TestContext};
use super::registry::{self, sh};
use super::{TIMEOUT, until};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::path::Path;

/// Makes the user trust the registry's certificate.
pub fn trust(ctx: &TestContext) -> Result<()> {
    let trusted = ctx
        .path("home/.config/containers/certs.d")
        .join(registry::ADDRESS);
    std::fs::create_dir_all(&trusted)?;
    std::fs::copy(ctx.path("tls.crt"), trusted.join("ca.crt"))?;
    Ok(())
}

/// A `husk` command of the user.
pub fn husk(ctx: &TestContext, words: &[&str]) -> Result<CommandResult> {
    let mut command = ctx.husk(words);
    command
        .env("HOME", ctx.path("home"))
        .env("REGISTRY_AUTH_FILE", ctx.path("auth.json"));
    ctx.finish(command, TIMEOUT)
}

/// `status` of a VM.
pub fn status(ctx: &TestContext, name: &str) -> Result<Value> {
    Ok(ctx.json(&["get", "vm", name, "-o", "json"])?["status"].take())
}

/// Waits for a `printableStatus`.
pub fn until_status(ctx: &TestContext, name: &str, wanted: &str) -> Result<()> {
    until(|| Ok(status(ctx, name)?["printableStatus"] == wanted))
        .with_context(|| format!("{name} is not {wanted}: {:?}", status(ctx, name)))
}

/// Checks that no object, volume, unit or file of a VM is left.
pub fn removed(ctx: &TestContext) -> Result<()> {
    let left = sh(
        ctx,
        "find data/objects data/volumes -type f -o -name '*:*'; ls run",
    )?;
    let left: Vec<&str> = left.lines().filter(|line| !line.ends_with("/.lock")).collect();
    ensure!(left.is_empty(), "{left:?}");
    ensure!(
        !Path::new("/etc/systemd/system/husk@.service").exists(),
        "the unit file is left"
    );
    let units = sh(
        ctx,
        "systemctl list-units --all --plain --no-legend 'husk@*' 'husk-import@*'",
    )?;
    ensure!(units.trim().is_empty(), "{units}");
    Ok(())
}
