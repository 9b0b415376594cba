//! The end-to-end suite `husk-e2e`: its programs, its cases and their tiers.

use crate::binaries::Profile;
use crate::finish::finish;
use crate::{checkout, lab};
use anyhow::{Context, Result};
use std::fs::File;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use tempfile::TempDir;

/// Prefixes of the names of cases that need the lab: its versions of containerd, or a machine whose systemd and users they
/// may change.
pub const NEED_THE_LAB: [&str; 2] = ["shim-", "apply"];
/// Time limit of one case.
const CASE_LIMIT: Duration = Duration::from_secs(12 * 60);
/// Time limit of one case with many VMs, one after the other.
const LONG_LIMIT: Duration = Duration::from_secs(100 * 60);
/// Expected duration of each case in seconds, in a lab on an idle machine. Used only to order the cases.
const SECONDS: &str = include_str!("seconds.txt");
/// Prefix of the names of folders with copies of the programs.
const PREFIX: &str = "e2e-";
/// Default duration in seconds of a case that has no line in [`SECONDS`].
const UNKNOWN_SECONDS: u32 = 60;

/// The programs that cases run.
const PROGRAMS: [&str; 9] = [
    "husk",
    "husk-monitor",
    "husk-agent",
    "husk-vmm",
    "containerd-shim-husk-v2",
    "husk-e2e",
    "husk-import",
    "husk-flow",
    "husk-vsock",
];

/// Runs `husk-e2e` with the arguments after the first, from a copy of the folder in the first. A program in a shared
/// folder is read again at each start, which takes longer than the start itself.
const FROM_A_COPY: &str = "copy=/var/tmp/husk-${1##*/}
[ -e $copy ] || { rm -rf /var/tmp/husk-e2e-* && cp -r \"$1\" $copy.new && mv $copy.new $copy; } || exit
shift
exec $copy/husk-e2e \"$@\"";

/// A group of cases. A run includes one or more of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tier {
    /// Cases of every run.
    Default,
    /// Cases of `--full`.
    Full,
    /// Cases of `--peers`, with programs built from Go modules.
    Upstream,
    /// Cases of `--kubevirt`, which run on this machine.
    KubeVirt,
    /// Cases of `--kubevirt` that need only KubeVirt's example manifests.
    Examples,
    /// Phases of `cargo xtask reboot`.
    Host,
    /// Cases of `cargo xtask soak`.
    Long,
}

impl Tier {
    /// The option of `husk-e2e` that selects this tier.
    fn option(self) -> Option<&'static str> {
        match self {
            Self::Default => None,
            Self::Full => Some("--full"),
            Self::Upstream => Some("--peers"),
            Self::KubeVirt => Some("--kubevirt"),
            Self::Examples => Some("--examples"),
            Self::Host => Some("--host"),
            Self::Long => Some("--long"),
        }
    }
}

/// A case to run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Case {
    pub name: String,
    pub tier: Tier,
}

impl Case {
    pub fn limit(&self) -> Duration {
        if matches!(self.tier, Tier::Examples | Tier::Host | Tier::Long) {
            LONG_LIMIT
        } else {
            CASE_LIMIT
        }
    }

    /// Expected duration in seconds.
    fn seconds(&self) -> u32 {
        let seconds = SECONDS.lines().find_map(|line| {
            let (name, seconds) = line.split_once(' ')?;
            (name == self.name).then(|| seconds.trim().parse().ok())?
        });
        seconds.unwrap_or(UNKNOWN_SECONDS)
    }
}

/// Copies of the binaries, so that a concurrent build does not change the tested programs.
#[derive(Debug)]
pub struct Suite {
    folder: TempDir,
    /// Locked, so that no other run takes the folder for one that an interrupted run has left.
    _in_use: File,
    /// Programs of `tests/peers`, for [`Tier::Upstream`].
    pub upstream: Option<PathBuf>,
}

