use super::*;
use crate::types::OsInfo;

const SECOND: Duration = Duration::from_secs(1);

/// Seconds after `start` at which each query is due, for an owner that looks once a second.
fn times(poller: &mut Poller, start: Instant, query: Query, until: u32) -> Vec<u32> {
    let mut times = Vec::new();
    for second in 0..until {
        while let Some(due) = poller.take_due(start + SECOND * second) {
            if due == query {
                times.push(second);
            }
        }
    }
    times
}

fn connected(now: Instant) -> Poller {
    let mut poller = Poller::default();
    poller.connected(now);
    poller
}

#[test]
fn a_connection_asks_everything_and_the_intervals_grow() {
    let now = Instant::now();
    assert_eq!(Poller::default().wake_at(), None);
    assert_eq!(Poller::default().take_due(now), None);
    assert_eq!(
        times(&mut connected(now), now, Query::System, 500),
        [0, 10, 30, 70, 150, 270, 390]
    );
    assert_eq!(
        times(&mut connected(now), now, Query::Load, 500),
        [0, 10, 30, 70, 150, 270, 390]
    );
    assert_eq!(
        times(&mut connected(now), now, Query::FileSystems, 999),
        [0, 10, 30, 70, 150, 310, 610, 910]
    );
    assert_eq!(
        times(&mut connected(now), now, Query::Version, 999),
        [0, 10, 30, 70, 150, 310, 610, 910]
    );
    assert_eq!(times(&mut connected(now), now, Query::Users, 35), [0, 10, 20, 30]);
    assert_eq!(
        times(&mut connected(now), now, Query::FsFreezeStatus, 16),
        [0, 5, 10, 15]
    );
}

#[test]
fn file_systems_that_are_not_frozen_are_asked_about_less_often() {
    let now = Instant::now();
    let mut poller = connected(now);
    poller.record(Answer::FsFreezeStatus(FsFreezeStatus::Thawed));
    assert_eq!(
        times(&mut poller, now, Query::FsFreezeStatus, 200),
        [0, 5, 15, 35, 75, 135, 195]
    );
    let frozen = now + SECOND * 200;
    poller.record(Answer::FsFreezeStatus(FsFreezeStatus::Frozen));
    poller.poll_now(Query::FsFreezeStatus, frozen);
    assert_eq!(times(&mut poller, frozen, Query::FsFreezeStatus, 12), [0, 5, 10]);
}

#[test]
fn an_owner_that_is_late_asks_once_and_starves_none() {
    let now = Instant::now();
    let mut poller = connected(now);
    let mut seen = Vec::new();
    // Each query takes longer than the shortest interval.
    for round in 0..6 {
        seen.extend(poller.take_due(now + SECOND * 6 * round));
    }
    assert_eq!(seen.len(), 6);
    for query in [
        Query::Version,
        Query::System,
        Query::FileSystems,
        Query::Users,
        Query::Load,
    ] {
        assert!(seen.contains(&query), "{query:?}: {seen:?}");
    }
    let mut poller = connected(now);
    let late = now + SECOND * 10_000;
    assert_eq!(std::iter::from_fn(|| poller.take_due(late)).count(), 6);
}

#[test]
fn it_rests_while_disconnected_or_paused() {
    let now = Instant::now();
    let mut poller = connected(now);
    while poller.take_due(now).is_some() {}
    assert_eq!(poller.wake_at(), Some(now + SECOND * 5));
    // A second word of the same changes nothing.
    poller.connected(now);
    assert_eq!(poller.wake_at(), Some(now + SECOND * 5));
    poller.paused(now);
    assert_eq!(poller.wake_at(), None);
    poller.poll_now(Query::FsFreezeStatus, now);
    assert_eq!(poller.take_due(now + SECOND * 100), None);
    poller.disconnected(now);
    poller.resumed(now);
    assert_eq!(poller.wake_at(), None);
    assert!(!poller.is_connected());
    poller.connected(now + SECOND);
    assert_eq!(poller.wake_at(), Some(now + SECOND));
}

#[test]
fn a_query_can_be_hurried() {
    let now = Instant::now();
    let mut poller = connected(now);
    while poller.take_due(now).is_some() {}
    poller.poll_now(Query::FsFreezeStatus, now + SECOND);
    assert_eq!(poller.take_due(now + SECOND), Some(Query::FsFreezeStatus));
    assert_eq!(poller.take_due(now + SECOND), None);
}

#[test]
fn answers_stay_and_changes_are_told() {
    let mut poller = Poller::default();
    let os = OsInfo {
        id: Some("debian".to_owned()),
        ..OsInfo::default()
    };
    let system = System {
        os: Some(os.clone()),
        host_name: Some("vm".to_owned()),
        ..System::default()
    };
    assert!(poller.record(Answer::System(Box::new(system.clone()))));
    assert!(!poller.record(Answer::System(Box::new(system))));
    // A frozen guest's agent refuses all of it.
    assert!(!poller.record(Answer::System(Box::default())));
    assert_eq!(poller.answers().system.os, Some(os));
    assert!(poller.record(Answer::FsFreezeStatus(FsFreezeStatus::Frozen)));
    assert!(!poller.record(Answer::FsFreezeStatus(FsFreezeStatus::Frozen)));
    assert!(!poller.record(Answer::Users(Vec::new())));
    assert_eq!(poller.answers().users, Some(Vec::new()));
    poller.forget();
    assert_eq!(poller.answers(), &Answers::default());
}
