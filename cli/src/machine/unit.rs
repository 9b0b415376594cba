//! The unit file `husk@.service`, of which each VM of `husk apply` is an instance.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::iter;
use std::path::{Path, PathBuf};

use husk_images::data_directory;

use super::systemd::Systemd;
use crate::failure::Failure;

const NAME: &str = "husk@.service";
/// Directory of the units of the machine.
const SYSTEM: &str = "/etc/systemd/system";
/// Directory of a user's units, in the folder of his configuration.
const OF_USER: &str = "systemd/user";
/// First line of a file that `husk` may replace.
const MARK: &str = "# Written by `husk apply`, which replaces it.";
/// Variables that change where `husk` and `husk-import` find files, credentials and proxies. The processes of VMs get
/// those of `husk apply`.
const VARIABLES: [&str; 17] = [
    "HUSK_DATA_DIR",
    "HUSK_SCRATCH_DIR",
    "HUSK_RUNTIME_DIR",
    "HUSK_VMM",
    "HUSK_IMPORT",
    "HUSK_KVM",
    "HOME",
    "XDG_DATA_HOME",
    "XDG_CONFIG_HOME",
    "REGISTRY_AUTH_FILE",
    "DOCKER_CONFIG",
    "HTTPS_PROXY",
    "HTTP_PROXY",
    "NO_PROXY",
    "https_proxy",
    "http_proxy",
    "no_proxy",
];

/// The variables that are set. A relative path is made absolute. A proxy with a password is left out, because everyone
/// can read units.
pub(super) fn environment() -> impl Iterator<Item = (&'static str, String)> {
    let set = |name: &'static str| Some((name, recorded(name, std::env::var(name).ok()?)?));
    VARIABLES.into_iter().filter_map(set)
}

/// The value of a variable as it is recorded, if it is.
fn recorded(name: &str, value: String) -> Option<String> {
    if name.to_ascii_uppercase().ends_with("PROXY") {
        return (!value.is_empty() && !value.contains('@')).then_some(value);
    }
    // A program without a folder is looked for on PATH.
    if matches!(name, "HUSK_VMM" | "HUSK_IMPORT") && !value.is_empty() && !value.contains('/') {
        return Some(value);
    }
    // It fails for an empty path.
    let path = std::path::absolute(Path::new(&value)).ok()?;
    path.into_os_string().into_string().ok()
}

/// Writes the unit file unless it is as it should be. A file that a person or a package wrote stays.
pub(crate) fn install(systemd: Systemd) -> Result<(), Failure> {
    let directory = directory(systemd)?;
    let target = match systemd.is_user() {
        true => "default.target",
        false => "multi-user.target",
    };
    let mounts = match systemd.is_user() {
        // The manager of a user does not mount what is in /etc/fstab.
        true => BTreeSet::new(),
        false => mounted(&data_directory()?),
    };
    let text = text(target, &mounts, &program()?, &environment().collect::<Vec<_>>());
    match write(&directory, &text)? {
        true => systemd.reload(),
        false => Ok(()),
    }
}

/// Writes the file to a directory unless it is as it should be, or not Husk's. True if it has changed.
fn write(directory: &Path, text: &str) -> Result<bool, Failure> {
    let path = directory.join(NAME);
    match fs::read_to_string(&path) {
        Ok(old) if old == text || !old.starts_with(MARK) => return Ok(false),
        _ => {}
    }
    let failed = |path: &Path| Failure::at(format!("write {}", path.display()));
    fs::create_dir_all(directory).map_err(failed(directory))?;
    // Another command may write the file at the same time.
    let new = directory.join(format!(".{NAME}.{}.new", uuid::Uuid::new_v4()));
    let written = fs::write(&new, text)
        .and_then(|()| fs::File::open(&new)?.sync_all())
        .and_then(|()| fs::rename(&new, &path));
    written.map_err(|error| {
        let _ = fs::remove_file(&new);
        failed(&path)(error)
    })?;
    Ok(true)
}

/// The paths whose file systems a VM needs. Without that of the claims, a DataVolume would be filled again, below the
/// mount point.
fn mounted(data: &Path) -> BTreeSet<PathBuf> {
    let paths = [data.to_owned(), data.join("volumes")];
    // systemd does not follow links.
    let targets = paths
        .clone()
        .into_iter()
        .filter_map(|path| fs::canonicalize(path).ok());
    let absolute = paths.iter().filter_map(|path| std::path::absolute(path).ok());
    absolute.chain(targets).collect()
}

