//! The protocol between `husk` and `husk-import`: one request as JSON on stdin, then one event as JSON in each line of
//! stdout. The last event is [`Event::Done`] or [`Event::Filled`], as the request was, or [`Event::Failed`].

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::name::PullPolicy;
use crate::store::StoredImage;
use crate::volume_request::VolumeRequest;

/// A request to `husk-import`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "request")]
pub enum Request {
    Pull(PullRequest),
    Volume(VolumeRequest),
}

/// Pull an image into the store.
#[derive(Clone, Serialize, Deserialize)]
pub struct PullRequest {
    /// Directory of the store.
    pub store: PathBuf,
    /// Name of the image, as the manifest has it.
    pub name: String,
    pub policy: PullPolicy,
    /// Paths of the files that are wanted, without a leading `/`; `None` is the disk in folder `disk`.
    pub files: Vec<Option<PathBuf>>,
    /// Content of `.dockerconfigjson` of the imagePullSecret. Without it the user's own credentials are used.
    pub pull_secret: Option<String>,
}

/// An event of a request. Sizes are in bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "event")]
pub enum Event {
    /// A layer is being fetched.
    Layer { digest: String, done: u64, size: u64 },
    /// The layers are being unpacked.
    Unpacking { done: u64, size: u64 },
    /// The file of a volume is being fetched. The size is known if the server says it.
    Download { done: u64, size: Option<u64> },
    /// The image of a volume is being converted. A qcow2 image that is compressed as a whole is unpacked before, and
    /// this begins again then.
    Converting { done: u64, size: u64 },
    /// An attempt failed, and another one follows.
    Retrying { reason: String },
    /// The store has the image.
    Done { image: StoredImage },
    /// The volume has its data; its size.
    Filled { size: u64 },
    /// The image was not pulled, or the volume not filled.
    Failed { reason: String },
}

/// The pull secret is not shown.
impl std::fmt::Debug for PullRequest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PullRequest")
            .field("name", &self.name)
            .field("policy", &self.policy)
            .field("files", &self.files)
            .finish_non_exhaustive()
    }
}
