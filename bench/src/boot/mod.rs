//! `cargo xtask bench boot`: the time from a VMM's start to its guest's user space, and its cost, compared with QEMU.

mod case;
mod exits;
pub mod inside;
mod profile;
mod report;
mod unpacking;

use super::bench_files::{Sources, keep};
use super::cases::BenchCase;
use super::guest::FLOOR_PROGRAM;
use super::measure::{self, Job};
use super::peers::Peers;
use super::record::{self, Record};
use super::svg::Better;
use super::vmm::Vmm;
use anyhow::{Result, ensure};
use inside::Plan;
use profile::Profile;
use std::time::Duration;
use unpacking::{ELF, PACKED, XZ};
use xtask::progress::Progress;
use xtask::{images, packages};

/// Arguments of `cargo xtask bench boot`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Rounds of boots of the same kernel and initrd [default: 10; with --icount, 3]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: Option<u32>,
    /// Rounds of boots of a whole Debian from its disk
    #[arg(long, default_value_t = 3)]
    disk_rounds: u32,
    /// Measure only this case; may be given several times
    #[arg(long, value_name = "CASE", value_parser = Vmm::ALL.map(Vmm::name))]
    only: Vec<String>,
    /// The guest's kernel
    #[arg(long, value_enum, default_value_t)]
    kernel: Kernel,
    /// Boot the kernel unpacked, as an ELF file
    #[arg(long)]
    elf: bool,
    /// Also measure the least program that boots the kernel: no VMM can take less
    #[arg(long, requires = "elf")]
    floor: bool,
    /// Boot the kernel packed by xz, boot it unpacked, and unpack it by xz: Husk may take 1.3 times as long as xz
    #[arg(long, conflicts_with_all = ["elf", "disk_rounds"])]
    unpacking: bool,
    /// Count instructions in place of time, in a machine for each boot: the load of this machine has no influence
    #[arg(long, conflicts_with = "disk_rounds")]
    icount: bool,
    #[command(flatten)]
    peers: Peers,
    /// One round of everything without warm-up, which only shows that the benchmark works
    #[arg(long, conflicts_with_all = ["rounds", "disk_rounds"])]
    quick: bool,
}

#[derive(Debug, Clone, Copy, Default, clap::ValueEnum)]
enum Kernel {
    /// Debian 12's, cloud flavour
    #[default]
    #[value(name = "6.1")]
    Bookworm,
    /// Debian 13's, cloud flavour
    #[value(name = "6.12")]
    Trixie,
}

impl Kernel {
    /// The image with kernel and initrd, and the one with a disk.
    fn images(self) -> [&'static str; 2] {
        match self {
            Self::Bookworm => ["initramfs-6.1", "debian-12-cloud"],
            Self::Trixie => ["initramfs-6.12", "debian-13-cloud"],
        }
    }
}

/// Rounds of profiled boots: their values hardly vary.
const OBSERVED: u32 = 3;

/// Maximum time of a round, on any machine.
const ROUND_LIMIT: Duration = Duration::from_secs(900);

/// Runs `cargo xtask bench boot`.
pub fn run(args: Args) -> Result<()> {
    let progress = Progress::on_stderr();
    let [kernel, disk] = args.kernel.images();
    measure::prepare(&progress, &[kernel, disk], &[measure::QEMU])?;
    let file = if args.elf { ELF } else { "vmlinuz" };
    let mut sources = Sources::new(kernel, file, if args.floor { &[FLOOR_PROGRAM] } else { &[] })?;
    sources.peers = args.peers.staged()?;
    if args.unpacking {
        packages::ensure(&progress, &[XZ])?;
        let elf = sources.kernel.with_file_name(ELF);
        let xz = unpacking::pack(&elf)?;
        let image = std::fs::read(&sources.kernel)?;
        sources.kernel = keep("vmlinuz", &unpacking::with_xz(&image, &xz)?)?;
        sources.others = vec![elf, keep(PACKED, &xz)?];
    }
    let rounds = args.rounds.unwrap_or(if args.icount { 3 } else { 10 });
    let mut cases = Vmm::ALL.to_vec();
    cases.retain(|vmm| vmm.asked_for(&args.peers, args.floor));
    if args.unpacking {
        // The others would run the decompressor in the bzImage.
        cases.retain(|vmm| *vmm == Vmm::Husk);
    }
    cases.retain(|vmm| args.only.is_empty() || args.only.iter().any(|name| name == vmm.name()));
    if args.icount {
        // The bars are relative to q35.
        cases.retain(|vmm| *vmm != Vmm::Microvm);
    }
    ensure!(
        !cases.is_empty(),
        "--only leaves no case: give the program of another VMM, or --floor; --icount has no qemu-microvm"
    );
    let plan = Plan {
        sources,
        disk: images::path(disk)?.join("disk.img"),
        cases,
        rounds: if args.quick { 1 } else { rounds },
        first_line: true,
        unpacking: args.unpacking,
        observed: if args.quick { 1 } else { OBSERVED.min(rounds) },
        disk_rounds: match (args.unpacking, args.quick) {
            (true, _) => 0,
            (_, true) => 1,
            _ => args.disk_rounds,
        },
        thorough: !args.quick,
    };
    let mut record = Record::default();
    let format = match (args.elf, args.unpacking) {
        (true, _) => "ELF",
        (_, true) => "bzImage packed by xz",
        _ => "bzImage",
    };
    record.note("guest", format!("{kernel}, {format}"));
    let mut profiles = Vec::new();
    let measured = if args.icount {
        plan.counted_job().measure(&progress, &mut record)
    } else {
        let job = Job {
            bench: "boot",
            limit: ROUND_LIMIT * (plan.rounds + plan.observed + plan.disk_rounds + 1),
            plan,
            in_lab: false,
        };
        job.measure(&progress, &mut record, |profile: Profile, _| {
            profiles.retain(|known: &Profile| known.case != profile.case);
            profiles.push(profile);
        })
    };
    // Also record a benchmark that ended early: its values are valid.
    let (text, plot) = if args.icount {
        (report::counted(&record), report::counted_plot(&record))
    } else {
        (report::text(&record, &mut profiles), report::plot(&record))
    };
    println!("{text}");
    let is_partial = args.quick || !args.only.is_empty();
    let words = [
        ("6.12", matches!(args.kernel, Kernel::Trixie)),
        ("elf", args.elf),
        ("unpacking", args.unpacking),
        ("icount", args.icount),
        ("quick", is_partial),
    ];
    let name = record::name("boot", &words);
    record.publish(&name, &report::setting(&record), Better::Less, &plot)?;
    measured
}
