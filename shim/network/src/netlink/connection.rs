//! The netlink socket.

use std::future::Future;

use futures_util::{Stream, TryStreamExt};
use rtnetlink::Handle;
use tokio::runtime::{Builder, Runtime};

use crate::error::NetworkFault;

/// A connection to the kernel.
#[derive(Debug)]
pub(crate) struct Netlink {
    runtime: Runtime,
    pub(super) handle: Handle,
}

impl Netlink {
    /// Connects to the calling thread's namespace.
    pub(crate) fn open() -> Result<Netlink, NetworkFault> {
        let what = || NetworkFault::kernel("opening a netlink socket");
        let runtime = Builder::new_current_thread()
            .enable_io()
            .build()
            .map_err(what())?;
        let _entered = runtime.enter();
        let (connection, handle, _) = rtnetlink::new_connection().map_err(what())?;
        drop(runtime.spawn(connection));
        drop(_entered);
        Ok(Netlink { runtime, handle })
    }

    pub(super) fn collect<T>(
        &self,
        what: &str,
        stream: impl Stream<Item = Result<T, rtnetlink::Error>>,
    ) -> Result<Vec<T>, NetworkFault> {
        self.block_on(what.to_owned(), stream.try_collect())
    }

    pub(super) fn block_on<T>(
        &self,
        what: String,
        work: impl Future<Output = Result<T, rtnetlink::Error>>,
    ) -> Result<T, NetworkFault> {
        let refused = |error| match error {
            rtnetlink::Error::NetlinkError(message) => message.to_io(),
            other => std::io::Error::other(other),
        };
        self.runtime
            .block_on(work)
            .map_err(refused)
            .map_err(NetworkFault::kernel(what))
    }
}
