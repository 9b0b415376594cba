//! PersistentVolumeClaims: each is made as an empty volume, and grows.

use std::collections::BTreeMap;
use std::iter::successors;

use husk_claims::{ClaimError, NewClaim};
use husk_vmi::objects::PersistentVolumeClaim;

use crate::failure::Failure;
use crate::machine::Machine;
use crate::output;

/// Granularity of sizes, in bytes.
const MIB: u64 = 1 << 20;

/// The error of a claim that cannot become what its manifest asks for.
pub(super) fn fault(machine: &Machine, claim: &PersistentVolumeClaim) -> Option<String> {
    let stored = machine
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

/// Makes a claim, or grows it to what the manifest asks for. `prefix` is in front of its errors.
pub(super) fn apply(machine: &Machine, prefix: &str, claim: &PersistentVolumeClaim) -> Result<(), Failure> {
    let name = match claim.metadata.namespace.as_str() {
        "default" => claim.metadata.name.clone(),
        namespace => format!("{namespace}/{}", claim.metadata.name),
    };
    let outcome =
        make(machine, claim).map_err(Failure::at(format!("{prefix}persistentvolumeclaim/{name}")))?;
    output::print(&format!("persistentvolumeclaim/{name} {outcome}\n"))
}

fn make(machine: &Machine, claim: &PersistentVolumeClaim) -> Result<&'static str, ClaimError> {
    let (namespace, name) = (&claim.metadata.namespace, &claim.metadata.name);
    match machine.claims.get(namespace, name) {
        Ok(stored) => match claim.spec.size {
            Some(size) if size > stored.size => {
                machine.claims.resize(namespace, name, size)?;
                Ok("configured")
            }
            _ => Ok("unchanged"),
        },
        Err(ClaimError::Unknown(_)) => {
            let new = NewClaim::of(&claim.metadata, &claim.spec, 0);
            match &claim.spec.data_source {
                None => machine.claims.create(&new)?,
                Some(source) => machine.claims.copy((namespace, source), &new, &|_, _| {})?,
            }
            Ok("created")
        }
        Err(error) => Err(error),
    }
}
