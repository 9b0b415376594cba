//! A table of all fields of KubeVirt's VMI schema: type, required or not, and support by Husk.
//!
//! The table guarantees that no valid field is ignored silently: a field is honoured, reported in a note, or refused with
//! a reason.

mod check;
mod devices;
mod field_type;
mod network;
mod spec;
mod volumes;

pub(crate) use check::{Findings, check};
pub(crate) use field_type::FieldType;
pub(crate) use spec::{OBJECT, VM_SPEC, VMI_SPEC};
