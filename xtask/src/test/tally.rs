//! Counts the results that test programs print.

/// Counts of test results.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Tally {
    /// Tests that passed.
    pub passed: u64,
    /// Tests that failed, and stages that failed for another reason.
    pub failed: u64,
    /// Tests that were skipped on purpose.
    pub skipped: u64,
    /// Names of cases that failed in a lab and passed at a later attempt.
    pub flaky: Vec<String>,
}

/// Maximum number of flaky cases in a good run.
const FLAKY: usize = 3;

impl Tally {
    /// Counts a failure that no test program counts, and prints it.
    pub fn fail(&mut self, what: &str, why: &str) {
        self.failed += 1;
        println!("FAILED {what}: {why}");
    }

    /// Adds the counts of `other`.
    pub fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
        self.flaky.extend(other.flaky);
    }

    /// Counts the closing line of a libtest program, if `line` is one:
    /// `test result: ok. 5 passed; 0 failed; 1 ignored; 0 measured; 2 filtered out; finished in 0.01s`.
    /// Tests that were filtered out count as skipped in a run of `all` tests. True if it is such a line.
    pub fn libtest(&mut self, line: &str, all: bool) -> bool {
        let Some((_, counts)) = line
            .strip_prefix("test result: ")
            .and_then(|result| result.split_once(". "))
        else {
            return false;
        };
        for count in counts.split(';') {
            match pair(count) {
                Some((number, "passed")) => self.passed += number,
                Some((number, "failed")) => self.failed += number,
                Some((number, "ignored")) => self.skipped += number,
                Some((number, "filtered out")) if all => self.skipped += number,
                _ => {}
            }
        }
        true
    }

    /// Counts the closing line of the end-to-end suite, if `line` is it: `e2e: 5 passed, 0 failed, 1 skipped`.
    pub fn end_to_end(&mut self, line: &str) -> bool {
        let Some(counts) = line.strip_prefix("e2e: ") else {
            return false;
        };
        let counts: Option<Vec<_>> = counts.split(", ").map(pair).collect();
        match counts.as_deref() {
            Some([(passed, "passed"), (failed, "failed"), (skipped, "skipped")]) => {
                self.passed += passed;
                self.failed += failed;
                self.skipped += skipped;
                true
            }
            _ => false,
        }
    }

    /// Counts a failure if too many cases are flaky.
    pub fn judge_flaky(&mut self) {
        if self.flaky.len() > FLAKY {
            let why = format!("{} cases are flaky, and {FLAKY} may be", self.flaky.len());
            self.fail("flaky cases", &why);
        }
    }

    /// `flaky: 2 (boots, stop)`.
    pub fn flaky_line(&self) -> String {
        if self.flaky.is_empty() {
            return "flaky: 0".to_owned();
        }
        format!(
            "flaky: {} ({}), logs in target/flaky",
            self.flaky.len(),
            self.flaky.join(", ")
        )
    }

    /// True if nothing failed and something passed.
    pub fn good(&self) -> bool {
        self.failed == 0 && self.passed > 0
    }

    /// The closing line.
    pub fn closing(&self) -> String {
        let Self {
            passed,
            failed,
            skipped,
            flaky: _,
        } = self;
        format!("{passed} passed, {failed} failed, {skipped} skipped")
    }
}

/// Parses `5 passed` into its number and word.
fn pair(count: &str) -> Option<(u64, &str)> {
    let (number, word) = count.trim().split_once(' ')?;
    Some((number.parse().ok()?, word))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_program_counts_once() {
        let mut tally = Tally::default();
        assert!(!tally.good(), "no tests at all is not good");
        for line in [
            "running 3 tests",
            "test result: ok. 5 passed; 0 failed; 1 ignored; 0 measured; 2 filtered out; finished in 0.01s",
            "test result: FAILED. 7 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1.00s",
            "test test result ... ok",
        ] {
            tally.libtest(line, false);
        }
        assert!(!tally.end_to_end("ok boots 12.3s"));
        assert!(!tally.end_to_end("e2e: many passed, 0 failed, 0 skipped"));
        assert!(!tally.end_to_end("e2e: 1 passed"));
        assert!(tally.end_to_end("e2e: 10 passed, 1 failed, 3 skipped"));
        assert_eq!(tally.closing(), "22 passed, 3 failed, 4 skipped");
        assert!(!tally.good());
    }

    #[test]
    fn more_than_three_flaky_cases_fail_the_run() {
        let mut tally = Tally {
            passed: 4,
            ..Tally::default()
        };
        assert_eq!(tally.flaky_line(), "flaky: 0");
        tally.flaky = ["a", "b", "c"].map(str::to_owned).into();
        tally.judge_flaky();
        assert!(tally.good());
        assert_eq!(tally.flaky_line(), "flaky: 3 (a, b, c), logs in target/flaky");
        tally.add(Tally {
            flaky: vec!["d".to_owned()],
            ..Tally::default()
        });
        tally.judge_flaky();
        assert_eq!(tally.closing(), "4 passed, 1 failed, 0 skipped");
    }

    #[test]
    fn a_failed_stage_counts() {
        let mut tally = Tally {
            passed: 4,
            ..Tally::default()
        };
        assert!(tally.good());
        tally.fail("clippy", "exit status: 1");
        assert_eq!(tally.closing(), "4 passed, 1 failed, 0 skipped");
        assert!(!tally.good());
    }
}
