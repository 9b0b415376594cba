//! The programs that Husk starts.

use std::env;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// A program of Husk. Displayed with the variable that chose it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Program {
    path: PathBuf,
    /// Its name, and the variable that chose its path.
    chosen: Option<(&'static str, &'static str)>,
}

/// A program was not found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{name} was found neither beside this program nor on PATH: set {variable} to its path")]
pub struct NotFound {
    name: &'static str,
    variable: &'static str,
}

/// A program could not be executed.
#[derive(Debug, thiserror::Error)]
#[error("{program} cannot be started: {cause}{}", program.hint())]
pub struct NotStarted {
    program: Program,
    /// Part of the text, before the hint.
    cause: io::Error,
}

impl Program {
    /// The VMM: `HUSK_VMM`, else `husk-vmm` beside this executable, else on `PATH`.
    pub fn vmm() -> Result<Program, NotFound> {
        Program::find("husk-vmm", "HUSK_VMM")
    }

    /// The monitor: `HUSK_MONITOR`, else `husk-monitor` beside this executable, else on `PATH`.
    pub fn monitor() -> Result<Program, NotFound> {
        Program::find("husk-monitor", "HUSK_MONITOR")
    }

    /// The program that pulls images and fills volumes: `HUSK_IMPORT`, else `husk-import` beside this executable, else
    /// on `PATH`.
    pub fn import() -> Result<Program, NotFound> {
        Program::find("husk-import", "HUSK_IMPORT")
    }

    fn find(name: &'static str, variable: &'static str) -> Result<Program, NotFound> {
        if let Some(path) = env::var_os(variable).filter(|value| !value.is_empty()) {
            return Ok(Program {
                path: path.into(),
                chosen: Some((name, variable)),
            });
        }
        let beside = env::current_exe()
            .ok()
            .and_then(|exe| Some(exe.parent()?.to_owned()));
        let path = env::var_os("PATH").unwrap_or_default();
        let directories = beside.into_iter().chain(env::split_paths(&path));
        directories
            .map(|dir| dir.join(name))
            .find(|program| program.is_file())
            .map(Program::from)
            .ok_or(NotFound { name, variable })
    }

    /// The path, absolute unless it is a name for PATH: a child may start in another directory.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        let named_by_directory = self.path.parent().is_some_and(|dir| dir != Path::new(""));
        let absolute = named_by_directory.then(|| std::path::absolute(&self.path).ok());
        absolute.flatten().unwrap_or_else(|| self.path.clone())
    }

    /// The error that `cause` kept it from being executed.
    #[must_use]
    pub fn not_started(&self, cause: io::Error) -> NotStarted {
        NotStarted {
            program: self.clone(),
            cause,
        }
    }

    /// The end of an error text, which tells the user to correct the variable that chose the path. Empty if none did.
    #[must_use]
    pub fn hint(&self) -> String {
        self.chosen.map_or(String::new(), |(name, variable)| {
            format!(": set {variable} to the path of {name}, or leave it out")
        })
    }
}

impl From<PathBuf> for Program {
    fn from(path: PathBuf) -> Program {
        Program { path, chosen: None }
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some((_, variable)) = self.chosen {
            write!(f, "{variable}=")?;
        }
        write!(f, "{}", self.path.display())
    }
}
