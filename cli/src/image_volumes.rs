//! Container images as the data of volumes that have none by `--volume`.

use std::collections::BTreeMap;
use std::path::PathBuf;

use husk_images::{ImageName, ImageStore, PullPolicy, PullRequest, StoredImage};
use husk_vmi::{Vmi, VolumeImage, volume_images};

use crate::failure::{Failure, print_warning};
use crate::import_program;

/// Returns `.dockerconfigjson` of the imagePullSecret of a field, by the field's path and the Secret's name.
type SecretOf<'a> = dyn Fn(&str, &str) -> Result<Option<String>, Failure> + 'a;

/// The images to pull for a VM.
pub(crate) struct ImageVolumes {
    images: Vec<(VolumeImage, ImageName, PullPolicy)>,
}

impl ImageVolumes {
    /// The images of volumes that are not in `given`.
    ///
    /// # Errors
    /// A line for each field that has no image name or policy.
    pub(crate) fn of(vmi: &Vmi, given: &BTreeMap<String, PathBuf>) -> Result<ImageVolumes, Vec<String>> {
        let (mut images, mut errors) = (Vec::new(), Vec::new());
        for image in volume_images(vmi) {
            if given.contains_key(&image.volume) {
                continue;
            }
            let name = image.image.parse::<ImageName>();
            let policy = image.pull_policy.as_deref().map(str::parse::<PullPolicy>);
            match (name, policy) {
                (Ok(name), None) => {
                    let policy = name.default_policy();
                    images.push((image, name, policy));
                }
                (Ok(name), Some(Ok(policy))) => images.push((image, name, policy)),
                (Err(error), _) => errors.push(format!("{}.image: Invalid value: {error}", image.field)),
                (_, Some(Err(()))) => {
                    let text = "must be Always, IfNotPresent or Never";
                    errors.push(format!(
                        "{}.imagePullPolicy: Unsupported value: {text}",
                        image.field
                    ));
                }
            }
        }
        match errors.is_empty() {
            true => Ok(ImageVolumes { images }),
            false => Err(errors),
        }
    }

    /// The volumes, with paths that do not exist yet.
    pub(crate) fn placeholders(&self) -> impl Iterator<Item = (String, PathBuf)> {
        let names = self.images.iter().map(|(image, ..)| image.volume.clone());
        names.map(|name| (name, PathBuf::from("/image")))
    }

    /// Pulls the images that the store does not have, with bars, and returns the paths of their files.
    ///
    /// # Errors
    /// An image cannot be pulled.
    pub(crate) fn pull(self) -> Result<BTreeMap<String, PathBuf>, Failure> {
        let no_secret = |field: &str, secret: &str| {
            print_warning(&format!(
                "{field}.imagePullSecret {secret} is ignored: credentials are those of `podman login` and `docker login`"
            ));
            Ok(None)
        };
        self.pull_by(&no_secret, &mut import_program::pull)
    }

    /// As [`pull`](Self::pull), by a function.
    ///
    /// # Errors
    /// The errors of the functions.
    pub(crate) fn pull_by(
        self,
        secret: &SecretOf<'_>,
        pull: &mut dyn FnMut(PullRequest) -> Result<StoredImage, Failure>,
    ) -> Result<BTreeMap<String, PathBuf>, Failure> {
        let mut paths = BTreeMap::new();
        if self.images.is_empty() {
            return Ok(paths);
        }
        let store = ImageStore::locate()?;
        for (image, name, policy) in self.images {
            let pull_secret = match &image.pull_secret {
                Some(name) => secret(&image.field, name)?,
                None => None,
            };
            let pulled = pull(PullRequest {
                store: store.path().to_owned(),
                name: name.to_string(),
                policy,
                files: image.files,
                pull_secret,
            })?;
            paths.insert(image.volume, store.rootfs(&pulled.digest));
        }
        Ok(paths)
    }
}
