//! The loads that are measured for every case, one at a time.

use super::wire;
use std::fmt::Write;

/// A load that runs for some time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cell {
    /// Name in metrics.
    pub name: &'static str,
    /// Title.
    pub title: &'static str,
    /// Metric of the rate.
    pub metric: &'static str,
    /// Name in `husk-netload`.
    load: &'static str,
    /// Number of simultaneous connections.
    streams: u32,
}

const fn cell(
    name: &'static str,
    title: &'static str,
    metric: &'static str,
    load: &'static str,
    streams: u32,
) -> Cell {
    Cell {
        name,
        title,
        metric,
        load,
        streams,
    }
}

/// All loads, in the order of measurement.
#[rustfmt::skip]
pub const CELLS: &[Cell] = &[
    cell("tcp_out", "TCP to the peer", "mbit_s_tcp_out", "tcp-out", 1),
    cell("tcp_in", "TCP from the peer", "mbit_s_tcp_in", "tcp-in", 1),
    cell("tcp_out_4", "TCP to the peer, 4 streams", "mbit_s_tcp_out_4", "tcp-out", 4),
    cell("tcp_in_4", "TCP from the peer, 4 streams", "mbit_s_tcp_in_4", "tcp-in", 4),
    cell("udp_out", "frames of 64 bytes to the peer", "packets_s_udp_out", "udp-out", 1),
    cell("udp_in", "frames of 64 bytes from the peer", "packets_s_udp_in", "udp-in", 1),
    cell("tcp_rr", "round trips by TCP", "round_trips_s", "tcp-turns", 1),
    cell("udp_rr", "round trips by UDP", "round_trips_s_udp", "udp-turns", 1),
];

impl Cell {
    /// True if the unit is bits instead of packets or round trips.
    fn streams(&self) -> bool {
        self.metric.starts_with("mbit")
    }

    /// Unit of the rate.
    pub fn unit(&self) -> &'static str {
        if self.streams() { "Mbit/s" } else { "1/s" }
    }

    /// The load's rate in the output of `husk-netload`.
    pub fn rate(&self, told: f64) -> f64 {
        if self.streams() { told * 8.0 / 1e6 } else { told }
    }

    /// Rate that costs refer to: MiB/s, or the rate that `husk-netload` reports.
    pub fn pieces(&self, told: f64) -> f64 {
        if self.streams() {
            told / f64::from(1 << 20)
        } else {
            told
        }
    }

    /// Unit that costs refer to.
    pub fn piece(&self) -> &'static str {
        match self.load {
            "tcp-out" | "tcp-in" => "a MiB",
            "udp-out" | "udp-in" => "a frame",
            _ => "a round trip",
        }
    }

    /// The line that the guest prints before the load.
    pub fn begins(&self) -> String {
        format!("husk-bench: begin {};", self.name)
    }

    /// The line that the guest prints before the load's result.
    pub fn ends(&self) -> String {
        format!("husk-bench: result {} ", self.name)
    }
}

/// The guest's instructions, one line for each of `cells`.
pub fn loads(cells: &[&Cell], ramp_ms: u32, time_ms: u32) -> String {
    let (mut text, peer) = (String::new(), wire::peer());
    for Cell {
        name, load, streams, ..
    } in cells
    {
        let _ = writeln!(
            text,
            "{name} {load} {peer} --streams {streams} --ramp {ramp_ms} --time {time_ms}"
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cell_has_a_line_and_a_metric_of_its_own() {
        let text = loads(&CELLS.iter().collect::<Vec<_>>(), 10, 20);
        assert_eq!(text.lines().count(), CELLS.len());
        assert!(text.starts_with("tcp_out tcp-out 198.51.100.1:7000 --streams 1 --ramp 10 --time 20\n"));
        let mut metrics: Vec<&str> = CELLS.iter().map(|cell| cell.metric).collect();
        metrics.sort_unstable();
        metrics.dedup();
        assert_eq!(metrics.len(), CELLS.len());
        // The markers differ, even if one load's name is a prefix of another's.
        for cell in CELLS {
            let others = CELLS.iter().filter(|other| other.name != cell.name);
            for other in others {
                assert!(!cell.begins().contains(&other.begins()) && !cell.ends().contains(&other.ends()));
            }
        }
    }

    #[test]
    fn stream_rates_are_in_bits_and_costs_per_mebibyte() {
        let told = f64::from(10 << 20);
        assert_eq!((CELLS[0].rate(told), CELLS[0].pieces(told)), (83.886_08, 10.0));
        assert_eq!((CELLS[6].rate(70.0), CELLS[6].pieces(70.0)), (70.0, 70.0));
    }
}
