//! The device model: features, configuration space, and the workers or vhost of the active device.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use husk_devices::component::{ComponentState, RestoreError, SaveError};
use husk_devices::page_log::PageLog;
use husk_devices::virtio::{ActivateError, Activation, ActiveQueue, VirtioDevice, config_space};
use virtio_bindings::virtio_ids::VIRTIO_ID_NET;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::active::{ActiveDevice, NetResources};
use crate::config::{self, CONFIG_SIZE, CONTROL_QUEUE_SIZE, MAX_PAIRS, QUEUE_SIZE};
use crate::control_state::ControlState;
use crate::handle::{NetHandle, Shared};
use crate::mac::Mac;
use crate::shared_throttle::SharedThrottle;
use crate::state;
use crate::tap::Tap;
use crate::vhost::VhostPair;

/// Smallest MTU that a device may report (section 5.1.4.1).
const MIN_MTU: u16 = 68;

/// The files of one queue pair.
#[derive(Debug)]
pub struct QueuePair {
    /// A queue of the tap, attached, opened with `IFF_TAP`, `IFF_NO_PI` and `IFF_VNET_HDR`, and with
    /// `IFF_MULTI_QUEUE` if there are several.
    pub tap: OwnedFd,
    /// An open `/dev/vhost-net` without an owner, if vhost carries the frames. For all pairs or for none.
    pub vhost: Option<OwnedFd>,
}

/// The parameters of a new device.
#[derive(Debug)]
pub struct NetSetup {
    /// The device is called `net-{id}` in logs and thread names.
    pub id: String,
    /// MAC address until the driver sets another.
    pub mac: Mac,
    /// MTU that the device reports, at least 68.
    pub mtu: Option<u16>,
    /// Initial state of the link: true if it is up.
    pub link: bool,
    /// Queue pairs, 1 to [`MAX_PAIRS`].
    pub pairs: Vec<QueuePair>,
}

/// A virtio network device.
#[derive(Debug)]
pub struct Net {
    pub(crate) mac: Mac,
    offered: u64,
    queue_sizes: Vec<u16>,
    pub(crate) resources: NetResources,
    /// State that the driver set, while the device is not active.
    pub(crate) state: Option<ControlState>,
    active: Option<ActiveDevice>,
}

impl Net {
    /// A device and its handle. Creates every kernel object of the device except eventfds and threads, so that it can
    /// run before the seccomp filter is installed.
    ///
    /// # Errors
    /// A parameter is out of range, a file is not a tap or vhost-net, or the kernel refuses an operation.
    pub fn new(setup: NetSetup) -> io::Result<(Self, NetHandle)> {
        let invalid = |what: &str| Err(io::Error::new(io::ErrorKind::InvalidInput, what.to_owned()));
        let count = setup.pairs.len();
        if count == 0 || count > MAX_PAIRS {
            return invalid(&format!("a network device has 1 to {MAX_PAIRS} queue pairs"));
        }
        if setup.mtu.is_some_and(|mtu| mtu < MIN_MTU) {
            return invalid("a network device has an MTU of 68 at least");
        }
        let with_vhost = setup.pairs.iter().filter(|pair| pair.vhost.is_some()).count();
        if with_vhost != 0 && with_vhost != count {
            return invalid("vhost is for all queue pairs or for none");
        }
        let (mut taps, mut vhost) = (Vec::new(), Vec::new());
        for pair in setup.pairs {
            taps.push(Tap::new(pair.tap, count > 1)?);
            if let Some(fd) = pair.vhost {
                vhost.push(VhostPair::new(fd)?);
            }
        }
        Self::over(setup.id, setup.mac, setup.mtu, setup.link, taps, vhost)
    }

    /// A device over these taps and vhosts.
    pub(crate) fn over(
        id: String,
        mac: Mac,
        mtu: Option<u16>,
        link: bool,
        taps: Vec<Tap>,
        vhost: Vec<VhostPair>,
    ) -> io::Result<(Self, NetHandle)> {
        let pairs = taps.len() as u16;
        let features = config::features(taps[0].has_uso(), mtu, pairs);
        let mut queue_sizes = vec![QUEUE_SIZE; 2 * taps.len()];
        queue_sizes.push(CONTROL_QUEUE_SIZE);
        let wakeup = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?;
        let name = format!("net-{id}");
        let shared = Shared::new(id, mac, link, wakeup);
        let net = Self {
            mac,
            offered: vhost.iter().fold(features, |all, pair| pair.limit(all)),
            queue_sizes,
            resources: NetResources {
                name,
                mtu,
                shared: Arc::clone(&shared),
                throttle: SharedThrottle::new(),
                taps: taps.into_iter().map(Arc::new).collect(),
                vhost: vhost.into_iter().map(Arc::new).collect(),
            },
            state: None,
            active: None,
        };
        net.resources.reset_taps()?;
        Ok((net, NetHandle(shared)))
    }

    fn pairs(&self) -> u16 {
        self.resources.taps.len() as u16
    }
}

impl VirtioDevice for Net {
    fn name(&self) -> &str {
        &self.resources.name
    }

    fn device_type(&self) -> u32 {
        VIRTIO_ID_NET
    }

    fn pci_class(&self) -> [u8; 3] {
        [0x02, 0x00, 0x00]
    }

    fn features(&self) -> u64 {
        self.offered
    }

    fn queue_max_sizes(&self) -> &[u16] {
        &self.queue_sizes
    }

    fn config_size(&self) -> u16 {
        CONFIG_SIZE as u16
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let space = config::space(
            self.resources.shared.mac(),
            self.resources.shared.status(),
            self.pairs(),
            self.resources.mtu,
        );
        config_space::read(&space, offset, data);
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let features = activation.features;
        let interrupt = Arc::clone(&activation.interrupt);
        let mac = self.mac;
        let state = self
            .state
            .take()
            .unwrap_or_else(|| ControlState::new(features, mac));
        self.active = Some(ActiveDevice::start(&self.resources, activation, state)?);
        self.resources.shared.set_driver(Some((interrupt, features)));
        Ok(())
    }

    fn reset(&mut self) {
        self.resources.shared.set_driver(None);
        self.quiesce();
        self.state = None;
        self.resources.shared.set_mac(self.mac);
        self.resources.shared.announced();
        if let Err(error) = self.resources.reset_taps() {
            tracing::warn!(device = self.resources.name, %error, "tap not reset");
        }
    }

    fn quiesce(&mut self) -> Option<Vec<ActiveQueue>> {
        let (queues, state) = self.active.take()?.stop(&self.resources);
        self.state = state;
        Some(queues)
    }

    fn log_pages(&mut self, log: Option<&Arc<PageLog>>) {
        for vhost in &self.resources.vhost {
            vhost.log_pages(log);
        }
    }

    fn save(&mut self) -> Result<ComponentState, SaveError> {
        state::save(self)
    }

    fn restore(&mut self, state: &ComponentState, features: u64) -> Result<(), RestoreError> {
        state::restore(self, state, features)
    }
}
