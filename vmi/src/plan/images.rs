//! The container images that a VM needs.

use std::path::PathBuf;

use super::volume_source::{KERNEL_VOLUME, relative};
use crate::load::Vmi;

/// A container image that holds data of a VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VolumeImage {
    /// Name of the volume, or [`KERNEL_VOLUME`].
    pub volume: String,
    /// Path of the field that has the image's name in `image`.
    pub field: String,
    /// Name of the image, as the manifest has it.
    pub image: String,
    /// `imagePullPolicy`, if it is set.
    pub pull_policy: Option<String>,
    /// `imagePullSecret`, if it is set.
    pub pull_secret: Option<String>,
    /// Files that are needed, without a leading `/`; `None` is the only one in the folder `disk`.
    pub files: Vec<Option<PathBuf>>,
}

/// The images of the VM's containerDisks, and that of its kernel.
#[must_use]
pub fn volume_images(vmi: &Vmi) -> Vec<VolumeImage> {
    let set = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
    let disks = vmi.spec.volumes.iter().enumerate().filter_map(|(index, volume)| {
        let disk = volume.container_disk.as_ref()?;
        Some(VolumeImage {
            volume: volume.name.clone(),
            field: vmi.at(&format!("volumes[{index}].containerDisk")),
            image: disk.image.clone(),
            pull_policy: set(&disk.image_pull_policy),
            pull_secret: set(&disk.image_pull_secret),
            files: vec![set(&disk.path).map(|path| relative(&path))],
        })
    });
    let boot = vmi.spec.domain.firmware.kernel_boot.as_ref();
    let container = boot.and_then(|boot| boot.container.as_ref());
    let kernel = container.and_then(|container| {
        let files = [&container.kernel_path, &container.initrd_path];
        let files = files.into_iter().filter_map(set);
        Some(VolumeImage {
            volume: KERNEL_VOLUME.to_owned(),
            field: vmi.at("domain.firmware.kernelBoot.container"),
            image: set(&container.image)?,
            pull_policy: set(&container.image_pull_policy),
            pull_secret: set(&container.image_pull_secret),
            files: files.map(|file| Some(relative(&file))).collect(),
        })
    });
    disks.chain(kernel).collect()
}

#[cfg(test)]
mod tests {
    use crate::load::{Loaded, load};

    use super::*;

    #[test]
    fn disks_and_the_kernel_name_their_images() {
        let text = "{apiVersion: kubevirt.io/v1, kind: VirtualMachineInstance, metadata: {name: a}, spec: {domain: {
            devices: {}, firmware: {kernelBoot: {container: {image: 'k:1', kernelPath: /boot/k, initrdPath: /boot/i}}}},
            volumes: [{name: root, containerDisk: {image: d, path: /images/x, imagePullPolicy: Never}},
            {name: plain, containerDisk: {image: e, imagePullSecret: s}}, {name: e, emptyDisk: {capacity: 1Gi}}]}}";
        let Loaded::Vmi(vmi) = load(text).unwrap().remove(0) else {
            panic!("no VMI")
        };
        let image = |volume: &str, field: &str, image: &str, files: &[Option<&str>]| VolumeImage {
            volume: volume.into(),
            field: format!("spec.{field}"),
            image: image.into(),
            pull_policy: None,
            pull_secret: None,
            files: files.iter().map(|file| file.map(PathBuf::from)).collect(),
        };
        let mut root = image("root", "volumes[0].containerDisk", "d", &[Some("images/x")]);
        root.pull_policy = Some("Never".into());
        let mut plain = image("plain", "volumes[1].containerDisk", "e", &[None]);
        plain.pull_secret = Some("s".into());
        let kernel = image(
            "kernel-boot-volume",
            "domain.firmware.kernelBoot.container",
            "k:1",
            &[Some("boot/k"), Some("boot/i")],
        );
        assert_eq!(volume_images(&vmi), [root, plain, kernel]);
    }
}
