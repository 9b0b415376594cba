//! The control queue and what it controls (virtio 1.2, section 5.1.6.5): commands change a state, the state is put into
//! force on the taps and the datapath.

use std::io;
use std::sync::Arc;

use virtio_bindings::virtio_net::VIRTIO_NET_F_CTRL_VLAN;

use crate::command::Command;
use crate::config::GUEST_OFFLOADS;
use crate::filter::{Filter, Mac};
use crate::handle::Shared;
use crate::pair::{Line, Rules};
use crate::tap::{Tap, TapFilter};
use crate::vhost::VhostPair;

/// What a driver set, from its start to its reset.
#[derive(Clone, Debug)]
pub(crate) struct State {
    pub features: u64,
    pub filter: Arc<Filter>,
    /// Pairs in use.
    pub pairs: u16,
    /// Guest offloads, by feature bit.
    pub offloads: u64,
}

impl State {
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
pub(crate) enum Datapath {
    /// Workers of this process, one for each pair.
    Workers(Vec<Line>),
    /// vhost, one for each pair.
    Vhost(Vec<Arc<VhostPair>>),
}

/// Taps and datapath of a driver, with what is in force on them.
#[derive(Debug)]
pub(crate) struct Wiring {
    /// One for each pair the driver set up, at least.
    pub taps: Vec<Arc<Tap>>,
    pub datapath: Datapath,
    pub link: bool,
    tap_filter: Option<TapFilter>,
}

impl Wiring {
    pub fn new(taps: Vec<Arc<Tap>>, datapath: Datapath, link: bool) -> Self {
        Self {
            taps,
            datapath,
            link,
            tap_filter: None,
        }
    }

    /// Pairs the driver set up.
    fn usable(&self) -> usize {
        match &self.datapath {
            Datapath::Workers(lines) => lines.len(),
            Datapath::Vhost(pairs) => pairs.len(),
        }
    }

    /// Puts the filter into force. Returns whether the kernel had to do something.
    pub fn apply_filter(&mut self, state: &State) -> bool {
        let wanted = state.filter.for_tap();
        let changed = self.tap_filter.as_ref() != Some(&wanted);
        if changed {
            // The workers filter too; with vhost, more arrives than the driver asked for, as it may.
            if let Err(error) = self.taps[0].set_filter(&wanted) {
                tracing::debug!(%error, "the tap does not filter");
            }
            self.tap_filter = Some(wanted);
        }
        if let Datapath::Workers(_) = self.datapath {
            self.order(state);
        }
        changed
    }

    /// Puts number of pairs and state of the link into force: afterwards no frame arrives in a pair out of use.
    pub fn apply_pairs(&mut self, state: &State) -> io::Result<()> {
        let (used, unused) = self.taps.split_at(usize::from(state.pairs));
        if let Datapath::Vhost(pairs) = &self.datapath {
            let open = if self.link { used.len() } else { 0 };
            pairs.iter().skip(open).try_for_each(|pair| pair.connect(None))?;
        }
        used.iter().try_for_each(|tap| tap.attach(true))?;
        match &self.datapath {
            Datapath::Workers(_) => self.order(state),
            Datapath::Vhost(pairs) if self.link => {
                let pairs = pairs.iter().zip(used);
                pairs
                    .into_iter()
                    .try_for_each(|(pair, tap)| pair.connect(Some(tap)))?;
            }
            Datapath::Vhost(_) => {}
        }
        unused.iter().try_for_each(|tap| tap.attach(false))
    }

    /// Pulls the cable or plugs it in.
    pub fn apply_link(&mut self, state: &State, link: bool) -> io::Result<()> {
        if std::mem::replace(&mut self.link, link) == link {
            return Ok(());
        }
        if let (true, Datapath::Vhost(_)) = (link, &self.datapath) {
            // What came in the meantime is lost. Workers see to that themselves.
            self.taps[..usize::from(state.pairs)]
                .iter()
                .for_each(|tap| tap.drain());
        }
        self.apply_pairs(state)
    }

    /// Tells the workers, and waits until all of them go by it.
    fn order(&self, state: &State) {
        let Datapath::Workers(lines) = &self.datapath else {
            return;
        };
        let orders: Vec<_> = lines
            .iter()
            .enumerate()
            .map(|(index, line)| line.order(self.rules(state, index)))
            .collect();
        for order in orders {
            // A worker whose queue is broken is gone, and the driver knows.
            let _ = order.recv();
        }
    }

    /// What the worker of pair `index` has to go by.
    fn rules(&self, state: &State, index: usize) -> Rules {
        Rules::new(state, index, self.link)
    }
}

impl Rules {
    /// Those of pair `index`.
    pub fn new(state: &State, index: usize, link: bool) -> Self {
        Self {
            enabled: index < usize::from(state.pairs),
            link,
            filter: Arc::clone(&state.filter),
        }
    }
}

/// What carrying out a command came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Outcome {
    pub ok: bool,
    /// The kernel had to take locks that others need too.
    pub costly: bool,
}

/// Carries out one command.
pub(crate) fn execute(command: Command, state: &mut State, wiring: &mut Wiring, shared: &Shared) -> Outcome {
    let before = Arc::clone(&state.filter);
    let (mut ok, mut costly) = (true, false);
    match command {
        Command::Mode(mode, on) => Arc::make_mut(&mut state.filter).set_mode(mode, on),
        Command::Tables(unicast, multicast) => {
            Arc::make_mut(&mut state.filter).set_tables(unicast, multicast);
        }
        // No station has a group's address.
        Command::Address(mac) if mac[0] & 1 != 0 || mac == [0; 6] => ok = false,
        Command::Address(mac) => {
            shared.set_mac(mac);
            Arc::make_mut(&mut state.filter).set_mac(mac);
        }
        Command::Vlan(id, on) => Arc::make_mut(&mut state.filter).set_vlan(id, on),
        Command::Announced => shared.announced(),
        Command::Pairs(pairs) if pairs == state.pairs => {}
        Command::Pairs(pairs) if pairs == 0 || usize::from(pairs) > wiring.usable() => ok = false,
        Command::Pairs(pairs) => {
            costly = true;
            let before = std::mem::replace(&mut state.pairs, pairs);
            if let Err(error) = wiring.apply_pairs(state) {
                tracing::warn!(%error, pairs, "number of queue pairs not set");
                state.pairs = before;
                ok = false;
                let _ = wiring.apply_pairs(state);
            }
        }
        Command::Offloads(offloads) if offloads & !(state.features & GUEST_OFFLOADS) != 0 => ok = false,
        Command::Offloads(offloads) if offloads == state.offloads => {}
        Command::Offloads(offloads) => {
            costly = true;
            match wiring.taps[0].set_offloads(offloads) {
                Ok(()) => state.offloads = offloads,
                Err(error) => {
                    tracing::warn!(%error, offloads, "offloads not set");
                    ok = false;
                }
            }
        }
    }
    if state.filter != before {
        costly |= wiring.apply_filter(state);
    }
    Outcome { ok, costly }
}
