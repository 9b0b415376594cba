//! Hotplug of interfaces.

use husk_network::MacAddr;
use husk_proto::shim::v1::{
    AddInterfaceRequest, Interface, KillRequest, PauseRequest, RemoveInterfaceRequest, ResumeRequest,
    SetLinkRequest,
};
use husk_shim_testing::pod::{Pod, ip};
use husk_vmi::NicBinding;
use tonic::Code;

use super::fixture::{Fixture, Vm, eventually};
use super::networks::{masquerade, on, taps, with_nic};

const MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 7]);

/// A pod that has another device, with an address.
fn pod() -> Pod {
    let pod = Pod::with_address();
    pod.add_veth("veth1", MacAddr([2, 0, 0, 0, 9, 7]), "net1", MAC);
    ip(&pod.netns, "addr add 10.9.0.5/24 brd + dev net1");
    pod
}

fn add(f: &Fixture, vm: &mut Vm, name: &str, device: &str, mac: &str) -> Result<(), (Code, String)> {
    let request = AddInterfaceRequest {
        name: name.into(),
        device: device.into(),
        mac: mac.into(),
    };
    told(f.wait(vm.client.add_interface(request)))
}

fn remove(f: &Fixture, vm: &mut Vm, name: &str) -> Result<(), (Code, String)> {
    let request = RemoveInterfaceRequest { name: name.into() };
    told(f.wait(vm.client.remove_interface(request)))
}

fn told<T>(answer: Result<T, tonic::Status>) -> Result<(), (Code, String)> {
    answer
        .map(drop)
        .map_err(|status| (status.code(), status.message().to_owned()))
}

fn shown(vm: &mut Vm, name: &str) -> Option<Interface> {
    vm.info()
        .interfaces
        .into_iter()
        .find(|interface| interface.name == name)
}

fn kill(vm: &mut Vm) {
    vm.ends(async |mut client| drop(client.kill(KillRequest {}).await.unwrap()));
}

pub fn interface_is_plugged_and_unplugged() {
    let f = Fixture::new();
    let pod = pod();
    let mut vm = f
        .start_config(&on(&f, &pod, with_nic("demo", NicBinding::Bridge)))
        .unwrap();
    let before = pod.state();
    for _ in 0..2 {
        add(&f, &mut vm, "blue", "net1", "").unwrap();
        // A second request changes nothing.
        add(&f, &mut vm, "blue", "net1", &MAC.to_string()).unwrap();
        let blue = shown(&mut vm, "blue").unwrap();
        assert_eq!((blue.device.as_str(), blue.mac), ("net1", MAC.to_string()));
        assert_eq!(
            (blue.binding.as_str(), &blue.addresses[..]),
            ("bridge", &["10.9.0.5".to_owned()][..])
        );
        eventually("the guest is offered its address", || {
            vm.said()
                .contains("blue is offered 10.9.0.5 Some(Hostname(\"demo-host\"))")
        });
        assert_eq!((taps(vm.monitor), taps(vm.vmm)), (0, 2));
        assert!(pod.shows("addr show k6t-net1").contains("169.254.75.11/32"));

        for up in [false, true] {
            let name = "blue".to_owned();
            f.wait(vm.client.set_link(SetLinkRequest { name, up })).unwrap();
            assert_eq!(shown(&mut vm, "blue").unwrap().link_up, up);
            eventually("the VMM is told", || {
                vm.said().contains(&format!("link of blue {up}\n"))
            });
        }

        remove(&f, &mut vm, "blue").unwrap();
        assert_eq!(shown(&mut vm, "blue"), None);
        assert_eq!(pod.state(), before);
        assert_eq!(taps(vm.vmm), 1);
    }
    kill(&mut vm);
    f.is_clean(&vm.pids());
}

pub fn removal_while_paused_completes_on_resume() {
    let f = Fixture::new();
    let pod = pod();
    let mut vm = f
        .start_config(&on(&f, &pod, with_nic("demo", masquerade())))
        .unwrap();
    let before = pod.state();
    add(&f, &mut vm, "blue", "net1", "").unwrap();
    f.wait(vm.client.pause(PauseRequest {})).unwrap();
    let (code, text) = remove(&f, &mut vm, "blue").unwrap_err();
    assert_eq!(code, Code::DeadlineExceeded);
    assert_eq!(
        text,
        "interface \"blue\" is still in use: the VM is paused; it is removed at resume"
    );
    assert!(shown(&mut vm, "blue").is_some());
    assert_eq!(
        add(&f, &mut vm, "blue", "net1", "").unwrap_err(),
        (
            Code::FailedPrecondition,
            "interface \"blue\" is being removed".to_owned()
        )
    );
    // Other requests are handled meanwhile, and the caller has timed out.
    let name = "default".to_owned();
    f.wait(vm.client.set_link(SetLinkRequest { name, up: false }))
        .unwrap();
    f.wait(vm.client.resume(ResumeRequest {})).unwrap();
    eventually("it goes", || shown(&mut vm, "blue").is_none());
    eventually("the device is given back", || pod.state() == before);
    kill(&mut vm);
    f.is_clean(&vm.pids());
}

