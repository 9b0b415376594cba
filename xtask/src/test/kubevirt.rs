//! `cargo xtask test --kubevirt`: the cases under KubeVirt's control plane, which run on this machine in a cluster of
//! their own, and `husk apply` of KubeVirt's example manifests in the lab.

use super::queue;
use super::rounds::{self, Round};
use super::stages::{Stage, Stages};
use super::suite::{Suite, Tier};
use crate::binaries::{self, Profile};
use crate::cluster::Options;
use crate::progress::{Progress, ends_with_this_process};
use crate::{cluster, images, lab, packages};
use anyhow::{Context, Result, bail};
use jiff::Timestamp;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

/// The case that needs no cluster.
const EXAMPLES: &str = "apply-examples";
/// Interval of looks for killed processes.
const RESTART_INTERVAL: Duration = Duration::from_secs(1);

/// Runs the cases whose names contain `filter`: those that need only the example manifests of the checkout `source`, and
/// those in a cluster with KubeVirt from it.
pub fn run(stages: &Stages, source: &Path, build: bool, filter: Option<&str>) {
    let named = |name: &str| filter.is_none_or(|filter| name.contains(filter));
    if named(EXAMPLES) {
        stages.run("husk apply of examples", |stage| examples(stage, source, build));
    }
    // The names of the others begin with `kubevirt-`.
    if !filter.is_some_and(|filter| filter.starts_with("apply")) {
        in_cluster(stages, source, build, filter);
    }
}

/// The case with KubeVirt's example manifests, which runs in the lab.
fn examples(stage: &mut Stage, source: &Path, build: bool) -> Result<()> {
    let progress = Progress::on_stderr();
    if build {
        stage.cpu = binaries::build(Profile::EndToEnd, &progress)?;
    }
    lab::ensure_image(&progress)?;
    images::ensure_default(&progress)?;
    let suite = Suite::copy(Profile::EndToEnd)?;
    let folder = suite.copy_folder(&source.join("examples"), "examples")?;
    let env = [("HUSK_EXAMPLES".to_owned(), folder.display().to_string())];
    let cases = suite.cases(&[Tier::Examples], None)?;
    queue::run(stage, &suite, cases, &env, super::END_TO_END_LIMIT, &progress)
}

/// Starts a cluster with KubeVirt from the checkout `source`, runs the cases in it, and ends it.
fn in_cluster(stages: &Stages, source: &Path, build: bool, filter: Option<&str>) {
    let up = stages.run("cluster", |_| {
        if cluster::exists() {
            bail!("there is a cluster: end it by cargo xtask cluster down");
        }
        let progress = Progress::on_stderr();
        // For virtctl ssh.
        packages::ensure(&progress, &super::TOOLS)?;
        images::ensure(&progress, &["debian-13-cloud"])?;
        let options = Options {
            nodes: 1,
            profile: Profile::EndToEnd,
            build,
        };
        cluster::up(source, &options)
    });
    if up {
        stages.run("cases under KubeVirt", |stage| {
            let (end, ended) = mpsc::channel::<()>();
            std::thread::scope(|scope| {
                scope.spawn(move || restart_killed(&ended));
                let result = cases(stage, source, filter);
                drop(end);
                result
            })
        });
        stages.run("end of the cluster", |_| cluster::down());
    } else {
        stages.fail("cases under KubeVirt", "not run, because there is no cluster");
    }
}

/// Starts the processes again that cases kill, until `ended` is closed.
fn restart_killed(ended: &mpsc::Receiver<()>) {
    while ended.recv_timeout(RESTART_INTERVAL) == Err(mpsc::RecvTimeoutError::Timeout) {
        if let Err(error) = cluster::restart_ended() {
            eprintln!("the control plane: {error:#}");
        }
    }
}

fn cases(stage: &mut Stage, source: &Path, filter: Option<&str>) -> Result<()> {
    let commit = rounds::commit()?;
    let mut suite = Command::new(Profile::EndToEnd.folder().join("husk-e2e"));
    ends_with_this_process(&mut suite);
    let mut suite = suite
        .arg("--kubevirt")
        .args(filter)
        .env("HUSK_CLUSTER", cluster::folder()?)
        .env("HUSK_XTASK", std::env::current_exe()?)
        .env("HUSK_KUBEVIRT", source.canonicalize()?)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot start husk-e2e")?;
    let mut kills = Kills::new(commit);
    let stdout = suite.stdout.take().context("no output")?;
    let mut closed = false;
    for line in BufReader::new(stdout).lines() {
        let line = line?;
        if let Some(round) = kills.round(&line)
            && let Err(error) = rounds::record(KILLS, &round)
        {
            stage.tally.fail(KILLS, &format!("{error:#}"));
        }
        if stage.tally.end_to_end(&line) {
            closed = true;
        } else {
            println!("{line}");
        }
    }
    let status = suite.wait()?;
    if !closed {
        bail!("husk-e2e ended early: {status}");
    }
    Ok(())
}

/// The case whose kills accumulate over runs.
const KILLS: &str = "kubevirt-kills";

/// A round of the case with kills, from the lines that the suite prints.
#[derive(Debug)]
struct Kills {
    commit: String,
    started: Timestamp,
    seed: u32,
    done: u32,
}

impl Kills {
    fn new(commit: String) -> Self {
        Self {
            commit,
            started: Timestamp::now(),
            seed: 0,
            done: 0,
        }
    }

    /// Takes a line; returns the round if the case ends with it.
    fn round(&mut self, line: &str) -> Option<Round> {
        // The suite indents the output of a case.
        let printed = line.trim_start();
        if let Some(seed) = printed.strip_prefix("HUSK_SEED=") {
            self.seed = seed.split_whitespace().next()?.parse().ok()?;
            (self.started, self.done) = (Timestamp::now(), 0);
        }
        if let Some(kill) = printed.strip_prefix("kill ") {
            self.done = kill.split(':').next()?.parse().ok()?;
        }
        let (outcome, name) = line.split_once(' ')?;
        let outcome = match outcome {
            "ok" => "passed",
            "FAILED" => "failed",
            _ => return None,
        };
        if name.split([' ', ':']).next() != Some(KILLS) {
            return None;
        }
        Some(Round {
            seed: self.seed,
            commit: self.commit.clone(),
            outcome: outcome.to_owned(),
            started: self.started.to_string(),
            seconds: Timestamp::now().duration_since(self.started).as_secs_f64(),
            kills: Some(self.done),
            ..Round::default()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_has_the_seed_and_the_kills() {
        let mut kills = Kills::new("0123456789ab".to_owned());
        for line in [
            "    HUSK_SEED=17 HUSK_KILLS=40",
            "    kill 1: agent after pause of kill-0",
            "    kill 2: shim after nothing of kill-3",
            "FAILED kubevirt-kills/kills: after kill 2 (9.1s)",
        ] {
            assert_eq!(kills.round(line), None);
        }
        let round = kills
            .round("FAILED kubevirt-kills: kills: after kill 2 (9.5s)")
            .expect("a round");
        assert_eq!(
            (round.seed, round.kills, round.outcome.as_str()),
            (17, Some(2), "failed")
        );
        assert!(
            kills
                .round("ok kubevirt-kills 1802.0s")
                .is_some_and(|round| round.outcome == "passed")
        );
    }
}
