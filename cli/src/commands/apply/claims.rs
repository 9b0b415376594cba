//! PersistentVolumeClaims: each is made as an empty volume, and grows.

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

/// Makes a claim, or grows it to what the manifest asks for.
pub(super) fn apply(machine: &Machine, claim: &PersistentVolumeClaim) -> Result<(), Failure> {
    let (namespace, name) = (&claim.metadata.namespace, &claim.metadata.name);
    let outcome = match machine.claims.get(namespace, name) {
        Ok(stored) => match claim.spec.size {
            Some(size) if size > stored.size => {
                machine.claims.resize(namespace, name, size)?;
                "configured"
            }
            _ => "unchanged",
        },
        Err(ClaimError::Unknown(_)) => {
            let new = NewClaim::of(&claim.metadata, &claim.spec, 0);
            match &claim.spec.data_source {
                None => machine.claims.create(&new)?,
                Some(source) => machine.claims.copy((namespace, source), &new, &|_, _| {})?,
            }
            "created"
        }
        Err(error) => return Err(error.into()),
    };
    let namespace = match namespace.as_str() {
        "default" => String::new(),
        namespace => format!("{namespace}/"),
    };
    output::print(&format!("persistentvolumeclaim/{namespace}{name} {outcome}\n"))
}