/// Removes the unit file, if `husk` wrote it.
pub(crate) fn remove(systemd: Systemd) -> Result<(), Failure> {
    let path = directory(systemd)?.join(NAME);
    if fs::read_to_string(&path).is_ok_and(|text| text.starts_with(MARK)) {
        fs::remove_file(&path).map_err(Failure::at(format!("remove {}", path.display())))?;
        systemd.reload()?;
    }
    Ok(())
}

/// Path of this program. It stays when the file is replaced by an upgrade.
pub(crate) fn program() -> Result<PathBuf, Failure> {
    std::env::current_exe().map_err(Failure::at("find this program"))
}

/// The paths that the file may have: for VMs of root, of this user, and of the users in `/etc/passwd`.
pub(crate) fn files() -> BTreeSet<PathBuf> {
    let passwd = fs::read_to_string("/etc/passwd").unwrap_or_default();
    let own = user_directory().map(|directory| directory.join(NAME));
    of_machine(&passwd).chain(own).collect()
}

/// The paths that the file has for VMs of root, and of the users in this text of `/etc/passwd`.
fn of_machine(passwd: &str) -> impl Iterator<Item = PathBuf> {
    let homes = passwd.lines().filter_map(|user| user.split(':').nth(5));
    let homes = homes.map(Path::new).filter(|home| home.is_absolute());
    let of_users = homes.map(|home| home.join(".config").join(OF_USER));
    iter::once(PathBuf::from(SYSTEM))
        .chain(of_users)
        .map(|directory| directory.join(NAME))
}

/// True if a unit file with this text names the program.
pub(crate) fn names(text: &str, program: &Path) -> bool {
    let program = escaped(&program.display().to_string());
    // In front of a path are quotes, the `=` of a setting or variable, or special characters of ExecStart.
    let begins = |c: char| c.is_whitespace() || "\"'=@-:+!|".contains(c);
    let ends = |c: char| c.is_whitespace() || "\"'".contains(c);
    let mut lines = text.lines().filter(|line| !line.starts_with(['#', ';']));
    lines.any(|line| {
        line.match_indices(&program).any(|(at, _)| {
            let after = &line[at + program.len()..];
            line[..at].chars().next_back().is_none_or(begins) && after.chars().next().is_none_or(ends)
        })
    })
}

fn directory(systemd: Systemd) -> Result<PathBuf, Failure> {
    #[cfg(test)]
    if let Some(directory) = super::fake_systemd::unit_directory() {
        return Ok(directory);
    }
    match systemd.is_user() {
        true => user_directory().ok_or_else(|| Failure::Runtime("HOME is not set".into())),
        false => Ok(SYSTEM.into()),
    }
}

fn user_directory() -> Option<PathBuf> {
    let set = |name| {
        std::env::var_os(name)
            .map(PathBuf::from)
            .filter(|path| path.is_absolute())
    };
    let configuration = set("XDG_CONFIG_HOME").or_else(|| Some(set("HOME")?.join(".config")))?;
    Some(configuration.join(OF_USER))
}

/// A text within double quotes.
fn escaped(text: &str) -> String {
    text.replace('%', "%%").replace('\\', "\\\\").replace('"', "\\\"")
}

