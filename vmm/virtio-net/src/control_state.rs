//! The control queue and what it controls (virtio 1.2, section 5.1.6.5): commands change the state, and the state is
//! applied to taps and datapath.

use std::io;
use std::sync::Arc;

use virtio_bindings::virtio_net::VIRTIO_NET_F_CTRL_VLAN;

use crate::config::GUEST_OFFLOADS;
use crate::control_command::ControlCommand;
use crate::filter::Filter;
use crate::handle::Shared;
use crate::mac::Mac;
use crate::pair_worker::{PairMailbox, PairRules};
use crate::tap::Tap;
use crate::vhost::VhostPair;

/// The state that a driver set, from activation to reset.
#[derive(Clone, Debug)]
pub(crate) struct ControlState {
    pub features: u64,
    pub filter: Arc<Filter>,
    /// Number of queue pairs in use.
    pub pairs: u16,
    /// Guest offloads, by feature bit.
    pub offloads: u64,
}

impl ControlState {
    /// The initial state for a driver with these features.
    pub fn new(features: u64, mac: Mac) -> Self {
        let filters_vlans = features & 1 << VIRTIO_NET_F_CTRL_VLAN != 0;
        Self {
            features,
            filter: Arc::new(Filter::new(mac, filters_vlans)),
            pairs: 1,
            offloads: features & GUEST_OFFLOADS,
        }
    }
}

/// The backend that moves frames between taps and queues: workers or vhost.
#[derive(Debug)]
pub(crate) enum Backend {
    /// Workers of this process, one for each pair.
    Workers(Vec<PairMailbox>),
    /// vhost, one for each pair.
    Vhost(Vec<Arc<VhostPair>>),
}

/// The taps and the frame backend of a driver, and the settings applied to them.
#[derive(Debug)]
pub(crate) struct Datapath {
    /// At least one for each pair that the driver set up.
    pub taps: Vec<Arc<Tap>>,
    pub backend: Backend,
    pub link: bool,
}

impl Datapath {
    pub fn new(taps: Vec<Arc<Tap>>, backend: Backend, link: bool) -> Self {
        Self { taps, backend, link }
    }

    /// Number of pairs that the driver set up.
    fn usable(&self) -> usize {
        match &self.backend {
            Backend::Workers(mailboxes) => mailboxes.len(),
            Backend::Vhost(pairs) => pairs.len(),
        }
    }

    /// Applies the receive filter. Returns true if it changed the filter of the tap.
    pub fn apply_filter(&self, state: &ControlState) -> bool {
        let changed = self.taps[0].set_filter(state.filter.for_tap());
        // The workers filter too. With vhost, the driver receives more than it asked for, which virtio allows.
        let changed = changed.unwrap_or_else(|error| {
            tracing::debug!(%error, "tap filter not set");
            true
        });
        if let Backend::Workers(_) = self.backend {
            self.update_workers(state);
        }
        changed
    }

    /// Applies the number of pairs and the link state. Afterwards no frame arrives in an unused pair.
    pub fn apply_pairs(&mut self, state: &ControlState) -> io::Result<()> {
        let (used, unused) = self.taps.split_at(usize::from(state.pairs));
        if let Backend::Vhost(pairs) = &self.backend {
            let open = if self.link { used.len() } else { 0 };
            pairs.iter().skip(open).try_for_each(|pair| pair.connect(None))?;
        }
        used.iter().try_for_each(|tap| tap.attach(true))?;
        match &self.backend {
            Backend::Workers(_) => self.update_workers(state),
            Backend::Vhost(pairs) if self.link => {
                let pairs = pairs.iter().zip(used);
                pairs
                    .into_iter()
                    .try_for_each(|(pair, tap)| pair.connect(Some(tap)))?;
            }
            Backend::Vhost(_) => {}
        }
        unused.iter().try_for_each(|tap| tap.attach(false))
    }

