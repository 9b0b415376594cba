//! The worker that waits for what the kernel cannot tell the driver itself: a malformed ring, and interrupts of queues
//! without a vector.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use husk_devices::virtio::VirtioInterrupt;
use husk_vhost::VhostCall;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::EventFd;

const STOP: u64 = 0;
const ERROR: u64 = 1;
/// First of the event numbers of the forwarded interrupts.
const CALL: u64 = 2;

/// The worker of an active device.
pub(super) struct NotifierWorker {
    pub interrupt: Arc<dyn VirtioInterrupt>,
    pub calls: Vec<VhostCall>,
    /// Signalled by vhost when a ring is malformed.
    pub error: EventFd,
}

impl NotifierWorker {
    /// Forwards until `stop` or a malformed ring.
    pub(super) fn run(self, stop: &EventFd) {
        if let Err(reason) = self.serve(stop) {
            self.interrupt.needs_reset(&reason);
        }
    }

    fn serve(&self, stop: &EventFd) -> Result<(), String> {
        let epoll = self.watch(stop).map_err(|e| format!("epoll: {e}"))?;
        let mut events = [EpollEvent::default(); 4];
        loop {
            let count = match epoll.wait(-1, &mut events) {
                Ok(count) => count,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => return Err(format!("epoll: {e}")),
            };
            let mut stopped = false;
            for event in &events[..count] {
                match event.data() {
                    STOP => stopped = true,
                    ERROR => return Err("vhost: malformed ring".into()),
                    call => {
                        if let Some(call) = self.calls.get((call - CALL) as usize) {
                            call.forward(&*self.interrupt);
                        }
                    }
                }
            }
            if stopped {
                return Ok(());
            }
        }
    }

    fn watch(&self, stop: &EventFd) -> io::Result<Epoll> {
        let epoll = Epoll::new()?;
        let calls = self.calls.iter().map(|call| &call.event);
        for (data, event) in (0..).zip([stop, &self.error].into_iter().chain(calls)) {
            let interest = EpollEvent::new(EventSet::IN, data);
            epoll.ctl(ControlOperation::Add, event.as_raw_fd(), interest)?;
        }
        Ok(epoll)
    }
}
