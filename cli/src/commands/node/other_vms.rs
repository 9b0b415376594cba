//! VMs without containerd, which may use the same programs: those of `husk apply` and of `husk run`.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::{MAX_NAMED, PROGRAMS};
use crate::failure::Failure;
use crate::machine::unit;

/// Programs that run while a VM does. `husk` itself also runs for other commands.
const OF_VMS: [&str; 2] = ["husk-vmm", "husk-monitor"];

/// Checks that no such VM uses the programs in `bin`, now or at its next start.
pub(super) fn check(bin: &Path) -> Result<(), Failure> {
    check_units(bin)?;
    check_processes(Path::new("/proc"), bin)
}

/// Checks that no VM of `husk apply` uses the programs in `bin` at its next start.
pub(super) fn check_units(bin: &Path) -> Result<(), Failure> {
    unit::files().iter().try_for_each(|file| check_unit(file, bin))
}

fn check_unit(file: &Path, bin: &Path) -> Result<(), Failure> {
    let Ok(text) = fs::read_to_string(file) else {
        return Ok(());
    };
    // systemd is given the path without symbolic links.
    let real = fs::canonicalize(bin).ok();
    let directories = real.iter().map(PathBuf::as_path).chain([bin]);
    let mut programs = directories.flat_map(|directory| PROGRAMS.map(|program| directory.join(program)));
    match programs.find(|program| unit::names(&text, program)) {
        None => Ok(()),
        Some(program) => Err(Failure::Runtime(format!(
            "{} runs VMs by {}: delete these VMs (`husk get vm --all-namespaces` shows them), or the file if there are \
             none, or use --force",
            file.display(),
            program.display()
        ))),
    }
}

fn check_processes(proc: &Path, bin: &Path) -> Result<(), Failure> {
    let id = |path: &Path| fs::metadata(path).ok().map(|meta| (meta.dev(), meta.ino()));
    let programs: Vec<_> = OF_VMS.iter().filter_map(|name| id(&bin.join(name))).collect();
    let processes = fs::read_dir(proc).into_iter().flatten().flatten();
    let mut running: Vec<u32> = processes
        .filter(|process| id(&process.path().join("exe")).is_some_and(|program| programs.contains(&program)))
        .filter_map(|process| process.file_name().to_str()?.parse().ok())
        .collect();
    if running.is_empty() {
        return Ok(());
    }
    running.sort_unstable();
    let named: Vec<_> = running.iter().take(MAX_NAMED).map(u32::to_string).collect();
    Err(Failure::Runtime(format!(
        "VMs run by the programs in {} (processes {}): stop them (`husk list` shows them), or use --force",
        bin.display(),
        named.join(", ")
    )))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn refusal(done: Result<(), Failure>) -> String {
        match done {
            Err(Failure::Runtime(text)) => text,
            _ => String::new(),
        }
    }

    #[test]
    fn a_unit_file_that_names_a_program_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(folder.path()).unwrap();
        let file = root.join("husk@.service");
        assert_eq!(refusal(check_unit(&file, &root)), "");
        fs::create_dir(root.join("bin")).unwrap();
        symlink("bin", root.join("link")).unwrap();
        let husk = root.join("bin/husk");
        fs::write(&file, format!("ExecStart=\"{}\" service %i\n", husk.display())).unwrap();
        for bin in ["bin", "link"] {
            let refused = refusal(check_unit(&file, &root.join(bin)));
            let begin = format!(
                "{} runs VMs by {}: delete these VMs",
                file.display(),
                husk.display()
            );
            assert!(refused.starts_with(&begin), "{refused}");
        }
        assert_eq!(refusal(check_unit(&file, &root)), "");
    }

    #[test]
    fn vms_that_run_are_found() {
        let folder = tempfile::tempdir().unwrap();
        let (bin, proc) = (folder.path().join("bin"), folder.path().join("proc"));
        for name in ["bin", "other", "proc/12", "proc/13", "proc/14", "proc/sys"] {
            fs::create_dir_all(folder.path().join(name)).unwrap();
        }
        for program in ["bin/husk", "bin/husk-vmm", "other/husk-vmm"] {
            fs::write(folder.path().join(program), "").unwrap();
        }
        let runs = |id: &str, program: &str| {
            let exe = proc.join(id).join("exe");
            symlink(folder.path().join(program), exe).unwrap();
        };
        runs("12", "bin/husk");
        runs("13", "other/husk-vmm");
        assert_eq!(refusal(check_processes(&proc, &bin)), "");
        runs("14", "bin/husk-vmm");
        let refused = refusal(check_processes(&proc, &bin));
        assert!(refused.contains("(processes 14): stop them"), "{refused}");
    }
}
