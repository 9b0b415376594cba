//! `husk-vsock`: for the guest of the case vsock. `serve PORT` echoes what comes on each connection to this vsock port,
//! up to its end. `connect PORT COUNT` opens that many connections to the port of the host before it uses one, and then
//! expects each to echo a line.

use anyhow::{Context, Result, bail, ensure};
use rustix::fd::OwnedFd;
use rustix::net::addr::{SocketAddrArg, SocketAddrLen, SocketAddrOpaque};
use rustix::net::{AddressFamily, SocketType, accept, bind, connect, listen, socket};
use rustix::process::{Resource, Rlimit, setrlimit};
use std::fs::File;
use std::io::{Read, Write};

/// VMADDR_CID_ANY and VMADDR_CID_HOST
const ANY: u32 = u32::MAX;
const HOST: u32 = 2;
const STACK: usize = 64 << 10;

/// `struct sockaddr_vm`.
#[repr(C)]
struct Address {
    family: u16,
    reserved: u16,
    port: u32,
    cid: u32,
    flags: u8,
    zero: [u8; 3],
}

impl Address {
    fn new(cid: u32, port: u32) -> Self {
        Self {
            family: AddressFamily::VSOCK.as_raw(),
            reserved: 0,
            port,
            cid,
            flags: 0,
            zero: [0; 3],
        }
    }
}

// SAFETY: the pointer and the length are those of a whole `struct sockaddr_vm`, which lives through the call of `f`.
unsafe impl SocketAddrArg for Address {
    unsafe fn with_sockaddr<R>(&self, f: impl FnOnce(*const SocketAddrOpaque, SocketAddrLen) -> R) -> R {
        f((&raw const *self).cast(), size_of::<Self>() as SocketAddrLen)
    }
}

fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize| -> Result<u32> {
        let word = words.get(at).with_context(|| format!("no argument {at}"))?;
        Ok(word.parse()?)
    };
    let most = Some(4096);
    setrlimit(
        Resource::Nofile,
        Rlimit {
            current: most,
            maximum: most,
        },
    )?;
    match words.first().map(String::as_str) {
        Some("serve") => serve(number(1)?),
        Some("connect") => connect_all(number(1)?, number(2)?),
        _ => bail!("neither serve PORT nor connect PORT COUNT"),
    }
}

fn vsock() -> Result<OwnedFd> {
    Ok(socket(AddressFamily::VSOCK, SocketType::STREAM, None)?)
}

fn serve(port: u32) -> Result<()> {
    let listener = vsock()?;
    bind(&listener, &Address::new(ANY, port))?;
    listen(&listener, 1024)?;
    loop {
        let connection = File::from(accept(&listener)?);
        std::thread::Builder::new().stack_size(STACK).spawn(move || {
            let mut bytes = vec![0; 16 << 10];
            while let Ok(count @ 1..) = (&connection).read(&mut bytes) {
                if (&connection).write_all(&bytes[..count]).is_err() {
                    break;
                }
            }
        })?;
    }
}

fn connect_all(port: u32, count: u32) -> Result<()> {
    let mut connections = Vec::new();
    for number in 0..count {
        let connection = vsock()?;
        connect(&connection, &Address::new(HOST, port)).with_context(|| format!("connection {number}"))?;
        connections.push(File::from(connection));
    }
    for (number, connection) in connections.iter_mut().enumerate() {
        let line = format!("line {number}\n");
        connection.write_all(line.as_bytes())?;
        let mut echo = vec![0; line.len()];
        connection.read_exact(&mut echo)?;
        ensure!(
            echo == line.as_bytes(),
            "connection {number} has the bytes of another"
        );
    }
    println!("{count} connections");
    Ok(())
}
