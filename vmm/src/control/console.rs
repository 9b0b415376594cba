//! Copies between ttyS0 and the monitor's console descriptor, on the control thread.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use husk_devices::legacy::serial::SerialPort;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use tokio::io::unix::AsyncFd;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use vmm_sys_util::eventfd::EventFd;

/// Time for which output is collected before it is written. A guest writes single bytes, and every write wakes this
/// process, the monitor and the client of the console.
const COALESCE_TIME: Duration = Duration::from_millis(1);
/// Minimum time between two writes: an answer to a key comes soon, and a guest that boots costs few wake-ups.
const WRITE_INTERVAL: Duration = Duration::from_millis(25);
/// Maximum time to write the last output when the VM has ended.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(1);
const CHUNK: usize = 16 << 10;
const INPUT_CHUNK: usize = 256;

/// A running console task.
#[derive(Debug)]
pub struct Console {
    stop: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

impl Console {
    /// Starts copying between `serial` and `fd`. Without an `fd` output is discarded.
    pub fn spawn(
        serial: Arc<SerialPort>,
        fd: Option<OwnedFd>,
        output_ready: EventFd,
        input_wanted: EventFd,
    ) -> io::Result<Self> {
        let fd = fd
            .map(|fd| {
                fcntl_setfl(&fd, fcntl_getfl(&fd)? | OFlags::NONBLOCK)?;
                register(fd)
            })
            .transpose()?;
        let pump = Pump {
            serial,
            reading: fd.is_some(),
            fd,
            output_ready: register(output_ready)?,
            input_wanted: register(input_wanted)?,
            output: Vec::new(),
            due: None,
            last_write: None,
            input: Vec::new(),
        };
        let (stop, stopped) = oneshot::channel();
        Ok(Self {
            stop,
            task: tokio::spawn(pump.run(stopped)),
        })
    }

    /// Writes the remaining output, within [`DRAIN_TIMEOUT`], and ends.
    pub async fn finish(self) {
        drop(self.stop);
        let _ = tokio::time::timeout(DRAIN_TIMEOUT, self.task).await;
    }
}

struct Pump {
    serial: Arc<SerialPort>,
    fd: Option<AsyncFd<OwnedFd>>,
    reading: bool,
    output_ready: AsyncFd<EventFd>,
    input_wanted: AsyncFd<EventFd>,
    /// Output that is being written.
    output: Vec<u8>,
    /// Time at which the output that the port has collected is taken.
    due: Option<Instant>,
    last_write: Option<Instant>,
    input: Vec<u8>,
}

/// Registers a descriptor that `inner` owns with the runtime.
fn register<T: AsRawFd>(inner: T) -> io::Result<AsyncFd<T>> {
    // SAFETY: both types used here, OwnedFd and EventFd, own their descriptor: it is the same and open as
    // long as they live, and they live in the AsyncFd.
    unsafe { AsyncFd::register(inner) }.map_err(io::Error::from)
}

/// Waits for an eventfd and clears it.
async fn signalled(event: &AsyncFd<EventFd>) -> io::Result<()> {
    let mut guard = event.readable().await?;
    let _ = guard.try_io(|e| e.get_ref().read());
    Ok(())
}

/// Waits until `due`, or for ever.
async fn until(due: Option<Instant>) {
    match due {
        Some(due) => tokio::time::sleep_until(due).await,
        None => std::future::pending().await,
    }
}

async fn write_some(fd: &AsyncFd<OwnedFd>, bytes: &[u8]) -> io::Result<usize> {
    loop {
        let mut guard = fd.writable().await?;
        match guard.try_io(|fd| rustix::io::write(fd.get_ref(), bytes).map_err(io::Error::from)) {
            Ok(Err(e)) if e.raw_os_error() == Some(libc::EINTR) => {}
            Ok(result) => return result,
            Err(_would_block) => {}
        }
    }
}

async fn read_some(fd: &AsyncFd<OwnedFd>) -> io::Result<Vec<u8>> {
    let mut buffer = [0; INPUT_CHUNK];
    loop {
        let mut guard = fd.readable().await?;
        match guard.try_io(|fd| rustix::io::read(fd.get_ref(), &mut buffer).map_err(io::Error::from)) {
            Ok(Err(e)) if e.raw_os_error() == Some(libc::EINTR) => {}
            Ok(result) => return result.map(|n| buffer[..n].to_vec()),
            Err(_would_block) => {}
        }
    }
}

impl Pump {
    async fn run(mut self, mut stop: oneshot::Receiver<()>) {
        let mut ending = false;
        loop {
            if self.output.is_empty() && (ending || self.is_due()) {
                self.take();
            }
            if ending && (self.output.is_empty() || self.fd.is_none()) {
                return;
            }
            let Some(fd) = self.fd.as_ref() else {
                self.output.clear();
                while self.serial.take_output(CHUNK).len() == CHUNK {}
                tokio::select! {
                    _ = signalled(&self.output_ready) => {}
                    _ = &mut stop => return,
                }
                continue;
            };
            tokio::select! {
                written = write_some(fd, &self.output), if !self.output.is_empty() => match written {
                    Ok(n) => drop(self.output.drain(..n)),
                    Err(error) => {
                        tracing::warn!(%error, "the console is closed: discarding output from now on");
                        self.fd = None;
                    }
                },
                _ = signalled(&self.output_ready), if self.due.is_none() => self.due = Some(self.next_write()),
                () = until(self.due), if self.output.is_empty() => {}
                read = read_some(fd), if self.reading && self.input.is_empty() && !ending => match read {
                    Ok(bytes) if !bytes.is_empty() => {
                        self.input = bytes;
                        self.offer();
                    }
                    _ => self.reading = false,
                },
                _ = signalled(&self.input_wanted), if !self.input.is_empty() => self.offer(),
                _ = &mut stop, if !ending => ending = true,
            }
        }
    }

