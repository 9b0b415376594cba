//! The peer: each connection sends a request, and gets a thread that runs it.

use super::meter::Times;
use super::{datagrams, streams};
use anyhow::{Context, Result, bail};
use std::io::Read;
use std::net::{SocketAddr, TcpListener, TcpStream};

/// Maximum length of a request.
const WISH: usize = 80;

/// Serves at `address`, forever.
pub fn serve(address: SocketAddr) -> Result<()> {
    let listener = TcpListener::bind(address).with_context(|| format!("cannot listen at {address}"))?;
    answer(&listener);
    Ok(())
}

/// Serves every connection.
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

/// Reads the first line byte by byte: the bytes after it may belong to a load.
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