pub fn refused_interface_changes_nothing() {
    let f = Fixture::new();
    let pod = pod();
    let mut vm = f
        .start_config(&on(&f, &pod, with_nic("full", NicBinding::Bridge)))
        .unwrap();
    let before = pod.state();
    let place = format!("--netns {}: ", pod.path());
    let missing = "is missing: let a network plugin add it first";
    let taken = |device| {
        format!("Unable to add interface [blue] because its device {device} is that of interface [default]")
    };
    for ((name, device, mac), code, why) in [
        (
            ("blue!", "", ""),
            Code::InvalidArgument,
            "the interface's name \"blue!\" must be at most 253 letters, digits, '-' and '_'".to_owned(),
        ),
        (
            ("blue", "", "x"),
            Code::InvalidArgument,
            "\"x\" is not a MAC address".to_owned(),
        ),
        (
            ("default", "net1", ""),
            Code::AlreadyExists,
            "Unable to add interface [default] because interface with that name already exists".to_owned(),
        ),
        (("blue", "eth0", ""), Code::AlreadyExists, taken("eth0")),
        (("blue", "tap0", ""), Code::AlreadyExists, taken("tap0")),
        (
            ("blue", "", ""),
            Code::NotFound,
            format!("{place}interface \"blue\": pod link (pod16477688c0e) {missing}"),
        ),
        (
            ("blue", "lo", ""),
            Code::FailedPrecondition,
            format!("{place}interface \"blue\": lo is the loopback device: name another one"),
        ),
        (
            ("blue", "../x", ""),
            Code::FailedPrecondition,
            format!(
                "{place}interface \"blue\": nic: \"../x\" is no name of a pod's device, or too long for one"
            ),
        ),
        (
            ("blue", "net1", "01:00:00:00:00:00"),
            Code::FailedPrecondition,
            format!("{place}interface \"blue\": macAddress: 01:00:00:00:00:00 is not unicast"),
        ),
        (
            ("blue", "net1", ""),
            Code::ResourceExhausted,
            "no slot is free".to_owned(),
        ),
    ] {
        assert_eq!(add(&f, &mut vm, name, device, mac).unwrap_err(), (code, why));
        assert_eq!(pod.state(), before, "{name} {device} {mac}");
    }
    for (name, code, why) in [
        ("default", Code::FailedPrecondition, "was present at start"),
        ("blue", Code::NotFound, "does not exist"),
    ] {
        let text = format!("Unable to remove interface [{name}] because it {why}");
        assert_eq!(remove(&f, &mut vm, name).unwrap_err(), (code, text));
    }
    let name = "blue".to_owned();
    let refused = told(f.wait(vm.client.set_link(SetLinkRequest { name, up: true })));
    assert_eq!(
        refused.unwrap_err(),
        (Code::NotFound, "the VM has no interface [blue]".to_owned())
    );
    kill(&mut vm);

    // Without a network no interface can be added.
    let mut vm = f.start(super::fixture::plan("demo")).unwrap();
    let (code, text) = add(&f, &mut vm, "blue", "net1", "").unwrap_err();
    assert_eq!(code, Code::FailedPrecondition);
    let why = "the VM has no network: its manifest asks for none, or it was not started by root";
    assert_eq!(text, why);
    let name = "default".to_owned();
    let refused = told(f.wait(vm.client.set_link(SetLinkRequest { name, up: true })));
    assert_eq!(refused.unwrap_err(), (Code::FailedPrecondition, why.to_owned()));
    kill(&mut vm);
    f.is_clean(&vm.pids());
}

pub fn plugged_interfaces_are_restored_at_exit() {
    let f = Fixture::new();
    let pod = pod();
    let before = pod.state();
    // The VM uses the namespace although its manifest has no interface.
    let mut vm = f
        .start_config(&on(&f, &pod, super::fixture::plan("demo")))
        .unwrap();
    add(&f, &mut vm, "blue", "net1", "02:00:00:00:00:42").unwrap();
    assert_eq!(shown(&mut vm, "blue").unwrap().mac, "02:00:00:00:00:42");
    kill(&mut vm);
    assert_eq!(pod.state(), before);
    f.is_clean(&vm.pids());
}
