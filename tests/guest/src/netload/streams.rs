//! TCP loads, and the peer's side of each.

use super::meter::{Meter, Times};
use anyhow::{Context, Result, bail};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// Size of one read or write.
const PIECE: usize = 64 << 10;

/// Maximum time without data where data is expected.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Opens a connection on which the peer runs the request `wish`.
pub fn ask(peer: SocketAddr, wish: &str) -> Result<TcpStream> {
    let mut stream = TcpStream::connect(peer).with_context(|| format!("no connection to {peer}"))?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    stream.write_all(format!("{wish}\n").as_bytes())?;
    Ok(stream)
}

/// Reads a number on a line of its own.
pub fn hear(stream: &TcpStream) -> Result<f64> {
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line)?;
    let number = line.trim().parse();
    number.with_context(|| format!("the peer answers {line:?}"))
}

/// Measures the bytes per second to the peer.
pub fn send(peer: SocketAddr, times: Times) -> Result<f64> {
    let mut stream = ask(peer, &format!("sink {}", times.words()))?;
    let (piece, over) = ([0; PIECE], times.over());
    while Instant::now() < over {
        stream.write_all(&piece)?;
    }
    stream.shutdown(std::net::Shutdown::Write)?;
    hear(&stream)
}

/// Measures the bytes per second from the peer.
pub fn receive(peer: SocketAddr, times: Times) -> Result<f64> {
    drain(&mut ask(peer, "source")?, times)
}

/// Measures the round trips of one byte per second.
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

/// Measures the bytes received per second.
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

/// The peer's side of [`send`].
pub fn sink(stream: &mut TcpStream, times: Times) -> Result<()> {
    let rate = drain(stream, times)?;
    writeln!(stream, "{rate:.3}")?;
    std::io::copy(stream, &mut std::io::sink())?;
    Ok(())
}

/// The peer's side of [`receive`]; runs until the client closes.
pub fn source(stream: &mut TcpStream) -> Result<()> {
    let piece = [0; PIECE];
    while stream.write_all(&piece).is_ok() {}
    Ok(())
}

/// The peer's side of [`turns`]; runs until the client closes.
pub fn echo(stream: &mut TcpStream) -> Result<()> {
    stream.set_nodelay(true)?;
    let mut byte = [0];
    while stream.read_exact(&mut byte).is_ok() {
        stream.write_all(&byte)?;
    }
    Ok(())
}
