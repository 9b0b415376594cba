//! `husk guest`.

mod exec;
pub(super) mod info;

use clap::Subcommand;
use husk_monitor::client::{self, GuestClient};
use husk_proto::shim::v1::{GuestFreezeRequest, GuestThawRequest};

use crate::failure::Failure;
use crate::live_vm;
use crate::vm_ref::VmRef;

/// Ask the guest agent of a VM
///
/// The guest needs a running QEMU guest agent: in Debian the package qemu-guest-agent.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  husk guest info demo
  husk guest exec demo -- /bin/systemctl is-system-running
  husk guest freeze demo && cp disk.img backup.img; husk guest thaw demo")]
pub(crate) struct Args {
    #[command(subcommand)]
    command: GuestCommand,
}

#[derive(Debug, Subcommand)]
enum GuestCommand {
    /// Show the guest's operating system, addresses, users and file systems
    ///
    /// Shows the last report of the agent. It is asked again every 5 s to 5 min.
    Info {
        #[command(flatten)]
        args: info::Args,
    },
    /// List the users that are logged in
    Users {
        #[command(flatten)]
        args: info::Args,
    },
    /// List the mounted file systems
    Fs {
        #[command(flatten)]
        args: info::Args,
    },
    Exec(exec::Args),
    /// Freeze the file systems, for a consistent copy of the disks
    ///
    /// The guest writes its caches to the disks; programs that write to them then wait until the thaw. The file systems
    /// are thawed after the time of --thaw-after, also if nobody asks for it.
    Freeze {
        /// The VM: NAME or NAMESPACE/NAME
        vm: VmRef,
        /// Seconds after which the file systems are thawed
        #[arg(long, value_name = "SECONDS", default_value_t = 300, value_parser = clap::value_parser!(u32).range(1..))]
        thaw_after: u32,
    },
    /// Thaw the file systems
    ///
    /// Fails if they were thawed already, because a copy that was made meanwhile may not be consistent.
    Thaw {
        /// The VM: NAME or NAMESPACE/NAME
        vm: VmRef,
    },
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    match &args.command {
        GuestCommand::Info { args } => info::run(args, info::Part::All),
        GuestCommand::Users { args } => info::run(args, info::Part::Users),
        GuestCommand::Fs { args } => info::run(args, info::Part::FileSystems),
        GuestCommand::Exec(args) => exec::run(args),
        GuestCommand::Freeze { vm, thaw_after } => live_vm::block_on(async {
            let thaw_seconds = Some(*thaw_after);
            let mut client = connect(vm).await?;
            let frozen = client
                .freeze(GuestFreezeRequest { thaw_seconds })
                .await?
                .into_inner();
            let already = if frozen.already_frozen { " already" } else { "" };
            match frozen.thaw_seconds {
                Some(seconds) => eprintln!("{vm}: frozen{already}; thawed in {seconds} s at the latest"),
                None => eprintln!("{vm}: frozen{already}, by something else: nothing thaws it in time"),
            }
            Ok(())
        }),
        GuestCommand::Thaw { vm } => live_vm::block_on(async {
            let thawed = connect(vm).await?.thaw(GuestThawRequest {}).await?.into_inner();
            if !thawed.was_frozen {
                return Err(Failure::Runtime(format!(
                    "{vm}: the file systems were thawed already: a copy since the freeze may not be consistent"
                )));
            }
            eprintln!("{vm}: thawed");
            Ok(())
        }),
    }
}

async fn connect(vm: &VmRef) -> Result<GuestClient, Failure> {
    Ok(client::connect_guest(&live_vm::find(vm)?).await?)
}
