//! A host without a CNI plugin: its guests, itself, and another machine.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::process::Command;
use std::time::{Duration, Instant};

use husk_network::{
    Binding, Masquerade, Netns, NetworkLocation, PreparedNic, StandaloneNetns, StandaloneNetwork, prepare,
};
use husk_shim_testing::pod::{interface, ip, path, switch};
use tempfile::TempDir;

use crate::guest_netns::GuestNetns;
use crate::raw_guest::TIMEOUT;

/// Address of the other machine.
const WORLD: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);

struct Node {
    netns: Netns,
    world: Netns,
    home: TempDir,
}

struct Vm {
    joined: StandaloneNetns,
    prepared: PreparedNic,
    _home: TempDir,
}

impl Node {
    fn new() -> Node {
        let node = Node {
            netns: Netns::create().unwrap(),
            world: Netns::create().unwrap(),
            home: tempfile::tempdir().unwrap(),
        };
        ip(&node.netns, "link set lo up");
        ip(
            &node.netns,
            &format!(
                "link add up0 mtu 1400 type veth peer name far0 mtu 1400 netns {}",
                path(&node.world)
            ),
        );
        ip(&node.netns, "addr add 192.0.2.2/24 dev up0");
        ip(&node.netns, "link set up0 up");
        ip(&node.world, "addr add 192.0.2.1/24 dev far0");
        ip(&node.world, "link set far0 up");
        ip(&node.netns, "route add default via 192.0.2.1");
        node
    }

    fn host(&self) -> StandaloneNetwork {
        StandaloneNetwork::with_lock(&self.home.path().join("lock"))
    }

    fn join(&self, vm: &str) -> StandaloneNetns {
        let host = self.host();
        self.netns.run(|| host.attach(vm)).unwrap().unwrap()
    }

    fn start(&self, vm: &str, binding: Binding) -> Vm {
        let (joined, home) = (self.join(vm), tempfile::tempdir().unwrap());
        let mut prepared = prepare(&joined.netns, home.path(), &[interface(binding)]).unwrap();
        Vm {
            joined,
            prepared: prepared.pop().unwrap(),
            _home: home,
        }
    }

    fn leave(&self, location: &NetworkLocation) {
        let host = self.host();
        self.netns.run(|| host.detach(location)).unwrap().unwrap();
    }

    /// Links without the initial ones.
    fn links(&self) -> Vec<String> {
        let shown = ip(&self.netns, "-o link show");
        let names = shown.lines().filter_map(|line| line.split_whitespace().nth(1));
        let own = |name: &&str| {
            !matches!(
                name.split(['@', ':']).next(),
                Some("lo" | "up0" | "ifb0" | "ifb1")
            )
        };
        names.filter(own).map(str::to_owned).collect()
    }

    /// True if packets that come in by this device are forwarded. `all` is the host's sysctl.
    fn forwards(&self, device: &str) -> bool {
        switch(&self.netns, &format!("ipv4/conf/{device}/forwarding")) == "1"
    }

    /// Content of the lock file.
    fn kept(&self) -> String {
        std::fs::read_to_string(self.home.path().join("lock")).unwrap()
    }

    fn has_table(&self) -> bool {
        let nft = || Command::new("nft").args(["list", "tables", "ip"]).output();
        let listed = self.netns.run(nft).unwrap();
        let listed = listed.unwrap_or_else(|e| panic!("this test needs the command nft: {e}"));
        String::from_utf8_lossy(&listed.stdout).contains("table ip husk\n")
    }

    fn nft(&self, command: &str) {
        let nft = || Command::new("nft").arg(command).status();
        assert!(self.netns.run(nft).unwrap().unwrap().success(), "{command}");
    }

    fn set(&self, switch: &str, value: &str) {
        let path = format!("/proc/sys/net/ipv4/conf/{switch}");
        self.netns.run(|| std::fs::write(path, value)).unwrap().unwrap();
    }

    fn refusal(&self, vm: &str) -> String {
        let host = self.host();
        let joined = self.netns.run(|| host.attach(vm)).unwrap();
        joined.unwrap_err().to_string()
    }
}

impl Vm {
    fn address(&self) -> Ipv4Addr {
        self.prepared.nic.ipv4().unwrap().addr()
    }

    /// A guest configured as by DHCP.
    fn guest(&self) -> GuestNetns {
        let machine = GuestNetns::on(&self.prepared);
        let lease = self.prepared.lease.as_ref().unwrap();
        ip(&machine.netns, &format!("addr add {} dev eth0", lease.address));
        ip(
            &machine.netns,
            &format!("route add default via {}", lease.router.unwrap()),
        );
        machine
    }
}

