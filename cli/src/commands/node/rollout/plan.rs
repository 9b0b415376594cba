//! Which files of containerd's configuration to change, and how.

use std::path::{Path, PathBuf};

use super::super::containerd_config;
use super::super::containerd_settings::Settings;
use super::super::files::{self, Access};
use super::super::imports;
use super::super::of;
use super::journal::ConfigFile;
use crate::failure::Failure;

/// Name of the drop-in file.
const NAME: &str = "husk.toml";
/// Directory beside the configuration that containerd's default configuration imports.
const DIRECTORY: &str = "conf.d";

/// Adds the handler with the shim at this path: in a drop-in file if containerd `merges` imported files and imports such
/// a file, else in the configuration.
pub(super) fn with_husk(config: &Path, merges: bool, shim: &Path) -> Result<Vec<ConfigFile>, Failure> {
    let (path, text) = read(config)?;
    let drop_in = match &text {
        Some(text) if merges => drop_in_path(config, text).map_err(of(&path))?,
        _ => None,
    };
    let Some(drop_in) = drop_in else {
        let after = containerd_config::with_husk(text.as_deref(), shim).map_err(of(&path))?;
        let mut files = stale_drop_ins(config, text.as_deref())?;
        files.extend(changed(path, text, Some(after), false));
        return Ok(files);
    };
    let own = match &text {
        Some(text) => containerd_config::without_husk(text).map_err(of(&path))?,
        None => None,
    };
    let added = containerd_config::with_husk(own.as_deref(), shim).map_err(of(&path))?;
    if own.as_ref() == Some(&added) {
        // Somebody else has added the same handler.
        return Ok(changed(path, text, own, false).into_iter().collect());
    }
    let before = files::text(&drop_in)?;
    let with_directory = match &before {
        None => !drop_in.parent().is_some_and(Path::exists),
        Some(text) => match containerd_config::is_drop_in(text) {
            Some(with_directory) => with_directory,
            None => {
                return Err(of(&drop_in)(
                    "it was not created by install: rename or remove it".to_owned(),
                ));
            }
        },
    };
    let version = own
        .as_deref()
        .and_then(|text| Settings::parse(text).ok()?.version())
        .unwrap_or(2);
    let after = containerd_config::drop_in(version, shim, with_directory).map_err(of(&drop_in))?;
    let mut files: Vec<_> = changed(path, text, own, false).into_iter().collect();
    files.extend(changed(drop_in, before, Some(after), with_directory));
    Ok(files)
}

/// Removes the handler.
pub(super) fn without_husk(config: &Path) -> Result<Vec<ConfigFile>, Failure> {
    let (path, text) = read(config)?;
    let mut files = stale_drop_ins(config, text.as_deref())?;
    if let Some(before) = &text {
        let after = containerd_config::without_husk(before).map_err(of(&path))?;
        files.extend(changed(path, text, after, false));
    }
    Ok(files)
}

fn read(config: &Path) -> Result<(PathBuf, Option<String>), Failure> {
    let path = files::followed(config)?;
    let text = files::text(&path)?;
    Ok((path, text))
}

fn changed(
    path: PathBuf,
    before: Option<String>,
    after: Option<String>,
    with_directory: bool,
) -> Option<ConfigFile> {
    (before != after).then(|| ConfigFile {
        access: Access::of(&path),
        path,
        before,
        after,
        with_directory,
    })
}

/// Removes drop-in files that install has created.
fn stale_drop_ins(config: &Path, text: Option<&str>) -> Result<Vec<ConfigFile>, Failure> {
    let beside = config
        .parent()
        .map(|directory| directory.join(DIRECTORY).join(NAME));
    let imported = match text {
        Some(text) => drop_in_path(config, text).map_err(of(config))?,
        None => None,
    };
    let mut paths: Vec<_> = beside.into_iter().chain(imported).collect();
    paths.dedup();
    let mut files = Vec::new();
    for path in paths {
        let before = files::text(&path)?;
        if let Some(with_directory) = before.as_deref().and_then(containerd_config::is_drop_in) {
            files.extend(changed(path, before, None, with_directory));
        }
    }
    Ok(files)
}

