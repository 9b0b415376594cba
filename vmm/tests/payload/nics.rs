//! NICs: at start, plugged and unplugged.

use std::fs;
use std::time::{Duration, Instant};

use husk_proto::vmm::v1::{self as pb};
use tonic::{Code, Status};

use super::guest::{elf, halt, print, reset};
use super::rig::Rig;
use super::saved_vm::Saved;
use super::wire::{isolated, tap_named};

const MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
/// The lowest hot-pluggable slot.
const SLOT: u32 = 24;

/// Ejects every function that it is asked to: `mov dx, PCID; in eax, dx; mov dx, B0EJ; out dx, eax; jmp`.
fn ejects() -> Vec<u8> {
    vec![
        0x66, 0xba, 0x24, 0x06, 0xed, 0x66, 0xba, 0x28, 0x06, 0xef, 0xeb, 0xf4,
    ]
}

impl Rig {
    /// A NIC on a tap of that name, which the kernel removes with its last descriptor.
    async fn nic(&self, id: &str, tap: &str) -> pb::Nic {
        let [tap] = <[_; 1]>::try_from(tap_named(tap, 1)).unwrap();
        pb::Nic {
            id: id.into(),
            mac: MAC.into(),
            mtu: 1450,
            taps: vec![self.send(tap).await],
            ..Default::default()
        }
    }

    async fn add_nic(&mut self, nic: pb::Nic) -> Result<u32, Status> {
        let added = self.client.add_nic(pb::AddNicRequest { nic: Some(nic) }).await;
        added.map(|answer| answer.into_inner().pci_slot)
    }

    async fn remove_nic(&mut self, id: &str) -> Result<(), Status> {
        let removed = self.client.remove_nic(pb::RemoveNicRequest { id: id.into() });
        removed.await.map(drop)
    }

    async fn set_link(&mut self, id: &str, up: bool) -> Result<(), Status> {
        let set = self.client.set_link(pb::SetLinkRequest { id: id.into(), up });
        set.await.map(drop)
    }

    /// Name, slot, link, and whether it is being removed.
    async fn nics(&mut self) -> Vec<(String, u32, bool, bool)> {
        let info = self.client.info(pb::InfoRequest {}).await.unwrap().into_inner();
        let nics = info.nics.into_iter();
        nics.map(|nic| (nic.id, nic.pci_slot, nic.link_up, nic.removing))
            .collect()
    }
}

/// Runs an asynchronous test in a network namespace of its own.
fn alone(name: &str, body: impl Future<Output = ()>) {
    isolated(&format!("nics::{name}"), || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.unwrap().block_on(body);
    });
}

/// Taps of this namespace.
fn taps() -> Vec<String> {
    let table = fs::read_to_string("/proc/self/net/dev").unwrap();
    let names = table.lines().filter_map(|line| line.trim().split_once(':'));
    let taps = names.map(|(name, _)| name.to_owned()).filter(|name| name != "lo");
    taps.collect()
}

fn code<T: std::fmt::Debug>(result: Result<T, Status>) -> Code {
    result.unwrap_err().code()
}

fn row(id: &str, slot: u32) -> (String, u32, bool, bool) {
    (id.to_owned(), slot, true, false)
}

#[test]
fn a_nic_is_plugged_and_unplugged() {
    alone("a_nic_is_plugged_and_unplugged", async {
        let mut rig = Rig::start().await;
        let kernel = elf(&[print("up"), ejects()].concat(), false);
        let mut config = rig.config(&kernel).await;
        config.nics.push(rig.nic("default", "tap0").await);
        rig.create(config).await.unwrap();
        rig.boot().await.unwrap();
        assert_eq!(rig.read_console(2).await, "up");
        assert_eq!(rig.nics().await, [row("default", 1)]);

        for _ in 0..3 {
            let nic = rig.nic("more", "tap1").await;
            assert_eq!(rig.add_nic(nic).await.unwrap(), SLOT);
            assert_eq!(rig.nics().await, [row("default", 1), row("more", SLOT)]);
            let same = rig.nic("more", "tap2").await;
            assert_eq!(code(rig.add_nic(same).await), Code::AlreadyExists);
            rig.remove_nic("more").await.unwrap();
            assert_eq!(rig.nics().await, [row("default", 1)]);
            assert_eq!(taps(), ["tap0"], "the VMM has closed the others");
        }
        assert_eq!(code(rig.remove_nic("more").await), Code::NotFound);

        rig.set_link("default", false).await.unwrap();
        assert!(!rig.nics().await[0].2);
        assert_eq!(code(rig.set_link("more", true).await), Code::NotFound);
        rig.client.stop(pb::StopRequest {}).await.unwrap();
        assert_eq!(rig.wait().await.code(), Some(0));
        assert_eq!(taps(), [""; 0]);
    });
}

