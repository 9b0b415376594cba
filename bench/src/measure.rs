//! The process that does not run where KVM is: prepares a benchmark, starts it and collects its messages.

use super::message::Message;
use super::record::Record;
use anyhow::{Result, bail};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::time::Duration;
use xtask::native::native_kvm;
use xtask::packages::{self, Tool, tool};
use xtask::progress::{Progress, Step};
use xtask::{binaries, images, lab, self_copy};

/// Packages of the programs that Husk is compared with.
pub const QEMU: Tool = tool("qemu-system-x86_64", "qemu-system-x86");

/// Builds the binaries and the missing `images`, and installs `tools` where there is no lab that has them.
pub fn prepare(progress: &Progress, images: &[&str], tools: &[Tool]) -> Result<()> {
    binaries::build_runtime(progress)?;
    images::ensure(progress, images)?;
    if native_kvm() {
        packages::ensure(progress, tools)?;
    }
    Ok(())
}

/// A benchmark to run, with a time `limit`.
#[derive(Debug)]
pub struct Job<P> {
    /// Name of the benchmark.
    pub bench: &'static str,
    /// Arguments of the process that measures.
    pub plan: P,
    /// Maximum time.
    pub limit: Duration,
    /// True if it needs programs that only the lab always has.
    pub in_lab: bool,
}

impl<P: Serialize> Job<P> {
    /// Runs the benchmark where KVM is. Values are added to `record`, also if the benchmark ends early; `more` gets the
    /// data that only this benchmark sends.
    pub fn measure<T: DeserializeOwned>(
        &self,
        progress: &Progress,
        record: &mut Record,
        more: impl FnMut(T, &Step) + Send,
    ) -> Result<()> {
        let is_native = native_kvm() && !self.in_lab;
        let place = if is_native { "native" } else { "lab" };
        record.measure(place, |record| self.listen(progress, record, more))
    }

    fn listen<T: DeserializeOwned>(
        &self,
        progress: &Progress,
        record: &mut Record,
        mut more: impl FnMut(T, &Step) + Send,
    ) -> Result<()> {
        let copy = self_copy::copy()?;
        let this = copy.to_string_lossy().into_owned();
        let plan = serde_json::to_string(&self.plan)?;
        let words = [this, "inside".into(), self.bench.into(), plan];
        let step = progress.step("measuring");
        let status = lab::Command::new(words)
            .timeout(self.limit)
            .in_lab(self.in_lab)
            .lines(progress, |line| match serde_json::from_str(line) {
                Ok(Message::News(news)) => step.news(&news),
                Ok(Message::Failed(what)) => step.say(&format!("failed, done again: {what}")),
                Ok(Message::Measured(measurement)) => record.measurements.push(measurement),
                Ok(Message::Env(facts)) => record.env.extend(facts),
                Ok(Message::More(thing)) => more(thing, &step),
                Err(_) => step.say(line),
            })?;
        if status != 0 {
            bail!("the benchmark ended early, with status {status}");
        }
        step.done();
        Ok(())
    }
}
