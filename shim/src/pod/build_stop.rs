//! Ends the build of a VM that is not wanted any more.

use tokio::sync::oneshot;

#[derive(Debug)]
pub(super) struct BuildStop {
    /// `None` once the build was to end.
    sender: Option<oneshot::Sender<()>>,
}

impl BuildStop {
    /// The second value completes when the build is to end.
    pub(super) fn new() -> (BuildStop, impl Future<Output = ()> + Send + 'static) {
        let (sender, stopped) = oneshot::channel();
        let stopped = async {
            if stopped.await.is_err() {
                std::future::pending().await
            }
        };
        (BuildStop { sender: Some(sender) }, stopped)
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.sender.is_none()
    }

    pub(super) fn stop(&mut self) {
        if let Some(sender) = self.sender.take() {
            let _ = sender.send(());
        }
    }
}
