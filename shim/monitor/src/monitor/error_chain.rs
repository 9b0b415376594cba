//! Formatting of errors.

use std::error::Error;

/// Formats an error and its causes on one line. A cause that is quoted already is not repeated.
pub(super) fn error_chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.ends_with(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quoted_cause_is_not_repeated() {
        #[derive(Debug, thiserror::Error)]
        #[error("outer: {0}")]
        struct Quoting(#[source] std::io::Error);
        #[derive(Debug, thiserror::Error)]
        #[error("start failed")]
        struct Outer(#[source] Quoting);
        let error = Outer(Quoting(std::io::Error::other("no space")));
        assert_eq!(error_chain(&error), "start failed: outer: no space");
    }
}
