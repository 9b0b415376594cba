//! `husk-flow`: sends bytes by TCP and checks each of them, in guests and in their peers.
//!
//! `husk-flow serve ADDRESS` serves all clients until it is killed. `husk-flow MOVE ADDRESS AMOUNT [STREAMS
//! [TIMEOUT]]` moves AMOUNT bytes by each of its streams (`both` has as many in either direction), or goes on until a
//! file of that name exists; and prints the result. A stream without progress for TIMEOUT seconds has failed.

mod content;
mod stream;

use anyhow::{Context, Result, bail, ensure};
use std::io::Write;
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use stream::{Amount, Direction};

/// Default time limit of a stream that makes no progress.
const TIMEOUT: u64 = 10;

/// Time without a client after which a server ends.
const SERVERS_TIMEOUT: Duration = Duration::from_secs(600);

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let done = match words.as_slice() {
        ["serve", address] => serve(address),
        [kind, address, amount, numbers @ ..] => move_all(kind, address, amount, numbers),
        _ => Err(anyhow::anyhow!(
            "serve ADDRESS, or send, receive or both ADDRESS AMOUNT [STREAMS [TIMEOUT]]"
        )),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("flow: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn serve(address: &str) -> Result<()> {
    let listener = TcpListener::bind(address).with_context(|| format!("cannot listen at {address}"))?;
    println!("flow: listening at {}", listener.local_addr()?);
    std::io::stdout().flush()?;
    loop {
        let (peer, from) = listener.accept()?;
        std::thread::spawn(move || {
            if let Err(error) = stream::answer(peer, SERVERS_TIMEOUT) {
                println!("flow: {from}: {error:#}");
            }
        });
    }
}

/// Set when streams must end.
static STOP: AtomicBool = AtomicBool::new(false);

fn amount(word: &str) -> Result<Amount> {
    if !word.starts_with('/') {
        let bytes = word.parse().with_context(|| format!("no number: {word}"))?;
        return Ok(Amount::Bytes(bytes));
    }
    let path = Path::new(word).to_owned();
    std::thread::spawn(move || {
        while !path.exists() {
            std::thread::sleep(Duration::from_millis(50));
        }
        STOP.store(true, Ordering::Relaxed);
    });
    Ok(Amount::Until(&STOP))
}

fn move_all(kind: &str, address: &str, how_much: &str, numbers: &[&str]) -> Result<()> {
    let directions: &[Direction] = match kind {
        "send" => &[Direction::Out],
        "receive" => &[Direction::In],
        "both" => &[Direction::Out, Direction::In],
        _ => bail!("{kind}: send, receive or both"),
    };
    let address: SocketAddr = address
        .parse()
        .with_context(|| format!("no address: {address}"))?;
    let amount = amount(how_much)?;
    let numbers: Vec<u64> = numbers
        .iter()
        .map(|word| word.parse().with_context(|| format!("no number: {word}")))
        .collect::<Result<_>>()?;
    let number = |at: usize, otherwise| numbers.get(at).copied().unwrap_or(otherwise);
    let timeout = Duration::from_secs(number(1, TIMEOUT));
    let started = Instant::now();
    let mut threads = Vec::new();
    for number in 0..number(0, 1) {
        for &direction in directions {
            // Each stream has its own content, so that mixed-up streams are detected.
            let way = u64::from(direction == Direction::In);
            let seed = (u64::from(std::process::id()) << 32) | (number << 1) | way;
            threads.push(std::thread::spawn(move || {
                stream::request(address, direction, amount, seed, timeout)
            }));
        }
    }
    let (mut pause, mut least, mut most) = (Duration::ZERO, u64::MAX, 0);
    let mut failed = Vec::new();
    let streams = threads.len();
    for thread in threads {
        match thread.join() {
            Ok(Ok(moved)) => {
                pause = pause.max(moved.longest_pause);
                (least, most) = (least.min(moved.bytes), most.max(moved.bytes));
            }
            Ok(Err(error)) => failed.push(format!("{error:#}")),
            Err(_) => failed.push("a panic".to_owned()),
        }
    }
    ensure!(
        failed.is_empty(),
        "{} of {streams} streams: {}",
        failed.len(),
        failed.join("; ")
    );
    println!(
        "flow: {streams} streams of {least} to {most} bytes as sent in {:.1} s, longest pause {} ms",
        started.elapsed().as_secs_f64(),
        pause.as_millis()
    );
    Ok(())
}
