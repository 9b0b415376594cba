//! The state of the serial port across a reset and a snapshot.

use serde::{Deserialize, Serialize};
use vm_superio::serial::SerialState;

use super::{OUTPUT_LIMIT, SerialPort};
use crate::component::{Bytes, Component, ComponentState, RestoreError, SaveError};

/// Bytes of the receive FIFO, which vm-superio bounds to this length.
const FIFO_LIMIT: usize = 64;

/// The registers (named as vm-superio names them), the receive FIFO, and the output that nobody has taken yet.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PortState {
    baud_divisor_low: u8,
    baud_divisor_high: u8,
    interrupt_enable: u8,
    interrupt_identification: u8,
    line_control: u8,
    line_status: u8,
    modem_control: u8,
    modem_status: u8,
    scratch: u8,
    received: Bytes,
    /// Input was refused, and is to be asked for when there is room.
    input_wanted: bool,
    /// The interrupt of the empty transmitter is pending behind that of received data.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    thr_empty: bool,
    output: Bytes,
    /// Bytes of output that were dropped because nobody took them.
    dropped: u64,
}

impl Component for SerialPort {
    /// Output already written is kept.
    fn reset(&self) {
        if let Err(error) = self.load(&SerialState::default(), None) {
            tracing::warn!(%error, "serial port not reset");
        }
        let mut state = self.state();
        self.request_input(&mut state);
    }

    fn save(&self) -> Result<ComponentState, SaveError> {
        let state = self.state();
        let registers = state.uart.state();
        let output = state.uart.writer();
        ComponentState::new(&PortState {
            baud_divisor_low: registers.baud_divisor_low,
            baud_divisor_high: registers.baud_divisor_high,
            interrupt_enable: registers.interrupt_enable,
            interrupt_identification: registers.interrupt_identification,
            line_control: registers.line_control,
            line_status: registers.line_status,
            modem_control: registers.modem_control,
            modem_status: registers.modem_status,
            scratch: registers.scratch,
            received: registers.in_buffer.into(),
            input_wanted: state.input_wanted,
            thr_empty: state.thr_empty,
            output: Bytes(output.bytes.iter().copied().collect()),
            dropped: output.dropped,
        })
    }

    fn restore(&self, saved: &ComponentState) -> Result<(), RestoreError> {
        let saved: PortState = saved.parse()?;
        let received = saved.received.at_most(FIFO_LIMIT, "received")?;
        let output = saved.output.at_most(OUTPUT_LIMIT, "output")?;
        let registers = SerialState {
            baud_divisor_low: saved.baud_divisor_low,
            baud_divisor_high: saved.baud_divisor_high,
            interrupt_enable: saved.interrupt_enable,
            interrupt_identification: saved.interrupt_identification,
            line_control: saved.line_control,
            line_status: saved.line_status,
            modem_control: saved.modem_control,
            modem_status: saved.modem_status,
            scratch: saved.scratch,
            in_buffer: received.to_vec(),
        };
        self.load(&registers, Some((output.to_vec().into(), saved.dropped)))?;
        let mut state = self.state();
        (state.input_wanted, state.thr_empty) = (saved.input_wanted, saved.thr_empty);
        Ok(())
    }
}
