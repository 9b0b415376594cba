//! VMs in the foreground: what happens to them, told line by line, until they end.

mod follower;
mod progress;
mod status;

use std::time::Duration;

use husk_shim::client::PodClient;
use tokio::sync::watch;

use crate::failure::{Failure, RUNTIME};
use crate::pod;
use crate::signals::{Asked, Signals};
use crate::vm_ref::VmRef;

pub(crate) use follower::Follower;
pub(crate) use status::{BOOT_FAILED, end, is_final};

/// How the VMs shall end: 0 by themselves, 1 by their power button, 2 by force.
type Ending = u8;

/// How often a monitor that is being started is looked for.
const RETRY: Duration = Duration::from_millis(5);

/// Some VMs, and how often the caller has asked for their end.
#[derive(Debug)]
pub(crate) struct Foreground {
    followers: Vec<Follower>,
    ending: watch::Sender<Ending>,
}

impl Foreground {
    /// Nothing to follow yet.
    pub(crate) fn new() -> Self {
        Self {
            followers: Vec::new(),
            ending: watch::Sender::new(0),
        }
    }

    /// Reaches a VM that is being started, whenever its monitor can be: a guest may end before its start has been
    /// reported, and how it ended is told only to those who listen by then.
    pub(crate) fn reach(&self, vm: &VmRef) -> impl Future<Output = Follower> + use<> {
        let (vm, ending) = (vm.clone(), self.ending.subscribe());
        async move {
            loop {
                if let Ok(client) = pod::connect(&vm).await
                    && let Ok(follower) = Follower::new(&vm, client, &ending).await
                {
                    return follower;
                }
                tokio::time::sleep(RETRY).await;
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
    pub(crate) fn obey(&mut self, asked: Asked) -> Result<(), Failure> {
        if asked == Asked::Hangup {
            return Err(Failure::Ended(asked.status()));
        }
        self.ending.send_modify(|ending| *ending = (*ending + 1).min(2));
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
                    asked = signals.next() => self.obey(asked)?,
                }
            };
            worst = if worst == 0 { status } else { worst };
        }
        match worst {
            0 => Ok(()),
            _ if *self.ending.borrow() >= 2 => Err(Failure::Ended(Asked::Interrupt.status())),
            status => Err(Failure::Ended(status)),
        }
    }
}
