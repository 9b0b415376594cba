//! The caller's end of a guest's serial console.

mod session;
mod terminal;

pub(crate) use session::{AtInputEnd, End};
