//! Register block through which ACPI methods discover added and removed slots.
//!
//! | offset | access | register |
//! | --- | --- | --- |
//! | 0 | read | `PCIU`: slots with a new function; cleared by reading |
//! | 4 | read | `PCID`: slots whose function is to be ejected; cleared by reading |
//! | 8 | write | `B0EJ`: slots that the guest ejects (`_EJ0`) |
//!
//! One bit per slot, dwords only. Everything else reads as zero and ignores writes. The notify hook raises
//! the interrupt of the generic event device, whose method reads both bitmaps and notifies the slots.

use std::sync::{Arc, Mutex, MutexGuard};

use serde::{Deserialize, Serialize};

use super::device::PciDevice;
use super::root::{PciRoot, PciRootError, SLOTS};
use crate::bus::BusDevice;
use crate::component::{Component, ComponentState, RestoreError, SaveError, check};

/// Length of the register block in bytes.
pub const REGISTERS: u64 = 12;

const PCIU: u64 = 0;
const PCID: u64 = 4;
const B0EJ: u64 = 8;

#[derive(Debug, Default)]
struct SlotBits {
    up: u32,
    down: u32,
    /// Removal requested and not ejected yet: the guest may eject only these.
    removal_requested: u32,
}

type EjectedFn = dyn Fn(u8, Arc<dyn PciDevice>) + Send + Sync;

/// Hotplug of functions on the root bus.
pub struct PciHotplug {
    root: Arc<PciRoot>,
    /// Held while functions come and go, so that no bit is set for an empty slot. Taken before the locks of `root`.
    slots: Mutex<SlotBits>,
    notify: Box<dyn Fn() + Send + Sync>,
    ejected: Box<EjectedFn>,
}

impl std::fmt::Debug for PciHotplug {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PciHotplug")
            .field("slots", &*self.slots())
            .finish_non_exhaustive()
    }
}

impl PciHotplug {
    /// `notify` raises the guest's interrupt. `ejected` is called, mostly on a vCPU thread, with a function that the
    /// guest ejected. The function is reset and unmapped; its owner frees its resources on another thread.
    pub fn new(
        root: Arc<PciRoot>,
        notify: impl Fn() + Send + Sync + 'static,
        ejected: impl Fn(u8, Arc<dyn PciDevice>) + Send + Sync + 'static,
    ) -> Self {
        Self {
            root,
            slots: Mutex::default(),
            notify: Box::new(notify),
            ejected: Box::new(ejected),
        }
    }

    /// Adds a function in an empty slot and notifies the guest.
    ///
    /// # Errors
    /// The slot does not exist or is occupied.
    pub fn add(&self, slot: u8, device: Arc<dyn PciDevice>) -> Result<(), PciRootError> {
        let mut slots = self.slots();
        self.root.add(slot, device)?;
        slots.up |= 1 << slot;
        slots.down &= !(1 << slot);
        slots.removal_requested &= !(1 << slot);
        drop(slots);
        (self.notify)();
        Ok(())
    }

    /// Asks the guest to eject the function in `slot`. The guest may take any time, or never do so.
    ///
    /// # Errors
    /// The slot has no removable function.
    pub fn request_removal(&self, slot: u8) -> Result<(), PciRootError> {
        let mut slots = self.slots();
        if slot == 0 || self.root.function(slot).is_none() {
            return Err(PciRootError::BadSlot(slot));
        }
        slots.down |= 1 << slot;
        slots.removal_requested |= 1 << slot;
        drop(slots);
        (self.notify)();
        Ok(())
    }

    fn eject(&self, requested: u32) {
        let removed: Vec<_> = {
            let mut slots = self.slots();
            let granted = requested & slots.removal_requested;
            slots.removal_requested &= !granted;
            slots.down &= !granted;
            slots.up &= !granted;
            let granted = (0..SLOTS).filter(|slot| granted & 1 << slot != 0);
            granted
                .filter_map(|slot| Some((slot, self.root.remove(slot)?)))
                .collect()
        };
        for (slot, device) in removed {
            device.reset();
            (self.ejected)(slot, device);
        }
    }

    fn slots(&self) -> MutexGuard<'_, SlotBits> {
        self.slots.lock().unwrap_or_else(|e| e.into_inner())
    }
}

/// The registers, and the slots that the guest may eject. A bit is a slot.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct HotplugState {
    up: u32,
    down: u32,
    removal_requested: u32,
}

impl Component for PciHotplug {
    /// The next boot scans every slot, so no notification is pending, and no driver uses the functions whose removal
    /// was requested: they are ejected now.
    fn reset(&self) {
        let removal_requested = {
            let mut slots = self.slots();
            (slots.up, slots.down) = (0, 0);
            slots.removal_requested
        };
        self.eject(removal_requested);
    }

