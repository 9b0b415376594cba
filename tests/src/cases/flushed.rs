//! Data that a guest has flushed is in the image, even if its VM is killed.

use crate::harness::context::TestContext;
use crate::harness::manifest::Manifest;
use crate::harness::vm::Vm;
use crate::harness::{Case, SMALL, TIMEOUT, images};
use anyhow::{Context, Result, ensure};
use regex::Regex;
use serde_json::json;
use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Duration;

pub const CASE: Case = Case {
    name: "kill-after-flush",
    about: "kill -9 of the VMM: every block the guest had flushed is in the image, in each cache mode",
    limit: SMALL,
    run,
};

/// Every disk's cache mode, in the order of the guest's names.
const DISKS: [(&str, &str); 3] = [("vda", "none"), ("vdb", "writethrough"), ("vdc", "writeback")];

/// Blocks the guest writes to each disk before it is killed.
const BLOCKS: u32 = 40;

/// Size of a block, as in the small guest's `numbers`.
pub const BLOCK: usize = 4096;
const PLACES: u64 = 1021;
const STRIDE: u64 = 389;

fn run(ctx: &TestContext) -> Result<()> {
    let mut manifest = Manifest::new("flushed");
    for (index, (disk, cache)) in DISKS.into_iter().enumerate() {
        let image = ctx.path(disk);
        File::create(&image)?.set_len(8 << 20)?;
        manifest = manifest
            .claim(disk, disk, &image)
            .set(&format!("/domain/devices/disks/{index}/cache"), json!(cache));
    }
    let manifest = manifest.small(&images::small("6.12")?, "numbers");
    let vm = Vm::start(ctx, &manifest)?;
    vm.console()
        .expect(&format!("husk-flushed: vdc {BLOCKS}\n"), TIMEOUT)?;
    vm.kill("vmmPid")?;
    vm.end(Duration::from_secs(20))?.fails_with(1, &["SIGKILL"])?;
    let said = vm.console().output().all();
    let flushed = flushed(&said)?;
    for (disk, _) in DISKS {
        ctx.part(disk, || {
            let numbers = flushed.get(disk).context("the guest wrote nothing")?;
            ensure!(
                numbers.len() > BLOCKS as usize / 2,
                "only {} blocks",
                numbers.len()
            );
            let image = File::open(ctx.path(disk))?;
            for number in numbers {
                let mut found = vec![0; BLOCK];
                image.read_exact_at(&mut found, place(*number))?;
                ensure!(
                    found == content(disk, *number),
                    "block {number} was flushed and is not there: {:?} …",
                    String::from_utf8_lossy(&found[..32])
                );
            }
            Ok(())
        });
    }
    // Its locks are released: the next VM can use the same images.
    let vm = Vm::start(ctx, &manifest)?;
    vm.expect("husk-flushed: vda 0\n")?;
    vm.discard()
}

/// The numbers of each disk, from complete lines of the console.
fn flushed(said: &str) -> Result<HashMap<String, Vec<u64>>> {
    let line = Regex::new(r"(?m)^husk-flushed: (\w+) (\d+)\n")?;
    let mut found: HashMap<String, Vec<u64>> = HashMap::new();
    for line in line.captures_iter(said) {
        found
            .entry(line[1].to_owned())
            .or_default()
            .push(line[2].parse()?);
    }
    Ok(found)
}

/// Offset of a block in bytes; each number of a test has a different offset.
pub fn place(number: u64) -> u64 {
    number * STRIDE % PLACES * BLOCK as u64
}

/// Content that the guest writes into a block.
pub fn content(disk: &str, number: u64) -> Vec<u8> {
    let line = format!("husk-block {number} of {disk}\n");
    line.bytes().cycle().take(BLOCK).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_lines_count() {
        let said =
            "husk-flushed: vda 0\nnoise husk-flushed: vda 7\nhusk-flushed: vdb 0\nhusk-flushed: vda 12";
        let found = flushed(said).expect("parsed");
        assert_eq!(found["vda"], [0]);
        assert_eq!(found["vdb"], [0]);
    }

    #[test]
    fn blocks_have_different_offsets() {
        let mut places: Vec<u64> = (0..PLACES).map(place).collect();
        places.sort_unstable();
        places.dedup();
        assert_eq!(places.len() as u64, PLACES);
        assert!(places[places.len() - 1] < 8 << 20);
        assert!(content("vda", 3).starts_with(b"husk-block 3 of vda\nhusk-block 3 of vda\n"));
    }
}
