//! The program of the VMM.

use std::env;
use std::fmt;
use std::path::{Path, PathBuf};

/// The VMM's program. Displayed with the variable that chose it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VmmProgram {
    path: PathBuf,
    chosen: bool,
}

impl VmmProgram {
    /// Finds `HUSK_VMM`, else `husk-vmm` beside this executable, else on `PATH`.
    pub fn find() -> Option<VmmProgram> {
        if let Some(path) = env::var_os("HUSK_VMM").filter(|value| !value.is_empty()) {
            return Some(VmmProgram {
                path: path.into(),
                chosen: true,
            });
        }
        let beside = env::current_exe()
            .ok()
            .and_then(|exe| Some(exe.parent()?.to_owned()));
        let path = env::var_os("PATH").unwrap_or_default();
        let directories = beside.into_iter().chain(env::split_paths(&path));
        directories
            .map(|dir| dir.join("husk-vmm"))
            .find(|program| program.is_file())
            .map(VmmProgram::from)
    }

    /// Returns the absolute path: the child starts in another directory.
    pub(super) fn path(&self) -> PathBuf {
        let named_by_directory = self.path.parent().is_some_and(|dir| dir != Path::new(""));
        let absolute = named_by_directory.then(|| std::path::absolute(&self.path).ok());
        absolute.flatten().unwrap_or_else(|| self.path.clone())
    }

    /// The way out if the program is not the VMM. Empty if no variable chose it.
    #[must_use]
    pub fn hint(&self) -> &'static str {
        match self.chosen {
            true => ": set HUSK_VMM to the path of husk-vmm, or leave it out",
            false => "",
        }
    }
}

impl From<PathBuf> for VmmProgram {
    fn from(path: PathBuf) -> VmmProgram {
        VmmProgram { path, chosen: false }
    }
}

impl fmt::Display for VmmProgram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = if self.chosen { "HUSK_VMM=" } else { "" };
        write!(f, "{name}{}", self.path.display())
    }
}
