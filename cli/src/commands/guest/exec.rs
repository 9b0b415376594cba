//! `husk guest exec`.

use std::io::{Read, Write};

use husk_proto::shim::v1::GuestExecRequest;

use crate::failure::Failure;
use crate::live_vm;
use crate::output;
use crate::vm_ref::VmRef;

/// Most bytes of input. The agent takes them at once.
const MAX_INPUT: u64 = 1 << 20;

/// Run a command in the guest
///
/// The guest agent starts it as root, without a shell and without a terminal. Its output is printed after its end;
/// more than 3 MiB are an error.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Exit status: that of the command; 128 + N if signal N ended it; 1 if it could
not be run, or runs on after the time limit.

Examples:
  husk guest exec demo -- /bin/uname -r
  husk guest exec demo -- /bin/sh -c 'df -h | head -3'")]
pub(super) struct Args {
    /// The VM: NAME or NAMESPACE/NAME
    vm: VmRef,

    /// Pass this command's input on, at most 1 MiB
    #[arg(short = 'i', long)]
    stdin: bool,

    /// Seconds to wait for the command's end; it runs on after that
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..))]
    timeout: u32,

    /// The command and its arguments
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<String>,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let input = match args.stdin {
        true => input()?,
        false => Vec::new(),
    };
    let (program, arguments) = args.command.split_first().expect("clap requires a command");
    let request = GuestExecRequest {
        program: program.clone(),
        arguments: arguments.to_vec(),
        environment: Vec::new(),
        input,
        timeout_seconds: args.timeout,
    };
    let done = live_vm::block_on(async {
        let mut client = super::connect(&args.vm).await?;
        Ok(client.exec(request).await?.into_inner())
    })?;
    output::write(&done.stdout)?;
    // It has no other place to go to.
    let _ = std::io::stderr().write_all(&done.stderr);
    match done.exit_code {
        0 => Ok(()),
        code => Err(Failure::Ended(u8::try_from(code).unwrap_or(u8::MAX))),
    }
}

fn input() -> Result<Vec<u8>, Failure> {
    let mut input = Vec::new();
    let read = std::io::stdin().take(MAX_INPUT + 1).read_to_end(&mut input);
    read.map_err(Failure::at("read stdin"))?;
    match input.len() as u64 > MAX_INPUT {
        true => Err(Failure::Runtime("the input is longer than 1 MiB".into())),
        false => Ok(input),
    }
}
