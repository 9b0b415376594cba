//! What a manifest may hold: one table that knows every field of KubeVirt's VMI schema, its type, whether it must be
//! given, and what Husk does with it.
//!
//! The table is what keeps the promise that no valid field is silently mis-set: a field is honoured ([`yes`]),
//! warned about by its path ([`noted`]), or refused by its path with the reason ([`no`]).

mod check;
mod devices;
mod network;
mod spec;
mod volumes;

pub(crate) use check::{Found, check};
pub(crate) use spec::{OBJECT, VM_SPEC, VMI_SPEC};

/// What a value must be.
#[derive(Debug)]
pub(crate) enum Kind {
    Str,
    Bool,
    /// An integer within these bounds.
    Int(i64, i64),
    /// A resource quantity: text or a number.
    Quantity,
    /// An object with exactly these fields.
    Object(&'static [Field]),
    /// An object of any fields; the known ones are checked.
    Open(&'static [Field]),
    List(&'static Kind),
    /// Names to text.
    Strings,
    /// Names to quantities.
    Quantities,
    /// Left to whom it is meant for.
    Any,
}

/// What Husk does with a field that is given.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Support {
    /// Honours it, or decides by its value.
    Yes,
    /// Goes on without it, and says so.
    Noted(&'static str),
    /// Refuses it.
    No(&'static str),
}

/// One field of an object.
#[derive(Debug)]
pub(crate) struct Field {
    name: &'static str,
    kind: Kind,
    required: bool,
    support: Support,
}

impl Field {
    const fn required(mut self) -> Self {
        self.required = true;
        self
    }
}

const fn field(name: &'static str, kind: Kind, support: Support) -> Field {
    Field {
        name,
        kind,
        required: false,
        support,
    }
}

/// A field that is honoured.
const fn yes(name: &'static str, kind: Kind) -> Field {
    field(name, kind, Support::Yes)
}

/// A field that is harmless to leave out; `why` completes the warning.
const fn noted(name: &'static str, kind: Kind, why: &'static str) -> Field {
    field(name, kind, Support::Noted(why))
}

/// A field that cannot be left out without changing what the guest gets; `why` is the reason for the refusal.
const fn no(name: &'static str, kind: Kind, why: &'static str) -> Field {
    field(name, kind, Support::No(why))
}

/// A field for the pod that a cluster runs the VM in.
const fn pod(name: &'static str, kind: Kind) -> Field {
    noted(
        name,
        kind,
        "is for the pod that a cluster runs the VM in; it changes nothing in the VM",
    )
}

const U32: Kind = Kind::Int(0, u32::MAX as i64);
const I32: Kind = Kind::Int(i32::MIN as i64, i32::MAX as i64);
const I64: Kind = Kind::Int(i64::MIN, i64::MAX);
const COUNT: Kind = Kind::Int(0, i64::MAX);
const EMPTY: Kind = Kind::Object(&[]);
const STRS: Kind = Kind::List(&Kind::Str);
