//! ttyS0: a 16550A with the registers of vm-superio and a bounded buffer in each direction.
//!
//! The guest never waits for the reader of its console. Output goes into a buffer that another thread drains. When
//! the buffer is full, the oldest bytes are dropped and counted.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::{Arc, Mutex, MutexGuard};

use vm_superio::serial::{NoEvents, SerialState};
use vm_superio::{Serial, Trigger};
use vmm_sys_util::eventfd::EventFd;

use crate::bus::BusDevice;

mod state;

/// First I/O port of COM1.
pub const PORT: u64 = 0x3f8;
/// Length of the port range.
pub const LEN: u64 = 8;
/// COM1's interrupt.
pub const IRQ: u32 = 4;

const IER: u64 = 1;
const IER_RDA: u8 = 1;
const IER_THR_EMPTY: u8 = 2;
const IIR: u64 = 2;
const IIR_NONE: u8 = 1;
const IIR_THR_EMPTY: u8 = 2;
const IIR_RDA: u8 = 4;
const IIR_FIFO: u8 = 0xc0;
const LSR: u64 = 5;
const LSR_DATA_READY: u8 = 1;
const LCR: u64 = 3;
const LCR_DLAB: u8 = 0x80;

/// Most bytes of guest output that wait to be drained.
pub const OUTPUT_LIMIT: usize = 256 << 10;

#[derive(Debug)]
struct IrqTrigger(Arc<EventFd>);

impl Trigger for IrqTrigger {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.0.write(1)
    }
}

#[derive(Debug)]
struct Output {
    bytes: VecDeque<u8>,
    dropped: u64,
    ready: EventFd,
}

impl Write for Output {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        let was_empty = self.bytes.is_empty();
        for &byte in buf {
            if self.bytes.len() == OUTPUT_LIMIT {
                self.bytes.pop_front();
                self.dropped += 1;
            }
            self.bytes.push_back(byte);
        }
        if was_empty {
            self.ready.write(1)?;
        }
        Ok(buf.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

type Uart = Serial<IrqTrigger, NoEvents, Output>;

struct State {
    uart: Uart,
    input_wanted: bool,
    /// The interrupt of the empty transmitter is pending behind that of received data.
    thr_empty: bool,
}

/// The serial port. Cloning shares it.
pub struct SerialPort {
    interrupt: Arc<EventFd>,
    input_ready: EventFd,
    state: Mutex<State>,
}

impl std::fmt::Debug for SerialPort {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SerialPort")
    }
}

impl SerialPort {
    /// A port that raises `interrupt`, signals `output_ready` when there is something to
    /// [`SerialPort::take_output`], and `input_wanted` when the guest emptied a full receive FIFO.
    pub fn new(interrupt: EventFd, output_ready: EventFd, input_wanted: EventFd) -> Self {
        let interrupt = Arc::new(interrupt);
        let output = Output {
            bytes: VecDeque::new(),
            dropped: 0,
            ready: output_ready,
        };
        let uart = Serial::new(IrqTrigger(interrupt.clone()), output);
        Self {
            interrupt,
            input_ready: input_wanted,
            state: Mutex::new(State {
                uart,
                input_wanted: false,
                thr_empty: false,
            }),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn request_input(&self, state: &mut State) {
        if state.input_wanted && state.uart.fifo_capacity() > 0 {
            state.input_wanted = false;
            let _ = self.input_ready.write(1);
        }
    }

    /// vm-superio clears the received-data interrupt when the IIR or one of several bytes is read, while a 16550
    /// keeps it until its FIFO is empty. Linux reads at most 256 bytes before it reads the IIR again, and would leave
    /// the rest to an interrupt that does not come.
    fn still_receiving(uart: &mut Uart) -> bool {
        uart.read(LSR as u8) & LSR_DATA_READY != 0 && Self::is_enabled(uart, IER_RDA)
    }

    /// True if an interrupt is enabled, as far as the IER can be read.
    fn is_enabled(uart: &mut Uart, interrupt: u8) -> bool {
        let dlab = uart.read(LCR as u8) & LCR_DLAB != 0;
        !dlab && uart.read(IER as u8) & interrupt != 0
    }

    /// A read of the IIR. vm-superio returns the bits of both interrupts together, which name a third one, and clears
    /// both. A 16550 names that of received data first.
    fn identify(state: &mut State) -> u8 {
        let read = state.uart.read(IIR as u8);
        let pending = |bit| read & IIR_NONE == 0 && read & bit != 0;
        let received = pending(IIR_RDA) && Self::is_enabled(&mut state.uart, IER_RDA);
        state.thr_empty |= pending(IIR_THR_EMPTY);
        let found = if received || Self::still_receiving(&mut state.uart) {
            IIR_RDA
        } else if state.thr_empty && Self::is_enabled(&mut state.uart, IER_THR_EMPTY) {
            state.thr_empty = false;
            IIR_THR_EMPTY
        } else {
            IIR_NONE
        };
        read & IIR_FIFO | found
    }

    /// Takes up to `limit` bytes of guest output.
    pub fn take_output(&self, limit: usize) -> Vec<u8> {
        let mut state = self.state();
        let bytes = &mut state.uart.writer_mut().bytes;
        let n = limit.min(bytes.len());
        let taken: Vec<u8> = bytes.drain(..n).collect();
        if bytes.is_empty() {
            // Free the memory of a burst: an idle console costs none.
            bytes.shrink_to(4 << 10);
        }
        taken
    }

    /// Bytes of output dropped because the buffer was full.
    pub fn dropped(&self) -> u64 {
        self.state().uart.writer().dropped
    }

    /// Offers input to the guest and returns the number of bytes that the receive FIFO took. If it took fewer than
    /// all, the `input_wanted` event fires once there is room.
    pub fn send(&self, input: &[u8]) -> usize {
        let mut state = self.state();
        let taken = state.uart.enqueue_raw_bytes(input).unwrap_or(0);
        state.input_wanted = taken < input.len();
        taken
    }

    /// Replaces the registers and the output, and keeps the descriptors.
    fn load(&self, registers: &SerialState, output: Option<(VecDeque<u8>, u64)>) -> io::Result<()> {
        let mut state = self.state();
        let ready = state.uart.writer().ready.try_clone()?;
        let old = state.uart.writer_mut();
        let (bytes, dropped) = output.unwrap_or_else(|| (std::mem::take(&mut old.bytes), old.dropped));
        if !bytes.is_empty() {
            ready.write(1)?;
        }
        let output = Output {
            bytes,
            dropped,
            ready,
        };
        let trigger = IrqTrigger(self.interrupt.clone());
        state.uart = Serial::from_state(registers, trigger, NoEvents, output)
            .map_err(|e| io::Error::other(format!("16550: {e}")))?;
        state.thr_empty = false;
        Ok(())
    }
}

impl BusDevice for SerialPort {
    fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0xff);
        let mut state = self.state();
        data[0] = match offset {
            IIR => Self::identify(&mut state),
            offset => state.uart.read(offset as u8),
        };
        self.request_input(&mut state);
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let mut state = self.state();
        if let Err(error) = state.uart.write(offset as u8, data[0]) {
            tracing::debug!(%error, "serial port write");
        }
        // A write may end loopback mode, which accepts no input.
        self.request_input(&mut state);
    }
}

#[cfg(test)]
mod tests;
