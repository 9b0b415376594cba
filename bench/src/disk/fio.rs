//! fio's result of a job: a line of fields separated by semicolons (fio's manual, "Terse output", version 3).

use anyhow::{Context, Result, ensure};

/// One job, or a group of them.
#[derive(Debug, Clone, PartialEq)]
pub struct Job {
    /// Name of the job; for a group, that of its first job.
    pub name: String,
    /// Requests per second.
    pub iops: f64,
    /// Bytes per second.
    pub bytes_s: f64,
    /// Median latency in microseconds.
    pub p50_us: f64,
    /// 99th percentile of the latency in microseconds.
    pub p99_us: f64,
}

/// Number of fields before those of the reads, and of each direction.
const HEAD: usize = 5;
const DIRECTION: usize = 41;
/// Offsets in a direction: KiB/s, requests per second, then 20 percentiles of the completion latency.
const KIB_S: usize = 1;
const IOPS: usize = 2;
const PERCENTILES: usize = 12;

/// Parses the line of a job that only writes, or only reads.
///
/// # Errors
/// If it is not such a line, or the job failed, or it did no I/O.
pub fn job(line: &str, writes: bool) -> Result<Job> {
    let fields: Vec<&str> = line.trim().split(';').collect();
    ensure!(
        fields.first() == Some(&"3") && fields.len() >= HEAD + 2 * DIRECTION,
        "not a job's line: {line}"
    );
    ensure!(fields[4] == "0", "{} failed with error {}", fields[2], fields[4]);
    let start = HEAD + if writes { DIRECTION } else { 0 };
    let direction = &fields[start..start + DIRECTION];
    let number = |field: usize| -> Result<f64> {
        let text = direction[field];
        text.parse().with_context(|| format!("{text:?} is not a number"))
    };
    let percentile = |label: &str| -> Result<f64> {
        let list = &direction[PERCENTILES..PERCENTILES + 20];
        let found = list
            .iter()
            .find_map(|field| field.strip_prefix(label)?.strip_prefix('='));
        let text = found.with_context(|| format!("no percentile {label}"))?;
        text.parse().with_context(|| format!("{text:?} is not a number"))
    };
    let job = Job {
        name: fields[2].to_owned(),
        iops: number(IOPS)?,
        bytes_s: number(KIB_S)? * 1024.0,
        p50_us: percentile("50.000000%")?,
        p99_us: percentile("99.000000%")?,
    };
    ensure!(job.iops > 0.0, "{} did nothing", job.name);
    Ok(job)
}

#[cfg(test)]
mod tests {
    use super::*;

    const READS: &str = "3;fio-3.39;rand4k_qd1;0;0;146072;72999;18249;2001;1;4619;13.631305;56.288862;0;13458;40.588061;191.704733;50.000000%=33;99.000000%=164;0%=0;0%=0;0%=0;0%=0;0%=0;0%=0;0%=0;0%=0;0%=0;0%=0;0%=0;0%=0;0%=0;0%=0;0%=0;0%=0;0%=0;0%=0;2;13475;54.219366;201.199515;56207;91792;100.000000%;73051.750000;16718.282455;0;0;0;0;0;0;0.000000;0.000000;0;0;0.000000;0.000000;50.000000%=0;99.000000%=0;0%=0;0%=0;0%=0;0%=0;0%=0;0%=0;0%=0;0%=0;0%=0;0%=0;0%=0;0%=0;0%=0;0%=0;0%=0;0%=0;0%=0;0%=0;0;0;0.000000;0.000000;0;0;0.000000%;0.000000;0.000000;3.250000%;32.300000%;21001;0;0;100.0%;0.0%";
    const WRITES: &str = "3;fio-3.39;rand4k_qd32_jobs4;1;0;0;0;0;0;0;0;0.000000;0.000000;0;0;0.000000;0.000000;50.000000%=0;99.000000%=0;0%=0;0%=0;0%=0;0%=0;0%=0;0%=0;0%=0;0%=0;0%=0;0%=0;0%=0;0%=0;0%=0;0%=0;0%=0;0%=0;0%=0;0%=0;0;0;0.000000;0.000000;0;0;0.000000%;0.000000;0.000000;484604;241336;60271;2008;2;16084;8.930323;128.707435;0;141289;2109.472471;4196.496603;50.000000%=1138;99.000000%=8716;0%=0;0%=0;0%=0;0%=0;0%=0;0%=0;0%=0;0%=0;0%=0;0%=0;0%=0;0%=0;0%=0;0%=0;0%=0;0%=0;0%=0;0%=0;15;141293;2118.398713;4197.337114;198924;271392;100.000000%;242001.750000;7672.176578;1.036593%;8.130386%;4742;0;0;0.0%;0.0%";

    #[test]
    fn a_line_tells_of_reads() {
        let job = job(READS, false).expect("a job");
        assert_eq!(
            job,
            Job {
                name: "rand4k_qd1".into(),
                iops: 18_249.0,
                bytes_s: 72_999.0 * 1024.0,
                p50_us: 33.0,
                p99_us: 164.0,
            }
        );
    }

    #[test]
    fn a_line_tells_of_writes() {
        let job = job(WRITES, true).expect("a job");
        assert_eq!((job.iops, job.p50_us, job.p99_us), (60_271.0, 1138.0, 8716.0));
    }

    #[test]
    fn failed_and_empty_runs_are_errors() {
        let failed = READS.replacen(";0;0;", ";0;5;", 1);
        let why = |line: &str, writes| format!("{:#}", job(line, writes).expect_err("no job"));
        assert!(why(&failed, false).contains("error 5"));
        assert!(why(READS, true).contains("did nothing"));
        assert!(why("fio: no such disk", false).contains("not a job's line"));
        assert!(why(&READS[..200], false).contains("not a job's line"));
    }
}
