//! VMs without containerd, which may use the same programs: those of `husk apply` and of `husk run`.

use std::fs::{self, File};
use std::io::Read;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::{MAX_NAMED, PROGRAMS};
use crate::failure::Failure;
use crate::machine::unit;

/// Programs that run while a VM does. `husk` itself also runs for other commands.
const OF_VMS: [&str; 2] = ["husk-vmm", "husk-monitor"];

/// Bytes of a unit file that are read.
const MAX_UNIT_FILE: u64 = 64 << 10;

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
    let Some(text) = text(file) else {
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

/// The text of a unit file; none if it is not one that Husk writes. Each user can put anything at its path, such as a
/// pipe or a link to a device.
fn text(file: &Path) -> Option<String> {
    // To open a pipe blocks, and to open a device may start it.
    let found = File::options()
        .read(true)
        .custom_flags(libc::O_PATH)
        .open(file)
        .ok()?;
    if !found.metadata().ok()?.is_file() {
        return None;
    }
    let file = File::open(format!("/proc/self/fd/{}", found.as_raw_fd())).ok()?;
    let mut text = Vec::new();
    file.take(MAX_UNIT_FILE).read_to_end(&mut text).ok()?;
    Some(String::from_utf8_lossy(&text).into_owned())
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

    use rustix::fs::{CWD, FileType, Mode, mknodat};

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
    fn what_is_no_unit_file_is_not_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let [pipe, zero, link] = ["pipe", "zero", "link"].map(path);
        mknodat(CWD, &pipe, FileType::Fifo, Mode::RWXU, 0).unwrap();
        symlink("/dev/zero", &zero).unwrap();
        fs::write(path("file"), format!("{}\n", path("husk").display())).unwrap();
        symlink("file", &link).unwrap();
        for file in [&pipe, &zero, &path("folder")] {
            assert_eq!(refusal(check_unit(file, folder.path())), "", "{}", file.display());
        }
        for file in [&path("file"), &link] {
            assert_ne!(refusal(check_unit(file, folder.path())), "");
        }
        fs::write(path("file"), vec![b'#'; 1 << 20]).unwrap();
        assert_eq!(text(&path("file")).map(|text| text.len()), Some(64 << 10));
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
