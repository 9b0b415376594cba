//! Queues, features and device configuration space (virtio 1.2, sections 5.3.2 to 5.3.4).

/// Most ports of a device.
pub const MAX_PORTS: usize = 8;

/// Longest name of a port, in bytes. Drivers offer control buffers of a page.
pub const MAX_NAME_LEN: usize = 128;

/// `VIRTIO_CONSOLE_F_MULTIPORT`
pub(crate) const MULTIPORT: u64 = 1 << 1;

/// Entries of each queue. Drivers fill receive queues with pages.
pub(crate) const QUEUE_SIZE: u16 = 64;

/// Indices of the control queues.
pub(crate) const CONTROL_RECEIVE: usize = 2;
pub(crate) const CONTROL_TRANSMIT: usize = 3;

/// Bytes of `struct virtio_console_config`.
pub(crate) const CONFIG_SIZE: usize = 12;

/// Index of a port's receive queue. The transmit queue is the next.
pub(crate) fn receive_queue(port: usize) -> usize {
    match port {
        0 => 0,
        _ => 2 + 2 * port,
    }
}

/// Number of queues of a device with this many port numbers, 0 included.
pub(crate) fn queue_count(numbers: usize) -> usize {
    2 * numbers + 2
}

/// Configuration space as the driver reads it. Size and emergency write are not offered.
pub(crate) fn space(numbers: usize) -> [u8; CONFIG_SIZE] {
    let mut space = [0; CONFIG_SIZE];
    space[4..8].copy_from_slice(&(numbers as u32).to_le_bytes()); // max_nr_ports
    space
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_control_queues_come_after_those_of_port_0() {
        let ports: Vec<_> = (0..4).map(receive_queue).collect();
        assert_eq!(ports, [0, 4, 6, 8]);
        assert_eq!(queue_count(4), 10);
    }

    #[test]
    fn the_configuration_has_the_number_of_ports() {
        assert_eq!(space(3), [0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0]);
    }
}
