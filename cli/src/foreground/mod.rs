//! VMs in the foreground: what happens to them, told line by line, until they end.

mod follower;
mod status;

use tokio::sync::watch;

use crate::failure::{Failure, RUNTIME};
use crate::pod;
use crate::signals::{Asked, Signals};
use crate::vm_ref::VmRef;

pub(crate) use follower::Follower;
pub(crate) use status::{BOOT_FAILED, end, is_final};

/// How the VMs shall end: 0 by themselves, 1 by their power button, 2 by force.
type Ending = u8;

/// Some VMs, and how often the caller has asked for their end.
#[derive(Debug)]
pub(crate) struct Foreground {
    followers: Vec<Follower>,
    ending: watch::Sender<Ending>,
}

impl Foreground {
    /// Starts to follow VMs that have been started.
    pub(crate) async fn new(vms: &[VmRef]) -> Result<Self, Failure> {
        let ending = watch::Sender::new(0);
        let mut followers = Vec::new();
        for vm in vms {
            followers.push(Follower::new(vm.clone(), pod::connect(vm).await?, ending.subscribe()).await?);
        }
        Ok(Self { followers, ending })
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
