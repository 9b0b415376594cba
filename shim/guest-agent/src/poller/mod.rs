//! The schedule of commands to the agent, and its last replies. The intervals are those of KubeVirt's virt-launcher,
//! but for file systems that are not frozen.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::types::{AgentInfo, FileSystem, FsFreezeStatus, LoadAverage, System, User};

/// Interval after the first round, if the query's own is longer. It doubles up to that one, because a guest that has
/// just booted changes quickly.
const FIRST_INTERVAL: Duration = Duration::from_secs(10);

/// A group of commands that are asked together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Query {
    /// `guest-info`.
    Version,
    /// `guest-get-fsinfo`.
    FileSystems,
    /// `guest-fsfreeze-status`.
    FsFreezeStatus,
    /// `guest-network-get-interfaces`, `guest-get-osinfo`, `guest-get-host-name` and `guest-get-timezone`.
    System,
    /// `guest-get-users`.
    Users,
    /// `guest-get-load`.
    Load,
}

/// Result of a [`Query`].
#[derive(Debug, Clone, PartialEq)]
pub enum Answer {
    Version(AgentInfo),
    FileSystems(Vec<FileSystem>),
    FsFreezeStatus(FsFreezeStatus),
    System(Box<System>),
    Users(Vec<User>),
    Load(LoadAverage),
}

/// The last answers; `None`: none yet. A hostile guest can make them take a few MiB in all.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Answers {
    pub version: Option<AgentInfo>,
    pub file_systems: Option<Vec<FileSystem>>,
    pub fs_freeze_status: Option<FsFreezeStatus>,
    pub system: System,
    pub users: Option<Vec<User>>,
    pub load: Option<LoadAverage>,
}

/// Time between two queries of the same kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Intervals {
    pub system: Duration,
    pub file_systems: Duration,
    pub users: Duration,
    pub version: Duration,
    /// While they are frozen, or it is not known.
    pub fs_freeze_status: Duration,
    /// Only the monitor can have the agent freeze file systems: an answer of *thawed* is not news before that.
    pub fs_thawed_status: Duration,
}

impl Default for Intervals {
    fn default() -> Self {
        Intervals {
            system: Duration::from_secs(120),
            file_systems: Duration::from_secs(300),
            users: Duration::from_secs(10),
            version: Duration::from_secs(300),
            fs_freeze_status: Duration::from_secs(5),
            fs_thawed_status: Duration::from_secs(60),
        }
    }
}

#[derive(Debug, Clone)]
struct Schedule {
    query: Query,
    /// Interval at last, and at present.
    longest: Duration,
    interval: Duration,
    /// `None` while the poller rests.
    next: Option<Instant>,
}

/// Says which query is due. It asks only while the agent is connected and the VM runs; it begins with all queries at
/// once, at a connection and when a paused VM goes on.
///
/// Of one kind at most one query is due, however late its owner is.
#[derive(Debug, Clone)]
pub struct Poller {
    schedules: Vec<Schedule>,
    connected: bool,
    paused: bool,
    answers: Answers,
    fs_thawed_status: Duration,
}

impl Default for Poller {
    fn default() -> Self {
        Poller::new(Intervals::default())
    }
}

impl Poller {
    #[must_use]
    pub fn new(intervals: Intervals) -> Poller {
        let schedule = |query, longest| Schedule {
            query,
            longest,
            interval: longest,
            next: None,
        };
        Poller {
            schedules: vec![
                schedule(Query::Version, intervals.version),
                schedule(Query::System, intervals.system),
                schedule(Query::FsFreezeStatus, intervals.fs_freeze_status),
                schedule(Query::FileSystems, intervals.file_systems),
                schedule(Query::Users, intervals.users),
                schedule(Query::Load, intervals.system),
            ],
            connected: false,
            paused: false,
            answers: Answers::default(),
            fs_thawed_status: intervals.fs_thawed_status,
        }
    }

