//! PersistentVolumeClaims: each is made as an empty volume or a copy, and grows.

use std::collections::BTreeMap;
use std::iter::successors;

use husk_claims::{ClaimError, NewClaim};
use husk_vmi::objects::PersistentVolumeClaim;

use crate::failure::Failure;
use crate::machine::LocalStores;
use crate::output;

/// Granularity of sizes, in bytes.
const MIB: u64 = 1 << 20;

/// The error of a claim that cannot become what its manifest asks for.
pub(super) fn fault(stores: &LocalStores, claim: &PersistentVolumeClaim) -> Option<String> {
    let stored = stores
        .claims
        .get(&claim.metadata.namespace, &claim.metadata.name)
        .ok()?;
    let size = claim.spec.size?.div_ceil(MIB).saturating_mul(MIB);
    (size < stored.size).then(|| {
        format!(
            "spec.resources.requests.storage: Forbidden: field can not be less than status.capacity: the volume {} has {}",
            claim.metadata.name,
            output::bytes(stored.size)
        )
    })
}

/// The claims in the order to make them: a copy comes after its source.
pub(super) fn ordered<'a>(
    mut claims: Vec<(&'a str, &'a PersistentVolumeClaim)>,
) -> Vec<(&'a str, &'a PersistentVolumeClaim)> {
    let key = |claim: &'a PersistentVolumeClaim| (&*claim.metadata.namespace, &*claim.metadata.name);
    let sources: BTreeMap<_, _> = claims
        .iter()
        .filter_map(|(_, claim)| Some((key(claim), (key(claim).0, claim.spec.data_source.as_deref()?))))
        .collect();
    // The sources of a claim may be a circle.
    let most = claims.len() + 1;
    claims.sort_by_cached_key(|(_, claim)| {
        let chain = successors(Some(key(claim)), |claim| sources.get(claim).copied());
        chain.take(most).count()
    });
    claims
}

/// Makes a claim, or changes its size, labels and annotations to what the manifest asks for. `prefix` is in front of
/// its errors.
pub(super) fn apply(
    stores: &LocalStores,
    prefix: &str,
    claim: &PersistentVolumeClaim,
) -> Result<(), Failure> {
    let name = match claim.metadata.namespace.as_str() {
        "default" => claim.metadata.name.clone(),
        namespace => format!("{namespace}/{}", claim.metadata.name),
    };
    let mut made = make(stores, claim);
    if matches!(made, Err(ClaimError::Exists(_))) {
        // Another command has just created it.
        made = make(stores, claim);
    }
    let outcome = made.map_err(Failure::at(format!("{prefix}persistentvolumeclaim/{name}")))?;
    output::print(&format!("persistentvolumeclaim/{name} {outcome}\n"))
}

fn make(stores: &LocalStores, claim: &PersistentVolumeClaim) -> Result<&'static str, ClaimError> {
    let (namespace, name) = (&claim.metadata.namespace, &claim.metadata.name);
    match stores.claims.get(namespace, name) {
        Ok(stored) => {
            let mut outcome = "unchanged";
            if let Some(size) = claim.spec.size.filter(|size| *size > stored.size) {
                stores.claims.resize(namespace, name, size)?;
                outcome = "configured";
            }
            let (old, labels) = (&stored.object.metadata, &claim.metadata.labels);
            // Others stay: one of them may tie the claim to its DataVolume.
            let mut annotations = old.annotations.clone();
            annotations.extend(claim.metadata.annotations.clone());
            if (&old.labels, &old.annotations) != (labels, &annotations) {
                stores.claims.relabel(namespace, name, labels, &annotations)?;
                outcome = "configured";
            }
            Ok(outcome)
        }
        Err(ClaimError::NotFound(_)) => {
            let new = NewClaim::of(&claim.metadata, &claim.spec, 0);
            match &claim.spec.data_source {
                None => stores.claims.create(&new)?,
                Some(source) => stores.claims.copy((namespace, source), &new, &|_, _| {})?,
            }
            Ok("created")
        }
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use husk_vmi::objects::{ObjectKind, read_objects};
    use serde_json::{Value, json};

    use super::*;

    fn claim(labels: &Value, annotations: &Value, size: &str) -> PersistentVolumeClaim {
        let manifest = json!({
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "data", "labels": labels, "annotations": annotations},
            "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": size}}},
        });
        match read_objects(&manifest.to_string()).unwrap().remove(0).kind {
            ObjectKind::PersistentVolumeClaim(claim) => claim,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn labels_and_annotations_of_a_claim_change() {
        let folder = tempfile::tempdir().unwrap();
        let stores = LocalStores::at(folder.path());
        let none = json!({});
        let (old, new) = (json!({"a": "1", "b": "2"}), json!({"a": "3"}));
        for (given, outcome, labels, annotations) in [
            (claim(&none, &none, "1Mi"), "created", &none, &none),
            (claim(&old, &none, "1Mi"), "configured", &old, &none),
            (claim(&old, &none, "1Mi"), "unchanged", &old, &none),
            (claim(&new, &old, "2Mi"), "configured", &new, &old),
            (
                claim(&none, &new, "2Mi"),
                "configured",
                &none,
                &json!({"a": "3", "b": "2"}),
            ),
            (
                claim(&none, &none, "1Mi"),
                "unchanged",
                &none,
                &json!({"a": "3", "b": "2"}),
            ),
        ] {
            assert_eq!(make(&stores, &given).unwrap(), outcome, "{given:?}");
            let stored = stores.claims.get("default", "data").unwrap().object.metadata;
            assert_eq!(
                (&json!(stored.labels), &json!(stored.annotations)),
                (labels, annotations)
            );
        }
        assert_eq!(stores.claims.get("default", "data").unwrap().size, 2 << 20);
    }
}
