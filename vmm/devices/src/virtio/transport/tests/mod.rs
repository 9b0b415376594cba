//! The transport from outside: its registers, its life, a real queue, and a guest that does anything.

mod echo;
mod fake;
mod lifecycle;
mod props;
mod registers;
