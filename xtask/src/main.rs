//! Everything one does with this checkout: test, measure, show, and the lab it all runs in.

mod bench;
mod demo;
mod images;
mod progress;

use anyhow::Result;
use clap::Parser;

/// Works on this checkout.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", version, arg_required_else_help = true)]
enum Xtask {
    /// Makes guest kernels and disk images
    Images(images::Args),
    /// Measures Husk beside QEMU
    Bench(bench::Args),
    /// Boots a Debian from a manifest and shows it
    Demo(demo::Args),
}

fn main() -> Result<()> {
    match Xtask::parse() {
        Xtask::Images(args) => images::run(args),
        Xtask::Bench(args) => bench::run(args),
        Xtask::Demo(args) => demo::run(args),
    }
}
