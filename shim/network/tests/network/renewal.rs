//! A client that asks for its lease again: the server itself in time, and everybody when that does not answer.

use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use husk_network::Binding;
use husk_network::dhcp::{DhcpOptions, DhcpServer};
use husk_shim_testing::pod::{Pod, can_run, interface, ip};

use crate::guest_netns::GuestNetns;
use crate::raw_guest::PATIENCE;

const OBTAINED: &str = "lease of 10.244.1.5 obtained from 169.254.75.10, lease time 60";

/// udhcpc while it keeps its lease, and what it says.
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

    /// What it says up to a line with `words`, that one included.
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
async fn a_client_renews_and_rebinds_a_lease_of_a_minute_in_time() {
    if !can_run() {
        return;
    }
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
    // The server needs this thread meanwhile.
    let checked = tokio::task::spawn_blocking(move || renews_and_rebinds(&machine));
    if let Err(e) = checked.await {
        std::panic::resume_unwind(e.into_panic());
    }
}

/// Nothing asks the client to: half of its lease goes by, twice.
fn renews_and_rebinds(machine: &GuestNetns) {
    let half = Duration::from_secs(30) + PATIENCE;
    let client = Client::start(machine);
    client.says(OBTAINED, PATIENCE);
    let said = client.says(OBTAINED, half);
    // By itself; on a busy machine udhcpc may have to ask everybody even now.
    assert!(said.contains("renew"), "{said}");
    // Kept from the server's own address, it has to ask everybody.
    ip(&machine.netns, "route add blackhole 169.254.75.10/32");
    let said = client.says(OBTAINED, half);
    assert!(said.contains("broadcast"), "{said}");
    let shown = ip(&machine.netns, "address show dev eth0");
    assert!(shown.contains("inet 10.244.1.5/24"), "{shown}");
}