/// Path of a drop-in file that the configuration imports, existing or not.
fn drop_in_path(config: &Path, text: &str) -> Result<Option<PathBuf>, String> {
    let settings = Settings::parse(text)?;
    Ok(imports::place_for(config, &settings, NAME))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    const SHIM: &str = "/opt/husk/1/containerd-shim-husk-v2";

    fn apply(files: Result<Vec<ConfigFile>, Failure>) -> usize {
        let files = files.unwrap_or_else(|failure| panic!("{failure:?}"));
        assert!(files.iter().all(|file| file.apply().is_ok()));
        files.len()
    }

    #[test]
    fn a_drop_in_is_used_where_one_is_imported() {
        for (version, plugin) in [
            (2, "io.containerd.grpc.v1.cri"),
            (3, "io.containerd.cri.v1.runtime"),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let at = |name: &str| dir.path().join(name);
            let text = format!("version = {version}\nimports = ['conf.d/*.toml']\n");
            fs::write(at("config.toml"), &text).unwrap();
            let with = |shim: &str| apply(with_husk(&at("config.toml"), true, Path::new(shim)));
            assert_eq!([with(SHIM), with(SHIM), with("/opt/husk/2/shim")], [1, 0, 1]);
            assert_eq!(fs::read_to_string(at("config.toml")).unwrap(), text);
            let drop_in = fs::read_to_string(at("conf.d/husk.toml")).unwrap();
            assert!(drop_in.contains(&format!("version = {version}\n")), "{drop_in}");
            assert!(drop_in.contains(&format!("[plugins.\"{plugin}\".containerd.runtimes.husk]")));
            assert!(drop_in.contains("\"/opt/husk/2/shim\""), "{drop_in}");
            assert_eq!(apply(without_husk(&at("config.toml"))), 1);
            assert!(!at("conf.d").exists());
            // A directory that was there stays.
            fs::create_dir(at("conf.d")).unwrap();
            assert_eq!([with(SHIM), apply(without_husk(&at("config.toml")))], [1, 1]);
            assert!(at("conf.d").exists());
        }
    }

    #[test]
    fn a_block_of_an_earlier_installation_moves_to_the_drop_in() {
        let dir = tempfile::tempdir().unwrap();
        let config = dir.path().join("config.toml");
        let text = "version = 2\nimports = ['conf.d/*.toml']\n";
        let old = containerd_config::with_husk(Some(text), Path::new("/usr/local/bin/shim")).unwrap();
        fs::write(&config, &old).unwrap();
        assert_eq!(apply(with_husk(&config, true, Path::new(SHIM))), 2);
        assert_eq!(fs::read_to_string(&config).unwrap(), text);
        // An older containerd needs it in the configuration.
        assert_eq!(apply(with_husk(&config, false, Path::new(SHIM))), 2);
        assert!(fs::read_to_string(&config).unwrap().contains(SHIM));
        assert!(!dir.path().join("conf.d").exists());
        assert_eq!(apply(without_husk(&config)), 1);
        assert_eq!(fs::read_to_string(&config).unwrap(), text);
    }

    #[test]
    fn files_of_others_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let config = dir.path().join("config.toml");
        fs::write(&config, "version = 2\nimports = ['*.toml']\n").unwrap();
        fs::write(dir.path().join("husk.toml"), "version = 2\n").unwrap();
        let refused = with_husk(&config, true, Path::new(SHIM));
        assert!(
            matches!(&refused, Err(Failure::Runtime(text)) if text.contains("husk.toml: it was not created"))
        );
        assert_eq!(apply(without_husk(&config)), 0);
    }
}
