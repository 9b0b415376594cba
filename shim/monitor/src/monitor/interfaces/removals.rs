//! Removals of interfaces under way.

use std::collections::HashMap;
use std::collections::hash_map::Entry as Slot;
use std::time::Duration;

use husk_proto::vmm::v1::RemoveNicRequest;
use tokio::task::JoinSet;
use tokio::time::sleep;
use tracing::warn;

use super::handle::Reply;
use crate::monitor::vm_error::VmError;
use crate::monitor::vmm_connection::VmmConnection;

/// Pause between two requests for a removal that the guest did not answer.
const AGAIN: Duration = Duration::from_secs(1);

/// Removals under way.
#[derive(Debug, Default)]
pub(super) struct PendingRemovals {
    /// Callers that wait for a removal, by interface.
    pub(super) waiters: HashMap<String, Vec<Reply<()>>>,
    tasks: JoinSet<(String, Result<(), VmError>)>,
}

impl PendingRemovals {
    /// Returns the next removal that ends.
    pub(super) async fn next(&mut self) -> Option<(String, Result<(), VmError>)> {
        match self.tasks.join_next().await? {
            Ok(ended) => Some(ended),
            Err(error) => {
                warn!(%error, "unplugging an interface");
                None
            }
        }
    }

    /// Starts a removal, or adds the caller to the waiters of the one under way.
    pub(super) fn begin(&mut self, connection: VmmConnection, name: String, reply: Option<Reply<()>>) {
        match self.waiters.entry(name) {
            Slot::Occupied(mut others) => {
                // Drop requests whose caller has timed out.
                others.get_mut().retain(|reply| !reply.is_closed());
                others.get_mut().extend(reply);
            }
            Slot::Vacant(first) => {
                self.tasks.spawn(unplug(connection, first.key().clone()));
                first.insert(reply.into_iter().collect());
            }
        }
    }
}

/// Asks the guest to release the device until it does.
async fn unplug(mut connection: VmmConnection, name: String) -> (String, Result<(), VmError>) {
    loop {
        let request = RemoveNicRequest { id: name.clone() };
        let removed = connection.client.remove_nic(request).await.map_err(VmError::from);
        let removed = match removed {
            Err(VmError::TimedOut(_)) => {
                sleep(AGAIN).await;
                continue;
            }
            // The VMM does not have the device: it is removed.
            Err(VmError::NotFound(_)) => Ok(()),
            removed => removed.map(drop),
        };
        return (name, removed);
    }
}
