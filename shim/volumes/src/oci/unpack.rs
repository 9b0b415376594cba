//! Extracts files of an image below a directory, under the paths that they have in the image.

use std::cell::Cell;
use std::fs::{self, DirBuilder, OpenOptions};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::super::error::{Reason, VolumeFault};
use super::super::path_handle::PathHandle;
use super::layer_search::{Extracted, Place};
use super::{ContainerImage, ImageFile};

/// Extracts the wanted files of the OCI image layout in `layout` to the new directory `into`. Returns their paths in
/// the image, in the order of `wanted`. Calls `progress` with compressed bytes read and total. Blocks.
///
/// # Errors
/// The image is not a usable one, lacks a wanted file, or does not fit. Files of the attempt are left in `into`.
pub fn unpack_image(
    layout: &Path,
    wanted: &[ImageFile],
    into: &Path,
    progress: &dyn Fn(u64, u64),
) -> Result<Vec<PathBuf>, VolumeFault> {
    let given = PathHandle::on_host(layout).map_err(VolumeFault::io(layout))?;
    let image = ContainerImage::find(&given)?
        .ok_or_else(|| VolumeFault::container_image(layout, "it is not an OCI image layout".into()))?;
    make_directory(into)?;
    let numbered = Numbered {
        directory: into.join(".unpacking"),
        next: Cell::new(0),
    };
    make_directory(&numbered.directory)?;
    let found = image.search(wanted, &numbered, progress)?;
    let mut paths = Vec::with_capacity(wanted.len());
    for wanted in wanted {
        let (path, extracted) = image.choose(&found, wanted)?;
        paths.push(path.to_owned());
        let (Some(name), Some(folder)) = (&extracted.name, path.parent()) else {
            continue;
        };
        let target = into.join(path);
        if target.exists() {
            continue;
        }
        let folder = into.join(folder);
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&folder)
            .map_err(VolumeFault::io(&folder))?;
        fs::rename(name, &target).map_err(VolumeFault::io(&target))?;
    }
    fs::remove_dir_all(&numbered.directory).map_err(VolumeFault::io(&numbered.directory))?;
    Ok(paths)
}

fn make_directory(path: &Path) -> Result<(), VolumeFault> {
    DirBuilder::new()
        .mode(0o700)
        .create(path)
        .map_err(VolumeFault::io(path))
}

/// Files with numbers as names, until their place is known.
struct Numbered {
    directory: PathBuf,
    next: Cell<u32>,
}

impl Place for Numbered {
    fn create(&self) -> Result<Extracted, Reason> {
        let number = self.next.replace(self.next.get().wrapping_add(1));
        let name = self.directory.join(number.to_string());
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&name)
            .map_err(|error| format!("{}: {error}", name.display()))?;
        Ok(Extracted {
            file,
            name: Some(name),
        })
    }

    fn path(&self) -> &Path {
        &self.directory
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{Home, layer, oci, special};
    use super::*;
    use tar::EntryType;

    #[test]
    fn wanted_files_are_unpacked_below_the_directory() {
        let home = Home::new();
        let layers = [
            layer(&[
                ("disk/a.img", &[1; 512]),
                ("boot/vmlinuz", b"old"),
                ("etc/other", b"x"),
            ]),
            layer(&[("boot/vmlinuz", b"kernel")]),
        ];
        let layout = home.directory(&oci(&layers));
        let into = home.path().join("rootfs");
        let wanted = [ImageFile::Disk, ImageFile::At("boot/vmlinuz".into())];
        let paths = unpack_image(&layout, &wanted, &into, &|_, _| {}).unwrap();
        assert_eq!(paths, [Path::new("disk/a.img"), Path::new("boot/vmlinuz")]);
        assert_eq!(fs::read(into.join("disk/a.img")).unwrap(), [1; 512]);
        assert_eq!(fs::read(into.join("boot/vmlinuz")).unwrap(), b"kernel");
        let mut names: Vec<_> = fs::read_dir(&into)
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        names.sort();
        assert_eq!(names, ["boot", "disk"]);
    }

    #[test]
    fn links_and_missing_files_are_named() {
        let home = Home::new();
        let layout = home.directory(&oci(&[special(
            "boot/vmlinuz",
            EntryType::Symlink,
            "/etc/shadow",
        )]));
        for (wanted, text) in [
            (
                "boot/vmlinuz",
                "boot/vmlinuz in it is a symbolic link, not a regular file",
            ),
            ("boot/initrd", "it has no file boot/initrd"),
        ] {
            let into = home.path().join(wanted.replace('/', "-"));
            let error =
                unpack_image(&layout, &[ImageFile::At(wanted.into())], &into, &|_, _| {}).unwrap_err();
            assert!(error.to_string().ends_with(text), "{error}");
            assert!(!into.join("boot").exists());
        }
    }

    #[test]
    fn replaced_files_are_removed() {
        let home = Home::new();
        let same: Vec<(&str, &[u8])> = vec![("disk/a.img", b"old"); 20];
        let layers = [
            layer(&same),
            layer(&[("disk/.wh.a.img", b"")]),
            layer(&[("disk/b.img", b"x"), ("disk/c.img", b"y")]),
        ];
        let into = home.path().join("rootfs");
        let layout = home.directory(&oci(&layers));
        unpack_image(&layout, &[ImageFile::Disk], &into, &|_, _| {}).unwrap_err();
        assert_eq!(fs::read_dir(into.join(".unpacking")).unwrap().count(), 2);
    }

    #[test]
    fn any_number_of_files_may_be_wanted_but_not_replaced() {
        let home = Home::new();
        let names: Vec<String> = (0..20).map(|number| format!("boot/{number}")).collect();
        let files: Vec<(&str, &[u8])> = names.iter().map(|name| (name.as_str(), &b"x"[..])).collect();
        let wanted: Vec<ImageFile> = names.iter().map(|name| ImageFile::At(name.into())).collect();
        let into = home.path().join("rootfs");
        unpack_image(
            &home.directory(&oci(&[layer(&files)])),
            &wanted,
            &into,
            &|_, _| {},
        )
        .unwrap();
        assert_eq!(fs::read_dir(into.join("boot")).unwrap().count(), 20);

        let same: Vec<(&str, &[u8])> = vec![("boot/0", b"old"); 5000];
        let layout = home.directory(&oci(&[layer(&same)]));
        let into = home.path().join("hostile");
        let error = unpack_image(&layout, &wanted, &into, &|_, _| {})
            .unwrap_err()
            .to_string();
        assert!(error.contains("its wanted files are more than 4096"), "{error}");
    }
}
