//! The peer: each connection says what it wishes, and gets a thread that does it.

use super::meter::Times;
use super::{datagrams, streams};
use anyhow::{Context, Result, bail};
use std::io::Read;
use std::net::{SocketAddr, TcpListener, TcpStream};

/// The longest wish.
const WISH: usize = 80;

/// Answers at `address`, for ever.
pub fn serve(address: SocketAddr) -> Result<()> {
    let listener = TcpListener::bind(address).with_context(|| format!("cannot listen at {address}"))?;
    answer(&listener);
    Ok(())
}

/// Answers all who come.
pub fn answer(listener: &TcpListener) {
    for stream in listener.incoming().flatten() {
        std::thread::spawn(move || {
            if let Err(error) = grant(stream) {
                eprintln!("husk-netload: {error:#}");
            }
        });
    }
}

fn grant(mut stream: TcpStream) -> Result<()> {
    let wish = wish(&mut stream)?;
    let mut words = wish.split(' ');
    match words.next().unwrap_or_default() {
        "sink" => streams::sink(&mut stream, Times::parse(words)?),
        "source" => streams::source(&mut stream),
        "echo" => streams::echo(&mut stream),
        "datagram-sink" => datagrams::sink(&mut stream, Times::parse(words)?),
        "datagram-source" => datagrams::source(&mut stream),
        "datagram-echo" => datagrams::echo(&mut stream),
        _ => bail!("a wish for {wish:?}"),
    }
}

/// The first line, byte by byte: what follows it may be a load's.
fn wish(stream: &mut TcpStream) -> Result<String> {
    let (mut line, mut byte) = (Vec::new(), [0]);
    while line.len() < WISH {
        stream.read_exact(&mut byte)?;
        if byte == *b"\n" {
            return Ok(String::from_utf8(line)?);
        }
        line.push(byte[0]);
    }
    bail!("a wish without an end")
}
