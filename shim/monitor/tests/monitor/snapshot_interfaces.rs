//! Snapshots of VMs with interfaces.

use std::fs;
use std::path::Path;

use husk_monitor::launch::MonitorConfig;
use husk_monitor::snapshot;
use husk_network::MacAddr;
use husk_proto::shim::v1::{
    AddInterfaceRequest, PauseRequest, RemoveInterfaceRequest, ResumeRequest, SetLinkRequest,
};
use husk_shim_testing::pod::{Pod, ip};

use super::fixture::{Fixture, Vm, eventually};
use super::networks::{masquerade, on, refusal, taps, with_nic};
use super::snapshots::{config, dir, kill, refused, restore, save};
use super::standalone::machine;

pub fn interfaces_keep_their_addresses() {
    let f = Fixture::new();
    let machine = machine();
    let work = || {
        let mut source = f.start(with_nic("demo", masquerade())).unwrap();
        let before = source.info().interfaces.remove(0);
        let link = SetLinkRequest {
            name: "default".into(),
            up: false,
        };
        f.wait(source.client.set_link(link)).unwrap();
        let directory = dir(&f, "one");
        save(&f, &source, &directory, true).unwrap();
        let mut clone = restore(&f, &directory, "clone").unwrap();
        let now = clone.info().interfaces.remove(0);
        assert_eq!((&now.mac, now.link_up), (&before.mac, false));
        assert_ne!(now.addresses, before.addresses);
        kill(&mut source);
        kill(&mut clone);
        f.is_clean(&[source.pids(), clone.pids()].concat());
    };
    machine.run(work).unwrap();
}

/// A VM in a pod, with the interface `blue` plugged into it.
fn with_blue<'f>(f: &'f Fixture, pod: &Pod) -> Vm<'f> {
    let mac = MacAddr([2, 0, 0, 0, 0, 7]);
    pod.add_veth("veth1", MacAddr([2, 0, 0, 0, 9, 7]), "net1", mac);
    ip(&pod.netns, "addr add 10.9.0.5/24 brd + dev net1");
    let mut vm = f
        .start_config(&on(f, pod, with_nic("demo", masquerade())))
        .unwrap();
    let request = AddInterfaceRequest {
        name: "blue".into(),
        device: "net1".into(),
        mac: "02:00:00:00:00:42".into(),
    };
    f.wait(vm.client.add_interface(request)).unwrap();
    vm
}

pub fn plugged_interface_keeps_its_slot() {
    let f = Fixture::new();
    let pod = Pod::with_address();
    let mut source = with_blue(&f, &pod);
    let link = SetLinkRequest {
        name: "blue".into(),
        up: false,
    };
    f.wait(source.client.set_link(link)).unwrap();
    let before = source.info().interfaces;
    let directory = dir(&f, "one");
    save(&f, &source, &directory, false).unwrap();
    kill(&mut source);
    let given_back = pod.state();

    // Its device is in the pod only.
    let machine = machine();
    let text = refused(machine.run(|| restore(&f, &directory, "demo")).unwrap());
    let wanted = "interface \"blue\": pod link (net1) is missing: no plugin adds devices";
    assert!(text.starts_with(wanted), "{text}");
    let config = MonitorConfig {
        netns: Some(pod.path().into()),
        ..config(&f, &directory, "demo")
    };
    let mut restored = f.start_config(&config).unwrap();
    let mut now = restored.info().interfaces;
    assert!(now[1].plugged && !now[1].link_up);
    // It answers the guest's DHCP requests, which other tests look at.
    now.iter_mut().for_each(|interface| interface.leased.clear());
    assert_eq!(now, before);
    let said = restored.said();
    let nic = "nic blue [02, 00, 00, 00, 00, 42] mtu 1450 queues 1 down slot 24\n";
    assert!(said.contains(nic), "{said}");
    // Another snapshot has it too, until it is unplugged.
    let again = dir(&f, "again");
    save(&f, &restored, &again, true).unwrap();
    let slots = |directory: &Path| {
        let text = fs::read(directory.join("snapshot.json")).unwrap();
        let document: serde_json::Value = serde_json::from_slice(&text).unwrap();
        document
            .pointer("/interfaces/0/pciSlot")
            .and_then(|slot| slot.as_u64())
    };
    assert_eq!(slots(&again), Some(24));
    let remove = RemoveInterfaceRequest { name: "blue".into() };
    f.wait(restored.client.remove_interface(remove)).unwrap();
    let without = dir(&f, "without");
    save(&f, &restored, &without, true).unwrap();
    assert_eq!(slots(&without), None);
    kill(&mut restored);
    assert_eq!(pod.state(), given_back);
    f.is_clean(&[source.pids(), restored.pids()].concat());
}

