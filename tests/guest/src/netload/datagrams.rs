//! UDP loads, and the peer's side of each.
//!
//! The number of datagrams in flight is limited, and the receiver acknowledges them at intervals. An unlimited sender
//! would make a busy processor drop most of them, and the count would then show how the processor was shared, not the
//! cost of a datagram.

use super::meter::{Meter, Times};
use super::streams::{ask, hear};
use anyhow::{Context, Result, ensure};
use std::io::{ErrorKind, Write};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

/// Payload bytes of a 64-byte frame, Ethernet's minimum: 14 + 20 + 8 bytes are headers and 4 the checksum.
const SIZE: usize = 18;

/// Datagrams in flight: fewer than any queue and any socket on the path hold.
const WINDOW: u64 = 128;

/// Datagrams after which the receiver acknowledges.
const STRIDE: u64 = WINDOW / 4;

/// Time after which datagrams in flight count as lost.
const LOST: Duration = Duration::from_millis(50);

/// Consecutive attempts after which the other end counts as gone.
const GONE: u32 = 100;

/// Measures the datagrams per second to the peer.
pub fn send(peer: SocketAddr, times: Times) -> Result<f64> {
    let (control, socket) = meet(peer, &format!("datagram-sink {}", times.words()))?;
    flow(&socket, Some(times.over()))?;
    hear(&control)
}

/// Measures the datagrams per second from the peer.
pub fn receive(peer: SocketAddr, times: Times) -> Result<f64> {
    let (_control, socket) = meet(peer, "datagram-source")?;
    // From here on the peer knows the destination address.
    socket.send(&[])?;
    count(&socket, times)
}

/// Measures the round trips of one datagram per second.
pub fn turns(peer: SocketAddr, times: Times) -> Result<f64> {
    let (_control, socket) = meet(peer, "datagram-echo")?;
    let (mut meter, mut buffer) = (Meter::new(times), [0; SIZE]);
    let mut silent = 0;
    for turn in 0_u64.. {
        socket.send(&numbered(turn))?;
        // Ignore a reply to an earlier datagram that counted as lost.
        loop {
            match arrived(&socket, &mut buffer)? {
                Some(number) if number == turn => break,
                Some(_) => {}
                None => {
                    silent += 1;
                    ensure!(silent < GONE, "the peer does not answer");
                    socket.send(&numbered(turn))?;
                }
            }
        }
        silent = 0;
        if let Some(rate) = meter.heard(1) {
            return Ok(rate);
        }
    }
    Ok(0.0)
}

/// A socket whose peer runs the request `wish`, and the connection on which it was requested.
fn meet(peer: SocketAddr, wish: &str) -> Result<(TcpStream, UdpSocket)> {
    let control = ask(peer, wish)?;
    let port = hear(&control)? as u16;
    let socket = UdpSocket::bind((control.local_addr()?.ip(), 0))?;
    socket.connect((peer.ip(), port))?;
    socket.set_read_timeout(Some(LOST))?;
    Ok((control, socket))
}

/// The peer's socket; the guest is informed of its port.
fn offer(control: &mut TcpStream) -> Result<UdpSocket> {
    let socket = UdpSocket::bind((control.local_addr()?.ip(), 0))?;
    socket.set_read_timeout(Some(LOST))?;
    writeln!(control, "{}", socket.local_addr()?.port())?;
    Ok(socket)
}

/// Connects to the sender of the first datagram, and leaves that datagram in the queue.
fn follow(socket: &UdpSocket) -> Result<()> {
    for _ in 0..GONE {
        if let Ok((_, guest)) = socket.peek_from(&mut [0; SIZE]) {
            return socket.connect(guest).context("cannot connect");
        }
    }
    anyhow::bail!("nothing came")
}

/// The peer's side of [`send`].
pub fn sink(control: &mut TcpStream, times: Times) -> Result<()> {
    let socket = offer(control)?;
    follow(&socket)?;
    let rate = count(&socket, times)?;
    writeln!(control, "{rate:.3}")?;
    // The sender keeps its pace until it has the acknowledgement.
    while let Ok(Some(number)) = arrived(&socket, &mut [0; SIZE]) {
        if number % STRIDE == 0 {
            let _ = socket.send(&numbered(number));
        }
    }
    Ok(())
}

/// The peer's side of [`receive`]; runs until the client is gone.
pub fn source(control: &mut TcpStream) -> Result<()> {
    let socket = offer(control)?;
    follow(&socket)?;
    // The datagram without content.
    socket.recv(&mut [0; SIZE])?;
    flow(&socket, None)
}

/// The peer's side of [`turns`]; runs until the client is gone.
pub fn echo(control: &mut TcpStream) -> Result<()> {
    let socket = offer(control)?;
    follow(&socket)?;
    let (mut buffer, mut silent) = ([0; SIZE], 0);
    while silent < GONE {
        match arrived(&socket, &mut buffer) {
            Ok(Some(number)) => {
                silent = 0;
                socket.send(&numbered(number))?;
            }
            Ok(None) => silent += 1,
            Err(_) => break,
        }
    }
    Ok(())
}

/// Sends datagrams, a window at a time, until `over` or until the other end is gone.
fn flow(socket: &UdpSocket, over: Option<Instant>) -> Result<()> {
    let (mut next, mut there, mut silent) = (0, 0, 0);
    while silent < GONE && over.is_none_or(|over| Instant::now() < over) {
        while next < there + WINDOW {
            if socket.send(&numbered(next)).is_err() {
                return Ok(());
            }
            next += 1;
        }
        match arrived(socket, &mut [0; SIZE]) {
            Ok(Some(number)) => (there, silent) = (there.max(number + 1), 0),
            Ok(None) => (there, silent) = (next, silent + 1),
            Err(_) => return Ok(()),
        }
    }
    Ok(())
}

/// Counts the datagrams that [`flow`] sends.
fn count(socket: &UdpSocket, times: Times) -> Result<f64> {
    let (mut meter, mut buffer) = (Meter::new(times), [0; SIZE]);
    let (mut told, mut silent) = (0, 0);
    loop {
        let Some(number) = arrived(socket, &mut buffer)? else {
            silent += 1;
            ensure!(silent < GONE, "nothing comes any more");
            continue;
        };
        silent = 0;
        if number + 1 >= told + STRIDE {
            told = number + 1;
            socket.send(&numbered(number))?;
        }
        if let Some(rate) = meter.heard(1) {
            return Ok(rate);
        }
    }
}

fn numbered(number: u64) -> [u8; SIZE] {
    let mut datagram = [0; SIZE];
    datagram[..8].copy_from_slice(&number.to_le_bytes());
    datagram
}

/// The number of the next datagram; nothing if none arrives for a while.
fn arrived(socket: &UdpSocket, buffer: &mut [u8; SIZE]) -> Result<Option<u64>> {
    match socket.recv(buffer) {
        Ok(_) => Ok(buffer.first_chunk().map(|bytes| u64::from_le_bytes(*bytes))),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => Ok(None),
        Err(error) => Err(error.into()),
    }
}