#[test]
fn a_removal_that_is_asked_for_during_the_eject_is_answered() {
    alone(
        "a_removal_that_is_asked_for_during_the_eject_is_answered",
        async {
            let mut rig = Rig::start().await;
            rig.run(&elf(&[print("up"), ejects()].concat(), false)).await;
            assert_eq!(rig.read_console(2).await, "up");
            for _ in 0..10 {
                let nic = rig.nic("more", "tap1").await;
                rig.add_nic(nic).await.unwrap();
                let removals: Vec<_> = (0..50)
                    .map(|_| {
                        let mut client = rig.client.clone();
                        let request = pb::RemoveNicRequest { id: "more".into() };
                        tokio::spawn(async move { client.remove_nic(request).await })
                    })
                    .collect();
                for removal in removals {
                    let removed = removal.await.unwrap().map_err(|status| status.code());
                    assert!(matches!(removed, Ok(_) | Err(Code::NotFound)), "{removed:?}");
                }
                assert_eq!(rig.nics().await, []);
            }
            rig.client.stop(pb::StopRequest {}).await.unwrap();
            assert_eq!(rig.wait().await.code(), Some(0));
        },
    );
}

#[test]
fn a_nic_of_the_start_is_replaced_in_its_slot() {
    alone("a_nic_of_the_start_is_replaced_in_its_slot", async {
        let mut rig = Rig::start().await;
        let kernel = elf(&[print("up"), ejects()].concat(), false);
        let mut config = rig.config(&kernel).await;
        for (id, tap) in [("default", "tap0"), ("other", "tap1")] {
            config.nics.push(rig.nic(id, tap).await);
        }
        rig.create(config).await.unwrap();
        rig.boot().await.unwrap();
        assert_eq!(rig.read_console(2).await, "up");
        rig.remove_nic("default").await.unwrap();
        assert_eq!(rig.nics().await, [row("other", 2)]);
        assert_eq!(taps(), ["tap1"]);
        for (slot, refused) in [
            (2, Code::FailedPrecondition),
            (3, Code::InvalidArgument),
            (256, Code::InvalidArgument),
        ] {
            let nic = rig.nic("default", &format!("no{slot}")).await;
            let nic = pb::Nic {
                pci_slot: slot,
                ..nic
            };
            assert_eq!(code(rig.add_nic(nic).await), refused, "{slot}");
        }
        let nic = pb::Nic {
            mac: vec![2, 0, 0, 0, 0, 2],
            pci_slot: 1,
            ..rig.nic("default", "tap2").await
        };
        assert_eq!(rig.add_nic(nic).await.unwrap(), 1);
        let info = rig.client.info(pb::InfoRequest {}).await.unwrap().into_inner();
        let nics: Vec<_> = info
            .nics
            .iter()
            .map(|nic| (nic.pci_slot, nic.mac[5], nic.ejectable))
            .collect();
        assert_eq!(nics, [(2, 1, true), (1, 2, true)]);
        rig.client.stop(pb::StopRequest {}).await.unwrap();
        assert_eq!(rig.wait().await.code(), Some(0));
    });
}

#[test]
fn a_nic_that_the_guest_does_not_eject_is_removed_by_a_reset() {
    alone(
        "a_nic_that_the_guest_does_not_eject_is_removed_by_a_reset",
        async {
            let mut rig = Rig::start().await;
            rig.run(&elf(&[print("up"), halt()].concat(), false)).await;
            assert_eq!(rig.read_console(2).await, "up");
            let nic = rig.nic("more", "tap1").await;
            rig.add_nic(nic).await.unwrap();
            let mut client = rig.client.clone();
            let removal = tokio::spawn(async move {
                client
                    .remove_nic(pb::RemoveNicRequest { id: "more".into() })
                    .await
            });
            let start = Instant::now();
            while !rig.nics().await[0].3 {
                assert!(start.elapsed() < Duration::from_secs(10));
            }
            assert!(!removal.is_finished());
            rig.client.reset(pb::ResetRequest {}).await.unwrap();
            removal.await.unwrap().unwrap();
            assert_eq!((rig.nics().await.len(), taps().len()), (0, 0));
            let nic = rig.nic("more", "tap1").await;
            rig.add_nic(nic).await.unwrap();
            rig.client.stop(pb::StopRequest {}).await.unwrap();
            assert_eq!(rig.wait().await.code(), Some(0));
        },
    );
}

