//! `husk-netload`: both ends of a network benchmark. The peer runs `serve`; the guest runs one load after the other,
//! each of which prints a rate on standard output.
//!
//! Data is counted where it arrives, by that end's clock.

mod datagrams;
mod meter;
mod serve;
mod streams;

use anyhow::Result;
use clap::{Parser, Subcommand};
use meter::Times;
use std::io::Write;
use std::net::SocketAddr;

/// Both ends of a network benchmark
#[derive(Debug, Parser)]
#[command(name = "husk-netload")]
struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Serves the loads below, forever
    Serve {
        /// Address to listen on
        address: SocketAddr,
    },
    /// Bytes per second that TCP carries to the peer
    TcpOut(Load),
    /// Bytes per second that TCP carries from the peer
    TcpIn(Load),
    /// Round trips per second of one byte, one at a time
    TcpTurns(Load),
    /// Datagrams per second to the peer
    UdpOut(Load),
    /// Datagrams per second from the peer
    UdpIn(Load),
    /// Round trips per second of one datagram, one at a time
    UdpTurns(Load),
}

#[derive(Debug, clap::Args)]
struct Load {
    /// Address of the peer
    peer: SocketAddr,
    /// Number of simultaneous connections
    #[arg(long, default_value_t = 1)]
    streams: usize,
    /// Milliseconds of warm-up, which are not measured
    #[arg(long, default_value_t = 1000)]
    ramp: u64,
    /// Milliseconds of the measurement
    #[arg(long, default_value_t = 3000)]
    time: u64,
}

/// Rate per second of one stream or client of a load.
type Rate = fn(SocketAddr, Times) -> Result<f64>;

fn main() -> Result<()> {
    let (load, each): (Load, Rate) = match Args::parse().what {
        What::Serve { address } => return serve::serve(address),
        What::TcpOut(load) => (load, streams::send),
        What::TcpIn(load) => (load, streams::receive),
        What::TcpTurns(load) => (load, streams::turns),
        What::UdpOut(load) => (load, datagrams::send),
        What::UdpIn(load) => (load, datagrams::receive),
        What::UdpTurns(load) => (load, datagrams::turns),
    };
    let rate = load.run(each)?;
    writeln!(std::io::stdout(), "{rate:.3}")?;
    Ok(())
}

impl Load {
    /// The sum of all streams.
    fn run(&self, each: fn(SocketAddr, Times) -> Result<f64>) -> Result<f64> {
        let times = Times::milliseconds(self.ramp, self.time);
        std::thread::scope(|scope| {
            let started: Vec<_> = (0..self.streams)
                .map(|_| scope.spawn(|| each(self.peer, times)))
                .collect();
            let rates = started.into_iter().map(|stream| match stream.join() {
                Ok(rate) => rate,
                Err(panic) => std::panic::resume_unwind(panic),
            });
            rates.sum()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{Ipv4Addr, TcpListener};

    #[test]
    fn every_load_has_its_answer() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let peer = listener.local_addr().expect("an address");
        std::thread::spawn(move || serve::answer(&listener));
        let loads: [fn(SocketAddr, Times) -> Result<f64>; 6] = [
            streams::send,
            streams::receive,
            streams::turns,
            datagrams::send,
            datagrams::receive,
            datagrams::turns,
        ];
        for (index, load) in loads.into_iter().enumerate() {
            let run = |streams| {
                let of = Load {
                    peer,
                    streams,
                    ramp: 100,
                    time: 500,
                };
                of.run(load).unwrap_or_else(|error| panic!("{index}: {error:#}"))
            };
            assert!(run(1) > 100.0);
            assert!(run(3) > 100.0);
        }
    }
}
