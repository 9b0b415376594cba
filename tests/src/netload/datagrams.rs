//! Loads of UDP, and what the peer does for each.
//!
//! So many datagrams are under way at most, and the end that receives says now and then how far it is. A sender that
//! knew no bound would have a busy processor drop most of them, and how many came would tell who got more of the
//! processor, not what one costs.

use super::meter::{Meter, Times};
use super::streams::{ask, hear};
use anyhow::{Context, Result, ensure};
use std::io::{ErrorKind, Write};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

/// Bytes that make a frame of 64, the least that Ethernet knows, with 14 + 20 + 8 of headers and a sum of 4.
const SIZE: usize = 18;

/// Datagrams under way: fewer than any queue and any socket on the way hold.
const WINDOW: u64 = 128;

/// Datagrams after which the receiver acknowledges.
const STRIDE: u64 = WINDOW / 4;

/// After that long what was under way counts as lost.
const LOST: Duration = Duration::from_millis(50);

/// Tries in a row until the other end counts as gone.
const GONE: u32 = 100;

/// Datagrams a second to the peer.
pub fn send(peer: SocketAddr, times: Times) -> Result<f64> {
    let (control, socket) = meet(peer, &format!("datagram-sink {}", times.words()))?;
    flow(&socket, Some(times.over()))?;
    hear(&control)
}

/// Datagrams a second from the peer.
pub fn receive(peer: SocketAddr, times: Times) -> Result<f64> {
    let (_control, socket) = meet(peer, "datagram-source")?;
    // From here on it knows where to send them.
    socket.send(&[])?;
    count(&socket, times)
}

/// Turns a second of a datagram there and back.
pub fn turns(peer: SocketAddr, times: Times) -> Result<f64> {
    let (_control, socket) = meet(peer, "datagram-echo")?;
    let (mut meter, mut buffer) = (Meter::new(times), [0; SIZE]);
    let mut silent = 0;
    for turn in 0_u64.. {
        socket.send(&numbered(turn))?;
        // An answer to an earlier one that counted as lost is none.
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

/// A socket whose other end does what `wish` expect_contains, and the connection on which it was wished.
fn meet(peer: SocketAddr, wish: &str) -> Result<(TcpStream, UdpSocket)> {
    let control = ask(peer, wish)?;
    let port = hear(&control)? as u16;
    let socket = UdpSocket::bind((control.local_addr()?.ip(), 0))?;
    socket.connect((peer.ip(), port))?;
    socket.set_read_timeout(Some(LOST))?;
    Ok((control, socket))
}

/// The peer's socket, whose port the guest knows.
fn offer(control: &mut TcpStream) -> Result<UdpSocket> {
    let socket = UdpSocket::bind((control.local_addr()?.ip(), 0))?;
    socket.set_read_timeout(Some(LOST))?;
    writeln!(control, "{}", socket.local_addr()?.port())?;
    Ok(socket)
}

/// Connects to whoever sends first, and leaves what was sent to be received.
fn follow(socket: &UdpSocket) -> Result<()> {
    for _ in 0..GONE {
        if let Ok((_, guest)) = socket.peek_from(&mut [0; SIZE]) {
            return socket.connect(guest).context("cannot connect");
        }
    }
    anyhow::bail!("nothing came")
}

/// The peer of [`send`].
pub fn sink(control: &mut TcpStream, times: Times) -> Result<()> {
    let socket = offer(control)?;
    follow(&socket)?;
    let rate = count(&socket, times)?;
    writeln!(control, "{rate:.3}")?;
    // Until the sender has heard of it, it is to go on at its pace.
    while let Ok(Some(number)) = arrived(&socket, &mut [0; SIZE]) {
        if number % STRIDE == 0 {
            let _ = socket.send(&numbered(number));
        }
    }
    Ok(())
}

/// The peer of [`receive`], until that is gone.
pub fn source(control: &mut TcpStream) -> Result<()> {
    let socket = offer(control)?;
    follow(&socket)?;
    // The one without content.
    socket.recv(&mut [0; SIZE])?;
    flow(&socket, None)
}

/// The peer of [`turns`], until that is gone.
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

/// Counts what comes of [`flow`].
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

/// The number of the next datagram; nothing if none comes for a while.
fn arrived(socket: &UdpSocket, buffer: &mut [u8; SIZE]) -> Result<Option<u64>> {
    match socket.recv(buffer) {
        Ok(_) => Ok(buffer.first_chunk().map(|bytes| u64::from_le_bytes(*bytes))),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => Ok(None),
        Err(error) => Err(error.into()),
    }
}