#[test]
fn slots_are_eight_and_a_guest_that_reboots_keeps_its_nics() {
    alone("slots_are_eight_and_a_guest_that_reboots_keeps_its_nics", async {
        let mut rig = Rig::start().await;
        rig.run(&elf(&[print("up"), reset()].concat(), false)).await;
        for i in 0..8 {
            let nic = rig.nic(&format!("nic{i}"), &format!("tap{i}")).await;
            assert_eq!(rig.add_nic(nic).await.unwrap(), SLOT + i);
        }
        let nic = rig.nic("nic8", "tap8").await;
        assert_eq!(code(rig.add_nic(nic).await), Code::ResourceExhausted);
        assert_eq!(rig.read_console(20).await, "up".repeat(10));
        assert_eq!(rig.nics().await.len(), 8);
        rig.client.stop(pb::StopRequest {}).await.unwrap();
        assert_eq!(rig.wait().await.code(), Some(0));
    });
}

/// A process with the saved VM, whose second NIC was plugged into `slot`; none if that is 0.
async fn restored(kernel: &[u8], saved: &Saved, slot: u32) -> Result<Rig, Status> {
    let mut rig = Rig::start().await;
    let mut config = rig.config(kernel).await;
    // A process that has refused the VM may still have its taps.
    config.nics.push(rig.nic("default", &format!("own{slot}")).await);
    if slot != 0 {
        let nic = rig.nic("more", &format!("more{slot}")).await;
        config.nics.push(pb::Nic {
            pci_slot: slot,
            ..nic
        });
    }
    let files = saved.send(&rig).await;
    rig.create_from(config, Some(files)).await.map(|()| rig)
}

#[test]
fn a_plugged_nic_keeps_its_slot_over_a_save() {
    alone("a_plugged_nic_keeps_its_slot_over_a_save", async {
        let mut rig = Rig::start().await;
        let kernel = elf(&[print("up"), ejects()].concat(), false);
        let mut config = rig.config(&kernel).await;
        config.nics.push(rig.nic("default", "tap0").await);
        rig.create(config).await.unwrap();
        rig.boot().await.unwrap();
        assert_eq!(rig.read_console(2).await, "up");
        let nic = rig.nic("more", "tap1").await;
        assert_eq!(rig.add_nic(nic).await.unwrap(), SLOT);
        rig.client.pause(pb::PauseRequest::default()).await.unwrap();
        let saved = Saved::empty();
        saved.save(&mut rig).await.unwrap();
        rig.client.stop(pb::StopRequest {}).await.unwrap();
        assert_eq!(rig.wait().await.code(), Some(0));

        for (slot, reason) in [
            (0, "\"functions\""),
            (SLOT + 1, "\"functions\""),
            (1, "not hot-pluggable"),
        ] {
            let refused = restored(&kernel, &saved, slot).await.unwrap_err();
            assert!(refused.message().contains(reason), "{slot}: {refused}");
        }
        let mut rig = restored(&kernel, &saved, SLOT).await.unwrap();
        rig.boot().await.unwrap();
        assert_eq!(rig.nics().await, [row("default", 1), row("more", SLOT)]);
        rig.remove_nic("more").await.unwrap();
        rig.remove_nic("default").await.unwrap();
        assert_eq!(rig.nics().await, []);
        rig.client.stop(pb::StopRequest {}).await.unwrap();
        assert_eq!(rig.wait().await.code(), Some(0));

        // The tables of a guest from before do not have the slot of the first, until it boots again.
        let state = saved.state_text();
        let before = state.replace(",\"nic_slots\":[1]", "");
        assert_ne!(before, state);
        let mut rig = restored(&kernel, &saved.with_state(&before), SLOT).await.unwrap();
        rig.boot().await.unwrap();
        let refused = rig.remove_nic("default").await.unwrap_err();
        assert_eq!(refused.code(), Code::FailedPrecondition);
        assert!(refused.message().contains("an older husk-vmm"), "{refused}");
        rig.remove_nic("more").await.unwrap();
        rig.client.reset(pb::ResetRequest {}).await.unwrap();
        rig.remove_nic("default").await.unwrap();
        rig.client.stop(pb::StopRequest {}).await.unwrap();
        assert_eq!(rig.wait().await.code(), Some(0));
    });
}
