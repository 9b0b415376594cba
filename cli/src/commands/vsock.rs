//! `husk vsock`.

use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use husk_monitor::client;

use crate::failure::Failure;
use crate::live_vm;
use crate::vm_ref::VmRef;

/// Bytes copied at a time.
const CHUNK: usize = 64 << 10;

/// Connect stdin and stdout to a vsock port of a VM
///
/// A program of the guest must listen on the port of a vsock socket. The end of the input is passed on to it. The
/// command ends when the guest closes the connection.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Exit status: 0 when the guest has closed the connection, 1 if it refuses it or
the VM ends.

Examples:
  husk vsock demo 5000 < request")]
pub(crate) struct Args {
    /// The VM: NAME or NAMESPACE/NAME
    vm: VmRef,

    /// Port of the guest
    #[arg(value_parser = clap::value_parser!(u32).range(..i64::from(u32::MAX)))]
    port: u32,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let Args { vm, port } = args;
    let stream = live_vm::block_on(async {
        let stream = client::connect_vsock(&live_vm::find(vm)?, *port).await;
        let stream = stream.map_err(Failure::at(vm))?.into_std()?;
        stream.set_nonblocking(false)?;
        Ok(stream)
    })?;
    let (input, mut output) = (plain(io::stdin())?, plain(io::stdout())?);
    let to_guest = stream.try_clone()?;
    // It may wait for input after the end of the connection, and ends with the process.
    std::thread::spawn(move || send(input, &to_guest));
    match copy(&stream, &mut output) {
        Ok(()) => {}
        // The reader of the output has had enough.
        Err(error) if error.kind() == ErrorKind::BrokenPipe => return Ok(()),
        // The guest or the VM has ended with the connection open.
        Err(error) if error.kind() == ErrorKind::ConnectionReset => {}
        Err(error) => return Err(Failure::at("copy from the guest to stdout")(error)),
    }
    match has_ended(vm) {
        true => Err(Failure::Runtime(format!("{vm} has ended"))),
        false => Ok(()),
    }
}

/// A standard stream without the buffer of this process: a byte is passed on when it arrives.
fn plain(stream: impl AsFd) -> io::Result<File> {
    Ok(stream.as_fd().try_clone_to_owned()?.into())
}

/// Copies up to the end. Not by `std::io::copy`: that uses splice(2), which holds the lock of a pipe while it waits for
/// the socket, so that the pipe's reader does not get what is in it.
fn copy(mut from: impl Read, mut to: impl Write) -> io::Result<()> {
    let mut bytes = vec![0; CHUNK];
    loop {
        match from.read(&mut bytes) {
            Ok(0) => return Ok(()),
            Ok(count) => to.write_all(&bytes[..count])?,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// Sends the input to the guest, and then its end. Errors show at the other direction.
fn send(input: File, to_guest: &UnixStream) {
    let _ = copy(input, to_guest);
    let _ = to_guest.shutdown(Shutdown::Write);
}

/// True if the VM does not run any more. Its VMM may have ended before its monitor has noticed.
fn has_ended(vm: &VmRef) -> bool {
    let info = live_vm::block_on(async { live_vm::info(&mut live_vm::connect(vm).await?).await });
    info.map_or(true, |info| info.booted_from.is_empty())
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread::{sleep, spawn};
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_piped_byte_is_read_while_the_connection_is_silent() {
        let (mut guest, stream) = UnixStream::pair().unwrap();
        let (mut reader, writer) = io::pipe().unwrap();
        let copying = spawn(move || copy(&stream, writer));
        guest.write_all(b"x").unwrap();
        // Until the copy waits for the next byte.
        sleep(Duration::from_millis(100));
        let (sender, receiver) = mpsc::channel();
        spawn(move || sender.send(reader.read(&mut [0; 8]).unwrap()));
        assert_eq!(receiver.recv_timeout(Duration::from_secs(20)), Ok(1));
        drop(guest);
        copying.join().unwrap().unwrap();
    }
}
