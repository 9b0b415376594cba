//! New overlays.

use super::*;

fn whole(file: &File) -> Vec<u8> {
    let mut bytes = vec![0; file.metadata().unwrap().len() as usize];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

fn empty() -> File {
    tempfile::tempfile_in("/var/tmp").unwrap()
}

fn over(overlay: &File, base: &File, format: ImageFormat) -> io::Result<Disk> {
    Disk::new_overlay(fd(overlay), (fd(base), format), options())
}

#[test]
fn overlays_share_an_unchanged_base() {
    let size = (3 << 20) + 512;
    for kind in [1, 2] {
        let ((base, format), content) = base(kind, size).unwrap();
        let before = whole(&base);
        let files = [empty(), empty()];
        let disks = files.each_ref().map(|file| over(file, &base, format).unwrap());
        for (fill, disk) in (1..).zip(&disks) {
            assert_eq!(disk.size(), size);
            assert!(all(disk) == content);
            let mut served = Served::new(disk);
            served.write(700 << 10, &mut [fill; 4096]).unwrap();
        }
        for (fill, (disk, file)) in (1..).zip(disks.into_iter().zip(&files)) {
            let mut model = content.clone();
            model[700 << 10..][..4096].fill(fill);
            assert!(all(&disk) == model);
            // Without a flush: closing the image writes its tables.
            drop(disk);
            check::check(file);
            assert!(all(&open(file, Some(&(base.try_clone().unwrap(), format)))) == model);
        }
        assert!(whole(&base) == before);
    }
}

#[test]
fn errors_distinguish_overlay_and_base() {
    let says = |overlay: &File, base: &File, format| over(overlay, base, format).unwrap_err().to_string();
    let base = image(1 << 20, CLUSTER);
    base.write_all_at(&104u64.to_be_bytes(), 8).unwrap();
    let overlay = empty();
    assert_eq!(
        says(&overlay, &base, ImageFormat::Qcow2),
        "qcow2: it names a backing file"
    );
    assert_eq!(overlay.metadata().unwrap().len(), 0);
    // A qcow2 file can be a raw base.
    over(&overlay, &base, ImageFormat::Raw).unwrap();
    let again = says(&overlay, &base, ImageFormat::Raw);
    assert_eq!(again, "its overlay: a new overlay must be an empty regular file");
    let odd = empty();
    odd.set_len(1000).unwrap();
    let error = says(&empty(), &odd, ImageFormat::Raw);
    assert_eq!(error, "its overlay: size 1000 must be a non-zero multiple of 512");
    let itself = empty();
    assert_eq!(says(&itself, &itself, ImageFormat::Raw), "it is the image itself");
}
