//! `cargo xtask bench pull`: the time to pull an image and unpack its disk, compared with skopeo and tar.

pub mod inside;

use super::figures;
use super::limits::{Limit, held, panels};
use super::measure::{self, Job};
use super::record::{self, Record};
use super::svg::Better;
use super::table::join;
use anyhow::Result;
use inside::{HUSK, METRICS, PEER, Plan, WHOLE};
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::time::Duration;
use xtask::progress::Progress;
use xtask::{checkout, container_image};

/// Arguments of `cargo xtask bench pull`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Rounds of both cases
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// One round with a small image, which only shows that the benchmark works
    #[arg(long, conflicts_with = "rounds")]
    quick: bool,
}

/// Maximum time of a round, on any machine.
const ROUND_LIMIT: Duration = Duration::from_secs(900);
const LIMITS: [Limit; 1] = [Limit::at_most(HUSK, WHOLE, "pull and unpack", 1.1).times(PEER)];

/// Runs `cargo xtask bench pull`.
pub fn run(args: Args) -> Result<()> {
    let progress = Progress::on_stderr();
    measure::prepare(&progress, &[], &[])?;
    let size_mib = if args.quick { 16 } else { 1024 };
    let share = checkout::folder(checkout::target().join("lab/share"))?;
    let folder = tempfile::Builder::new().prefix("pull.").tempdir_in(share)?;
    let archive = folder.path().join("image.tar");
    let step = progress.step("packing the image");
    image(folder.path(), size_mib, &archive)?;
    step.done();
    let plan = Plan {
        release: checkout::release(),
        archive,
        size_mib,
        rounds: if args.quick { 1 } else { args.rounds },
    };
    let mut record = Record::default();
    let job = Job {
        bench: "pull",
        limit: ROUND_LIMIT * (plan.rounds + 1),
        plan,
        // It always has the registry and skopeo.
        in_lab: true,
    };
    let measured = job.measure(&progress, &mut record, |(), _| {});
    let setting = format!(
        "an image with one layer, packed by gzip, and a disk of {} MiB in it; {}",
        record.setting("disk_mib"),
        record.machine()
    );
    let base = |case: &str| (case == HUSK).then_some(PEER);
    let table = figures::medians(&record, "median (÷ peer)", &[HUSK, PEER], base, METRICS);
    println!("{}", join([setting.clone(), table, held(&record, &LIMITS)]));
    let name = record::name("pull", &[("quick", args.quick)]);
    let panels = panels(&record, &LIMITS, &[HUSK, PEER], [METRICS[0]]);
    record.publish(&name, &setting, Better::Less, &panels)?;
    measured
}

/// Packs a disk of `size_mib` of which half is random bytes, a quarter text and a quarter zeros.
fn image(folder: &Path, size_mib: u64, archive: &Path) -> Result<()> {
    let tree = folder.join("tree");
    std::fs::create_dir_all(tree.join("disk"))?;
    let mut disk = File::create(tree.join("disk/disk.img"))?;
    let quarter = size_mib << 18;
    io::copy(&mut File::open("/dev/urandom")?.take(2 * quarter), &mut disk)?;
    let text = b"Lines of a log file, which say much the same again and again, as files on disks do.\n";
    let lines = usize::try_from(quarter)? / text.len();
    io::copy(&mut text.repeat(lines).as_slice(), &mut disk)?;
    disk.set_len(size_mib << 20)?;
    drop(disk);
    container_image::pack(&tree, "localhost/pull:1", &["/none"], archive, true)?;
    std::fs::remove_dir_all(tree)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bar_is_for_the_whole_time() {
        let verdict = |husk| {
            let record = Record::example([(HUSK, WHOLE, husk), (PEER, WHOLE, 10.0)]);
            held(&record, &LIMITS)
        };
        assert_eq!(
            verdict(11.2),
            "MISSED  pull and unpack  1.12  ≤ 1.10 × skopeo+tar"
        );
        assert!(verdict(10.9).starts_with("ok"));
        assert_eq!(held(&Record::default(), &LIMITS), "");
    }

    #[test]
    fn the_image_has_a_disk_of_the_size() {
        let folder = tempfile::tempdir().expect("a folder");
        let archive = folder.path().join("image.tar");
        image(folder.path(), 1, &archive).expect("packed");
        let packed = archive.metadata().expect("an archive").len();
        assert!((1 << 19..3 << 18).contains(&packed), "{packed}");
    }
}
