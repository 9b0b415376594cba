//! The part of the demonstration that runs where KVM is.

use super::guest::{Guest, moment};
use super::place::Place;
use super::show::Message;
use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Parameters of the demonstration.
#[derive(Debug, Serialize, Deserialize)]
pub struct Plan {
    /// Objects to apply.
    pub manifest: PathBuf,
    /// The root disk as a container image.
    pub archive: PathBuf,
}

/// The VM's name in its manifest, and its user.
const NAME: &str = "demo";
const USER: &str = "debian";

/// Prints nothing if no unit and no file of objects, claims, images and VMs is left.
const LEFT: &str = "systemctl list-units --all --plain --no-legend 'husk@*' 'husk-import@*'; \
                    find data -type f -not -name .lock";

/// Shows the `plan`.
pub fn run(plan: &Plan) -> Result<()> {
    let manifest = std::fs::read_to_string(&plan.manifest)
        .with_context(|| format!("cannot read {}", plan.manifest.display()))?;
    let password = password(&manifest).context("the manifest sets no password")?;
    let mut place = Place::make(&plan.manifest, &plan.archive)?;

    heading("A registry with TLS and a password, filled by skopeo");
    place.start_registry()?;
    place.shows(
        "skopeo copy -q --insecure-policy --preserve-digests --dest-creds demo:husk oci-archive:debian.tar \
         docker://localhost:5443/debian:13",
    )?;

    heading("A VirtualMachine with its Secrets and a claim is applied");
    let apply = || place.shows("husk apply -f demo-apply.yaml");
    let mut guest = Guest::started(&place, NAME, apply)?;
    kernel(&mut guest)?;
    boots(&mut guest)?;
    place.shows("husk get vm; husk get pvc")?;
    guest.console.log_in(USER, password)?;
    // The kernel's messages would mix with the output of commands.
    guest.console.run("sudo dmesg --console-off")?;
    guest.shows("lsblk -o NAME,SIZE,SERIAL,MOUNTPOINTS")?;

    heading("A disk is plugged: it is added to the manifest, and that is applied again");
    place.shows("sed -i 's/^#+//' demo-apply.yaml; husk diff -f demo-apply.yaml | grep '^[+-]'")?;
    apply()?;
    guest
        .console
        .run("until lsblk -no SERIAL | grep -q plugged; do sleep 0.2; done")?;
    guest.shows("lsblk -o NAME,SIZE,SERIAL,MOUNTPOINTS")?;
    drop(guest);

    heading("A restart");
    let mut guest = Guest::started(&place, NAME, || place.shows("husk restart demo"))?;
    kernel(&mut guest)?;
    drop(guest);

    heading("Deletion");
    place.shows("husk delete -f demo-apply.yaml")?;
    place.shows("husk get vm; husk get pvc; husk get secret")?;
    place.shows("husk images rm localhost:5443/debian:13")?;
    let left = place.shows(LEFT)?;
    ensure!(left.is_empty(), "something is left");
    heading("Nothing is left: no VM, no object, no claim, no unit");
    Ok(())
}

fn heading(text: &str) {
    Message::Heading(text.to_owned()).tell();
}

/// Shows the guest's boot until its init starts.
fn kernel(guest: &mut Guest) -> Result<()> {
    for (words, what, program) in [
        ("Linux version ", "kernel", "Linux"),
        ("systemd[1]: systemd ", "init", "systemd"),
    ] {
        let (_, seconds) = guest.until(&[words])?;
        let version = guest.console.rest_of_line()?;
        let version = version.split(' ').next().unwrap_or_default();
        moment(seconds, what, &format!("{program} {version}"));
    }
    Ok(())
}

/// Shows the rest of the boot until cloud-init is done and a login is possible.
fn boots(guest: &mut Guest) -> Result<()> {
    // These lines come in any order.
    let mut awaited = vec![
        ("login: ", "login prompt", "on ttyS0"),
        ("first boot done", "first boot's command", "from the Secret"),
        (" finished at ", "cloud-init done", ""),
    ];
    while !awaited.is_empty() {
        let words: Vec<&str> = awaited.iter().map(|(words, _, _)| *words).collect();
        let (which, seconds) = guest.until(&words)?;
        let (_, what, more) = awaited.remove(which);
        moment(seconds, what, more);
    }
    Ok(())
}

/// The password that cloud-init sets.
fn password(manifest: &str) -> Option<&str> {
    manifest
        .lines()
        .find_map(|line| line.trim().strip_prefix("password:"))
        .map(str::trim)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_manifest_has_a_password() {
        let path = crate::checkout::root().join("tests/manifests/demo-apply.yaml");
        let manifest = std::fs::read_to_string(path).expect("the manifest");
        assert_eq!(password(&manifest), Some("husk"));
        assert_eq!(password("spec: {}"), None);
    }
}