    fn save(&self) -> Result<ComponentState, SaveError> {
        let slots = self.slots();
        ComponentState::new(&HotplugState {
            up: slots.up,
            down: slots.down,
            removal_requested: slots.removal_requested,
        })
    }

    fn restore(&self, state: &ComponentState) -> Result<(), RestoreError> {
        let state: HotplugState = state.parse()?;
        let occupied = (1..SLOTS).filter(|slot| self.root.is_occupied(*slot));
        let occupied = occupied.fold(0, |bits, slot| bits | 1_u32 << slot);
        let plugged = |bits: u32| bits & !occupied == 0;
        check(plugged(state.up), "up", "has a slot without a function")?;
        let removable = plugged(state.removal_requested);
        check(removable, "removal_requested", "has a slot without a function")?;
        let requested = state.down & !state.removal_requested == 0;
        check(requested, "down", "has a slot whose removal was not requested")?;
        *self.slots() = SlotBits {
            up: state.up,
            down: state.down,
            removal_requested: state.removal_requested,
        };
        Ok(())
    }
}

impl BusDevice for PciHotplug {
    fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        let Ok(dword) = <&mut [u8; 4]>::try_from(data) else {
            return;
        };
        let mut slots = self.slots();
        let value = match offset {
            PCIU => std::mem::take(&mut slots.up),
            PCID => std::mem::take(&mut slots.down),
            _ => 0,
        };
        *dword = value.to_le_bytes();
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if let (B0EJ, Ok(dword)) = (offset, <[u8; 4]>::try_from(data)) {
            self.eject(u32::from_le_bytes(dword));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::sync::mpsc;
    use std::time::Duration;

    use super::super::fake::{Event, FAKE_BAR, FakeFunction};
    use super::*;
    use crate::bus::Bus;

    const WINDOW: Range<u64> = 0x8000_0000..0x8000_0000 + FAKE_BAR;

    struct Machine {
        root: Arc<PciRoot>,
        hotplug: Arc<PciHotplug>,
        notified: Arc<AtomicU32>,
        ejected: Arc<Mutex<Vec<u8>>>,
    }

    fn machine() -> Machine {
        let root = PciRoot::new(Arc::new(Bus::new()), Vec::from([WINDOW]));
        let (notified, ejected) = (Arc::new(AtomicU32::new(0)), Arc::new(Mutex::new(Vec::new())));
        let (notify, eject) = (notified.clone(), ejected.clone());
        let hotplug = PciHotplug::new(
            root.clone(),
            move || _ = notify.fetch_add(1, Ordering::Relaxed),
            move |slot, _| eject.lock().unwrap().push(slot),
        );
        Machine {
            root,
            hotplug: Arc::new(hotplug),
            notified,
            ejected,
        }
    }

    impl Machine {
        fn read(&self, offset: u64) -> u32 {
            let mut data = [0xaa; 4];
            self.hotplug.read(offset, &mut data);
            u32::from_le_bytes(data)
        }

        fn ejected(&self) -> Vec<u8> {
            std::mem::take(&mut *self.ejected.lock().unwrap())
        }
    }

    #[test]
    fn an_added_slot_is_reported_once() {
        let m = machine();
        m.hotplug.add(5, FakeFunction::new(5, 0)).unwrap();
        m.hotplug.add(31, FakeFunction::new(31, 0)).unwrap();
        assert_eq!(m.notified.load(Ordering::Relaxed), 2);
        assert_eq!(
            m.hotplug.add(5, FakeFunction::new(5, 0)),
            Err(PciRootError::Occupied(5))
        );
        assert_eq!(
            (m.read(4), m.read(0), m.read(0), m.read(8)),
            (0, 1 << 31 | 1 << 5, 0, 0)
        );
    }

    #[test]
    fn a_slot_is_ejected_only_after_a_request_and_by_the_guest() {
        let m = machine();
        let function = FakeFunction::new(5, 0);
        m.hotplug.add(5, function.clone()).unwrap();
        m.hotplug.write(8, &(1_u32 << 5).to_le_bytes());
        assert!(m.root.function(5).is_some(), "nobody asked for it");
        m.hotplug.request_removal(5).unwrap();
        assert_eq!((m.read(4), m.read(4)), (1 << 5, 0));
        assert!(m.root.function(5).is_some(), "not before the guest lets go");
        m.hotplug.write(8, &u32::MAX.to_le_bytes());
        assert!(m.root.function(5).is_none());
        assert_eq!((m.ejected(), function.log()), (vec![5], vec![Event::Reset]));
        m.hotplug.write(8, &u32::MAX.to_le_bytes());
        assert!(m.ejected().is_empty() && m.root.function(0).is_some());
        assert_eq!(m.hotplug.request_removal(5), Err(PciRootError::BadSlot(5)));
        assert_eq!(m.hotplug.request_removal(0), Err(PciRootError::BadSlot(0)));
        assert_eq!(m.hotplug.request_removal(200), Err(PciRootError::BadSlot(200)));
    }

    #[test]
    fn a_removal_requested_during_the_eject_leaves_no_bit() {
        let m = machine();
        let function = FakeFunction::new(5, WINDOW.start);
        m.hotplug.add(5, function.clone()).unwrap();
        m.root.config_write(5, 4, &[6, 0]);
        let (hotplug, (done, answer)) = (m.hotplug.clone(), mpsc::channel());
        let answer = Mutex::new(answer);
        // The function is about to leave the bus. The request may wait until it has left.
        let request_again = move || {
            let (hotplug, done) = (hotplug.clone(), done.clone());
            std::thread::spawn(move || done.send(hotplug.request_removal(5)));
            let _ = answer.lock().unwrap().recv_timeout(Duration::from_millis(200));
        };
        let _ = function.on_unmap.set(Box::new(request_again));
        m.hotplug.request_removal(5).unwrap();
        m.hotplug.write(8, &(1_u32 << 5).to_le_bytes());
        assert_eq!(m.ejected(), [5]);
        machine().hotplug.restore(&m.hotplug.save().unwrap()).unwrap();
    }

    #[test]
    fn a_reboot_completes_removals_and_forgets_the_rest() {
        let m = machine();
        m.hotplug.add(5, FakeFunction::new(5, 0)).unwrap();
        m.hotplug.add(6, FakeFunction::new(6, 0)).unwrap();
        m.hotplug.request_removal(5).unwrap();
        m.hotplug.reset();
        assert_eq!((m.ejected(), m.read(0), m.read(4)), (vec![5], 0, 0));
        assert!(m.root.function(6).is_some());
    }

    #[test]
    fn other_widths_and_offsets_are_ignored() {
        let m = machine();
        m.hotplug.add(1, FakeFunction::new(1, 0)).unwrap();
        m.hotplug.request_removal(1).unwrap();
        for offset in 0..REGISTERS {
            for len in [1, 2, 4] {
                let mut data = [0xff; 4];
                if len != 4 || offset % 4 != 0 {
                    m.hotplug.read(offset, &mut data[..len]);
                    assert_eq!(data[..len], [0; 4][..len]);
                }
                if (offset, len) != (B0EJ, 4) {
                    m.hotplug.write(offset, &[0xff; 4][..len]);
                }
            }
        }
        assert_eq!((m.read(0), m.read(4)), (2, 2));
        assert!(m.root.function(1).is_some());
    }

    #[test]
    fn pending_notifications_and_removals_are_saved() {
        let old = machine();
        let new = machine();
        for m in [&old, &new] {
            for slot in [5, 6] {
                m.root.add(slot, FakeFunction::new(slot, 0)).unwrap();
            }
        }
        old.hotplug.add(7, FakeFunction::new(7, 0)).unwrap();
        old.hotplug.request_removal(5).unwrap();
        let state = old.hotplug.save().unwrap();
        let error = new.hotplug.restore(&state).unwrap_err().to_string();
        assert_eq!(error, "field \"up\": has a slot without a function");
        new.root.add(7, FakeFunction::new(7, 0)).unwrap();
        new.hotplug.restore(&state).unwrap();
        assert_eq!((new.read(0), new.read(4)), (1 << 7, 1 << 5));
        new.hotplug.write(8, &u32::MAX.to_le_bytes());
        assert_eq!(new.ejected(), [5]);
    }

    #[test]
    fn slots_that_cannot_be_ejected_are_refused() {
        let m = machine();
        m.root.add(5, FakeFunction::new(5, 0)).unwrap();
        let restore = |up: u32, down: u32, removal_requested: u32| {
            let state = serde_json::json!({
                "up": up, "down": down, "removal_requested": removal_requested
            });
            m.hotplug.restore(&state.into())
        };
        for (up, down, requested) in [(1, 0, 0), (0, 0, 1), (0, 1 << 5, 0), (0, 0, 1 << 6)] {
            assert!(restore(up, down, requested).is_err(), "{up} {down} {requested}");
        }
        assert!(restore(1 << 5, 1 << 5, 1 << 5).is_ok());
    }
}
