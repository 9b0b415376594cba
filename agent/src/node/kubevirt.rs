//! The installed KubeVirt, as the operator reports it.

use kube::api::ListParams;
use kube::core::{ApiResource, DynamicObject, GroupVersionKind};
use kube::{Api, Client};

/// The minor versions whose contract with a node the agent knows.
const KNOWN: [(u32, u32); 1] = [(1, 9)];

/// A version of KubeVirt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KubeVirtVersion(String);

impl KubeVirtVersion {
    /// Returns the version that runs in the cluster, or the reason why there is none.
    ///
    /// # Errors
    /// The API server does not answer.
    pub async fn installed(client: &Client) -> Result<Result<KubeVirtVersion, String>, kube::Error> {
        let Some(objects) = objects(client).await? else {
            return Ok(Err("KubeVirt is not installed".to_owned()));
        };
        let versions = objects.iter().filter_map(|object| {
            let version = &object.data["status"]["observedKubeVirtVersion"];
            version.as_str().filter(|version| !version.is_empty())
        });
        let version = versions.map(|version| KubeVirtVersion(version.to_owned())).next();
        Ok(version.ok_or_else(|| "the KubeVirt object does not report a version yet".to_owned()))
    }

    /// Checks that the agent knows the version.
    ///
    /// # Errors
    /// For another version; the text names the known ones.
    pub fn check(&self) -> Result<(), String> {
        let mut numbers = self.0.trim_start_matches('v').split('.');
        let mut number = || numbers.next()?.parse::<u32>().ok();
        let minor = number().zip(number());
        if minor.is_some_and(|minor| KNOWN.contains(&minor)) {
            return Ok(());
        }
        let known = KNOWN.map(|(major, minor)| format!("{major}.{minor}"));
        Err(format!(
            "KubeVirt {} is installed, and this agent knows {}: install another version of either",
            self.0,
            known.join(", ")
        ))
    }
}

/// Returns the version of the KubeVirt object, which has the cluster's configuration; empty if there is none.
///
/// # Errors
/// The API server does not answer.
pub async fn configuration_version(client: &Client) -> Result<String, kube::Error> {
    let objects = objects(client).await?.unwrap_or_default();
    let version = objects
        .into_iter()
        .find_map(|object| object.metadata.resource_version);
    Ok(version.unwrap_or_default())
}

/// The KubeVirt objects of the cluster; `None` if KubeVirt is not installed.
async fn objects(client: &Client) -> Result<Option<Vec<DynamicObject>>, kube::Error> {
    let kind = GroupVersionKind::gvk("kubevirt.io", "v1", "KubeVirt");
    let resource = ApiResource::from_gvk_with_plural(&kind, "kubevirts");
    let api: Api<DynamicObject> = Api::all_with(client.clone(), &resource);
    match super::within(api.list(&ListParams::default())).await {
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(None),
        list => Ok(Some(list?.items)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_known_minor_versions_are_accepted() {
        let check = |version: &str| KubeVirtVersion(version.to_owned()).check();
        for known in ["v1.9.0", "v1.9.3", "1.9.0", "v1.9.0-rc.1"] {
            assert_eq!(check(known), Ok(()), "{known}");
        }
        for unknown in ["v1.8.2", "v1.10.0", "v2.9.0", "devel", "", "v1"] {
            let error = check(unknown).unwrap_err();
            assert!(error.contains("this agent knows 1.9"), "{unknown}: {error}");
        }
    }
}
