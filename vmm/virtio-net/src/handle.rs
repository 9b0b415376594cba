//! Host-side control of a device.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use husk_devices::virtio::VirtioInterrupt;
use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_GUEST_ANNOUNCE, VIRTIO_NET_F_STATUS, VIRTIO_NET_S_ANNOUNCE, VIRTIO_NET_S_LINK_UP,
};
use vmm_sys_util::eventfd::EventFd;

use crate::counters::{Counters, Totals};
use crate::mac::Mac;

/// State shared between the device, its workers and its handles. No operation on it blocks.
pub(crate) struct Shared {
    pub id: String,
    /// MAC address, in the low 48 bits.
    mac: AtomicU64,
    link: AtomicBool,
    announce: AtomicBool,
    pub received: Totals,
    pub sent: Totals,
    /// Signalled when the link changes.
    pub wakeup: EventFd,
    /// Interrupts and negotiated features of the active driver.
    driver: Mutex<Option<(Arc<dyn VirtioInterrupt>, u64)>>,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared")
            .field("id", &self.id)
            .field("link", &self.link)
            .finish_non_exhaustive()
    }
}

impl Shared {
    pub fn new(id: String, mac: Mac, link: bool, wakeup: EventFd) -> Arc<Self> {
        let shared = Self {
            id,
            mac: AtomicU64::default(),
            link: AtomicBool::new(link),
            announce: AtomicBool::new(false),
            received: Totals::default(),
            sent: Totals::default(),
            wakeup,
            driver: Mutex::default(),
        };
        shared.set_mac(mac);
        Arc::new(shared)
    }

    pub fn mac(&self) -> Mac {
        let [mac @ .., _, _] = self.mac.load(Ordering::Relaxed).to_le_bytes();
        mac
    }

    pub fn set_mac(&self, [a, b, c, d, e, f]: Mac) {
        self.mac
            .store(u64::from_le_bytes([a, b, c, d, e, f, 0, 0]), Ordering::Relaxed);
    }

    pub fn link(&self) -> bool {
        self.link.load(Ordering::Acquire)
    }

    pub fn announcing(&self) -> bool {
        self.announce.load(Ordering::Relaxed)
    }

    /// Sets what a saved device had. The workers of the driver see the link when they start.
    pub fn restore(&self, mac: Mac, link: bool, announcing: bool) {
        self.set_mac(mac);
        self.link.store(link, Ordering::Release);
        self.announce.store(announcing, Ordering::Relaxed);
    }

    /// Clears the announce request: the driver acknowledged it or was reset.
    pub fn announced(&self) {
        self.announce.store(false, Ordering::Relaxed);
    }

    /// The status field of the configuration space (section 5.1.4).
    pub fn status(&self) -> u16 {
        let bit = |set, bit: u32| if set { bit as u16 } else { 0 };
        bit(self.link(), VIRTIO_NET_S_LINK_UP)
            | bit(self.announce.load(Ordering::Relaxed), VIRTIO_NET_S_ANNOUNCE)
    }

    pub fn set_driver(&self, driver: Option<(Arc<dyn VirtioInterrupt>, u64)>) {
        *self.driver.lock().unwrap_or_else(PoisonError::into_inner) = driver;
    }

    /// The driver's interrupts, if there is one that negotiated these features.
    fn driver_with(&self, features: u64) -> Option<Arc<dyn VirtioInterrupt>> {
        let driver = self.driver.lock().unwrap_or_else(PoisonError::into_inner);
        let (interrupt, negotiated) = driver.as_ref()?;
        (negotiated & features == features).then(|| Arc::clone(interrupt))
    }
}

/// Host-side control of a [`Net`](crate::Net). Usable from any thread and in any device state.
#[derive(Clone, Debug)]
pub struct NetHandle(pub(crate) Arc<Shared>);

impl NetHandle {
    /// The `id` of the device.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.0.id
    }

    /// MAC address of the device: the initial one until the driver sets another.
    #[must_use]
    pub fn mac(&self) -> Mac {
        self.0.mac()
    }

    /// True if the link is up.
    #[must_use]
    pub fn link(&self) -> bool {
        self.0.link()
    }

    /// Sets the link state and notifies a driver that negotiated VIRTIO_NET_F_STATUS (virtio 1.2, section 5.1.4).
    /// While the link is down no frame passes, also with a driver without that feature. Takes effect shortly after
    /// this returns.
    pub fn set_link(&self, up: bool) {
        if self.0.link.swap(up, Ordering::AcqRel) == up {
            return;
        }
        // A full counter means that a wake-up is already pending.
        let _ = self.0.wakeup.write(1);
        if let Some(interrupt) = self.0.driver_with(1 << VIRTIO_NET_F_STATUS) {
            interrupt.signal_config();
        }
    }

    /// Asks the guest to announce its addresses on the network (virtio 1.2, section 5.1.6.5.4), as after a migration.
    /// Returns false if no active driver supports it.
    #[must_use]
    pub fn announce(&self) -> bool {
        let needed = 1 << VIRTIO_NET_F_STATUS | 1 << VIRTIO_NET_F_GUEST_ANNOUNCE;
        let Some(interrupt) = self.0.driver_with(needed) else {
            return false;
        };
        self.0.announce.store(true, Ordering::Relaxed);
        interrupt.signal_config();
        true
    }

    /// Frames received by the guest. Frames that vhost carries are not counted here but by the tap.
    #[must_use]
    pub fn received(&self) -> Counters {
        self.0.received.read()
    }

    /// Frames sent by the guest, counted in the same way.
    #[must_use]
    pub fn sent(&self) -> Counters {
        self.0.sent.read()
    }
}
