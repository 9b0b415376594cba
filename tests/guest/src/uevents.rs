//! `husk-uevents COUNT`: for the guest of a benchmark. Prints `+SERIAL;` when a SCSI disk is added, and `-SERIAL;` when
//! it is removed, until COUNT disks have been removed.
//!
//! It sleeps in between and prints little: polling in the guest, or a byte on a serial line, would cost more time than
//! the measured event.

use anyhow::{Context, Result, bail};
use rustix::net::netlink::{KOBJECT_UEVENT, SocketAddrNetlink};
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, bind, recv, socket_with};
use std::collections::HashMap;
use std::io::Write;

/// Multicast group of the kernel's events, as opposed to udev's.
const KERNEL: u32 = 1;

fn main() -> Result<()> {
    let Some(count) = std::env::args().nth(1).and_then(|word| word.parse().ok()) else {
        bail!("no COUNT");
    };
    let kernel = socket_with(
        AddressFamily::NETLINK,
        SocketType::DGRAM,
        SocketFlags::CLOEXEC,
        Some(KOBJECT_UEVENT),
    )?;
    bind(&kernel, &SocketAddrNetlink::new(0, KERNEL))?;
    tell("ready;\n")?;
    let (mut message, mut serials, mut gone) = ([0; 8192], HashMap::new(), 0_u32);
    while gone < count {
        let (_, size) = recv(&kernel, &mut message, RecvFlags::empty())?;
        match change(&message[..size]) {
            Some(("add", disk)) => {
                let serial = serial(disk)?;
                tell(&format!("+{serial};\n"))?;
                serials.insert(disk.to_owned(), serial);
            }
            Some(("remove", disk)) => {
                let serial = serials.remove(disk).unwrap_or_default();
                tell(&format!("-{serial};\n"))?;
                gone += 1;
            }
            _ => {}
        }
    }
    Ok(())
}

/// The action and the disk in a message about a disk: it starts with `ACTION@PATH`.
fn change(message: &[u8]) -> Option<(&str, &str)> {
    let head = message.split(|byte| *byte == 0).next()?;
    let (action, path) = std::str::from_utf8(head).ok()?.split_once('@')?;
    // A partition is one level deeper.
    let (folder, disk) = path.rsplit_once('/')?;
    (folder.ends_with("/block") && disk.starts_with("sd")).then_some((action, disk))
}

/// The serial number that the kernel has read from the disk.
fn serial(disk: &str) -> Result<String> {
    let page = std::fs::read(format!("/sys/block/{disk}/device/vpd_pg80"))
        .with_context(|| format!("{disk} has no serial number"))?;
    let text = page.get(4..).unwrap_or_default();
    Ok(String::from_utf8_lossy(text).trim().to_owned())
}

/// Writes a line in one write, so that it arrives in one piece.
fn tell(line: &str) -> Result<()> {
    std::io::stdout().lock().write_all(line.as_bytes())?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_about_disks_are_understood() {
        let path = "/devices/pci0000:00/0000:00:01.0/virtio0/host0/target0:0:0/0:0:0:1";
        let message =
            |action: &str, device: &str| format!("{action}@{path}/{device}\0ACTION={action}\0SEQNUM=7\0");
        let told = message("add", "block/sda");
        assert_eq!(change(told.as_bytes()), Some(("add", "sda")));
        for other in ["block/sda/sda1", "scsi_device/0:0:0:1", "bsg/0:0:0:1"] {
            assert_eq!(change(message("add", other).as_bytes()), None);
        }
        assert_eq!(change(b"libudev\0\xfe\xed"), None);
    }
}
