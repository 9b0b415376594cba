//! The machine's generation: a random ID in guest memory that is another for each restore of the guest. A guest that
//! sees a new one must not go on with secrets that another copy of it has, such as the state of its random number
//! generator (Microsoft's "Virtual Machine Generation ID").

use std::cell::Cell;
use std::io;

use husk_devices::GuestMemMmap;
use husk_devices::legacy::power::{PowerEvent, PowerRegisters};
use rustix::rand::{GetRandomFlags, getrandom};
use vm_memory::{Bytes, GuestAddress, GuestMemoryError};

use super::error::MachineError;
use crate::layout::{GENERATION_ID, GENERATION_ID_LEN};

type Id = [u8; GENERATION_ID_LEN];

/// The ID of the current generation, which a reset of the machine keeps.
#[derive(Debug)]
pub(super) struct Generation {
    id: Cell<Id>,
}

impl Generation {
    /// The first generation.
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self {
            id: Cell::new(random()?),
        })
    }

    /// Writes the ID to guest memory.
    pub(super) fn write(&self, memory: &GuestMemMmap) -> Result<(), GuestMemoryError> {
        memory.write_slice(&self.id.get(), GuestAddress(GENERATION_ID))
    }

    /// Starts a new generation: writes its ID to guest memory, then notifies the guest.
    pub(super) fn renew(&self, memory: &GuestMemMmap, power: &PowerRegisters) -> Result<(), MachineError> {
        self.id.set(random()?);
        self.write(memory)?;
        Ok(power.notify(PowerEvent::NewGeneration)?)
    }
}

/// Reads random bytes by the system call: the confined process has no /dev.
fn random() -> io::Result<Id> {
    let mut id = Id::default();
    // The kernel does not cut so few bytes short.
    getrandom(&mut id, GetRandomFlags::empty())?;
    Ok(id)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use husk_devices::bus::BusDevice;
    use husk_devices::legacy::power;
    use vmm_sys_util::eventfd::EventFd;

    use super::*;

    fn memory() -> GuestMemMmap {
        GuestMemMmap::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap()
    }

    fn id(memory: &GuestMemMmap) -> Id {
        memory.read_obj(GuestAddress(GENERATION_ID)).unwrap()
    }

    #[test]
    fn a_new_generation_is_in_memory_and_notified() {
        let interrupt = EventFd::new(libc::EFD_NONBLOCK).unwrap();
        let power = PowerRegisters::new(Arc::new(|_| {}), interrupt.try_clone().unwrap());
        let (generation, memory) = (Generation::new().unwrap(), memory());
        generation.write(&memory).unwrap();
        let first = id(&memory);
        assert_ne!(first, Id::default());
        assert!(interrupt.read().is_err(), "a start is no event");

        generation.renew(&memory, &power).unwrap();
        let second = id(&memory);
        assert_ne!(first, second);
        assert_eq!(interrupt.read().unwrap(), 1);
        let mut events = [0; 4];
        power.read(power::EVENTS, &mut events);
        assert_eq!(u32::from_le_bytes(events), PowerEvent::NewGeneration as u32);
        let mut around = [0; 48];
        memory
            .read_slice(&mut around, GuestAddress(GENERATION_ID - 16))
            .unwrap();
        assert_eq!((&around[..16], &around[32..]), (&[0; 16][..], &[0; 16][..]));
    }

    #[test]
    fn a_reset_keeps_the_generation_and_machines_differ() {
        let generation = Generation::new().unwrap();
        let (before, after, other) = (memory(), memory(), memory());
        generation.write(&before).unwrap();
        generation.write(&after).unwrap();
        Generation::new().unwrap().write(&other).unwrap();
        assert_eq!(id(&before), id(&after));
        assert_ne!(id(&before), id(&other));
    }
}
