//! The kinds of requests that are measured for every case, one at a time.

use std::fmt::Write;

/// Requests of one kind, issued for some time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cell {
    /// Name in metrics.
    pub name: &'static str,
    /// Title.
    pub title: &'static str,
    /// Name of the pattern in fio.
    pattern: &'static str,
    /// Size of a request in KiB.
    kib: u32,
    /// Queue depth of each job.
    depth: u32,
    /// Number of simultaneous jobs.
    jobs: u32,
    /// A job submits as many requests as its queue is deep together, and waits for all of them.
    batch: bool,
}

const fn cell(
    name: &'static str,
    title: &'static str,
    pattern: &'static str,
    (kib, depth, jobs): (u32, u32, u32),
) -> Cell {
    Cell {
        name,
        title,
        pattern,
        kib,
        depth,
        jobs,
        batch: false,
    }
}

const fn batch(cell: Cell) -> Cell {
    Cell { batch: true, ..cell }
}

/// All kinds, in the order of measurement: reads first, because writes leave work behind.
#[rustfmt::skip]
pub const CELLS: &[Cell] = &[
    cell("rand4k_qd1", "random reads of 4 KiB, depth 1", "randread", (4, 1, 1)),
    cell("rand4k_qd32", "random reads of 4 KiB, depth 32", "randread", (4, 32, 1)),
    batch(cell("rand4k_batch32", "random reads of 4 KiB, 32 begun and ended together", "randread", (4, 32, 1))),
    cell("rand4k_qd32_jobs4", "random reads of 4 KiB, 4 jobs of depth 32", "randread", (4, 32, 4)),
    cell("seq128k", "reads of 128 KiB in order, depth 4", "read", (128, 4, 1)),
    cell("seq1m", "reads of 1 MiB in order, depth 4", "read", (1024, 4, 1)),
    cell("randw4k_qd1", "random writes of 4 KiB, depth 1", "randwrite", (4, 1, 1)),
    cell("randw4k_qd32", "random writes of 4 KiB, depth 32", "randwrite", (4, 32, 1)),
    cell("randw4k_qd32_jobs4", "random writes of 4 KiB, 4 jobs of depth 32", "randwrite", (4, 32, 4)),
    cell("seqw1m", "writes of 1 MiB in order, depth 4", "write", (1024, 4, 1)),
];

impl Cell {
    /// True if the requests write.
    pub fn writes(&self) -> bool {
        self.pattern.ends_with("write")
    }

    /// True if the unit is bytes instead of requests.
    pub fn streams(&self) -> bool {
        self.kib >= 128
    }

    /// Metric of the rate.
    pub fn rate(&self) -> String {
        let kind = if self.streams() { "mib_s" } else { "iops" };
        format!("{kind}_{}", self.name)
    }

    /// Unit of the rate.
    pub fn unit(&self) -> &'static str {
        if self.streams() { "MiB/s" } else { "1/s" }
    }
}

/// fio's job file: `cells` one after the other, for `time_ms` milliseconds each, after the first `ramp_ms`. Each
/// prints a marker on the console when it starts.
pub fn jobs(cells: &[&Cell], ramp_ms: u32, time_ms: u32) -> String {
    let mut text = format!(
        "[global]\nfilename=${{DISK}}\nioengine=libaio\ndirect=1\nthread=1\ngroup_reporting=1\ntime_based=1\n\
         ramp_time={ramp_ms}ms\nruntime={time_ms}ms\nnorandommap=1\npercentile_list=50:99\n"
    );
    for cell in cells {
        let Cell {
            name,
            pattern,
            kib,
            depth,
            jobs,
            batch,
            ..
        } = cell;
        let _ = write!(
            text,
            "[{name}]\nstonewall\nrw={pattern}\nbs={kib}k\niodepth={depth}\nnumjobs={jobs}\n\
             exec_prerun=/bin/sh /mark {name}\n"
        );
        if *batch {
            let _ = write!(
                text,
                "iodepth_batch_submit={depth}\niodepth_batch_complete_min={depth}\n\
                 iodepth_batch_complete_max={depth}\n"
            );
        }
    }
    text
}

/// The script `/mark`, which announces a cell.
pub const MARK: &str = include_str!("mark.sh");

/// fio's result for `cell`.
pub fn begins(cell: &Cell) -> String {
    format!("husk-bench: begin {};", cell.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cell_has_a_job_and_metrics_of_its_own() {
        let text = jobs(&CELLS.iter().collect::<Vec<_>>(), 1000, 3000);
        assert_eq!(text.matches("stonewall").count(), CELLS.len());
        assert!(
            text.contains("ramp_time=1000ms\nruntime=3000ms\n") && text.contains("filename=${DISK}\n"),
            "{text}"
        );
        assert_eq!(
            text.matches("iodepth_batch_submit=32\niodepth_batch_complete_min=32\n")
                .count(),
            1
        );
        let mut rates: Vec<String> = CELLS.iter().map(Cell::rate).collect();
        assert!(rates.contains(&"iops_randw4k_qd32".to_owned()));
        assert!(rates.contains(&"mib_s_seq1m".to_owned()));
        rates.sort_unstable();
        rates.dedup();
        assert_eq!(rates.len(), CELLS.len());
        // The markers differ, even if one cell's name is a prefix of another's.
        for cell in CELLS {
            let others = CELLS.iter().filter(|other| other.name != cell.name);
            assert!(others.map(begins).all(|mark| !mark.contains(&begins(cell))));
        }
    }
}
