//! Makes a Debian root tree of any suite from the mirror that this machine uses.

use crate::checkout;
use crate::packages::{self, Tool, tool};
use crate::progress::{Progress, Step};
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::Command;

const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// Old suites, whose updates are listed in indexes and gone from the mirrors.
const WITHOUT_UPDATES: [&str; 1] = ["bullseye"];

/// The suite in development.
pub const TESTING: &str = "forky";

/// Commands that making a root tree needs on this machine.
pub const TOOLS: &[Tool] = &[
    tool("mmdebstrap", "mmdebstrap"),
    tool(KEYRING, "debian-archive-keyring"),
];

/// The archives from which this machine's apt installs Debian packages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mirror {
    /// Repository of the suites.
    pub main: String,
    /// Repository of the security updates, if the machine uses one.
    pub security: Option<String>,
}

impl Mirror {
    /// Queries apt. Refreshes the package lists as root if apt has none.
    pub fn find(step: &Step) -> Result<Self> {
        if let Some(mirror) = Self::from_apt()? {
            return Ok(mirror);
        }
        if rustix::process::geteuid().is_root() {
            step.command(&mut packages::apt(&["update"]))?;
            if let Some(mirror) = Self::from_apt()? {
                return Ok(mirror);
            }
        }
        bail!("apt knows no Debian archive: check /etc/apt/sources.list*, then run apt-get update")
    }

    fn from_apt() -> Result<Option<Self>> {
        let output = Command::new("apt-get")
            .args([
                "indextargets",
                "--format",
                "$(ORIGIN)|$(LABEL)|$(COMPONENT)|$(REPO_URI)",
            ])
            .arg("Created-By: Packages")
            .output()
            .context("cannot start apt-get")?;
        Ok(Self::parse(&String::from_utf8_lossy(&output.stdout)))
    }

    /// Reads lines of `ORIGIN|LABEL|COMPONENT|URI`.
    fn parse(targets: &str) -> Option<Self> {
        let find = |label: &str| {
            targets.lines().find_map(|line| {
                let mut fields = line.split('|');
                let wanted = [Some("Debian"), Some(label), Some("main")];
                wanted
                    .iter()
                    .all(|w| fields.next() == *w)
                    .then(|| fields.next())?
            })
        };
        Some(Self {
            main: find("Debian")?.to_owned(),
            security: find("Debian-Security").map(str::to_owned),
        })
    }

    /// The sources.list line for `suite` (a codename) alone.
    fn source(&self, suite: &str) -> String {
        format!("deb [signed-by={KEYRING}] {} {suite} main", self.main)
    }

    /// The same for a suite in development, whose index is accepted for a week, because mirrors lag behind.
    fn lagging(&self, suite: &str) -> String {
        self.source(suite).replacen('[', "[check-valid-until=no ", 1)
    }

    /// sources.list lines for `suite` (a codename) with its updates, if mirrors still have them.
    pub fn sources(&self, suite: &str) -> Vec<String> {
        if WITHOUT_UPDATES.contains(&suite) {
            return vec![self.source(suite)];
        }
        if suite == TESTING {
            return vec![self.lagging(suite)];
        }
        let mut lines = vec![
            self.source(suite),
            format!("deb [signed-by={KEYRING}] {} {suite}-updates main", self.main),
        ];
        if let Some(security) = &self.security {
            lines.push(format!(
                "deb [signed-by={KEYRING}] {security} {suite}-security main"
            ));
        }
        lines
    }
}

/// A root tree to make: minbase, no recommended packages, no documentation, debs kept in the cache.
#[derive(Debug, Clone, Copy)]
pub struct Recipe<'a> {
    /// Codename of the suite.
    pub suite: &'a str,
    /// Packages in addition to minbase.
    pub packages: &'a [&'a str],
    /// Packages that are unpacked in separate folders and not installed.
    pub aside: &'a [Aside],
    /// A shell script run on this machine at the end, with the root tree as `$1`.
    pub customize: &'a str,
}

/// A package's files in a separate folder, so that several versions can exist and none is active.
#[derive(Debug, Clone, Copy)]
pub struct Aside {
    /// Codename of the suite that the package comes from.
    pub suite: &'static str,
    /// Name of the package.
    pub package: &'static str,
    /// Path of the package's files within the root tree.
    pub folder: &'static str,
}

