//! Links, addresses, routes and neighbours of the calling thread's network namespace.
//!
//! Only this module uses rtnetlink, whose API changes often. Calls block: make them on a namespace's own thread.

mod addresses;
mod connection;
mod link;
mod links;
mod neighbours;
mod raw_message;
mod routes;
pub(super) mod saved_routes;
mod veth;

pub(super) use connection::Netlink;
pub(super) use link::Link;
pub(super) use links::LinkChange;
pub(super) use veth::Veth;