impl Suite {
    /// Copies the binaries that `profile` builds.
    pub fn copy(profile: Profile) -> Result<Self> {
        let (folder, in_use) = new_folder(&lab::share()?)?;
        for program in PROGRAMS {
            let built = profile.folder().join(program);
            std::fs::copy(&built, folder.path().join(program))
                .with_context(|| format!("the build made no {}", built.display()))?;
        }
        // Some cases run as other users.
        std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o755))?;
        Ok(Self {
            folder,
            _in_use: in_use,
            upstream: None,
        })
    }

    /// A copy of the folder `from`, as `name` beside the programs.
    pub fn copy_folder(&self, from: &Path, name: &str) -> Result<PathBuf> {
        let to = self.folder.path().join(name);
        std::fs::create_dir(&to)?;
        for entry in std::fs::read_dir(from).with_context(|| from.display().to_string())? {
            let entry = entry?;
            std::fs::copy(entry.path(), to.join(entry.file_name()))
                .with_context(|| entry.path().display().to_string())?;
        }
        Ok(to)
    }

    /// Path of `husk-e2e`.
    fn program(&self) -> PathBuf {
        self.folder.path().join("husk-e2e")
    }

    /// The cases of `tiers` whose name contains `filter`, the longest first.
    pub fn cases(&self, tiers: &[Tier], filter: Option<&str>) -> Result<Vec<Case>> {
        let mut cases = Vec::new();
        for &tier in tiers {
            let listed = Self::listed(&self.program(), tier)?;
            let names = listed.lines().filter_map(|line| line.split_whitespace().next());
            cases.extend(
                names
                    .filter(|name| filter.is_none_or(|filter| name.contains(filter)))
                    .map(|name| Case {
                        name: name.to_owned(),
                        tier,
                    }),
            );
        }
        cases.sort_by_key(|case| std::cmp::Reverse(case.seconds()));
        Ok(cases)
    }

    /// Output of `husk-e2e --list` for `tier`: a name and a description on each line.
    fn listed(program: &Path, tier: Tier) -> Result<String> {
        finish(Command::new(program).args(tier.option()).arg("--list"))
    }

    /// The command that runs `case` alone.
    pub fn command(&self, case: &Case) -> lab::Command {
        self.with_words(case, vec![self.program().to_string_lossy().into_owned()])
    }

    /// The same in a lab, on the lab's own disk.
    pub fn command_in_lab(&self, case: &Case) -> lab::Command {
        let folder = self.folder.path().to_string_lossy();
        let words = ["sh", "-c", FROM_A_COPY, "sh", &folder].map(str::to_owned);
        self.with_words(case, words.into()).in_lab(true)
    }

    fn with_words(&self, case: &Case, mut words: Vec<String>) -> lab::Command {
        words.extend(["--exact".to_owned(), case.name.clone()]);
        words.extend(case.tier.option().map(str::to_owned));
        let mut command = lab::Command::new(words).timeout(case.limit());
        if let Some(upstream) = &self.upstream {
            command
                .env
                .push(("HUSK_PEERS".to_owned(), upstream.to_string_lossy().into_owned()));
        }
        command
    }
}

/// A new folder in `parent`, with the lock on it. Removes those that interrupted runs have left.
fn new_folder(parent: &Path) -> Result<(TempDir, File)> {
    let _lock = checkout::lock(&parent.join("lock"), "copies the programs to test")?;
    for entry in std::fs::read_dir(parent)?.flatten() {
        let is_copy = entry.file_name().to_string_lossy().starts_with(PREFIX);
        if is_copy && File::open(entry.path()).is_ok_and(|folder| folder.try_lock().is_ok()) {
            // It may be root's.
            let _ = checkout::remove(&entry.path());
        }
    }
    let folder = tempfile::Builder::new().prefix(PREFIX).tempdir_in(parent)?;
    let in_use = File::open(folder.path())?;
    in_use.lock()?;
    Ok((folder, in_use))
}

/// Prints the cases of every tier.
pub fn list() -> Result<()> {
    let program = Profile::EndToEnd.folder().join("husk-e2e");
    for (tier, title) in [
        (Tier::Default, "cargo xtask test"),
        (Tier::Full, "cargo xtask test --full"),
        (Tier::Upstream, "cargo xtask test --peers, and --full"),
        (Tier::KubeVirt, "cargo xtask test --kubevirt CHECKOUT"),
        (
            Tier::Examples,
            "cargo xtask test --kubevirt CHECKOUT, without its cluster",
        ),
        (Tier::Host, "cargo xtask reboot, in phases"),
        (Tier::Long, "cargo xtask soak"),
    ] {
        println!("{title}:\n{}", Suite::listed(&program, tier)?);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_folders_of_runs_that_have_ended_are_removed() {
        let parent = tempfile::tempdir().expect("a folder");
        let (used, _lock) = new_folder(parent.path()).expect("a folder");
        let (left, lock) = new_folder(parent.path()).expect("a folder");
        let left = left.keep();
        drop(lock);
        assert!(left.exists());
        new_folder(parent.path()).expect("a folder");
        assert!(used.path().exists() && !left.exists());
    }
}
