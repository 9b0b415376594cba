//! A machine that nobody else gives a network: its guests, itself, and another machine.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use husk_shim::network::{Binding, Host, Joined, Masquerade, Netns, Place, Prepared, prepare};
use tempfile::TempDir;

use crate::guest::PATIENCE;
use crate::machine::Machine;
use crate::pod::{can_run, interface, ip, path, switch};

/// The other machine's address.
const WORLD: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);

struct Node {
    netns: Netns,
    world: Netns,
    home: TempDir,
}

/// A VM on it, and its guest.
struct Vm {
    joined: Joined,
    prepared: Prepared,
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

    fn host(&self) -> Host {
        Host::with_lock(&self.home.path().join("lock"))
    }

    fn join(&self, vm: &str) -> Joined {
        let host = self.host();
        self.netns.run(|| host.join(vm)).unwrap().unwrap()
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

    fn leave(&self, place: &Place) {
        let host = self.host();
        self.netns.run(|| host.leave(place)).unwrap().unwrap();
    }

    /// Links but the ones it had from the beginning.
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

    fn forwards(&self) -> String {
        switch(&self.netns, "ipv4/ip_forward")
    }
}

impl Vm {
    fn address(&self) -> Ipv4Addr {
        self.prepared.nic.ipv4().unwrap().addr()
    }

    /// A guest that has what DHCP would have told it.
    fn guest(&self) -> Machine {
        let machine = Machine::on(&self.prepared);
        let lease = self.prepared.lease.as_ref().unwrap();
        ip(&machine.netns, &format!("addr add {} dev eth0", lease.address));
        ip(
            &machine.netns,
            &format!("route add default via {}", lease.router.unwrap()),
        );
        machine
    }
}

/// What a server at `address` in `there` sees as its client, asked from `here`.
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
fn guests_reach_each_other_the_machine_and_the_world() {
    if !can_run() {
        return;
    }
    let node = Node::new();
    assert_eq!((node.links().len(), node.forwards().as_str()), (0, "0"));
    let one = node.start("default/one", Binding::Bridge);
    let two = node.start("default/two", Binding::Masquerade(Masquerade::default()));
    assert_eq!((one.prepared.mtu, two.prepared.mtu), (1400, 1400));
    assert_eq!((node.links().len(), node.forwards().as_str()), (3, "1"));
    let (first, second) = (one.guest(), two.guest());
    let gateway = one.joined.net.addr();
    assert_eq!(gateway, Ipv4Addr::new(10, 77, 0, 1));

    let own = one.address().to_string();
    // The world sees the machine, others the guest.
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

    node.leave(&one.joined.place);
    assert_eq!((node.links().len(), node.forwards().as_str()), (2, "1"));
    node.leave(&two.joined.place);
    assert_eq!(
        (node.links(), node.forwards().as_str()),
        (Vec::<String>::new(), "0")
    );
    assert_eq!(seen(&node.netns, &node.world, WORLD), "192.0.2.2");
}

#[test]
fn a_vm_has_its_address_again_and_nobody_elses() {
    if !can_run() {
        return;
    }
    let node = Node::new();
    let address = |joined: &Joined| {
        let shown = ip(&joined.netns, "-o -4 addr show eth0");
        shown.split_whitespace().nth(3).unwrap().to_owned()
    };
    let first = node.join("default/demo");
    let (had, mac) = (address(&first), ip(&first.netns, "-o link show eth0"));
    assert!(mac.contains(" link/ether 0a:58:0a:4d:"), "{mac}");
    node.leave(&first.place);
    let again = node.join("default/demo");
    assert_eq!(address(&again), had);
    // What is left twice is not another one's.
    node.leave(&first.place);
    let namesake = node.join("default/demo");
    assert_ne!(address(&namesake), had);
    assert_eq!(node.links().len(), 3);
    node.leave(&again.place);
    node.leave(&namesake.place);
    assert!(node.links().is_empty());
}

#[test]
fn what_killed_monitors_leave_goes() {
    if !can_run() {
        return;
    }
    let node = Node::new();
    let tidy = || {
        let host = node.host();
        node.netns.run(|| host.tidy()).unwrap().unwrap();
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
    let end = Instant::now() + PATIENCE;
    while !node.links().is_empty() {
        assert!(Instant::now() < end, "{:?}", node.links());
        std::thread::sleep(Duration::from_millis(20));
        tidy();
    }
    assert_eq!(node.forwards(), "0");
    // Killed before it was complete.
    ip(&node.netns, "link add husk0-new type bridge");
    tidy();
    assert!(node.links().is_empty());
}

#[test]
fn a_network_is_chosen_that_is_free() {
    if !can_run() {
        return;
    }
    let node = Node::new();
    ip(&node.netns, "route add 10.77.0.0/16 via 192.0.2.1");
    ip(&node.netns, "route add blackhole 10.78.1.0/24 table 7");
    let joined = node.join("default/demo");
    assert_eq!(joined.net.to_string(), "10.79.0.1/20");
    // While it is there it stays.
    ip(&node.netns, "route add 10.79.0.0/24 via 192.0.2.1");
    assert_eq!(node.join("default/other").net, joined.net);
    node.leave(&joined.place);
}

#[test]
fn a_bridge_of_the_users_keeps_its_network_and_stays() {
    if !can_run() {
        return;
    }
    let node = Node::new();
    ip(&node.netns, "link add husk0 type bridge");
    let host = node.host();
    let error = node.netns.run(|| host.join("default/demo")).unwrap().unwrap_err();
    assert_eq!(
        error.to_string(),
        "husk0 has no IPv4 address: give it one, or remove it by `ip link del husk0`"
    );
    ip(&node.netns, "addr add 192.168.9.1/29 dev husk0");
    let joined: Vec<Joined> = (0..5).map(|n| node.join(&format!("default/{n}"))).collect();
    let error = node.netns.run(|| host.join("default/demo")).unwrap().unwrap_err();
    assert_eq!(
        error.to_string(),
        "every address of 192.168.9.0/29 is taken: end a VM, or give husk0 a larger network while none runs"
    );
    joined.iter().for_each(|joined| node.leave(&joined.place));
    assert_eq!(node.links(), ["husk0:"]);
}

#[test]
fn many_come_and_go_at_once() {
    if !can_run() {
        return;
    }
    let node = Node::new();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let node = &node;
            scope.spawn(move || {
                for n in 0..5 {
                    let joined = node.join(&format!("default/{thread}-{n}"));
                    let routes = ip(&joined.netns, "route show");
                    assert!(routes.starts_with("default via 10.77.0.1 dev eth0"), "{routes}");
                    node.leave(&joined.place);
                }
            });
        }
    });
    assert!(node.links().is_empty());
    assert_eq!(node.forwards(), "0");
}
