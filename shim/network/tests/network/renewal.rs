//! A client renews its lease at the server, and rebinds by broadcast when the server does not answer.

use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use husk_network::Binding;
use husk_network::dhcp::{DhcpOptions, DhcpServer};
use husk_shim_testing::pod::{Pod, interface, ip};

use crate::guest_netns::GuestNetns;
use crate::raw_guest::TIMEOUT;

const OBTAINED: &str = "lease of 10.244.1.5 obtained from 169.254.75.10, lease time 60";

/// A running udhcpc and its output.
struct Client {
    child: Child,
    said: Receiver<String>,
}

impl Client {
    fn start(machine: &GuestNetns) -> Client {
        let mut command = machine.udhcpc();
        command.arg("-f").stderr(Stdio::piped());
        let mut child = machine.netns.run(|| command.spawn()).unwrap().unwrap();
        let (sender, said) = channel();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        std::thread::spawn(move || {
            for line in stderr.lines().map_while(Result::ok) {
                let _ = sender.send(line);
            }
        });
        Client { child, said }
    }

    /// Output up to the line that contains `words`.
    fn says(&self, words: &str, limit: Duration) -> String {
        let mut all = String::new();
        while let Ok(line) = self.said.recv_timeout(limit) {
            all += &line;
            all.push('\n');
            if line.contains(words) {
                return all;
            }
        }
        panic!("not {words:?}: {all}");
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test]
#[ignore = "needs root and /dev/net/tun"]
async fn a_client_renews_and_rebinds_a_lease_of_a_minute_in_time() {
    let pod = Pod::with_address();
    let interface = interface(Binding::Bridge);
    let prepared = pod.ready(&interface);
    let options = DhcpOptions {
        lease_time: Duration::from_secs(60),
        ..DhcpOptions::default()
    };
    let _server = DhcpServer::start(&pod.netns, &interface, &prepared, options)
        .unwrap()
        .unwrap();
    let machine = GuestNetns::on(&prepared);
    // The server needs this thread.
    let checked = tokio::task::spawn_blocking(move || renews_and_rebinds(&machine));
    if let Err(e) = checked.await {
        std::panic::resume_unwind(e.into_panic());
    }
}

/// Waits for half of the lease to pass, twice.
fn renews_and_rebinds(machine: &GuestNetns) {
    let half = Duration::from_secs(30) + TIMEOUT;
    let client = Client::start(machine);
    client.says(OBTAINED, TIMEOUT);
    let said = client.says(OBTAINED, half);
    // On a busy machine udhcpc may rebind instead.
    assert!(said.contains("renew"), "{said}");
    // The server's own address is unreachable, so the client must broadcast.
    ip(&machine.netns, "route add blackhole 169.254.75.10/32");
    let said = client.says(OBTAINED, half);
    assert!(said.contains("broadcast"), "{said}");
    // udhcpc reports a lease before its script sets the address.
    let end = Instant::now() + TIMEOUT;
    loop {
        let shown = ip(&machine.netns, "address show dev eth0");
        if shown.contains("inet 10.244.1.5/24") {
            break;
        }
        assert!(Instant::now() < end, "{shown}");
        std::thread::sleep(Duration::from_millis(50));
    }
}