pub fn interface_that_is_being_unplugged_is_not_saved() {
    let f = Fixture::new();
    let pod = Pod::with_address();
    let mut vm = with_blue(&f, &pod);
    f.wait(vm.client.pause(PauseRequest {})).unwrap();
    let remove = RemoveInterfaceRequest { name: "blue".into() };
    f.wait(vm.client.remove_interface(remove)).unwrap_err();
    let directory = dir(&f, "one");
    let error = save(&f, &vm, &directory, false).unwrap_err();
    assert!(
        error
            .message()
            .starts_with("interface \"blue\": it is being unplugged"),
        "{}",
        error.message()
    );
    assert!(!directory.exists());
    f.wait(vm.client.resume(ResumeRequest {})).unwrap();
    eventually("it goes", || vm.info().interfaces.len() == 1);
    save(&f, &vm, &directory, true).unwrap();
    kill(&mut vm);
    f.is_clean(&vm.pids());
}

/// The configuration of a VM of this name that goes on in the pod, with other MAC addresses.
fn replugged(f: &Fixture, pod: &Pod, directory: &Path, name: &str) -> MonitorConfig {
    let plan = snapshot::read(directory).unwrap();
    MonitorConfig {
        plan: plan.plan_for("default", name, true).unwrap(),
        netns: Some(pod.path().into()),
        replug_nics: true,
        ..config(f, directory, name)
    }
}

fn octets(mac: &str) -> String {
    mac.replace(':', ", ")
}

pub fn clone_gets_other_nics_in_the_same_slots() {
    let f = Fixture::new();
    let pod = Pod::with_address();
    let mut source = with_blue(&f, &pod);
    let before = source.info().interfaces;
    let directory = dir(&f, "one");
    save(&f, &source, &directory, false).unwrap();
    kill(&mut source);
    let given_back = pod.state();

    let mut clone = f.start_config(&replugged(&f, &pod, &directory, "clone")).unwrap();
    let now = clone.info().interfaces;
    let said = clone.said();
    let at = |text: &str| said.find(text).unwrap_or_else(|| panic!("no {text:?} in {said}"));
    for (old, new, slot) in [(&before[0], &now[0], 1), (&before[1], &now[1], 24)] {
        assert_eq!((&old.name, old.plugged), (&new.name, new.plugged));
        assert_ne!(old.mac, new.mac);
        let (name, saved) = (&old.name, if slot == 1 { "" } else { " slot 24" });
        let stand_in = format!(
            "nic {name} [{}] mtu 1450 queues 1 down{saved}\n",
            octets(&old.mac)
        );
        let own = format!(
            "nic {name} [{}] mtu 1450 queues 1 slot {slot}\n",
            octets(&new.mac)
        );
        let steps = [
            at(&stand_in),
            at("goes on from"),
            at(&format!("asked for {name}\n")),
            at(&own),
        ];
        assert!(steps.is_sorted(), "{steps:?} in {said}");
    }
    eventually("the guest is offered its address", || {
        clone.said().contains("blue is offered 10.9.0.5")
    });
    assert_eq!((taps(clone.monitor), taps(clone.vmm)), (0, 2));
    let again = dir(&f, "again");
    save(&f, &clone, &again, true).unwrap();
    let plan = snapshot::read(&again).unwrap().plan;
    assert_eq!(MacAddr(plan.nics[0].mac.unwrap()).to_string(), now[0].mac);
    kill(&mut clone);
    assert_eq!(pod.state(), given_back);
    f.is_clean(&[source.pids(), clone.pids()].concat());
}

pub fn guest_that_does_not_release_its_nics_is_ended() {
    let f = Fixture::new();
    let pod = Pod::with_address();
    let mut source = with_blue(&f, &pod);
    let directory = dir(&f, "one");
    save(&f, &source, &directory, false).unwrap();
    kill(&mut source);
    let given_back = pod.state();
    for (name, wanted) in [
        ("clings", "has not released its NIC within 30 s"),
        ("undescribed", "leave out --replug-nics"),
    ] {
        let text = refusal(&f, &replugged(&f, &pod, &directory, name));
        assert!(
            text.starts_with("interface \"") && text.contains(wanted),
            "{text}"
        );
        assert_eq!(pod.state(), given_back);
    }
    f.is_clean(&source.pids());
}
