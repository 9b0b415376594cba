//! A table of all fields of KubeVirt's VMI schema and of the objects around it: type, required or not, and support by
//! Husk.
//!
//! The table guarantees that no valid field is ignored silently: a field is honoured, reported in a warning, or refused
//! with a reason.

mod check;
mod credentials;
mod devices;
mod field_type;
mod instancetype;
mod network;
mod objects;
mod spec;
mod volumes;

pub(crate) use check::{Diagnostics, check};
pub(crate) use field_type::FieldType;
pub(crate) use instancetype::{INSTANCETYPE, PREFERENCE};
pub(crate) use objects::{CONFIG_MAP, DATA_VOLUME, PERSISTENT_VOLUME_CLAIM, SECRET};
pub(crate) use spec::{OBJECT, VM_SPEC, VMI_SPEC, WHOLE_VM_SPEC};
