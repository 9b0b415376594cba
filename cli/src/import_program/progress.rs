//! Progress of a pull: a bar for each layer on a terminal, else a line for each step.

use std::collections::BTreeMap;
use std::io::IsTerminal;

use husk_images::Event;
use indicatif::{HumanBytes, MultiProgress, ProgressBar, ProgressStyle};

use crate::failure::one_line;

/// Characters of a layer's digest that are shown, with `sha256:`.
const DIGEST: usize = 19;
/// Bar of a layer or of unpacking.
const TEMPLATE: &str = "{prefix:19}  {bar:30}  {bytes:>10} of {total_bytes:<10}  {msg}";

#[derive(Debug)]
pub(super) struct Progress {
    image: String,
    bars: MultiProgress,
    live: bool,
    /// By digest; that of unpacking has none.
    shown: BTreeMap<String, ProgressBar>,
}

impl Progress {
    pub(super) fn new(image: &str) -> Progress {
        Progress {
            image: one_line(image),
            bars: MultiProgress::new(),
            live: std::io::stderr().is_terminal(),
            shown: BTreeMap::new(),
        }
    }

    pub(super) fn show(&mut self, event: &Event) {
        match event {
            Event::Layer { digest, done, size } => {
                let short: String = one_line(digest).chars().take(DIGEST).collect();
                self.bar(&short, *done, *size);
            }
            Event::Unpacking { done, size } => self.bar("unpacking", *done, *size),
            Event::Retrying { reason } => {
                let line = format!("{}: {}; trying again", self.image, one_line(reason));
                let _ = self.bars.println(&line);
                if !self.live {
                    eprintln!("{line}");
                }
            }
            // Those of volumes, and the last ones.
            Event::Download { .. }
            | Event::Converting { .. }
            | Event::Done { .. }
            | Event::Filled { .. }
            | Event::Failed { .. } => {}
        }
    }

    /// Sets a bar, and announces a new one.
    fn bar(&mut self, name: &str, done: u64, size: u64) {
        if self.shown.is_empty() {
            match self.live {
                true => drop(self.bars.println(format!("pulling {}", self.image))),
                false => eprintln!("pulling {}", self.image),
            }
        }
        let bar = self.shown.entry(name.to_owned()).or_insert_with(|| {
            if !self.live {
                eprintln!("{}: {name} ({})", self.image, HumanBytes(size));
            }
            let style = ProgressStyle::with_template(TEMPLATE);
            let bar =
                ProgressBar::new(size).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
            bar.set_prefix(name.to_owned());
            self.bars.add(bar)
        });
        bar.set_position(done);
    }

    /// Removes the bars.
    pub(super) fn end(&mut self) {
        let _ = self.bars.clear();
    }
}
