//! Follows VMs in the foreground until they end.

mod follower;
mod progress;

use std::time::Duration;

use husk_monitor::client::PodClient;
use tokio::sync::watch;

use crate::failure::{Failure, RUNTIME};
use crate::live_vm;
use crate::signals::{Signals, StopSignal};
use crate::vm_ref::VmRef;

pub(crate) use follower::Follower;
use follower::StopLevel;

/// Interval between attempts to connect to a monitor that is starting.
const CONNECT_INTERVAL: Duration = Duration::from_millis(20);

/// The VMs in the foreground and the requested stop level.
#[derive(Debug)]
pub(crate) struct Foreground {
    followers: Vec<Follower>,
    stop_level: watch::Sender<StopLevel>,
}

impl Foreground {
    /// Creates a set without VMs.
    pub(crate) fn new() -> Self {
        Self {
            followers: Vec::new(),
            stop_level: watch::Sender::new(0),
        }
    }

    /// Connects to a VM that is being started as soon as its monitor accepts connections. A guest may end before its
    /// start is reported, and only subscribers by then learn how it ended.
    pub(crate) fn connect_follower(&self, vm: &VmRef) -> impl Future<Output = Follower> + use<> {
        let (vm, stop_level) = (vm.clone(), self.stop_level.subscribe());
        async move {
            loop {
                if let Ok(client) = live_vm::connect(&vm).await
                    && let Ok(follower) = Follower::new(&vm, client, &stop_level).await
                {
                    return follower;
                }
                tokio::time::sleep(CONNECT_INTERVAL).await;
            }
        }
    }

    /// Adds a VM that was started, and prints that it is running.
    pub(crate) async fn add(&mut self, mut follower: Follower) {
        follower.until_running().await;
        self.followers.push(follower);
    }

    /// A client for the monitor of the first VM.
    pub(crate) fn client(&self) -> Option<PodClient> {
        self.followers.first().map(Follower::client)
    }

    /// Raises the stop level. For SIGHUP, fails with the exit status of this command and leaves the VMs running.
    pub(crate) fn handle_signal(&mut self, asked: StopSignal) -> Result<(), Failure> {
        if asked == StopSignal::Hangup {
            return Err(Failure::Ended(asked.status()));
        }
        self.stop_level
            .send_modify(|stop_level| *stop_level = (*stop_level + 1).min(2));
        Ok(())
    }

    /// Follows the VMs and handles signals until the last VM has ended.
    pub(crate) async fn follow(mut self, signals: &mut Signals) -> Result<(), Failure> {
        let running: Vec<_> = self
            .followers
            .drain(..)
            .map(|follower| tokio::spawn(follower.run()))
            .collect();
        let mut worst = 0;
        for mut follower in running {
            let status = loop {
                tokio::select! {
                    status = &mut follower => break status.unwrap_or(RUNTIME),
                    asked = signals.next() => self.handle_signal(asked)?,
                }
            };
            worst = if worst == 0 { status } else { worst };
        }
        match worst {
            0 => Ok(()),
            _ if *self.stop_level.borrow() >= 2 => Err(Failure::Ended(StopSignal::Interrupt.status())),
            status => Err(Failure::Ended(status)),
        }
    }
}
