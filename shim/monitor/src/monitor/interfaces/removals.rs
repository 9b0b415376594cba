//! Removals of interfaces that are under way.

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

/// Pause before a removal that the guest did not answer is asked for again.
const AGAIN: Duration = Duration::from_secs(1);

/// Removals that are under way.
#[derive(Debug, Default)]
pub(super) struct PendingRemovals {
    /// Who waits for what.
    pub(super) waiters: HashMap<String, Vec<Reply<()>>>,
    tasks: JoinSet<(String, Result<(), VmError>)>,
}

impl PendingRemovals {
    /// The next one that ends.
    pub(super) async fn next(&mut self) -> Option<(String, Result<(), VmError>)> {
        match self.tasks.join_next().await? {
            Ok(ended) => Some(ended),
            Err(error) => {
                warn!(%error, "unplugging an interface");
                None
            }
        }
    }

    /// Begins a removal, or waits with those for whom it is.
    pub(super) fn begin(&mut self, connection: VmmConnection, name: String, reply: Option<Reply<()>>) {
        match self.waiters.entry(name) {
            Slot::Occupied(mut others) => {
                // Who asks again and again has given up as often.
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

/// Asks the guest to let go, until it does.
async fn unplug(mut connection: VmmConnection, name: String) -> (String, Result<(), VmError>) {
    loop {
        let request = RemoveNicRequest { id: name.clone() };
        let removed = connection.client.remove_nic(request).await.map_err(VmError::from);
        let removed = match removed {
            Err(VmError::TimedOut(_)) => {
                sleep(AGAIN).await;
                continue;
            }
            // What the VMM does not have is gone.
            Err(VmError::NotFound(_)) => Ok(()),
            removed => removed.map(drop),
        };
        return (name, removed);
    }
}
