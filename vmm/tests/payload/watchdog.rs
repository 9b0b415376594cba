//! The watchdog, with guests that start it and never reload it.

use std::time::{Duration, Instant};

use husk_proto::vmm::v1::event::Event as Kind;
use husk_proto::vmm::v1::watchdog::Action;
use husk_proto::vmm::v1::{self as pb, ExitReason, State};
use tokio_stream::StreamExt;
use tonic::Streaming;

use super::guest::{elf, halt, pci_config, print};
use super::rig::Rig;

/// After rng, balloon and the SCSI controller.
const SLOT: u8 = 4;
/// Both stages at 1 MHz with the power-on preloads.
const TIMEOUT: Duration = Duration::from_millis(2013);

/// A guest that prints, starts the watchdog and halts.
fn kernel() -> Vec<u8> {
    let start = [pci_config(SLOT, 0x60, 4), pci_config(SLOT, 0x68, 2)].concat();
    elf(&[print("up"), start, halt()].concat(), false)
}

/// A guest that prints, and starts the watchdog with the shortest stages whenever it is off.
fn restless() -> Vec<u8> {
    let unlock = [
        0xc7, 0x46, 0x0c, 0x80, 0, 0, 0, // mov dword [rsi + 0xc], 0x80
        0xc7, 0x46, 0x0c, 0x86, 0, 0, 0, // mov dword [rsi + 0xc], 0x86
    ];
    let preload = |stage: u8| {
        let zero = [0xc7, 0x46, 4 * stage, 0, 0, 0, 0]; // mov dword [rsi + 4 * stage], 0
        [&unlock[..], &zero].concat()
    };
    let poll = [
        0xec, // in al, dx: the lock register, which is 0 when the watchdog has bitten
        0x84, 0xc0, // test al, al
        0x75, 0xfb, // jnz to the in
    ];
    let start = pci_config(SLOT, 0x68, 2);
    let mut again = [preload(0), preload(1), start, poll.to_vec()].concat();
    let back = -(again.len() as i32 + 5);
    again.push(0xe9); // jmp to the first preload
    again.extend(back.to_le_bytes());
    // The BAR goes to 0xd0000000.
    let bar = (0x10..).zip([0, 0, 0, 0xd0, 0, 0, 0, 0]);
    let bar: Vec<_> = bar.flat_map(|(at, byte)| pci_config(SLOT, at, byte)).collect();
    let address = [0xbe, 0, 0, 0, 0xd0]; // mov esi, 0xd0000000
    let setup = [print("up"), bar, pci_config(SLOT, 4, 2), address.to_vec()].concat();
    elf(&[setup, again].concat(), false)
}

async fn start(action: Action) -> (Rig, Streaming<pb::Event>) {
    start_with(action, &kernel()).await
}

async fn start_with(action: Action, kernel: &[u8]) -> (Rig, Streaming<pb::Event>) {
    let mut rig = Rig::start().await;
    let mut config = rig.config(kernel).await;
    config.watchdog = Some(pb::Watchdog {
        action: action.into(),
    });
    rig.create(config).await.unwrap();
    let events = rig.client.events(pb::EventsRequest {}).await;
    rig.boot().await.unwrap();
    assert_eq!(rig.read_console(2).await, "up");
    (rig, events.unwrap().into_inner())
}

/// The events after the VM has started to run.
async fn next(events: &mut Streaming<pb::Event>) -> Kind {
    loop {
        let event = events.next().await.unwrap().unwrap().event.unwrap();
        if !matches!(&event, Kind::State(state) if [State::Created as i32, State::Running as i32].contains(state))
        {
            return event;
        }
    }
}

fn bite(action: Action) -> Kind {
    Kind::Watchdog(pb::event::WatchdogBite {
        action: action.into(),
    })
}

