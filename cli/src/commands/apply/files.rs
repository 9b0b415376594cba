//! The objects of the files and folders of `-f`.

use std::fs;
use std::path::{Path, PathBuf};

use husk_objects::{Key, Kind};
use husk_vmi::LoadError;
use husk_vmi::objects::{Object, ObjectKind, read_objects};

use crate::failure::{Failure, chain, print_warning};
use crate::manifest;
use crate::vm_ref::DEFAULT_NAMESPACE;

/// Endings of manifests in a folder, as kubectl has them.
const ENDINGS: [&str; 3] = ["yaml", "yml", "json"];

/// An object and where it is from.
#[derive(Debug)]
pub(crate) struct InputObject {
    /// In front of messages about it.
    pub prefix: String,
    pub object: Object,
}

impl InputObject {
    /// The key of an object that is stored; none for a claim.
    pub(crate) fn key(&self) -> Option<Key> {
        Key::of(&self.object.value)
    }
}

/// Reads files, folders and, for `-`, stdin. Objects without a namespace get that of `namespace`. Objects of a kind
/// that Husk does not support are left out, with a warning.
///
/// # Errors
/// A line for each wrong field of all files.
pub(crate) fn read(sources: &[PathBuf], namespace: Option<&str>) -> Result<Vec<InputObject>, Failure> {
    let (mut given, mut lines) = (Vec::new(), Vec::new());
    let sources = sources.iter().map(|source| files(source));
    let sources: Vec<PathBuf> = sources
        .collect::<Result<Vec<_>, _>>()?
        .into_iter()
        .flatten()
        .collect();
    for source in &sources {
        let name = source.to_string_lossy();
        let (name, text) = manifest::text(&name)?;
        let several = sources.len() > 1;
        let prefix = |document: Option<&str>| {
            let parts = [several.then_some(name), document];
            parts
                .into_iter()
                .flatten()
                .map(|part| format!("{part}: "))
                .collect::<String>()
        };
        match read_objects(&text) {
            Ok(objects) => given.extend(objects.into_iter().map(|object| InputObject {
                prefix: prefix(object.document.as_deref()),
                object,
            })),
            Err(LoadError::Invalid(documents)) => {
                for bad in &documents {
                    let prefix = prefix(bad.document.as_deref());
                    lines.extend(bad.errors.iter().map(|error| format!("{prefix}{error}")));
                }
            }
            Err(error) => return Err(Failure::Usage(format!("{name}: {error}"))),
        }
    }
    if !lines.is_empty() {
        return Err(Failure::Manifest(lines));
    }
    let mut used = Vec::new();
    for mut one in given {
        if let ObjectKind::Other(other) = &one.object.kind {
            print_warning(&format!(
                "{}{other} is ignored: Husk does not support this kind",
                one.prefix
            ));
            continue;
        }
        if let Some(namespace) = namespace {
            set_namespace(&mut one, namespace)?;
        }
        used.push(one);
    }
    if used.is_empty() {
        return Err(Failure::Usage("the files have no objects that Husk uses".into()));
    }
    Ok(used)
}

/// The manifests in a folder, sorted; else the file itself.
fn files(source: &Path) -> Result<Vec<PathBuf>, Failure> {
    if !source.is_dir() {
        return Ok(vec![source.to_owned()]);
    }
    let failed = |error: &std::io::Error| Failure::Usage(format!("{}: {}", source.display(), chain(error)));
    let entries = fs::read_dir(source).map_err(|error| failed(&error))?;
    let mut files: Vec<PathBuf> = entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| {
            path.is_file()
                && path
                    .extension()
                    .is_some_and(|ending| ENDINGS.iter().any(|known| ending == *known))
        })
        .collect();
    files.sort();
    Ok(files)
}

/// Puts an object into a namespace; one that names another is an error, as with kubectl.
fn set_namespace(given: &mut InputObject, namespace: &str) -> Result<(), Failure> {
    if given.key().is_some_and(|key| !Kind::is_namespaced(key.kind)) {
        return Ok(());
    }
    let metadata = &given.object.value["metadata"];
    let own = metadata["namespace"].as_str().unwrap_or(DEFAULT_NAMESPACE);
    if own != DEFAULT_NAMESPACE && own != namespace {
        return Err(Failure::Usage(format!(
            "{}the namespace from the provided object \"{own}\" does not match the namespace \"{namespace}\": omit \
             --namespace",
            given.prefix
        )));
    }
    let mut value = given.object.value.take();
    value["metadata"]["namespace"] = namespace.into();
    // Read again, because the namespace is in several places of an object.
    let mut objects = read_objects(&value.to_string()).map_err(|error| Failure::Usage(error.to_string()))?;
    if let Some(object) = objects.pop() {
        given.object = object;
    }
    Ok(())
}
