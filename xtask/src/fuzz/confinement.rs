//! Where a fuzz target may write.
//!
//! An input can make a target write anywhere: through a symbolic link that it has created, for example. Landlock allows
//! it to change nothing but its own folders.

use anyhow::{Context, Result, bail};
use landlock::{ABI, AccessFs, Ruleset, RulesetAttr, RulesetCreatedAttr, RulesetStatus, path_beneath_rules};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

/// The newest version of Landlock that is used where the kernel has it.
const VERSION: ABI = ABI::V5;

/// Runs `work` with the command of a target. The command, and everything that `work` starts, can write below `folders`
/// and in a temporary folder of its own in memory.
pub fn confined<T: Send>(
    program: &Path,
    folders: &[&Path],
    work: impl FnOnce(Command) -> Result<T> + Send,
) -> Result<T> {
    let temporary = tempfile::Builder::new()
        .prefix("husk-fuzz-")
        .tempdir_in("/dev/shm")
        .context("cannot create a folder in /dev/shm")?;
    let mut writable: Vec<PathBuf> = folders.iter().map(|folder| folder.to_path_buf()).collect();
    writable.extend([temporary.path().to_owned(), "/dev/null".into()]);
    let mut command = Command::new(program);
    command.env("TMPDIR", temporary.path());
    // The restriction holds for the thread and the processes that it starts, and cannot be lifted.
    thread::scope(|scope| {
        scope
            .spawn(|| {
                restrict(&writable)?;
                work(command)
            })
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

fn restrict(writable: &[PathBuf]) -> Result<()> {
    let access = AccessFs::from_write(VERSION);
    let status = Ruleset::default()
        .handle_access(access)?
        .create()?
        .add_rules(path_beneath_rules(writable, access))?
        .restrict_self()?;
    if status.ruleset == RulesetStatus::NotEnforced && rustix::process::geteuid().is_root() {
        bail!("fuzzing as root needs Landlock, which this kernel does not have: fuzz as another user");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(folders: &[&Path], script: &str) -> bool {
        confined(Path::new("/bin/sh"), folders, |mut command| {
            Ok(command.args(["-c", script]).status()?.success())
        })
        .unwrap()
    }

    #[test]
    fn a_target_writes_to_its_folders_only() {
        let (own, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (inside, outside) = (own.path().join("file"), other.path().join("file"));
        std::fs::write(&outside, "content").unwrap();
        let link = own.path().join("link");
        std::os::unix::fs::symlink(&outside, &link).unwrap();
        let folders = [own.path()];
        assert!(shell(&folders, &format!("echo > {}", inside.display())));
        assert!(shell(&folders, "echo > $TMPDIR/file && echo > /dev/null"));
        for harm in [
            format!("echo > {}", outside.display()),
            format!("echo > {}", link.display()),
            format!("rm {}", outside.display()),
            format!("mkdir {}/folder", other.path().display()),
        ] {
            assert!(!shell(&folders, &harm), "{harm}");
        }
        assert_eq!(std::fs::read_to_string(&outside).unwrap(), "content");
        assert!(shell(&folders, &format!("cat {} > /dev/null", outside.display())));
    }
}
