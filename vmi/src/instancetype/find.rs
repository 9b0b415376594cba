//! The instance type and the preference that a VirtualMachine names.

use super::Lookup;
use crate::field::FieldError;
use crate::objects::{Matcher, VirtualMachine};
use crate::types::{InstancetypeSpec, PreferenceSpec};

pub(super) fn instancetype<'a>(
    vm: &VirtualMachine,
    matcher: Option<&Matcher>,
    objects: &'a (impl Lookup + ?Sized),
) -> Result<Option<&'a InstancetypeSpec>, FieldError> {
    let Some(matcher) = matcher else {
        return Ok(None);
    };
    let resource = Resource {
        field: "instancetype",
        matcher: "InstancetypeMatcher",
        namespaced: "virtualmachineinstancetype",
        cluster: "virtualmachineclusterinstancetype",
    };
    let namespace = resource.namespace(vm, matcher)?;
    match objects.instancetype(namespace, &matcher.name) {
        Some(instancetype) => Ok(Some(&instancetype.spec)),
        None => Err(resource.missing(namespace, matcher)),
    }
}

pub(super) fn preference<'a>(
    vm: &VirtualMachine,
    matcher: Option<&Matcher>,
    objects: &'a (impl Lookup + ?Sized),
) -> Result<Option<&'a PreferenceSpec>, FieldError> {
    let Some(matcher) = matcher else {
        return Ok(None);
    };
    let resource = Resource {
        field: "preference",
        matcher: "PreferenceMatcher",
        namespaced: "virtualmachinepreference",
        cluster: "virtualmachineclusterpreference",
    };
    let namespace = resource.namespace(vm, matcher)?;
    match objects.preference(namespace, &matcher.name) {
        Some(preference) => Ok(Some(&preference.spec)),
        None => Err(resource.missing(namespace, matcher)),
    }
}

/// True if a matcher's kind is that of the whole cluster; none if it is no kind of instance types or preferences.
pub(super) fn is_of_cluster(kind: &str) -> Option<bool> {
    let kind = kind.to_lowercase();
    match kind.strip_suffix('s').unwrap_or(&kind) {
        "" | "virtualmachineclusterinstancetype" | "virtualmachineclusterpreference" => Some(true),
        "virtualmachineinstancetype" | "virtualmachinepreference" => Some(false),
        _ => None,
    }
}

/// The API's names for instance types, or for preferences.
struct Resource {
    field: &'static str,
    matcher: &'static str,
    namespaced: &'static str,
    cluster: &'static str,
}

impl Resource {
    /// The namespace to look in; none for the whole cluster.
    fn namespace<'a>(
        &self,
        vm: &'a VirtualMachine,
        matcher: &Matcher,
    ) -> Result<Option<&'a str>, FieldError> {
        let kind = matcher.kind.to_lowercase();
        match kind.strip_suffix('s').unwrap_or(&kind) {
            "" => Ok(None),
            singular if singular == self.cluster => Ok(None),
            singular if singular == self.namespaced => Ok(Some(&vm.metadata.namespace)),
            _ => {
                let text = format!("got unexpected kind in {}: {}", self.matcher, matcher.kind);
                Err(FieldError::invalid(format!("spec.{}.kind", self.field), text))
            }
        }
    }

    fn missing(&self, namespace: Option<&str>, matcher: &Matcher) -> FieldError {
        let resource = if namespace.is_some() {
            self.namespaced
        } else {
            self.cluster
        };
        let place = namespace.map(|namespace| format!(" in namespace {namespace}"));
        let text = format!(
            "{resource}s.instancetype.kubevirt.io \"{}\" not found{}; add it to the manifest",
            matcher.name,
            place.unwrap_or_default()
        );
        FieldError::not_found(format!("spec.{}.name", self.field), text)
    }
}
