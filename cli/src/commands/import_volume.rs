//! `husk import-volume`: fills the volume of one DataVolume.

use sd_notify::{NotifyState, notify};

use crate::failure::{Failure, one_line};
use crate::machine::{LocalStores, import, systemd};
use crate::vm_ref::VmRef;

/// Fill the volume of a DataVolume; started by systemd as husk-import@NAMESPACE:NAME.service
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// NAMESPACE:NAME of the DataVolume
    #[arg(value_parser = systemd::instance)]
    volume: VmRef,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let stores = LocalStores::locate()?;
    let _ = notify(&[NotifyState::Ready]);
    let objects = stores.objects.read_kinds(|kind| !kind.is_vm())?;
    let mut report = |text: &str| {
        let _ = notify(&[NotifyState::Status(&one_line(text))]);
    };
    import(&stores, &objects, &args.volume, &mut report).map_err(|error| {
        let _ = notify(&[NotifyState::Status(&one_line(&error.text))]);
        Failure::Runtime(error.text)
    })
}
