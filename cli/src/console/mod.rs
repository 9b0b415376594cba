//! Client of a guest's serial console.

mod session;
mod terminal;

use std::pin::pin;

use husk_monitor::client::PodClient;
use husk_proto::shim::v1::ConsoleInput;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use crate::failure::Failure;
use crate::output;
use crate::vm_ref::VmRef;

pub(crate) use session::{OnInputEof, SessionEnd};

/// Connects stdin and stdout to the console of `vm` until the user detaches, the session ends, or `until` completes.
/// The terminal mode is restored before this returns.
pub(crate) async fn attach<T>(
    vm: &VmRef,
    client: &mut PodClient,
    at_input_end: OnInputEof,
    until: impl Future<Output = T>,
) -> Result<Result<SessionEnd, T>, Failure> {
    let (to_guest, inputs) = mpsc::channel::<ConsoleInput>(1);
    let mut until = pin!(until);
    let from_guest = tokio::select! {
        from_guest = client.console(ReceiverStream::new(inputs)) => from_guest?.into_inner(),
        asked = &mut until => return Ok(Err(asked)),
    };
    output::print(&format!(
        "Successfully connected to {} console. The escape sequence is ^]\n",
        vm.name
    ))?;
    let raw = terminal::RawMode::enter().map_err(Failure::at("switch the terminal to raw mode"))?;
    let input = session::stdin().map_err(Failure::at("read stdin"))?;
    let ended = tokio::select! {
        ended = session::run(to_guest, from_guest, input, tokio::io::stdout(), at_input_end) => ended.map(Ok),
        asked = until => Ok(Err(asked)),
    };
    drop(raw);
    match ended {
        // The reader of stdout is gone.
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(Ok(SessionEnd::Detached)),
        ended => ended.map_err(Failure::at("write to stdout")),
    }
}
