//! Loads of TCP, and what the peer does for each.

use super::meter::{Meter, Times};
use anyhow::{Context, Result, bail};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// Size of one read or write.
const PIECE: usize = 64 << 10;

/// The longest that nothing may come, where something is to.
const PATIENCE: Duration = Duration::from_secs(10);

/// A connection on which the peer does what `wish` says.
pub fn ask(peer: SocketAddr, wish: &str) -> Result<TcpStream> {
    let mut stream = TcpStream::connect(peer).with_context(|| format!("no connection to {peer}"))?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.write_all(format!("{wish}\n").as_bytes())?;
    Ok(stream)
}

/// A number on a line of its own.
pub fn hear(stream: &TcpStream) -> Result<f64> {
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line)?;
    let number = line.trim().parse();
    number.with_context(|| format!("the peer answers {line:?}"))
}

/// Bytes a second to the peer.
pub fn send(peer: SocketAddr, times: Times) -> Result<f64> {
    let mut stream = ask(peer, &format!("sink {}", times.words()))?;
    let (piece, over) = ([0; PIECE], times.over());
    while Instant::now() < over {
        stream.write_all(&piece)?;
    }
    stream.shutdown(std::net::Shutdown::Write)?;
    hear(&stream)
}

/// Bytes a second from the peer.
pub fn receive(peer: SocketAddr, times: Times) -> Result<f64> {
    drain(&mut ask(peer, "source")?, times)
}

/// Turns a second of a byte there and back.
pub fn turns(peer: SocketAddr, times: Times) -> Result<f64> {
    let mut stream = ask(peer, "echo")?;
    let (mut meter, mut byte) = (Meter::new(times), [0]);
    loop {
        stream.write_all(&byte)?;
        stream.read_exact(&mut byte)?;
        if let Some(rate) = meter.heard(1) {
            return Ok(rate);
        }
    }
}

/// Bytes a second that come.
fn drain(stream: &mut TcpStream, times: Times) -> Result<f64> {
    let (mut meter, mut piece) = (Meter::new(times), [0; PIECE]);
    loop {
        let count = stream.read(&mut piece)?;
        if count == 0 {
            bail!("the connection ended early");
        }
        if let Some(rate) = meter.heard(count) {
            return Ok(rate);
        }
    }
}

/// The peer of [`send`].
pub fn sink(stream: &mut TcpStream, times: Times) -> Result<()> {
    let rate = drain(stream, times)?;
    writeln!(stream, "{rate:.3}")?;
    std::io::copy(stream, &mut std::io::sink())?;
    Ok(())
}

/// The peer of [`receive`], until that has enough.
pub fn source(stream: &mut TcpStream) -> Result<()> {
    let piece = [0; PIECE];
    while stream.write_all(&piece).is_ok() {}
    Ok(())
}

/// The peer of [`turns`], until that has enough.
pub fn echo(stream: &mut TcpStream) -> Result<()> {
    stream.set_nodelay(true)?;
    let mut byte = [0];
    while stream.read_exact(&mut byte).is_ok() {
        stream.write_all(&byte)?;
    }
    Ok(())
}