#[tokio::test]
async fn it_resets_the_machine_again_and_again() {
    for action in [Action::Unspecified, Action::Reset] {
        let (mut rig, mut events) = start(action).await;
        for _ in 0..2 {
            assert_eq!(next(&mut events).await, bite(action));
            let cause = "watchdog".into();
            assert_eq!(next(&mut events).await, Kind::Reset(pb::event::Reset { cause }));
            assert_eq!(rig.read_console(2).await, "up");
        }
        rig.client.stop(pb::StopRequest {}).await.unwrap();
        assert_eq!(rig.wait().await.code(), Some(0));
    }
}

#[tokio::test]
async fn it_ends_the_vm() {
    let (rig, mut events) = start(Action::Poweroff).await;
    assert_eq!(next(&mut events).await, bite(Action::Poweroff));
    assert_eq!(next(&mut events).await, Kind::State(State::Stopped.into()));
    let Kind::Exit(exit) = next(&mut events).await else {
        panic!("no exit");
    };
    assert_eq!(exit.reason(), ExitReason::Watchdog);
    assert_eq!(rig.wait().await.code(), Some(14));
}

#[tokio::test]
async fn it_presses_the_power_button() {
    let (mut rig, mut events) = start(Action::Shutdown).await;
    assert_eq!(next(&mut events).await, bite(Action::Shutdown));
    // This guest does not react.
    let info = rig.client.info(pb::InfoRequest {}).await.unwrap().into_inner();
    assert_eq!((info.state(), info.boots), (State::Running, 1));
    rig.client.stop(pb::StopRequest {}).await.unwrap();
    assert_eq!(rig.wait().await.code(), Some(0));
}

#[tokio::test]
async fn it_presses_the_power_button_at_most_once_a_second() {
    let (mut rig, mut events) = start_with(Action::Shutdown, &restless()).await;
    assert_eq!(next(&mut events).await, bite(Action::Shutdown));
    let first = Instant::now();
    let mut bites = 0;
    while first.elapsed() < Duration::from_millis(2500) {
        if let Ok(event) = tokio::time::timeout(Duration::from_millis(100), next(&mut events)).await {
            assert_eq!(event, bite(Action::Shutdown));
            bites += 1;
        }
    }
    assert!((1..=5).contains(&bites), "{bites}");
    rig.client.stop(pb::StopRequest {}).await.unwrap();
    assert_eq!(rig.wait().await.code(), Some(0));
}

#[tokio::test]
async fn it_pauses_the_vm_once() {
    let (mut rig, mut events) = start(Action::Pause).await;
    assert_eq!(next(&mut events).await, bite(Action::Pause));
    assert_eq!(next(&mut events).await, Kind::State(State::Paused.into()));
    rig.client.resume(pb::ResumeRequest::default()).await.unwrap();
    tokio::time::sleep(TIMEOUT + Duration::from_millis(500)).await;
    let info = rig.client.info(pb::InfoRequest {}).await.unwrap().into_inner();
    assert_eq!(info.state(), State::Running);
    rig.client.stop(pb::StopRequest {}).await.unwrap();
    assert_eq!(rig.wait().await.code(), Some(0));
}

#[tokio::test]
async fn it_does_not_run_while_the_vm_is_paused() {
    let (mut rig, mut events) = start(Action::Reset).await;
    rig.client.pause(pb::PauseRequest::default()).await.unwrap();
    assert_eq!(next(&mut events).await, Kind::State(State::Paused.into()));
    tokio::time::sleep(TIMEOUT * 2).await;
    rig.client.resume(pb::ResumeRequest::default()).await.unwrap();
    let resumed = Instant::now();
    assert_eq!(next(&mut events).await, bite(Action::Reset));
    let left = resumed.elapsed();
    assert!(left > TIMEOUT / 2 && left < TIMEOUT * 2, "{left:?}");
    rig.client.stop(pb::StopRequest {}).await.unwrap();
    assert_eq!(rig.wait().await.code(), Some(0));
}

#[tokio::test]
async fn an_unknown_action_is_refused() {
    let mut rig = Rig::start().await;
    let mut config = rig.config(&kernel()).await;
    config.watchdog = Some(pb::Watchdog { action: 9 });
    let error = rig.create(config).await.unwrap_err();
    assert!(
        error.message().contains("config.watchdog.action: 9 is no action"),
        "{error}"
    );
}
