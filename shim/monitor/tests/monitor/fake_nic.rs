//! A NIC of the fake VMM: a guest that sends DHCP requests until it is offered an address.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use dhcproto::v4::{DhcpOption, Message, MessageType};
use dhcproto::{Decodable, Decoder, Encodable};
use husk_proto::vmm::v1::Nic;

/// virtio's header before each frame.
const HEADER: usize = 12;

/// Unplugs the NIC when dropped.
pub struct FakeNic {
    unplugged: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl FakeNic {
    pub fn plug(nic: &Nic, taps: Vec<File>, console: Option<UnixStream>) -> FakeNic {
        let unplugged = Arc::new(AtomicBool::new(false));
        let (mac, id, down) = (nic.mac.clone(), nic.id.clone(), nic.link_down);
        let ended = unplugged.clone();
        let thread = std::thread::spawn(move || {
            let mut asking = !down;
            while !ended.load(Ordering::Relaxed) {
                if asking && let Some(offer) = ask(&taps[0], &mac) {
                    let options = offer.opts();
                    let hostname = options.get(dhcproto::v4::OptionCode::Hostname);
                    let text = format!("{id} is offered {} {hostname:?}\n", offer.yiaddr());
                    let _ = console
                        .as_ref()
                        .map(|mut console| console.write_all(text.as_bytes()));
                    asking = false;
                }
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        FakeNic {
            unplugged,
            thread: Some(thread),
        }
    }
}

impl Drop for FakeNic {
    fn drop(&mut self) {
        self.unplugged.store(true, Ordering::Relaxed);
        let _ = self.thread.take().unwrap().join();
    }
}

/// Sends a DISCOVER and looks for an OFFER among the frames received.
fn ask(mut tap: &File, mac: &[u8]) -> Option<Message> {
    let mut frame = vec![0; HEADER];
    frame.extend(discover(mac));
    // A tap that is down accepts no frames.
    let _ = tap.write(&frame);
    let mut buffer = vec![0; 70_000];
    for _ in 0..20 {
        while let Ok(length) = tap.read(&mut buffer) {
            let frame = &buffer[HEADER.min(length)..length];
            if frame.get(12..14) == Some(&[8, 0]) && frame.get(36..38) == Some(&68u16.to_be_bytes()) {
                let message = Message::decode(&mut Decoder::new(&frame[42..])).unwrap();
                assert_eq!(message.opts().msg_type(), Some(MessageType::Offer));
                return Some(message);
            }
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    None
}

/// A broadcast frame.
fn discover(mac: &[u8]) -> Vec<u8> {
    let none = std::net::Ipv4Addr::UNSPECIFIED;
    let mut message = Message::new(none, none, none, none, mac);
    message
        .opts_mut()
        .insert(DhcpOption::MessageType(MessageType::Discover));
    let mut packet = Vec::new();
    message.encode(&mut dhcproto::Encoder::new(&mut packet)).unwrap();
    let udp = 8 + packet.len() as u16;
    let mut frame = [&[0xff; 6], mac, &[8, 0]].concat();
    let mut ip = vec![0x45, 0];
    ip.extend((20 + udp).to_be_bytes());
    ip.extend([0, 0, 0, 0, 64, 17, 0, 0, 0, 0, 0, 0, 255, 255, 255, 255]);
    let sum: u32 = ip
        .chunks(2)
        .map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1]))
        .sum();
    let sum = !((sum & 0xffff) + (sum >> 16)) as u16;
    ip[10..12].copy_from_slice(&sum.to_be_bytes());
    frame.extend(ip);
    for part in [68, 67, udp, 0u16] {
        frame.extend(part.to_be_bytes());
    }
    frame.extend(packet);
    frame
}
