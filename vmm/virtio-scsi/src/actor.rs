//! The thread that owns the controller: it waits for queues, messages and completions, and runs the controller.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::mpsc::Receiver;
use std::time::Duration;

use husk_devices::virtio::ActiveQueue;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::EventFd;

use crate::controller::{Controller, FatalError};
use crate::handle::ControllerMessage;

/// Data of the epoll events that are not queues. A queue's event carries its index.
const STOP: u64 = 1 << 16;
const MESSAGES: u64 = STOP + 1;
const DISKS: u64 = STOP + 2;

/// Maximum events taken at a time.
const EVENTS: usize = 16;

/// The controller and its messages.
pub(crate) struct Actor {
    pub controller: Controller,
    pub messages: Receiver<ControllerMessage>,
    /// Signalled after a message was sent.
    pub wakeup: EventFd,
}

impl Actor {
    /// Serves until `stop` is signalled or a fatal error occurs.
    pub fn run(mut self, stop: &EventFd) {
        if let Err(reason) = self.serve(stop) {
            tracing::error!(reason, "the SCSI controller stopped");
            self.controller.virtqueues().fail(&reason);
        }
    }

    fn serve(&mut self, stop: &EventFd) -> Result<(), FatalError> {
        let mut events = [EpollEvent::default(); EVENTS];
        let mut epoll = self.watch(stop)?;
        let mut more = true;
        loop {
            let timeout = if more {
                0
            } else {
                self.controller.next_due().map_or(-1, milliseconds)
            };
            let count = match epoll.wait(timeout, &mut events) {
                Ok(count) => count,
                // io_uring interrupts the wait when it has completions to process.
                Err(e) if e.kind() == io::ErrorKind::Interrupted => 0,
                Err(e) => return Err(broken(e)),
            };
            let mut mail = false;
            for event in &events[..count] {
                match event.data() {
                    STOP => return Ok(()),
                    MESSAGES => mail = true,
                    DISKS => {}
                    queue => {
                        if let Some(vq) = self.controller.virtqueues().queue(queue as u16) {
                            vq.ready = true;
                        }
                    }
                }
            }
            if mail {
                // Before the messages are read, so that a later message signals again.
                let _ = self.wakeup.read();
                let engine = self.engine_event();
                while let Ok(message) = self.messages.try_recv() {
                    if self.controller.handle_message(message)? {
                        epoll = self.watch(stop)?;
                    }
                }
                // The first qcow2 image or block device changes the engine's event.
                if self.engine_event() != engine {
                    epoll = self.watch(stop)?;
                }
            }
            more = self.controller.pass()?;
        }
    }

    fn engine_event(&self) -> RawFd {
        self.controller.engine().event().as_raw_fd()
    }

    /// Queue kicks are edge-triggered and never read. The engine resets its own event, and `stop` stays signalled.
    fn watch(&mut self, stop: &EventFd) -> Result<Epoll, FatalError> {
        let engine = self.engine_event();
        let controller = &mut self.controller;
        let edge = EventSet::IN | EventSet::EDGE_TRIGGERED;
        let always = [
            (stop.as_raw_fd(), EventSet::IN, STOP),
            (self.wakeup.as_raw_fd(), EventSet::IN, MESSAGES),
            (engine, EventSet::IN, DISKS),
        ];
        let kicks = controller.virtqueues().queues.iter().map(|vq| {
            let ActiveQueue { index, kick, .. } = &vq.active;
            (kick.as_raw_fd(), edge, u64::from(*index))
        });
        let epoll = Epoll::new().map_err(broken)?;
        for (fd, events, data) in always.into_iter().chain(kicks) {
            let event = EpollEvent::new(events, data);
            epoll.ctl(ControlOperation::Add, fd, event).map_err(broken)?;
        }
        Ok(epoll)
    }
}

fn broken(error: io::Error) -> FatalError {
    format!("epoll: {error}")
}

/// Milliseconds for epoll, rounded up.
fn milliseconds(duration: Duration) -> i32 {
    i32::try_from(duration.as_millis() + 1).unwrap_or(i32::MAX)
}