    fn is_due(&self) -> bool {
        self.due.is_some_and(|due| due <= Instant::now())
    }

    /// Time of the next write, if the guest has just begun to write.
    fn next_write(&self) -> Instant {
        let soon = Instant::now() + COALESCE_TIME;
        self.last_write
            .map_or(soon, |last| soon.max(last + WRITE_INTERVAL))
    }

    /// Takes output to write. An emptied port signals its next byte.
    fn take(&mut self) {
        self.output = self.serial.take_output(CHUNK);
        if self.output.len() < CHUNK {
            self.due = None;
        }
        if !self.output.is_empty() {
            self.last_write = Some(Instant::now());
        }
    }

    fn offer(&mut self) {
        let taken = self.serial.send(&self.input);
        self.input.drain(..taken);
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::{UnixDatagram, UnixStream};

    use husk_devices::bus::BusDevice;

    use super::*;
    use crate::machine::eventfd;

    struct Rig {
        serial: Arc<SerialPort>,
        console: Console,
        outside: UnixStream,
    }

    fn start(inside: OwnedFd) -> (Arc<SerialPort>, Console) {
        let (output, input) = (eventfd().unwrap(), eventfd().unwrap());
        let serial = Arc::new(SerialPort::new(
            eventfd().unwrap(),
            output.try_clone().unwrap(),
            input.try_clone().unwrap(),
        ));
        let console = Console::spawn(serial.clone(), Some(inside), output, input).unwrap();
        (serial, console)
    }

    fn rig() -> Rig {
        let (inside, outside) = UnixStream::pair().unwrap();
        let (serial, console) = start(inside.into());
        Rig {
            serial,
            console,
            outside,
        }
    }

    #[tokio::test]
    async fn output_is_complete_and_input_arrives_as_the_guest_takes_it() {
        let mut rig = rig();
        rig.outside.write_all(&[b'i'; 200]).unwrap();
        for byte in b"hello" {
            rig.serial.write(0, &[*byte]);
        }
        let mut got = 0;
        while got < 200 {
            tokio::time::sleep(Duration::from_millis(1)).await;
            let mut lsr = [0];
            rig.serial.read(5, &mut lsr);
            if lsr[0] & 1 != 0 {
                rig.serial.read(0, &mut lsr);
                assert_eq!(lsr, [b'i']);
                got += 1;
            }
        }
        rig.serial.write(0, b"!");
        rig.console.finish().await;
        let mut text = String::new();
        rig.outside.read_to_string(&mut text).unwrap();
        assert_eq!(text, "hello!");
    }

    #[tokio::test]
    async fn a_guest_that_goes_on_writing_causes_few_writes() {
        // Datagrams are as long as the writes.
        let (inside, outside) = UnixDatagram::pair().unwrap();
        let (serial, console) = start(inside.into());
        let began = Instant::now();
        let mut written = 0;
        while began.elapsed() < 5 * WRITE_INTERVAL {
            serial.write(0, b"x");
            written += 1;
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        console.finish().await;
        // One more at the beginning, and one at the end.
        let most = began.elapsed().as_millis() / WRITE_INTERVAL.as_millis() + 2;
        outside.set_nonblocking(true).unwrap();
        let (mut read, mut reads, mut chunk) = (0, 0, [0; CHUNK]);
        while let Ok(length) = outside.recv(&mut chunk) {
            (read, reads) = (read + length, reads + 1);
        }
        assert_eq!(read, written);
        assert!(reads <= most, "{reads} writes, at most {most} expected");
    }

    #[tokio::test]
    async fn a_stalled_or_closed_reader_does_not_delay_the_end() {
        let stalled = rig();
        for _ in 0..1 << 20 {
            stalled.serial.write(0, b"x");
        }
        tokio::time::timeout(DRAIN_TIMEOUT * 3, stalled.console.finish())
            .await
            .unwrap();
        let gone = rig();
        drop(gone.outside);
        gone.serial.write(0, b"x");
        tokio::time::timeout(DRAIN_TIMEOUT / 2, gone.console.finish())
            .await
            .unwrap();
    }
}
