//! The entries of the schema table: a field, its type and its support.

/// What a value must be.
#[derive(Debug)]
pub(crate) enum FieldType {
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
    List(&'static FieldType),
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
    Honoured,
    /// Goes on without it, and says so.
    Noted(&'static str),
    /// Refuses it.
    Refused(&'static str),
}

/// One field of an object.
#[derive(Debug)]
pub(crate) struct Field {
    pub(super) name: &'static str,
    pub(super) kind: FieldType,
    pub(super) required: bool,
    pub(super) support: Support,
}

impl Field {
    pub(super) const fn required(mut self) -> Self {
        self.required = true;
        self
    }
}

pub(super) const fn field(name: &'static str, kind: FieldType, support: Support) -> Field {
    Field {
        name,
        kind,
        required: false,
        support,
    }
}

/// A field that is honoured.
pub(super) const fn honoured(name: &'static str, kind: FieldType) -> Field {
    field(name, kind, Support::Honoured)
}

/// A field that is harmless to leave out; `why` completes the warning.
pub(super) const fn noted(name: &'static str, kind: FieldType, why: &'static str) -> Field {
    field(name, kind, Support::Noted(why))
}

/// A field that cannot be left out without changing what the guest gets; `why` is the reason for the refusal.
pub(super) const fn refused(name: &'static str, kind: FieldType, why: &'static str) -> Field {
    field(name, kind, Support::Refused(why))
}

/// A field for the pod that a cluster runs the VM in.
pub(super) const fn pod(name: &'static str, kind: FieldType) -> Field {
    noted(
        name,
        kind,
        "is for the pod that a cluster runs the VM in; it changes nothing in the VM",
    )
}

pub(super) const U32: FieldType = FieldType::Int(0, u32::MAX as i64);
pub(super) const I32: FieldType = FieldType::Int(i32::MIN as i64, i32::MAX as i64);
pub(super) const I64: FieldType = FieldType::Int(i64::MIN, i64::MAX);
pub(super) const COUNT: FieldType = FieldType::Int(0, i64::MAX);
pub(super) const EMPTY: FieldType = FieldType::Object(&[]);
pub(super) const STRS: FieldType = FieldType::List(&FieldType::Str);

pub(super) const OWN_ADDRESS: &str = "the VMM places devices on the PCI bus itself";
pub(super) const NO_TAG: &str = "a config drive does not list devices yet";
