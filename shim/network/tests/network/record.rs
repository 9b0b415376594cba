//! The state machine of a preparation, and its teardown.

use std::time::Duration;

use husk_network::{Binding, Interface, MacAddr, Masquerade, tear_down, tear_down_interface};
use husk_shim_testing::pod::{NODE_MAC, POD_MAC, Pod, interface, ip, switch};

use crate::raw_guest::RawGuest;

fn bindings() -> [Binding; 2] {
    [Binding::Bridge, Binding::Masquerade(Masquerade::default())]
}

#[test]
#[ignore = "needs root and /dev/net/tun"]
fn a_finished_preparation_is_left_as_it_is() {
    for binding in bindings() {
        let pod = Pod::with_address();
        let first = pod.ready(&interface(binding.clone()));
        let before = pod.state();
        let (mac, lease) = (first.mac, first.lease.clone());
        // The only queue is open already.
        let busy = pod.prepare(&[interface(binding.clone())]).unwrap_err();
        assert!(busy.to_string().contains("opening tap0"), "{busy}");
        let holder = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(200));
            drop(first);
        });
        let again = pod.ready(&interface(binding.clone()));
        holder.join().unwrap();
        assert_eq!((again.mac, again.lease), (mac, lease), "{binding:?}");
        assert_eq!(pod.state(), before);
    }
}

#[test]
#[ignore = "needs root and /dev/net/tun"]
fn an_interrupted_preparation_is_critical_and_can_be_torn_down() {
    for binding in bindings() {
        let pod = Pod::with_address();
        let before = pod.state();
        drop(pod.ready(&interface(binding.clone())));
        let path = pod.dir.path().join("network-eth0.json");
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, text.replace("Finished", "Started")).unwrap();
        // State after an interruption.
        ip(&pod.netns, "link del tap0");

        let error = pod.prepare(&[interface(binding.clone())]).unwrap_err();
        assert!(error.is_critical(), "{error}");
        assert_eq!(
            error.to_string(),
            "interface \"default\": the network preparation of eth0 was interrupted and cannot be restarted"
        );
        tear_down(&pod.netns, pod.dir.path()).unwrap();
        assert_eq!(pod.state(), before, "{binding:?}");
    }
}

#[test]
#[ignore = "needs root and /dev/net/tun"]
fn the_pod_gets_its_network_back() {
    for make in [
        Pod::with_address as fn() -> Pod,
        Pod::with_link_local_gateway,
        Pod::with_both_families,
        Pod::bare,
    ] {
        let pod = make();
        let before = pod.state();
        drop(pod.ready(&interface(Binding::Bridge)));
        assert_ne!(pod.state(), before);
        tear_down(&pod.netns, pod.dir.path()).unwrap();
        assert_eq!(pod.state(), before);
        assert!(pod.shows("link show eth0").contains(&POD_MAC.to_string()));
        assert_eq!(std::fs::read_dir(pod.dir.path()).unwrap().count(), 0);
        // A second teardown succeeds, and a new preparation too.
        tear_down(&pod.netns, pod.dir.path()).unwrap();
        drop(pod.ready(&interface(Binding::Bridge)));
    }
}

#[test]
#[ignore = "needs root and /dev/net/tun"]
fn differences_from_the_record_are_errors() {
    let pod = Pod::with_address();
    drop(pod.ready(&interface(Binding::Bridge)));
    let [_, masquerade] = bindings();
    let error = pod.prepare(&[interface(masquerade)]).unwrap_err().to_string();
    assert!(
        error.contains("binding bridge, which cannot become binding masquerade"),
        "{error}"
    );
    let two = Interface {
        queues: 2,
        ..interface(Binding::Bridge)
    };
    let error = pod.prepare(&[two]).unwrap_err().to_string();
    assert!(
        error.contains("1 queues, which cannot become 2 queues"),
        "{error}"
    );

    ip(&pod.netns, "link del k6t-eth0");
    let error = pod.prepare(&[interface(Binding::Bridge)]).unwrap_err();
    assert!(
        error.is_critical() && error.to_string().contains("k6t-eth0 has gone"),
        "{error}"
    );

    std::fs::remove_file(pod.dir.path().join("network-eth0.json")).unwrap();
    let error = pod.prepare(&[interface(Binding::Bridge)]).unwrap_err();
    assert!(
        error.is_critical() && error.to_string().contains("eth0-nic exists"),
        "{error}"
    );
}

