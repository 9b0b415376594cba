//! Saved state of a network that a teardown reads: records of interfaces with changed fields, and rtnetlink messages
//! of routes and addresses. Asserts that a record and a request stay as they are when they are read again.
#![no_main]

use arbitrary::Arbitrary;
use husk_fuzz::host::{JsonEdit, Splice, directory, edit_json, splice};
use husk_network::testing::{is_same_route, location, replay_address, replay_route, rewrite_record};
use libfuzzer_sys::fuzz_target;
use serde_json::json;

const WORDS: &[&str] = &[
    "",
    "eth0",
    "net1",
    "../x",
    "Started",
    "Finished",
    "bridge",
    "masquerade",
    "10.244.1.5/24",
    "0.0.0.0/0",
    "fd00::5/64",
    "169.254.1.1",
    "02:00:00:00:00:01",
    "ip",
    "ip6",
    "phase",
    "netns",
    "mac",
    "nic",
    "kept",
    "switches",
    "queues",
    "/proc/sys/net/ipv4/conf/eth0/forwarding",
    "1",
    "standalone",
    "port",
    "index",
    "path",
    "id",
    "Bridge",
    "Masquerade",
];

#[derive(Arbitrary, Debug)]
enum Program {
    Record(Vec<JsonEdit>, Vec<Splice>),
    Location(Vec<JsonEdit>, bool),
    Routes(Vec<Message>),
}

/// A message of the kernel: a header and attributes.
#[derive(Arbitrary, Debug)]
struct Message {
    header: [u8; 12],
    v6: bool,
    attributes: Vec<Attribute>,
    damage: Vec<Splice>,
}

#[derive(Arbitrary, Debug)]
enum Attribute {
    Number(u8, u32),
    CacheInfo([u8; 32]),
    Hops(Vec<Hop>),
    Any(u16, Vec<u8>),
}

#[derive(Arbitrary, Debug)]
struct Hop {
    length: Option<u16>,
    head: [u8; 6],
    attributes: Vec<u8>,
}

fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let value = &value[..value.len().min(4096)];
    let mut bytes = [
        &(value.len() as u16 + 4).to_ne_bytes()[..],
        &kind.to_ne_bytes(),
        value,
    ]
    .concat();
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

impl Message {
    fn bytes(&self, header: usize) -> Vec<u8> {
        let mut bytes = self.header[..header].to_vec();
        bytes[0] = if self.v6 { 10 } else { 2 };
        for found in self.attributes.iter().take(16) {
            bytes.extend(match found {
                Attribute::Number(kind, number) => attribute(u16::from(*kind), &number.to_ne_bytes()),
                Attribute::CacheInfo(value) => attribute(12, value),
                Attribute::Hops(hops) => {
                    attribute(9, &hops.iter().take(8).flat_map(Hop::bytes).collect::<Vec<_>>())
                }
                Attribute::Any(kind, value) => attribute(*kind, value),
            });
        }
        splice(&mut bytes, &self.damage);
        bytes
    }
}

impl Hop {
    fn bytes(&self) -> Vec<u8> {
        let attributes = &self.attributes[..self.attributes.len().min(64)];
        let length = self.length.unwrap_or(8 + attributes.len() as u16);
        let mut bytes = [&length.to_ne_bytes()[..], &self.head, attributes].concat();
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }
}

fuzz_target!(|program: Program| {
    match program {
        Program::Record(edits, splices) => {
            let mut record = json!({
                "phase": "Finished", "netns": 4026532000u64, "interface": "default", "binding": "Bridge",
                "mac": "02:00:00:00:00:01", "queues": 2,
                "nic": {
                    "name": "eth0", "index": 2, "mac": "0a:58:0a:f4:01:05", "mtu": 1450,
                    "addresses": ["10.244.1.5/24", "fd00::5/64"],
                    "routes": [{"destination": "0.0.0.0/0", "gateway": "10.244.1.1", "source": null, "metric": null,
                        "onlink": false, "protocol": 3}],
                    "neighbours": [{"address": "10.244.1.1", "mac": "02:00:00:00:00:02"}],
                },
                "kept": {"down": false, "addresses": [[2, 24, 0, 0, 2, 0, 0, 0]], "routes": []},
                "switches": [["/proc/sys/net/ipv4/ip_forward", "0"]], "foreign_tables": ["ip"],
            });
            edit_json(&mut record, &edits, WORDS);
            let mut text = record.to_string().into_bytes();
            splice(&mut text, &splices);
            let directory = directory();
            let path = directory.path().join("network-eth0.json");
            std::fs::write(&path, text).expect("written");
            if let Ok(Some(again)) = rewrite_record(&path) {
                std::fs::write(&path, &again).expect("written");
                assert_eq!(rewrite_record(&path).expect("a record"), Some(again));
            }
        }
        Program::Location(edits, standalone) => {
            let mut saved = match standalone {
                true => json!({"standalone": {"port": "husk0", "index": 7}}),
                false => json!({"netns": {"path": "/run/netns/a", "id": 4026532000u64}}),
            };
            edit_json(&mut saved, &edits, WORDS);
            let directory = directory();
            let path = directory.path().join("netns.json");
            std::fs::write(&path, saved.to_string()).expect("written");
            if let Ok(Some(found)) = location(&path) {
                found.save(directory.path()).expect("saved");
                assert_eq!(location(&path).expect("a location"), Some(found));
            }
        }
        Program::Routes(messages) => {
            for message in messages.iter().take(8) {
                let route = message.bytes(12);
                for request in replay_route(&route) {
                    assert!(request.len() <= route.len() + 8, "a request grew");
                    assert_eq!(replay_route(&request), std::slice::from_ref(&request));
                    assert!(is_same_route(&request, &request));
                }
                let address = replay_address(&message.bytes(8));
                assert_eq!(replay_address(&address), address);
            }
        }
    }
});