/// Client address that a server at `address` in `there` sees for a connection from `here`.
fn seen(here: &Netns, there: &Netns, address: Ipv4Addr) -> String {
    let listener = there.run(|| TcpListener::bind((address, 0))).unwrap().unwrap();
    let port = listener.local_addr().unwrap().port();
    let server = std::thread::spawn(move || {
        let (mut client, from) = listener.accept().unwrap();
        client.write_all(from.ip().to_string().as_bytes()).unwrap();
    });
    let ask = || {
        let mut stream =
            TcpStream::connect_timeout(&(address, port).into(), Duration::from_secs(30)).unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    };
    let text = here.run(ask).unwrap();
    server.join().unwrap();
    text
}

#[test]
#[ignore = "needs root and /dev/net/tun"]
fn guests_reach_each_other_the_machine_and_the_world() {
    let node = Node::new();
    assert_eq!((node.links().len(), node.forwards("up0")), (0, false));
    let one = node.start("default/one", Binding::Bridge);
    let two = node.start("default/two", Binding::Masquerade(Masquerade::default()));
    assert_eq!((one.prepared.mtu, two.prepared.mtu), (1400, 1400));
    assert_eq!((node.links().len(), node.forwards("up0")), (3, true));
    assert!(!node.forwards("all"), "the machine's switch is left alone");
    let (first, second) = (one.guest(), two.guest());
    let gateway = one.joined.net.addr();
    assert_eq!(gateway, Ipv4Addr::new(10, 77, 0, 1));

    let own = one.address().to_string();
    // Other machines see the host's address, guests and the host see the guest's.
    assert_eq!(seen(&first.netns, &node.world, WORLD), "192.0.2.2");
    assert_eq!(seen(&second.netns, &node.world, WORLD), "192.0.2.2");
    assert_eq!(seen(&first.netns, &node.netns, gateway), own);
    assert_eq!(
        seen(&node.netns, &first.netns, one.address()),
        gateway.to_string()
    );
    assert_eq!(
        seen(&second.netns, &first.netns, one.address()),
        two.address().to_string()
    );

    node.leave(&one.joined.location);
    assert_eq!((node.links().len(), node.forwards("up0")), (2, true));
    node.leave(&two.joined.location);
    assert_eq!(
        (node.links(), node.forwards("up0")),
        (Vec::<String>::new(), false)
    );
    assert_eq!((node.kept().as_str(), node.has_table()), ("", false));
    assert_eq!(seen(&node.netns, &node.world, WORLD), "192.0.2.2");
}

#[test]
#[ignore = "needs root and /dev/net/tun"]
fn a_restarted_vm_gets_its_address_again() {
    let node = Node::new();
    let address = |joined: &StandaloneNetns| {
        let shown = ip(&joined.netns, "-o -4 addr show eth0");
        shown.split_whitespace().nth(3).unwrap().to_owned()
    };
    let first = node.join("default/demo");
    let (had, mac) = (address(&first), ip(&first.netns, "-o link show eth0"));
    assert!(mac.contains(" link/ether 0a:58:0a:4d:"), "{mac}");
    node.leave(&first.location);
    let again = node.join("default/demo");
    assert_eq!(address(&again), had);
    // A second detach must not remove another VM's port.
    node.leave(&first.location);
    let namesake = node.join("default/demo");
    assert_ne!(address(&namesake), had);
    assert_eq!(node.links().len(), 3);
    node.leave(&again.location);
    node.leave(&namesake.location);
    assert!(node.links().is_empty());
}

#[test]
#[ignore = "needs root and /dev/net/tun"]
fn leftovers_of_killed_monitors_are_removed() {
    let node = Node::new();
    let tidy = || {
        let host = node.host();
        node.netns.run(|| host.clean_up()).unwrap().unwrap();
    };
    tidy();
    let (one, two) = (
        node.start("default/one", Binding::Bridge),
        node.start("default/two", Binding::Bridge),
    );
    tidy();
    assert_eq!(node.links().len(), 3);
    // As when their processes end.
    drop((one, two));
    let end = Instant::now() + TIMEOUT;
    while !node.links().is_empty() {
        assert!(Instant::now() < end, "{:?}", node.links());
        std::thread::sleep(Duration::from_millis(20));
        tidy();
    }
    assert!(!node.forwards("up0"));
    // Killed before the bridge was configured.
    ip(&node.netns, "link add husk0-new type bridge");
    tidy();
    assert!(node.links().is_empty());
}

