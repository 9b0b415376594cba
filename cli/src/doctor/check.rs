//! One thing a node needs, and whether it is there.

use serde::Serialize;

/// How much a missing thing matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Severity {
    /// No VM runs without it.
    Required,
    /// VMs run without some feature or speed.
    Optional,
}

/// Whether it is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum CheckStatus {
    /// It is there and works.
    Present,
    /// It is not there or does not work.
    Missing,
}

/// The result of looking for one thing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Check {
    /// Stable identifier, for scripts.
    pub name: &'static str,
    /// The name people know it by; not in the JSON form.
    #[serde(skip)]
    pub title: &'static str,
    /// Whether it is there.
    pub status: CheckStatus,
    /// How much it matters.
    pub severity: Severity,
    /// What was found.
    pub detail: String,
    /// How to get it, if it is missing and there is a way.
    pub fix: Option<String>,
}

impl Check {
    pub(super) fn present(
        name: &'static str,
        title: &'static str,
        severity: Severity,
        detail: impl Into<String>,
    ) -> Self {
        Self {
            name,
            title,
            status: CheckStatus::Present,
            severity,
            detail: detail.into(),
            fix: None,
        }
    }

    pub(super) fn missing(
        name: &'static str,
        title: &'static str,
        severity: Severity,
        detail: impl Into<String>,
        fix: Option<String>,
    ) -> Self {
        Self {
            name,
            title,
            status: CheckStatus::Missing,
            severity,
            detail: detail.into(),
            fix,
        }
    }

    /// No VM can run because of it.
    pub(crate) fn blocks(&self) -> bool {
        self.status == CheckStatus::Missing && self.severity == Severity::Required
    }
}