impl Aside {
    /// The mmdebstrap hook that unpacks it.
    fn hook(&self) -> String {
        let Self {
            suite,
            package,
            folder,
        } = self;
        format!(
            "--customize-hook=cd \"$(mktemp -d)\" && chmod 755 . \
            && APT_CONFIG=\"$MMDEBSTRAP_APT_CONFIG\" apt-get -q -o APT::Sandbox::User=root download {package}/{suite} \
            && mkdir -p \"$1{folder}\" && dpkg -x ./*.deb \"$1{folder}\" && rm ./*.deb && rmdir \"$PWD\""
        )
    }
}

impl Recipe<'_> {
    /// Makes the tree in the new folder `root`. Needs root.
    pub fn bootstrap(&self, step: &Step, root: &Path) -> Result<()> {
        let mirror = Mirror::find(step)?;
        let debs = debs(self.suite)?;
        let quoted = crate::shell::quote(&debs.to_string_lossy());
        // In a file, because mmdebstrap prints the whole hook when it fails, and hides the reason.
        let customize = tempfile::NamedTempFile::new()?;
        std::fs::write(customize.path(), self.customize)?;
        let script = crate::shell::quote(&customize.path().to_string_lossy());
        let mut command = Command::new("mmdebstrap");
        command
            // With INITRD=No the kernel's hook makes no initrd, which would take longer than the rest.
            .env("INITRD", "No")
            .args(["--variant=minbase", "--mode=auto", "--format=directory"])
            .arg("--aptopt=Apt::Install-Recommends \"false\"")
            .arg("--aptopt=Acquire::Retries \"3\"")
            .arg("--dpkgopt=path-exclude=/usr/share/man/*")
            .arg("--dpkgopt=path-exclude=/usr/share/locale/*")
            .arg("--dpkgopt=path-exclude=/usr/share/doc/*")
            .arg("--dpkgopt=force-unsafe-io")
            .arg("--skip=essential/unlink")
            .arg("--setup-hook=mkdir -p \"$1/var/cache/apt/archives\"")
            .arg(format!("--setup-hook=sync-in {quoted} /var/cache/apt/archives"))
            .arg(format!(
                "--customize-hook=sync-out /var/cache/apt/archives {quoted}"
            ))
            .arg("--customize-hook=rm -f \"$1\"/var/cache/apt/archives/*.deb")
            .args(self.aside.iter().map(Aside::hook))
            .arg(format!("--customize-hook=sh {script} \"$1\""))
            .arg(format!("--include={}", self.packages.join(",")))
            // Only unpacked packages come from other suites.
            .arg(format!("--aptopt=APT::Default-Release \"/^{}/\"", self.suite))
            .arg(self.suite)
            .arg(root)
            .args(mirror.sources(self.suite));
        let mut others: Vec<&str> = self.aside.iter().map(|aside| aside.suite).collect();
        others.retain(|suite| *suite != self.suite);
        others.sort_unstable();
        others.dedup();
        command.args(others.into_iter().map(|suite| mirror.lagging(suite)));
        step.command(&mut command)
    }
}

/// Cache folder of the packages of `suite`.
fn debs(suite: &str) -> Result<PathBuf> {
    checkout::folder(checkout::cache()?.join("debs").join(suite))
}

/// Installs the commands that [`Recipe::bootstrap`] needs.
pub fn ensure_tools(progress: &Progress) -> Result<()> {
    packages::ensure(progress, TOOLS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mirrors_come_from_apt() {
        let targets = "|||https://third.example/apt/\n\
            Node|Node|main|https://node.example/\n\
            Debian|Debian|contrib|http://c.example/\n\
            Debian|Debian|main|http://a.example/debian/\n\
            Debian|Debian-Security|main|http://s.example/sec/\n";
        let mirror = Mirror::parse(targets).expect("found");
        assert_eq!(mirror.main, "http://a.example/debian/");
        assert_eq!(mirror.security.as_deref(), Some("http://s.example/sec/"));
        assert_eq!(mirror.sources("trixie").len(), 3);
        assert_eq!(Mirror::parse("Node|Node|main|https://node.example/\n"), None);
    }
}