#[test]
#[ignore = "needs root and /dev/net/tun"]
fn a_network_is_chosen_that_is_free() {
    let node = Node::new();
    ip(&node.netns, "route add 10.77.0.0/16 via 192.0.2.1");
    ip(&node.netns, "route add blackhole 10.78.1.0/24 table 7");
    let joined = node.join("default/demo");
    assert_eq!(joined.net.to_string(), "10.79.0.1/20");
    // An existing bridge keeps its network.
    ip(&node.netns, "route add 10.79.0.0/24 via 192.0.2.1");
    assert_eq!(node.join("default/other").net, joined.net);
    node.leave(&joined.location);
}

#[test]
#[ignore = "needs root and /dev/net/tun"]
fn an_existing_bridge_is_used_and_not_removed() {
    let node = Node::new();
    ip(&node.netns, "link add husk0 type bridge");
    assert_eq!(
        node.refusal("default/demo"),
        "husk0 has no IPv4 address: give it one, or remove it by `ip link del husk0`"
    );
    ip(&node.netns, "addr add 192.168.9.1/29 dev husk0");
    let joined: Vec<StandaloneNetns> = (0..5).map(|n| node.join(&format!("default/{n}"))).collect();
    assert_eq!(
        node.refusal("default/demo"),
        "every address of 192.168.9.0/29 is taken: end a VM, or give husk0 a larger network while none runs"
    );
    assert!(node.forwards("husk0") && node.forwards("up0"));
    // A port that the user added is not a guest's.
    ip(&node.netns, "link add own0 type veth peer name own1");
    ip(&node.netns, "link set own0 master husk0");
    joined.iter().for_each(|joined| node.leave(&joined.location));
    assert_eq!(node.links(), ["husk0:", "own1@own0:", "own0@own1:"]);
    assert!(!node.forwards("husk0") && !node.forwards("up0") && !node.has_table());
}

#[test]
#[ignore = "needs root and /dev/net/tun"]
fn forwarding_set_by_others_is_kept() {
    let node = Node::new();
    ip(&node.netns, "link add up1 type veth peer name far1");
    ip(&node.netns, "link set up1 up");
    ip(&node.netns, "route add default dev up1 metric 7 table 7");
    node.set("up1/forwarding", "1");
    node.set("up0/accept_redirects", "0");
    let joined = node.join("default/one");
    assert!(node.forwards("up0") && node.forwards("up1") && !node.forwards("lo"));
    assert_eq!(switch(&node.netns, "ipv4/conf/up0/accept_redirects"), "0");
    let NetworkLocation::Standalone { port, .. } = &joined.location else {
        panic!("{:?}", joined.location)
    };
    for device in ["husk0", port] {
        assert_eq!(
            switch(&node.netns, &format!("ipv6/conf/{device}/disable_ipv6")),
            "1",
            "{device}"
        );
    }
    node.leave(&joined.location);
    // It was set before, so Husk leaves it set.
    assert!(!node.forwards("up0") && node.forwards("up1"));

    // As Docker does on start.
    let joined = node.join("default/one");
    node.set("all/forwarding", "1");
    node.leave(&joined.location);
    assert!(node.forwards("all") && node.forwards("up0"));
    // On a host that forwards, Husk does not override a single device.
    node.set("up0/forwarding", "0");
    let joined = node.join("default/one");
    assert!(!node.forwards("up0"));
    node.leave(&joined.location);
    assert_eq!(node.kept(), "");
}

#[test]
#[ignore = "needs root and /dev/net/tun"]
fn the_machine_does_not_route_between_its_networks() {
    const OTHER: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 1);
    let node = Node::new();
    let other = Netns::create().unwrap();
    let words = format!("link add up1 type veth peer name far1 netns {}", path(&other));
    ip(&node.netns, &words);
    ip(&node.netns, "addr add 198.51.100.2/24 dev up1");
    ip(&node.netns, "link set up1 up");
    ip(&other, "addr add 198.51.100.1/24 dev far1");
    ip(&other, "link set far1 up");
    ip(&other, "route add default via 198.51.100.2");
    ip(&node.world, "route add 198.51.100.0/24 via 192.0.2.2");

    let vm = node.start("default/one", Binding::Bridge);
    assert!(node.forwards("up0") && node.forwards("up1"));
    let guest = vm.guest();
    assert_eq!(seen(&guest.netns, &other, OTHER), "198.51.100.2");
    let listener = other.run(|| TcpListener::bind((OTHER, 0))).unwrap().unwrap();
    let address = listener.local_addr().unwrap();
    let reaches = |timeout| {
        let connect = || TcpStream::connect_timeout(&address, timeout);
        node.world.run(connect).unwrap().is_ok()
    };
    assert!(!reaches(Duration::from_secs(2)));
    // That it could be reached without the chain's rules shows that the test would fail.
    node.nft("flush chain ip husk forward");
    assert!(reaches(TIMEOUT));

    // Once others let the machine route, the rules do not come back.
    node.set("all/forwarding", "1");
    let joined = node.join("default/two");
    assert!(reaches(Duration::from_secs(2)));
    node.leave(&joined.location);
    node.leave(&vm.joined.location);
}

