//! VMs in the foreground: what happens to them, shown line by line, until they end.

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

/// How often a monitor that is being started is looked for.
const CONNECT_INTERVAL: Duration = Duration::from_millis(5);

/// Some VMs, and how often the caller has asked for their end.
#[derive(Debug)]
pub(crate) struct Foreground {
    followers: Vec<Follower>,
    stop_level: watch::Sender<StopLevel>,
}

impl Foreground {
    /// Nothing to follow yet.
    pub(crate) fn new() -> Self {
        Self {
            followers: Vec::new(),
            stop_level: watch::Sender::new(0),
        }
    }

    /// Reaches a VM that is being started, whenever its monitor can be: a guest may end before its start has been
    /// reported, and how it ended is shown only to those who listen by then.
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

    /// Follows a VM that was reached and has been started; tells that it runs.
    pub(crate) async fn add(&mut self, mut follower: Follower) {
        follower.until_running().await;
        self.followers.push(follower);
    }

    /// Another connection to the first VM's monitor.
    pub(crate) fn client(&self) -> Option<PodClient> {
        self.followers.first().map(Follower::client)
    }

    /// Passes a signal on to the VMs; fails with the status to leave with, if it asks to leave them alone.
    pub(crate) fn handle_signal(&mut self, asked: StopSignal) -> Result<(), Failure> {
        if asked == StopSignal::Hangup {
            return Err(Failure::Ended(asked.status()));
        }
        self.stop_level
            .send_modify(|stop_level| *stop_level = (*stop_level + 1).min(2));
        Ok(())
    }

    /// Follows the VMs, obeying signals, until the last has ended.
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