/// The unit file. A VM that is stopped has its grace period: the service asks for more time than TimeoutStopSec when
/// that is longer.
fn text(target: &str, mounts: &BTreeSet<PathBuf>, husk: &Path, environment: &[(&str, String)]) -> String {
    let mut requires = String::new();
    for path in mounts {
        let path = escaped(&path.display().to_string());
        let _ = writeln!(requires, "RequiresMountsFor=\"{path}\"");
    }
    let mut variables = String::new();
    for (name, value) in environment {
        let value = escaped(value);
        let _ = writeln!(variables, "Environment=\"{name}={value}\"");
    }
    let husk = escaped(&husk.display().to_string());
    format!(
        "{MARK}\n\
         [Unit]\n\
         Description=Virtual machine %i (Husk)\n\
         Wants=network-online.target\n\
         After=network-online.target\n\
         {requires}\
         \n\
         [Service]\n\
         Type=notify\n\
         NotifyAccess=main\n\
         {variables}\
         ExecStart=\"{husk}\" service %i\n\
         # The process starts its VM again itself. This is for a process that was killed.\n\
         Restart=on-abnormal\n\
         RestartSec=1\n\
         # After a boot with many VMs its first step may be late.\n\
         TimeoutStartSec=infinity\n\
         # It asks for more if the grace period of the VM is longer.\n\
         TimeoutStopSec=45\n\
         KillMode=mixed\n\
         OOMPolicy=continue\n\
         LimitNOFILE=524288\n\
         \n\
         [Install]\n\
         WantedBy={target}\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn services_do_not_start_in_the_folder_of_the_user() {
        let value = |name: &str, value: &str| recorded(name, value.to_owned());
        let here = std::env::current_dir().unwrap();
        let path = |name: &str| Some(here.join(name).to_str()?.to_owned());
        assert_eq!(value("HUSK_DATA_DIR", "data"), path("data"));
        assert_eq!(value("HUSK_DATA_DIR", "/data"), Some("/data".into()));
        assert_eq!(value("HUSK_DATA_DIR", ""), None);
        assert_eq!(value("HUSK_VMM", "husk-vmm"), Some("husk-vmm".into()));
        assert_eq!(value("HUSK_VMM", "./husk-vmm"), path("husk-vmm"));
    }

    #[test]
    fn each_user_has_a_unit_file() {
        let passwd =
            "root:x:0:0:root:/root:/bin/bash\nu:x:1000:1000::/home/u:/bin/sh\nodd:x:1\nnone:x:2:2:::\n";
        let found: Vec<_> = of_machine(passwd).collect();
        let expected = [
            SYSTEM,
            "/root/.config/systemd/user",
            "/home/u/.config/systemd/user",
        ];
        assert_eq!(found, expected.map(|directory| Path::new(directory).join(NAME)));
    }

    #[test]
    fn passwords_of_proxies_are_not_recorded() {
        let value = |value: &str| recorded("https_proxy", value.to_owned());
        assert_eq!(value("http://proxy:3128"), Some("http://proxy:3128".into()));
        assert_eq!(value("http://user:secret@proxy:3128"), None);
        assert_eq!(value(""), None);
    }

    #[test]
    fn the_file_systems_of_data_and_claims_are_needed() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().canonicalize().unwrap();
        let data = folder.join("data");
        let mounts = |data: &Path| mounted(data).into_iter().collect::<Vec<_>>();
        assert_eq!(mounts(&data), [data.clone(), data.join("volumes")]);
        let large = folder.join("large");
        for path in [&data, &large] {
            fs::create_dir(path).unwrap();
        }
        std::os::unix::fs::symlink(&large, data.join("volumes")).unwrap();
        assert_eq!(mounts(&data), [data.clone(), data.join("volumes"), large]);
    }

    #[test]
    fn commands_write_the_file_at_the_same_time() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(NAME);
        std::thread::scope(|scope| {
            for writer in 0..4 {
                let folder = folder.path();
                scope.spawn(move || {
                    for round in 0..50 {
                        write(folder, &format!("{MARK}\n# {writer} {round}\n")).unwrap();
                    }
                });
            }
        });
        assert!(fs::read_to_string(&path).unwrap().starts_with(MARK));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        fs::write(&path, "of a person").unwrap();
        assert!(!write(folder.path(), MARK).unwrap());
    }

    #[test]
    fn paths_and_variables_are_quoted() {
        let variables = [("HUSK_DATA_DIR", "/a b/100%".to_owned())];
        let mounts = [PathBuf::from("/a b/100%")].into();
        let text = text("default.target", &mounts, Path::new("/opt/my husk"), &variables);
        assert!(
            text.contains("target\nRequiresMountsFor=\"/a b/100%%\"\n\n[Service]\n"),
            "{text}"
        );
        assert!(text.contains("ExecStart=\"/opt/my husk\" service %i\n"), "{text}");
        assert!(
            text.contains("Environment=\"HUSK_DATA_DIR=/a b/100%%\"\n"),
            "{text}"
        );
    }

    #[test]
    fn a_program_is_found_in_a_unit_file() {
        let program = Path::new("/opt/my 100%/husk");
        let text = text("default.target", &BTreeSet::new(), program, &[]);
        assert!(names(&text, program));
        let vmm = Path::new("/opt/bin/husk-vmm");
        for (text, expected) in [
            ("Environment=\"HUSK_VMM=/opt/bin/husk-vmm\"", true),
            ("ExecStart=-/opt/bin/husk-vmm", true),
            ("ExecStart=/opt/bin/husk-vmm-2", false),
            ("ExecStart=/srv/opt/bin/husk-vmm", false),
            ("# ExecStart=/opt/bin/husk-vmm", false),
        ] {
            assert_eq!(names(text, vmm), expected, "{text}");
        }
    }
}
