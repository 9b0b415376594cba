//! The files of Secrets and ConfigMaps, as the kubelet would mount them.

use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use serde_json::Value;

/// A directory in memory for the files of one VM's start, which is removed with its contents.
#[derive(Debug)]
pub(crate) struct ObjectFiles {
    path: PathBuf,
}

impl ObjectFiles {
    /// An empty directory at `path`. What is there was left by a process that was killed.
    pub(crate) fn new(path: PathBuf) -> io::Result<ObjectFiles> {
        match fs::remove_dir_all(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        make(&path)?;
        Ok(ObjectFiles { path })
    }

    /// Writes the keys of one object as files, and returns their directory.
    pub(crate) fn write<'a>(
        &self,
        object: &str,
        files: impl IntoIterator<Item = (&'a str, &'a [u8])>,
    ) -> io::Result<PathBuf> {
        let directory = self.path.join(object);
        make(&directory)?;
        for (key, content) in files {
            // Keys of an object were checked; a path of downwardAPI may have folders.
            let path = directory.join(key);
            if let Some(parent) = path.parent() {
                make(parent)?;
            }
            OpenOptions::new()
                .write(true)
                .create(true)
                .truncate(true)
                .mode(0o600)
                .open(&path)?
                .write_all(content)?;
        }
        Ok(directory)
    }
}

impl Drop for ObjectFiles {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.path);
        // It fails while other VMs start.
        let _ = self.path.parent().map(fs::remove_dir);
    }
}

fn make(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// A field of a downwardAPI item in the manifest of a VMI, or why there is none.
pub(super) fn downward_field(manifest: &Value, path: &str) -> Result<String, String> {
    let metadata = &manifest["metadata"];
    let map = |field: &str| {
        let map = metadata[field].as_object().into_iter().flatten();
        let lines = map.map(|(key, value)| format!("{key}={:?}", value.as_str().unwrap_or_default()));
        lines.collect::<Vec<_>>().join("\n")
    };
    match path {
        "metadata.name" | "metadata.namespace" | "metadata.uid" => {
            let field = path.trim_start_matches("metadata.");
            Ok(metadata[field].as_str().unwrap_or_default().to_owned())
        }
        "metadata.labels" => Ok(map("labels")),
        "metadata.annotations" => Ok(map("annotations")),
        _ => {
            let entry = ["labels", "annotations"].into_iter().find_map(|field| {
                let key = path
                    .strip_prefix(&format!("metadata.{field}['"))?
                    .strip_suffix("']")?;
                Some(metadata[field][key].as_str().unwrap_or_default().to_owned())
            });
            entry.ok_or_else(|| format!("{path} is not known on a machine without a cluster"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn files_are_the_owners_and_go_with_the_directory() {
        let runtime = tempfile::tempdir().unwrap();
        let path = runtime.path().join("files/a-b:c");
        let files = ObjectFiles::new(path.clone()).unwrap();
        let keys = [("password", &b"secret"[..]), ("tls.crt", b"")];
        let directory = files.write("secret", keys).unwrap();
        assert_eq!(fs::read(directory.join("password")).unwrap(), b"secret");
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&directory), 0o700);
        assert_eq!(mode(&directory.join("tls.crt")), 0o600);
        // Those of a process that was killed go at the next start.
        let again = ObjectFiles::new(path).unwrap();
        assert!(!directory.exists());
        std::mem::forget(files);
        drop(again);
        assert_eq!(fs::read_dir(runtime.path()).unwrap().count(), 0);
    }

    #[test]
    fn downward_fields_are_those_of_the_vmi() {
        let manifest = json!({"metadata": {"name": "demo", "labels": {"a/b": "c", "d": "e\n"}}});
        let field = |path: &str| downward_field(&manifest, path);
        assert_eq!(field("metadata.name"), Ok("demo".into()));
        assert_eq!(field("metadata.labels"), Ok("a/b=\"c\"\nd=\"e\\n\"".into()));
        assert_eq!(field("metadata.labels['a/b']"), Ok("c".into()));
        assert_eq!(field("metadata.annotations"), Ok(String::new()));
        assert!(field("spec.nodeName").unwrap_err().contains("spec.nodeName"));
    }
}
