//! The start of a shim: `start` leaves a process that serves on a socket, and prints the address.

mod flags;
mod launch;
mod params;
mod socket;

use std::fs;
use std::path::Path;

use containerd_shim_protos::protobuf::Message;
use containerd_shim_protos::types::introspection::{RuntimeInfo, RuntimeVersion};

use crate::bundle;

pub(crate) use flags::{Action, Flags};
pub(crate) use launch::LISTENING;
use params::Params;
pub(crate) use params::TTRPC_ADDRESS;
pub(crate) use socket::Address;

/// The file of a bundle with the address of its shim.
const ADDRESS: &str = "address";

/// `start`: returns the reply. A pod's containers share the process of the first.
pub(crate) fn start(flags: &Flags) -> Result<Vec<u8>, String> {
    let params = Params::read(flags)?;
    let bundle = bundle::directory(&flags.bundle)?;
    let group = bundle::group(&bundle).map_err(|error| error.to_string())?;
    let group = group.unwrap_or_else(|| flags.id.clone());
    let address = Address::of(
        params.socket_dir.as_deref(),
        &flags.address,
        &flags.namespace,
        &group,
    );
    if !address.is_served() {
        launch::launch(flags, &params, &bundle, &address)?;
    }
    // containerd 1.7 reads this file after a restart. Later versions store the reply.
    let kept = bundle.join(ADDRESS);
    fs::write(&kept, address.to_string()).map_err(|error| format!("{}: {error}", kept.display()))?;
    params.reply(&address.to_string())
}

/// The address that [`start`] wrote to a bundle. Only `start` gets the directory of sockets from containerd.
pub(crate) fn address_in(bundle: &Path) -> Option<Address> {
    let address = fs::read_to_string(bundle.join(ADDRESS)).ok()?;
    address.strip_prefix("unix://").map(Address::at)
}

/// `-info`: describes this runtime.
pub(crate) fn info() -> Result<Vec<u8>, String> {
    let info = RuntimeInfo {
        name: "io.containerd.husk.v2".into(),
        version: Some(RuntimeVersion {
            version: env!("CARGO_PKG_VERSION").into(),
            ..RuntimeVersion::default()
        })
        .into(),
        ..RuntimeInfo::default()
    };
    info.write_to_bytes().map_err(|error| error.to_string())
}