    /// The agent has opened its end of the stream.
    pub fn connected(&mut self, now: Instant) {
        self.set(true, self.paused, now);
    }

    /// The agent has closed its end. The answers stay, as in KubeVirt, until [`Poller::forget`].
    pub fn disconnected(&mut self, now: Instant) {
        self.set(false, self.paused, now);
    }

    /// The VM is paused: its agent cannot answer.
    pub fn paused(&mut self, now: Instant) {
        self.set(self.connected, true, now);
    }

    /// The VM goes on.
    pub fn resumed(&mut self, now: Instant) {
        self.set(self.connected, false, now);
    }

    fn set(&mut self, connected: bool, paused: bool, now: Instant) {
        let before = self.is_active();
        self.connected = connected;
        self.paused = paused;
        let after = self.is_active();
        if before == after {
            return;
        }
        for schedule in &mut self.schedules {
            schedule.interval = schedule.longest.min(FIRST_INTERVAL);
            schedule.next = after.then_some(now);
        }
    }

    fn is_active(&self) -> bool {
        self.connected && !self.paused
    }

    /// True while the agent is connected.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        self.connected
    }

    /// When the next query is due; `None` while there is nothing to ask.
    #[must_use]
    pub fn wake_at(&self) -> Option<Instant> {
        self.schedules.iter().filter_map(|schedule| schedule.next).min()
    }

    /// The query that has waited longest, if one is due. It is due again after its interval, whatever becomes of it.
    pub fn take_due(&mut self, now: Instant) -> Option<Query> {
        let due = self
            .schedules
            .iter_mut()
            .filter(|schedule| schedule.next.is_some_and(|next| next <= now));
        let schedule = due.min_by_key(|schedule| schedule.next)?;
        let thawed = self.answers.fs_freeze_status == Some(FsFreezeStatus::Thawed);
        let longest = match schedule.query {
            Query::FsFreezeStatus if thawed => self.fs_thawed_status,
            _ => schedule.longest,
        };
        let interval = schedule.interval.min(longest);
        schedule.next = now.checked_add(interval);
        schedule.interval = interval.saturating_mul(2).min(longest);
        Some(schedule.query)
    }

    /// Makes a query due now, as the status after a freeze.
    pub fn poll_now(&mut self, query: Query, now: Instant) {
        if !self.is_active() {
            return;
        }
        for schedule in &mut self.schedules {
            if schedule.query == query {
                schedule.next = schedule.next.map(|next| next.min(now));
            }
        }
    }

    /// Keeps an answer. Returns true if it changes what the status of a VMI shows: the operating system, interfaces, or
    /// whether file systems are frozen.
    pub fn record(&mut self, answer: Answer) -> bool {
        let answers = &mut self.answers;
        match answer {
            Answer::Version(info) => answers.version = Some(info),
            Answer::FileSystems(list) => answers.file_systems = Some(list),
            Answer::Users(list) => answers.users = Some(list),
            Answer::Load(load) => answers.load = Some(load),
            Answer::FsFreezeStatus(status) => return replace(&mut answers.fs_freeze_status, Some(status)),
            Answer::System(system) => {
                replace(&mut answers.system.host_name, system.host_name);
                replace(&mut answers.system.time_zone, system.time_zone);
                let os = replace(&mut answers.system.os, system.os);
                return replace(&mut answers.system.interfaces, system.interfaces) || os;
            }
        }
        false
    }

    /// The last answers.
    #[must_use]
    pub fn answers(&self) -> &Answers {
        &self.answers
    }

    /// Drops the answers, as after a restart of the guest.
    pub fn forget(&mut self) {
        self.answers = Answers::default();
    }
}

/// Replaces a value unless the new one is missing: a frozen guest's agent refuses to tell. Returns true if it changed.
fn replace<T: PartialEq>(old: &mut Option<T>, new: Option<T>) -> bool {
    let changed = new.is_some() && *old != new;
    if changed {
        *old = new;
    }
    changed
}

#[cfg(test)]
mod tests;