#[test]
#[ignore = "needs root and /dev/net/tun"]
fn a_bridge_removed_during_setup_leaves_no_sysctl_set() {
    let node = Node::new();
    let joined = node.join("default/one");
    assert!(node.forwards("up0") && node.has_table());
    ip(&node.netns, "link del husk0");
    node.leave(&joined.location);
    assert!(!node.forwards("up0") && !node.has_table());

    // The same without a detach.
    let joined = node.join("default/one");
    ip(&node.netns, "link del husk0");
    drop(joined);
    let end = Instant::now() + TIMEOUT;
    while node.forwards("up0") || node.has_table() {
        assert!(Instant::now() < end, "{:?}", node.links());
        std::thread::sleep(Duration::from_millis(20));
        let host = node.host();
        node.netns.run(|| host.clean_up()).unwrap().unwrap();
    }
    assert!(node.links().is_empty());
}

#[test]
#[ignore = "needs root and /dev/net/tun"]
fn a_start_that_fails_changes_nothing() {
    let node = Node::new();
    ip(&node.netns, "link add husk0 type veth peer name other0");
    ip(&node.netns, "addr add 192.168.9.1/24 dev husk0");
    assert_eq!(
        node.refusal("default/demo"),
        "husk0 is not a bridge: remove it by `ip link del husk0`, or give it another name"
    );
    ip(&node.netns, "link del husk0");
    ip(&node.netns, "link add husk0 type bridge");
    ip(&node.netns, "addr add 192.168.9.1/32 dev husk0");
    assert_eq!(
        node.refusal("default/demo"),
        "192.168.9.1/32, the network of husk0, has no room for a guest: give it a larger one"
    );
    assert!(!node.forwards("husk0") && !node.forwards("up0") && !node.has_table());
    assert_eq!(node.kept(), "");
    let host = StandaloneNetwork::with_lock(std::path::Path::new("/proc/sys/husk-network.lock"));
    let error = node
        .netns
        .run(|| host.attach("default/demo"))
        .unwrap()
        .unwrap_err();
    let error = error.to_string();
    assert!(
        error.starts_with(
            "/proc/sys/husk-network.lock, which says what Husk did to this machine's network, cannot be"
        ) && error.ends_with(": make its directory writable, or run the VM with --netns"),
        "{error}"
    );
}

#[test]
#[ignore = "needs root and /dev/net/tun"]
fn a_table_that_husk_did_not_make_is_not_touched() {
    let node = Node::new();
    node.nft("table ip husk { chain mine { counter accept; }; }");
    assert_eq!(
        node.refusal("default/demo"),
        "nftables has a table ip husk that Husk did not make: give it another name, or remove it by `nft delete table ip \
         husk`"
    );
    assert!(node.has_table() && node.links().is_empty());
    assert!(!node.forwards("up0"));
    node.nft("delete table ip husk");
    let joined = node.join("default/demo");
    // As when a firewall reloads its rules.
    node.nft("flush ruleset");
    let other = node.join("default/other");
    assert!(node.has_table());
    node.leave(&joined.location);
    node.leave(&other.location);
    assert!(!node.has_table());
}

#[test]
#[ignore = "needs root and /dev/net/tun"]
fn many_vms_start_and_end_at_once() {
    let node = Node::new();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let node = &node;
            scope.spawn(move || {
                for n in 0..5 {
                    let joined = node.join(&format!("default/{thread}-{n}"));
                    let routes = ip(&joined.netns, "route show");
                    assert!(routes.starts_with("default via 10.77.0.1 dev eth0"), "{routes}");
                    node.leave(&joined.location);
                }
            });
        }
    });
    assert!(node.links().is_empty());
    assert_eq!((node.forwards("up0"), node.kept().as_str()), (false, ""));
}
