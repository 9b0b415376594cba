//! What a manifest may hold: one table that knows every field of KubeVirt's VMI schema, its type, whether it must be
//! given, and what Husk does with it.
//!
//! The table is what keeps the promise that no valid field is silently mis-set: a field is honoured ([`honoured`]),
//! warned about by its path ([`noted`]), or refused by its path with the reason ([`refused`]).

mod check;
mod devices;
mod field_type;
mod network;
mod spec;
mod volumes;

pub(crate) use check::{Findings, check};
pub(crate) use field_type::FieldType;
pub(crate) use spec::{OBJECT, VM_SPEC, VMI_SPEC};
