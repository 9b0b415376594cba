//! The transport from outside: registers, lifecycle, a real queue, and arbitrary guest accesses.

use super::fake;

mod echo;
mod lifecycle;
mod props;
mod registers;
