//! `spec.accessCredentials`.

use super::field_type::FieldType::{Object, Str};
use super::field_type::{EMPTY, Field, FieldType, STRS, honoured};

/// An entry of `spec.accessCredentials`.
pub(crate) static ACCESS_CREDENTIAL: FieldType = Object(&[
    honoured("sshPublicKey", Object(SSH_PUBLIC_KEY)),
    honoured("userPassword", Object(USER_PASSWORD)),
]);

const SSH_PUBLIC_KEY: &[Field] = &[
    honoured("source", Object(SOURCE)).required(),
    honoured("propagationMethod", Object(SSH_PROPAGATION)).required(),
];

const USER_PASSWORD: &[Field] = &[
    honoured("source", Object(SOURCE)).required(),
    honoured("propagationMethod", Object(PASSWORD_PROPAGATION)).required(),
];

const SOURCE: &[Field] = &[honoured(
    "secret",
    Object(&[honoured("secretName", Str).required()]),
)];

const SSH_PROPAGATION: &[Field] = &[
    honoured("configDrive", EMPTY),
    honoured("noCloud", EMPTY),
    honoured("qemuGuestAgent", Object(&[honoured("users", STRS).required()])),
];

const PASSWORD_PROPAGATION: &[Field] = &[honoured("qemuGuestAgent", EMPTY)];
