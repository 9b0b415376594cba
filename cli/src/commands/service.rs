//! `husk service`: the process of one VM of `husk apply`, which systemd runs.

use crate::failure::Failure;
use crate::machine::{service, systemd};
use crate::vm_ref::VmRef;

/// Run one VM of `husk apply`; started by systemd as husk@NAMESPACE:NAME.service
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// NAMESPACE:NAME of the VM
    #[arg(value_parser = systemd::instance)]
    vm: VmRef,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    service::run(&args.vm)
}
