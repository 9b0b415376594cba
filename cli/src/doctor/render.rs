//! The report as a table and as JSON.

use std::fmt::Write as _;

use serde::Serialize;

use super::check::{Check, CheckStatus, Severity};

/// Results of all checks.
///
/// The JSON form is stable: fields and checks may be added, none changes its meaning.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Report {
    /// True if no required feature is missing.
    pub can_run_vms: bool,
    /// The verdict in one line.
    pub summary: String,
    /// The checks, in a fixed order.
    pub checks: Vec<Check>,
}

impl Report {
    pub(super) fn new(checks: Vec<Check>) -> Self {
        let blocking: Vec<_> = checks.iter().filter(|check| check.blocks()).collect();
        let summary = match blocking.first() {
            None => "This host can run VMs.".into(),
            Some(first) => format!("This host cannot run VMs: {}: {}.", first.title, first.detail),
        };
        Self {
            can_run_vms: blocking.is_empty(),
            summary,
            checks,
        }
    }

    /// Formats an aligned table, in colour if `colour`.
    pub(crate) fn table(&self, colour: bool) -> String {
        let width = self
            .checks
            .iter()
            .map(|check| check.title.len())
            .max()
            .unwrap_or(0);
        let mut out = String::new();
        for check in &self.checks {
            let (word, code) = match (check.status, check.severity) {
                (CheckStatus::Present, _) => ("ok", "32"),
                (CheckStatus::Missing, Severity::Required) => ("MISSING", "1;31"),
                (CheckStatus::Missing, Severity::Optional) => ("missing", "33"),
            };
            let word = paint(&format!("{word:<8}"), code, colour);
            let _ = writeln!(out, "{:width$}  {word} {}", check.title, check.detail);
            if let Some(fix) = &check.fix {
                let _ = writeln!(out, "{:width$}  {:8} fix: {fix}", "", "");
            }
        }
        let code = if self.can_run_vms { "1;32" } else { "1;31" };
        let _ = writeln!(out, "\n{}", paint(&self.summary, code, colour));
        out
    }

    /// The JSON form, indented.
    pub(crate) fn json(&self) -> String {
        // Serialising strings and booleans into a string cannot fail.
        serde_json::to_string_pretty(self).unwrap_or_default()
    }
}

fn paint(text: &str, code: &str, colour: bool) -> String {
    if colour {
        format!("\x1b[{code}m{text}\x1b[0m")
    } else {
        text.to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        Report::new(vec![
            Check::present("kvm", "/dev/kvm", Severity::Required, "API version 12"),
            Check::missing(
                "mode",
                "guest kernel mode",
                Severity::Required,
                "emulated",
                Some("real metal".into()),
            ),
            Check::missing("tun", "/dev/net/tun", Severity::Optional, "no such device", None),
        ])
    }

    #[test]
    fn the_table_is_aligned_and_plain() {
        assert_eq!(
            report().table(false),
            "/dev/kvm           ok       API version 12\n\
             guest kernel mode  MISSING  emulated\n\
             \x20                           fix: real metal\n\
             /dev/net/tun       missing  no such device\n\
             \n\
             This host cannot run VMs: guest kernel mode: emulated.\n"
        );
    }

    #[test]
    fn colour_only_on_request() {
        assert!(report().table(true).contains("\x1b[1;31mMISSING \x1b[0m"));
        assert!(!report().table(false).contains('\x1b'));
    }

    #[test]
    fn json_keeps_its_shape() {
        let json: serde_json::Value = serde_json::from_str(&report().json()).unwrap();
        assert_eq!(
            json,
            serde_json::json!({
                "canRunVms": false,
                "summary": "This host cannot run VMs: guest kernel mode: emulated.",
                "checks": [
                    {"name": "kvm", "status": "present", "severity": "required", "detail": "API version 12", "fix": null},
                    {"name": "mode", "status": "missing", "severity": "required", "detail": "emulated", "fix": "real metal"},
                    {"name": "tun", "status": "missing", "severity": "optional", "detail": "no such device", "fix": null},
                ],
            })
        );
    }

    #[test]
    fn missing_optional_features_do_not_block() {
        let report = Report::new(vec![Check::missing("tun", "t", Severity::Optional, "x", None)]);
        assert!(report.can_run_vms);
        assert_eq!(report.summary, "This host can run VMs.");
    }
}
