//! The entries of the schema table: a field, its type and its support.

/// Type of a value.
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
    /// An object with any fields; these are checked.
    Open(&'static [Field]),
    List(&'static FieldType),
    /// A map of names to strings.
    Strings,
    /// A map of names to quantities.
    Quantities,
    /// Any value.
    Any,
}

/// Support of a field by Husk.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Support {
    /// Honoured, or decided by its value.
    Honoured,
    /// Accepted with a warning.
    Warned(&'static str),
    /// Refused with a reason.
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

/// A field that is accepted with a warning; `why` is its text.
pub(super) const fn warned(name: &'static str, kind: FieldType, why: &'static str) -> Field {
    field(name, kind, Support::Warned(why))
}

/// A field that cannot be ignored, since the guest would differ; `why` is the text of the error.
pub(super) const fn refused(name: &'static str, kind: FieldType, why: &'static str) -> Field {
    field(name, kind, Support::Refused(why))
}

/// A field that only concerns the pod of the VM.
pub(super) const fn pod(name: &'static str, kind: FieldType) -> Field {
    warned(
        name,
        kind,
        "is ignored: it only concerns the pod that runs the VM in a cluster",
    )
}

pub(super) const U32: FieldType = FieldType::Int(0, u32::MAX as i64);
pub(super) const I32: FieldType = FieldType::Int(i32::MIN as i64, i32::MAX as i64);
pub(super) const I64: FieldType = FieldType::Int(i64::MIN, i64::MAX);
pub(super) const COUNT: FieldType = FieldType::Int(0, i64::MAX);
pub(super) const EMPTY: FieldType = FieldType::Object(&[]);
pub(super) const STRS: FieldType = FieldType::List(&FieldType::Str);

pub(super) const OWN_ADDRESS: &str = "PCI addresses cannot be chosen; the VMM assigns them";
pub(super) const NO_TAG: &str = "is ignored: the config drive does not list devices yet";
