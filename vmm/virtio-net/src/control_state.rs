//! The control queue and what it controls (virtio 1.2, section 5.1.6.5): commands change a state, the state is put into
//! force on the taps and the datapath.

use std::io;
use std::sync::Arc;

use virtio_bindings::virtio_net::VIRTIO_NET_F_CTRL_VLAN;

use crate::config::GUEST_OFFLOADS;
use crate::control_command::ControlCommand;
use crate::filter::Filter;
use crate::handle::Shared;
use crate::mac::Mac;
use crate::pair_worker::{PairMailbox, PairRules};
use crate::tap::{Tap, TapFilter};
use crate::vhost::VhostPair;

/// What a driver set, from its start to its reset.
#[derive(Clone, Debug)]
pub(crate) struct ControlState {
    pub features: u64,
    pub filter: Arc<Filter>,
    /// Pairs in use.
    pub pairs: u16,
    /// Guest offloads, by feature bit.
    pub offloads: u64,
}

impl ControlState {
    /// What a driver with these features finds.
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

/// Who moves the frames.
#[derive(Debug)]
pub(crate) enum FrameCarrier {
    /// Workers of this process, one for each pair.
    Workers(Vec<PairMailbox>),
    /// vhost, one for each pair.
    Vhost(Vec<Arc<VhostPair>>),
}

/// Taps and datapath of a driver, with what is in force on them.
#[derive(Debug)]
pub(crate) struct Datapath {
    /// One for each pair the driver set up, at least.
    pub taps: Vec<Arc<Tap>>,
    pub carrier: FrameCarrier,
    pub link: bool,
    tap_filter: Option<TapFilter>,
}

impl Datapath {
    pub fn new(taps: Vec<Arc<Tap>>, carrier: FrameCarrier, link: bool) -> Self {
        Self {
            taps,
            carrier,
            link,
            tap_filter: None,
        }
    }

    /// Pairs the driver set up.
    fn usable(&self) -> usize {
        match &self.carrier {
            FrameCarrier::Workers(mailboxes) => mailboxes.len(),
            FrameCarrier::Vhost(pairs) => pairs.len(),
        }
    }

    /// Puts the filter into force. Returns whether the kernel had to do something.
    pub fn apply_filter(&mut self, state: &ControlState) -> bool {
        let wanted = state.filter.for_tap();
        let changed = self.tap_filter.as_ref() != Some(&wanted);
        if changed {
            // The workers filter too; with vhost, more arrives than the driver asked for, as it may.
            if let Err(error) = self.taps[0].set_filter(&wanted) {
                tracing::debug!(%error, "the tap does not filter");
            }
            self.tap_filter = Some(wanted);
        }
        if let FrameCarrier::Workers(_) = self.carrier {
            self.update_workers(state);
        }
        changed
    }

    /// Puts number of pairs and state of the link into force: afterwards no frame arrives in a pair out of use.
    pub fn apply_pairs(&mut self, state: &ControlState) -> io::Result<()> {
        let (used, unused) = self.taps.split_at(usize::from(state.pairs));
        if let FrameCarrier::Vhost(pairs) = &self.carrier {
            let open = if self.link { used.len() } else { 0 };
            pairs.iter().skip(open).try_for_each(|pair| pair.connect(None))?;
        }
        used.iter().try_for_each(|tap| tap.attach(true))?;
        match &self.carrier {
            FrameCarrier::Workers(_) => self.update_workers(state),
            FrameCarrier::Vhost(pairs) if self.link => {
                let pairs = pairs.iter().zip(used);
                pairs
                    .into_iter()
                    .try_for_each(|(pair, tap)| pair.connect(Some(tap)))?;
            }
            FrameCarrier::Vhost(_) => {}
        }
        unused.iter().try_for_each(|tap| tap.attach(false))
    }

    /// Pulls the cable or plugs it in.
    pub fn apply_link(&mut self, state: &ControlState, link: bool) -> io::Result<()> {
        if std::mem::replace(&mut self.link, link) == link {
            return Ok(());
        }
        if let (true, FrameCarrier::Vhost(_)) = (link, &self.carrier) {
            // What came in the meantime is lost. Workers see to that themselves.
            self.taps[..usize::from(state.pairs)]
                .iter()
                .for_each(|tap| tap.drain());
        }
        self.apply_pairs(state)
    }

    /// Tells the workers, and waits until all of them go by it.
    fn update_workers(&self, state: &ControlState) {
        let FrameCarrier::Workers(mailboxes) = &self.carrier else {
            return;
        };
        let updates: Vec<_> = mailboxes
            .iter()
            .enumerate()
            .map(|(index, mailbox)| mailbox.set_rules(self.rules(state, index)))
            .collect();
        for update in updates {
            // A worker whose queue is broken is gone, and the driver knows.
            let _ = update.recv();
        }
    }

    /// What the worker of pair `index` has to go by.
    fn rules(&self, state: &ControlState, index: usize) -> PairRules {
        PairRules::new(state, index, self.link)
    }
}

impl PairRules {
    /// Those of pair `index`.
    pub fn new(state: &ControlState, index: usize, link: bool) -> Self {
        Self {
            enabled: index < usize::from(state.pairs),
            link,
            filter: Arc::clone(&state.filter),
        }
    }
}

/// What carrying out a command came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CommandOutcome {
    pub ok: bool,
    /// The kernel had to take locks that others need too.
    pub costly: bool,
}

/// Carries out one command.
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
        // No station has a group's address.
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
                Ok(()) => state.offloads = offloads,
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
