//! VMs without a pod. The host is a namespace of the test.

use husk_network::Netns;
use husk_proto::shim::v1::KillRequest;
use husk_shim_testing::pod::{ip, switch};
use husk_vmi::{NicBinding, NicNetwork};
use rustix::process::Signal;

use super::fixture::{Fixture, Vm, alive, eventually, signal};
use super::networks::{masquerade, refusal, taps, with_nic};

pub fn machine() -> Netns {
    let netns = Netns::create().unwrap();
    ip(&netns, "link set lo up");
    netns
}

/// The devices that Husk created in it.
fn links(netns: &Netns) -> Vec<String> {
    let shown = ip(netns, "-o link show");
    let names = shown.lines().filter_map(|line| line.split_whitespace().nth(1));
    names
        .filter(|name| name.starts_with("husk"))
        .map(str::to_owned)
        .collect()
}

fn is_untouched(netns: &Netns) {
    assert_eq!(links(netns), [""; 0]);
    assert_eq!(switch(netns, "ipv4/ip_forward"), "0");
}

fn address(vm: &mut Vm) -> String {
    vm.info().interfaces[0].addresses[0].clone()
}

pub fn standalone_vm_gets_its_own_network() {
    let f = Fixture::new();
    let machine = machine();
    let work = || {
        let mut one = f.start(with_nic("one", NicBinding::Bridge)).unwrap();
        let mut two = f.start(with_nic("two", masquerade())).unwrap();
        let addresses = [address(&mut one), address(&mut two)];
        assert!(
            addresses.iter().all(|address| address.starts_with("10.77.")),
            "{addresses:?}"
        );
        assert_ne!(addresses[0], addresses[1]);
        eventually("the guests are offered their addresses", || {
            one.said()
                .contains(&format!("default is offered {} ", addresses[0]))
                && two.said().contains("default is offered 10.0.2.2 ")
        });
        assert_eq!((taps(one.monitor), taps(one.vmm)), (0, 1));
        assert_eq!(links(&machine).len(), 3);
        for vm in [&mut one, &mut two] {
            vm.ends(async |mut client| drop(client.kill(KillRequest {}).await.unwrap()));
        }
        f.is_clean(&[one.pids(), two.pids()].concat());
    };
    machine.run(work).unwrap();
    is_untouched(&machine);
}

pub fn failed_starts_leave_nothing() {
    let f = Fixture::new();
    let machine = machine();
    let work = || {
        for (name, why) in [
            ("refused", "config.memory: too much of it"),
            ("dies-early", "out of luck"),
        ] {
            let config = f.config(with_nic(name, NicBinding::Bridge));
            assert_eq!(refusal(&f, &config), why);
            is_untouched(&machine);
        }
        let mut inside = with_nic("demo", masquerade());
        if let NicBinding::Masquerade { cidr, .. } = &mut inside.nics[0].binding {
            *cidr = Some("10.77.4.0/24".parse().unwrap());
        }
        assert_eq!(
            refusal(&f, &f.config(inside)),
            "interface \"default\": vmNetworkCIDR: 10.77.4.0/24 overlaps 10.77.0.0/20, the network of husk0: choose \
             another one"
        );
        let mut multus = with_nic("demo", NicBinding::Bridge);
        multus.nics[0].network = NicNetwork::Multus {
            network_name: "red".into(),
            default: true,
        };
        let told = refusal(&f, &f.config(multus));
        assert!(
            told.starts_with("interface \"default\": a Multus network "),
            "{told}"
        );
    };
    machine.run(work).unwrap();
    is_untouched(&machine);
    f.is_clean(&[]);
}

pub fn killed_processes_leave_nothing() {
    let f = Fixture::new();
    let machine = machine();
    let work = || {
        let vm = f.start(with_nic("demo", NicBinding::Bridge)).unwrap();
        signal(vm.monitor, Signal::KILL);
        eventually("the VMM ends", || !alive(vm.vmm));
        eventually("the monitor's lock goes", || f.state().list().unwrap().is_empty());
        // The kernel may still be closing the VMM's tap.
        eventually("the VM is removed", || {
            f.state().remove_abandoned().unwrap().len() == 1
        });
        is_untouched(&machine);

        let mut vm = f.start(with_nic("demo", NicBinding::Bridge)).unwrap();
        let vmm = vm.vmm;
        vm.ends(async |_| signal(vmm, Signal::KILL));
        is_untouched(&machine);
        f.is_clean(&vm.pids());
    };
    machine.run(work).unwrap();
}
