//! Guest kernels and disk images, built once from Debian packages and cached by a hash of their recipes; and the
//! container image of `deploy/`.
//!
//! A guest image is a folder `images/NAME` in the cache: with `disk.img`, a whole disk, or with `vmlinuz`,
//! `vmlinux` and `initrd`.

pub mod containers;
mod disk;
mod recipe;
mod tree;

use crate::progress::Progress;
use crate::{checkout, debian};
use anyhow::{Context, Result, bail};
use recipe::Recipe;
use std::path::PathBuf;

/// Arguments of `cargo xtask images`.
#[derive(clap::Args, Debug)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Args {
    #[command(subcommand)]
    kind: Option<Kind>,
    /// Images to make; all if none is named
    names: Vec<String>,
    /// List the images and their paths, and make none
    #[arg(long)]
    list: bool,
}

#[derive(clap::Subcommand, Debug)]
enum Kind {
    /// Packs husk-agent and the programs of a node as target/images/husk-agent.tar, without Docker
    Containers(containers::Args),
}

/// Runs `cargo xtask images`.
pub fn run(args: Args) -> Result<()> {
    if let Some(Kind::Containers(args)) = &args.kind {
        return containers::run(args);
    }
    if args.list {
        for recipe in recipe::ALL {
            let place = match path(recipe.name) {
                Ok(folder) => folder.display().to_string(),
                Err(_) => "not made yet".to_owned(),
            };
            println!("{:<18} {}\n{:<18} {place}", recipe.name, recipe.about, "");
        }
        return Ok(());
    }
    let names: Vec<&str> = args.names.iter().map(String::as_str).collect();
    let progress = Progress::on_stderr();
    if names.is_empty() {
        ensure_all(&progress)
    } else {
        ensure(&progress, &names)
    }
}

/// Images that only cases of `cargo xtask test --full` and `cargo xtask soak` boot.
const FULL_TIER: [&str; 6] = [
    "initramfs-5.10-disks",
    "initramfs-testing-disks",
    "initramfs-6.1-disks",
    "debian-12-cloud",
    "debian-13-generic",
    "debian-13-bls",
];

/// Makes every guest image that the tests need, unless it is in the cache.
pub fn ensure_all(progress: &Progress) -> Result<()> {
    let names: Vec<&str> = recipe::ALL.iter().map(|recipe| recipe.name).collect();
    ensure(progress, &names)
}

/// Makes the guest images that the default tier of the tests needs, unless they are in the cache.
pub fn ensure_default(progress: &Progress) -> Result<()> {
    let default = |recipe: &&Recipe| !FULL_TIER.contains(&recipe.name);
    let names: Vec<&str> = recipe::ALL
        .iter()
        .filter(default)
        .map(|recipe| recipe.name)
        .collect();
    ensure(progress, &names)
}

/// Makes the images called `names`, unless they are in the cache.
///
/// # Errors
/// If there is no such image, or it has to be made and this is not root.
pub fn ensure(progress: &Progress, names: &[&str]) -> Result<()> {
    let mut recipes = Vec::new();
    for name in names {
        let recipe = find(name)?;
        if !current(recipe)? {
            recipes.push(recipe);
        }
    }
    recipe::groups(recipes)
        .iter()
        .try_for_each(|group| make(progress, group))
}

/// The folder of the image called `name`, made by the current recipe.
///
/// # Errors
/// If it has not been made.
pub fn path(name: &str) -> Result<PathBuf> {
    if !current(find(name)?)? {
        bail!("the image {name} has not been made yet: run cargo xtask images {name} as root");
    }
    Ok(folder()?.join(name))
}

/// The folder that holds one folder for each image.
fn folder() -> Result<PathBuf> {
    checkout::folder(checkout::cache()?.join("images"))
}

fn find(name: &str) -> Result<&'static Recipe> {
    recipe::ALL
        .iter()
        .find(|recipe| recipe.name == name)
        .with_context(|| {
            let names: Vec<&str> = recipe::ALL.iter().map(|recipe| recipe.name).collect();
            format!("no image is called {name}; there are {}", names.join(", "))
        })
}

/// True if the cache holds the image of this checkout's recipe.
fn current(recipe: &Recipe) -> Result<bool> {
    let marker = folder()?.join(recipe.name).join("recipe");
    Ok(std::fs::read_to_string(marker).is_ok_and(|text| text == hash(recipe)))
}

fn hash(recipe: &Recipe) -> String {
    recipe.hash().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Makes the images of `group`, which share a root tree.
fn make(progress: &Progress, group: &[&Recipe]) -> Result<()> {
    let folder = folder()?;
    let _lock = checkout::lock(&folder.join("lock"), "makes guest images")?;
    let mut missing = Vec::new();
    for recipe in group {
        if !current(recipe)? {
            missing.push(*recipe);
        }
    }
    let names: Vec<&str> = missing.iter().map(|recipe| recipe.name).collect();
    if names.is_empty() {
        return Ok(());
    }
    debian::ensure_tools(progress)?;
    if !rustix::process::geteuid().is_root() {
        bail!("guest images are made by root, once: run sudo --preserve-env=HOME,PATH cargo xtask images");
    }
    let aside = folder.join("unfinished");
    checkout::remove(&aside)?;
    std::fs::create_dir(&aside)?;
    let what = if names.len() == 1 { "image" } else { "images" };
    let step = progress.step(format!("making the guest {what} {}", names.join(", ")));
    recipe::build(&missing, &step, &aside)?;
    for recipe in missing {
        let made = aside.join(recipe.name);
        std::fs::write(made.join("recipe"), hash(recipe))?;
        let place = folder.join(recipe.name);
        checkout::remove(&place)?;
        std::fs::rename(&made, &place)?;
    }
    checkout::remove(&aside)?;
    step.done();
    Ok(())
}
