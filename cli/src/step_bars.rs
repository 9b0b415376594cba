//! Progress of work in steps: a bar for each on a terminal, else a line.

use std::collections::BTreeMap;
use std::io::IsTerminal;

use indicatif::{HumanBytes, MultiProgress, ProgressBar, ProgressStyle};

use crate::failure::one_line;
use crate::vm_ref::VmRef;

const TEMPLATE: &str = "{prefix:19}  {bar:30}  {bytes:>10} of {total_bytes:<10}";

#[derive(Debug)]
pub(crate) struct StepBars {
    vm: VmRef,
    /// The verb in the line of a step: `saving` in `demo: saving memory`.
    doing: &'static str,
    all: MultiProgress,
    live: bool,
    shown: BTreeMap<String, ProgressBar>,
}

impl StepBars {
    pub(crate) fn new(vm: &VmRef, doing: &'static str) -> StepBars {
        StepBars {
            vm: vm.clone(),
            doing,
            all: MultiProgress::new(),
            live: std::io::stderr().is_terminal(),
            shown: BTreeMap::new(),
        }
    }

    /// Sets the bar of a step, and announces a new one.
    pub(crate) fn show(&mut self, step: &str, done_bytes: u64, total_bytes: u64) {
        let bar = self.shown.entry(step.to_owned()).or_insert_with(|| {
            let name = one_line(step);
            if !self.live {
                eprintln!("{}: {} {name} ({})", self.vm, self.doing, HumanBytes(total_bytes));
            }
            let style = ProgressStyle::with_template(TEMPLATE);
            let bar = ProgressBar::new(total_bytes)
                .with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
            bar.set_prefix(name);
            self.all.add(bar)
        });
        bar.set_length(total_bytes);
        bar.set_position(done_bytes);
    }

    /// Removes the bars.
    pub(crate) fn end(&self) {
        let _ = self.all.clear();
    }
}
