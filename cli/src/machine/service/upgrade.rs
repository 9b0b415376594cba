//! An upgrade of Husk while a VM runs.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Link to the program of this process.
pub(super) const PROGRAM: &str = "/proc/self/exe";

/// True if the file that the link leads to was removed, and another has its path.
pub(super) fn is_replaced(program: &Path) -> bool {
    let Ok(target) = fs::read_link(program) else {
        return false;
    };
    let path = target.as_os_str().as_bytes().strip_suffix(b" (deleted)");
    path.is_some_and(|path| Path::new(OsStr::from_bytes(path)).is_file())
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_program_is_replaced_when_another_has_its_path() {
        let folder = tempfile::tempdir().unwrap();
        let [program, new] = ["program", "new"].map(|name| folder.path().join(name));
        for path in [&program, &new] {
            fs::copy("/bin/sleep", path).unwrap();
        }
        let mut process = Command::new(&program).arg("60").spawn().unwrap();
        let link = Path::new("/proc").join(process.id().to_string()).join("exe");
        let runs = is_replaced(&link);
        fs::rename(&new, &program).unwrap();
        let replaced = is_replaced(&link);
        fs::remove_file(&program).unwrap();
        let removed = is_replaced(&link);
        process.kill().unwrap();
        process.wait().unwrap();
        assert_eq!((runs, replaced, removed), (false, true, false));
    }
}
