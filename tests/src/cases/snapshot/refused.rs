//! Snapshots that are cut off, damaged or of another version.

use super::{SAVE, text};
use crate::harness::context::TestContext;
use crate::harness::manifest::Manifest;
use crate::harness::vm::Vm;
use crate::harness::{TIMEOUT, images};
use anyhow::Result;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// A copy of a snapshot, with a file changed.
fn changed(
    ctx: &TestContext,
    from: &Path,
    name: &str,
    change: impl FnOnce(&Path) -> Result<()>,
) -> Result<String> {
    let to = ctx.path(name);
    let mut copy = Command::new("cp");
    copy.args(["-a", "--sparse=always"]).arg(from).arg(&to);
    ctx.finish(copy, TIMEOUT)?.ok()?;
    change(&to)?;
    Ok(text(&to))
}

pub fn run(ctx: &TestContext) -> Result<()> {
    let manifest = Manifest::new("plain").small(&images::small("6.12")?, "shell");
    let vm = Vm::start(ctx, &manifest)?;
    vm.expect("# $")?;
    let whole = ctx.path("whole");
    let save = ["snapshot", "plain", &text(&whole), "--live", "--checksums"];
    ctx.run_within(&save, SAVE)?
        .says(&["saving memory", "saving rest of memory"])?;
    ctx.run(&["snapshot", "plain", &text(&whole)])?
        .fails_with(1, &[&text(&whole), "empty"])?;
    ctx.run(&["restore", &text(&whole)])?.fails_with(1, &["plain"])?;
    vm.discard()?;

    let restore = |dir: &str, words: &[&str]| -> Result<()> {
        ctx.run_within(&["restore", dir], TIMEOUT)?.fails_with(1, words)?;
        ctx.nothing_left(Duration::from_secs(10))
    };
    let half = changed(ctx, &whole, "half", |dir| {
        Ok(std::fs::remove_file(dir.join("snapshot.json"))?)
    })?;
    restore(&half, &["not a complete snapshot"])?;
    let short = changed(ctx, &whole, "short", |dir| {
        let memory = OpenOptions::new().write(true).open(dir.join("memory"))?;
        Ok(memory.set_len(memory.metadata()?.len() / 2)?)
    })?;
    restore(&short, &["memory", "bytes"])?;
    let state = changed(ctx, &whole, "state", |dir| {
        File::options()
            .write(true)
            .open(dir.join("state.json"))?
            .set_len(100)?;
        Ok(())
    })?;
    restore(&state, &["state.json"])?;
    let later = changed(ctx, &whole, "later", |dir| {
        let file = dir.join("snapshot.json");
        let mut document: serde_json::Value = serde_json::from_slice(&std::fs::read(&file)?)?;
        document["version"] = 99.into();
        Ok(std::fs::write(file, document.to_string())?)
    })?;
    restore(&later, &["version 99"])?;
    restore(&text(&ctx.path("missing")), &["missing"])?;

    let verify = |dir: &str, words: &[&str]| -> Result<()> {
        let answer = ctx.run_within(&["restore", dir, "--verify"], SAVE)?;
        answer.fails_with(1, words)?;
        ctx.nothing_left(Duration::from_secs(10))
    };
    let flipped = changed(ctx, &whole, "flipped", |dir| {
        let memory = OpenOptions::new()
            .read(true)
            .write(true)
            .open(dir.join("memory"))?;
        let at = memory.metadata()?.len() - 1;
        let mut byte = [0];
        memory.read_exact_at(&mut byte, at)?;
        Ok(memory.write_all_at(&[byte[0] ^ 1], at)?)
    })?;
    verify(&flipped, &["checking memory", "flipped/memory: the MiB at byte "])?;
    let bare = changed(ctx, &whole, "bare", |dir| {
        let file = dir.join("snapshot.json");
        let mut document: serde_json::Value = serde_json::from_slice(&std::fs::read(&file)?)?;
        document
            .as_object_mut()
            .and_then(|fields| fields.remove("checksums"));
        Ok(std::fs::write(file, document.to_string())?)
    })?;
    verify(&bare, &["bare has no checksums", "--checksums"])?;

    let vm = Vm::restore_with(ctx, &whole, "plain", &["--verify"])?;
    vm.console().send("echo husk-$((40+2))\n")?;
    vm.expect("husk-42")?;
    vm.discard()
}
