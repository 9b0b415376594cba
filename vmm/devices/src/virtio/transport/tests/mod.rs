//! The transport from outside: registers, lifecycle, a real queue, and arbitrary guest accesses.

mod echo;
mod fake;
mod lifecycle;
mod props;
mod registers;
