//! Result of one check of the host.

use serde::Serialize;

/// Importance of a feature.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Severity {
    /// No VM can run without it.
    Required,
    /// Without it, VMs lack a feature or are slower.
    Optional,
}

/// Outcome of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum CheckStatus {
    /// The feature is present and works.
    Present,
    /// The feature is missing or does not work.
    Missing,
}

/// Result of one check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Check {
    /// Stable identifier, for scripts.
    pub name: &'static str,
    /// Name in the table; not in the JSON form.
    #[serde(skip)]
    pub title: &'static str,
    pub status: CheckStatus,
    pub severity: Severity,
    /// Finding, in one line.
    pub detail: String,
    /// Way to enable a missing feature, if there is one.
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

    /// True if no VM can run because of this result.
    pub(crate) fn blocks(&self) -> bool {
        self.status == CheckStatus::Missing && self.severity == Severity::Required
    }
}
