//! Interrupts that vhost raises.

use std::io;

use husk_devices::virtio::VirtioInterrupt;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// A queue without an interrupt vector, and the eventfd that vhost signals for it. A worker forwards it.
#[derive(Debug)]
pub struct VhostCall {
    /// Index of the queue.
    pub queue: u16,
    /// Readable when vhost wants to interrupt the driver.
    pub event: EventFd,
}

impl VhostCall {
    /// Raises an interrupt that vhost cannot raise itself.
    pub fn forward(&self, interrupt: &dyn VirtioInterrupt) {
        let _ = self.event.read();
        interrupt.signal_queue(self.queue);
    }
}

/// Returns the eventfd for vhost's interrupts of `queue`: the vector's own, so that an interrupt does not pass this
/// process. If the driver mapped the queue to no vector, it is a new one, and `calls` gets our end of it.
///
/// # Errors
/// The kernel refuses an eventfd.
pub fn call_event(
    interrupt: &dyn VirtioInterrupt,
    queue: u16,
    calls: &mut Vec<VhostCall>,
) -> io::Result<EventFd> {
    if let Some(direct) = interrupt.queue_event(queue) {
        return Ok(direct);
    }
    let event = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?;
    let ours = event.try_clone()?;
    calls.push(VhostCall { queue, event: ours });
    Ok(event)
}
