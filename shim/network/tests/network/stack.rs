//! The kernel's network stack and busybox's DHCP client as the guest.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use husk_network::dhcp::{DhcpOptions, DhcpServer};
use husk_network::{Binding, Interface, Masquerade, Netns, Port, PreparedNic, Protocol};
use husk_shim_testing::pod::{Pod, interface, ip};

use crate::guest_netns::GuestNetns;
use crate::raw_guest::{QUIET, TIMEOUT};

/// A guest with a lease.
async fn leased(pod: &Pod, interface: &Interface, prepared: &PreparedNic) -> (GuestNetns, DhcpServer) {
    let server = DhcpServer::start(&pod.netns, interface, prepared, DhcpOptions::default());
    let server = server.unwrap().unwrap();
    let machine = GuestNetns::on(prepared);
    // The server needs this thread.
    let ready = tokio::task::spawn_blocking(move || {
        machine.run_udhcpc();
        machine
    });
    match ready.await {
        Ok(machine) => (machine, server),
        // Continue the panic of the thread.
        Err(e) => std::panic::resume_unwind(e.into_panic()),
    }
}

/// True if bytes sent by TCP from one namespace to a server in another come back.
fn talks(from: &Netns, to: &str, server: &Netns, bind: &str) -> bool {
    talks_within(TIMEOUT, from, to, server, bind)
}

/// True if a connection fails.
fn is_unreachable(from: &Netns, to: &str, server: &Netns, bind: &str) -> bool {
    !talks_within(QUIET * 3, from, to, server, bind)
}

fn talks_within(limit: Duration, from: &Netns, to: &str, server: &Netns, bind: &str) -> bool {
    let listener = server.run(|| TcpListener::bind(bind)).unwrap().unwrap();
    let port = listener.local_addr().unwrap().port();
    let target: SocketAddr = format!("{to}:{port}").parse().unwrap();
    let sent: Vec<u8> = (0..300_000u32).map(|i| i as u8).collect();
    let patient = |stream: &TcpStream| {
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        stream.set_write_timeout(Some(TIMEOUT)).unwrap();
    };
    std::thread::scope(|scope| {
        let client = scope.spawn(|| {
            let connect = || TcpStream::connect_timeout(&target, limit);
            let mut stream = from.run(connect).unwrap().ok()?;
            patient(&stream);
            stream.write_all(&sent).ok()?;
            let mut back = vec![0; sent.len()];
            stream.read_exact(&mut back).ok()?;
            Some(back)
        });
        listener.set_nonblocking(true).unwrap();
        let mut echo = None;
        while !client.is_finished() && echo.is_none() {
            match listener.accept() {
                Ok((stream, _)) => echo = Some(stream),
                Err(_) => std::thread::sleep(Duration::from_millis(5)),
            }
        }
        if let Some(mut stream) = echo {
            stream.set_nonblocking(false).unwrap();
            patient(&stream);
            let mut all = vec![0; sent.len()];
            stream.read_exact(&mut all).unwrap();
            stream.write_all(&all).unwrap();
        }
        client.join().unwrap().is_some_and(|back| back == sent)
    })
}

#[tokio::test]
#[ignore = "needs root and /dev/net/tun"]
async fn a_bridged_guest_has_the_pods_address_and_routes() {
    let pod = Pod::with_address();
    ip(&pod.netns, "route add 10.96.0.0/12 via 10.244.1.7");
    let before = ip(&pod.netns, "route show");
    let interface = interface(Binding::Bridge);
    let prepared = pod.ready(&interface);
    let (machine, _server) = leased(&pod, &interface, &prepared).await;
    assert_eq!(ip(&machine.netns, "route show"), before);
    assert!(ip(&machine.netns, "link show eth0").contains("mtu 1450"));
    assert!(
        talks(&machine.netns, "10.244.1.1", &pod.node, "10.244.1.1:0"),
        "out"
    );
    assert!(
        talks(&pod.node, "10.244.1.5", &machine.netns, "10.244.1.5:0"),
        "in"
    );
}

#[tokio::test]
#[ignore = "needs root and /dev/net/tun"]
async fn a_link_local_gateway_needs_nothing_of_the_guest() {
    let pod = Pod::with_link_local_gateway();
    let before = ip(&pod.netns, "route show");
    let interface = interface(Binding::Bridge);
    let prepared = pod.ready(&interface);
    let (machine, _server) = leased(&pod, &interface, &prepared).await;
    assert_eq!(ip(&machine.netns, "route show"), before);
    assert!(talks(&machine.netns, "10.0.0.1", &pod.node, "10.0.0.1:0"), "out");
    assert!(
        talks(&pod.node, "10.244.1.5", &machine.netns, "10.244.1.5:0"),
        "in"
    );

    // Without proxy ARP.
    ip(
        &pod.netns,
        "link set eth0-nic type bridge_slave proxy_arp_wifi off",
    );
    ip(&machine.netns, "neigh flush all");
    assert!(
        is_unreachable(&machine.netns, "10.0.0.1", &pod.node, "10.0.0.1:0"),
        "without it"
    );
}

#[tokio::test]
#[ignore = "needs root and /dev/net/tun"]
async fn a_masqueraded_guest_is_reached_at_its_ports_alone() {
    let pod = Pod::with_both_families();
    let port = |port| Port {
        protocol: Protocol::Tcp,
        port,
    };
    let interface = interface(Binding::Masquerade(Masquerade {
        ports: vec![port(8080), port(8081)],
        ..Masquerade::default()
    }));
    let prepared = pod.ready(&interface);
    let (machine, _server) = leased(&pod, &interface, &prepared).await;
    assert!(
        talks(&machine.netns, "10.244.1.1", &pod.node, "10.244.1.1:0"),
        "out"
    );
    assert!(
        talks(&pod.node, "10.244.1.5", &machine.netns, "10.0.2.2:8080"),
        "in"
    );
    assert!(
        talks(&pod.netns, "127.0.0.1", &machine.netns, "10.0.2.2:8081"),
        "from the pod's loopback"
    );
    assert!(
        is_unreachable(&pod.node, "10.244.1.5", &machine.netns, "10.0.2.2:8082"),
        "a port that is not listed"
    );

    // The kernel takes its router from the advertisement. Its address would come from DHCPv6.
    ip(&machine.netns, "addr add fd10:0:2::2/128 dev eth0 nodad");
    let mut routes = String::new();
    for _ in 0..TIMEOUT.as_millis() / QUIET.as_millis() {
        routes = ip(&machine.netns, "-6 route show");
        if routes.contains("default via fe80::") {
            break;
        }
        tokio::time::sleep(QUIET).await;
    }
    assert!(
        routes.contains("default via fe80::") && routes.contains("fd10:0:2::/120"),
        "{routes}"
    );
    assert!(
        talks(&machine.netns, "[fd00:1::1]", &pod.node, "[fd00:1::1]:0"),
        "out by IPv6"
    );
    assert!(
        talks(&pod.node, "[fd00:1::5]", &machine.netns, "[fd10:0:2::2]:8080"),
        "in by IPv6"
    );
}