#[test]
#[ignore = "needs root and /dev/net/tun"]
fn records_of_other_namespaces_are_ignored() {
    let gone = Pod::with_address();
    drop(gone.ready(&interface(Binding::Bridge)));
    let pod = Pod::with_address();
    let record = "network-eth0.json";
    std::fs::copy(gone.dir.path().join(record), pod.dir.path().join(record)).unwrap();
    let mut guest = RawGuest::of(&pod.ready(&interface(Binding::Bridge)));
    guest.ip = Some([10, 244, 1, 5].into());
    assert!(guest.pings([10, 244, 1, 1].into(), NODE_MAC));
}

#[test]
#[ignore = "needs root and /dev/net/tun"]
fn a_missing_link_is_named() {
    let pod = Pod::bare();
    let absent = Interface {
        nic: "net1".to_owned(),
        ..interface(Binding::Bridge)
    };
    let error = pod.prepare(&[absent]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "interface \"default\": pod link (net1) is missing"
    );
    assert!(!error.is_critical());
}

#[test]
#[ignore = "needs root and /dev/net/tun"]
fn one_of_several_interfaces_is_torn_down() {
    let pod = Pod::with_address();
    let second = |index| Interface {
        name: format!("second{index}"),
        nic: format!("net{index}"),
        index,
        ..interface(Binding::Bridge)
    };
    for index in [1, 2] {
        let (outer, inner) = (format!("veth{index}"), format!("net{index}"));
        pod.add_veth(
            &outer,
            MacAddr([2, 0, 0, 0, 9, index]),
            &inner,
            MacAddr([2, 0, 0, 0, 0, index]),
        );
        ip(
            &pod.netns,
            &format!("addr add 10.9.{index}.5/24 brd + dev {inner}"),
        );
    }
    let before = pod.state();
    let [first, other] = [1, 2].map(|index| pod.ready(&second(index)));
    tear_down_interface(&pod.netns, pod.dir.path(), "net1").unwrap();
    drop(first);
    // arp_ignore stays while the other interface needs it.
    assert_eq!(switch(&pod.netns, "ipv4/conf/all/arp_ignore"), "1");
    assert!(pod.shows("link show net1").contains("02:00:00:00:00:01"));
    assert!(pod.shows("link show").contains("k6t-net2") && !pod.shows("link show").contains("k6t-net1"));
    tear_down_interface(&pod.netns, pod.dir.path(), "net1").unwrap();
    drop(pod.ready(&second(1)));
    drop(other);
    tear_down_interface(&pod.netns, pod.dir.path(), "net2").unwrap();
    tear_down_interface(&pod.netns, pod.dir.path(), "net1").unwrap();
    assert_eq!(pod.state(), before);
}

#[test]
#[ignore = "needs root and /dev/net/tun"]
fn a_failed_teardown_does_not_stop_the_others() {
    let pod = Pod::with_address();
    pod.add_veth(
        "veth1",
        MacAddr([2, 0, 0, 0, 9, 1]),
        "aaa1",
        MacAddr([2, 0, 0, 0, 0, 1]),
    );
    let before = pod.state();
    let second = Interface {
        name: "second".to_owned(),
        index: 1,
        nic: "aaa1".to_owned(),
        ..interface(Binding::Bridge)
    };
    drop(pod.prepare(&[interface(Binding::Bridge), second]).unwrap());
    // The name now belongs to another device.
    ip(&pod.netns, "link property add dev lo altname aaa1");
    let error = tear_down(&pod.netns, pod.dir.path()).unwrap_err().to_string();
    assert!(
        error.starts_with("interface \"second\": removing aaa1:"),
        "{error}"
    );
    let remedy = "aaa1 could not be restored; delete the namespace if unused";
    assert!(error.ends_with(remedy), "{error}");
    assert!(pod.shows("addr show eth0").contains("inet 10.244.1.5/24"));
    let left: Vec<_> = std::fs::read_dir(pod.dir.path()).unwrap().collect();
    assert_eq!(left.len(), 1, "{left:?}");

    ip(&pod.netns, "link property del dev lo altname aaa1");
    tear_down(&pod.netns, pod.dir.path()).unwrap();
    assert_eq!(pod.state(), before);
}