    /// Applies the link state.
    pub fn apply_link(&mut self, state: &ControlState, link: bool) -> io::Result<()> {
        if std::mem::replace(&mut self.link, link) == link {
            return Ok(());
        }
        if let (true, Backend::Vhost(_)) = (link, &self.backend) {
            // Drop the frames that arrived while the link was down. Workers do so themselves.
            self.taps[..usize::from(state.pairs)]
                .iter()
                .for_each(|tap| tap.drain());
        }
        self.apply_pairs(state)
    }

    /// Takes the link down for good, as far as the kernel lets it.
    pub fn close(&mut self, state: &ControlState) {
        self.link = false;
        match &self.backend {
            Backend::Workers(_) => self.update_workers(state),
            Backend::Vhost(pairs) => pairs.iter().for_each(|pair| drop(pair.connect(None))),
        }
    }

    /// Sends the rules to the workers and waits until they are in force.
    fn update_workers(&self, state: &ControlState) {
        let Backend::Workers(mailboxes) = &self.backend else {
            return;
        };
        let updates: Vec<_> = mailboxes
            .iter()
            .enumerate()
            .map(|(index, mailbox)| mailbox.set_rules(self.rules(state, index)))
            .collect();
        for update in updates {
            // A worker whose ring was malformed has ended, and the driver was notified.
            let _ = update.recv();
        }
    }

    /// The rules of pair `index`.
    fn rules(&self, state: &ControlState, index: usize) -> PairRules {
        PairRules::new(state, index, self.link)
    }
}

impl PairRules {
    /// The rules of pair `index`.
    pub fn new(state: &ControlState, index: usize, link: bool) -> Self {
        Self {
            enabled: index < usize::from(state.pairs),
            link,
            filter: Arc::clone(&state.filter),
        }
    }
}

/// The result of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CommandOutcome {
    pub ok: bool,
    /// The kernel took host-wide locks.
    pub costly: bool,
}

/// Executes one command.
pub(crate) fn execute(
    command: ControlCommand,
    state: &mut ControlState,
    datapath: &mut Datapath,
    shared: &Shared,
) -> CommandOutcome {
    let before = Arc::clone(&state.filter);
    let (mut ok, mut costly) = (true, false);
    match command {
        ControlCommand::Mode(mode, on) => Arc::make_mut(&mut state.filter).set_mode(mode, on),
        ControlCommand::Tables(unicast, multicast) => {
            Arc::make_mut(&mut state.filter).set_tables(unicast, multicast);
        }
        // A group address is not a valid station address.
        ControlCommand::Address(mac) if mac[0] & 1 != 0 || mac == [0; 6] => ok = false,
        ControlCommand::Address(mac) => {
            shared.set_mac(mac);
            Arc::make_mut(&mut state.filter).set_mac(mac);
        }
        ControlCommand::Vlan(id, on) => Arc::make_mut(&mut state.filter).set_vlan(id, on),
        ControlCommand::Announced => shared.announced(),
        ControlCommand::Pairs(pairs) if pairs == state.pairs => {}
        ControlCommand::Pairs(pairs) if pairs == 0 || usize::from(pairs) > datapath.usable() => ok = false,
        ControlCommand::Pairs(pairs) => {
            costly = true;
            let before = std::mem::replace(&mut state.pairs, pairs);
            if let Err(error) = datapath.apply_pairs(state) {
                tracing::warn!(%error, pairs, "number of queue pairs not set");
                state.pairs = before;
                ok = false;
                let _ = datapath.apply_pairs(state);
            }
        }
        ControlCommand::Offloads(offloads) if offloads & !(state.features & GUEST_OFFLOADS) != 0 => {
            ok = false
        }
        ControlCommand::Offloads(offloads) if offloads == state.offloads => {}
        ControlCommand::Offloads(offloads) => {
            costly = true;
            match datapath.taps[0].set_offloads(offloads) {
                Ok(_) => state.offloads = offloads,
                Err(error) => {
                    tracing::warn!(%error, offloads, "offloads not set");
                    ok = false;
                }
            }
        }
    }
    if state.filter != before {
        costly |= datapath.apply_filter(state);
    }
    CommandOutcome { ok, costly }
}
