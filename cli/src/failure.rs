//! How a command fails: what goes to stderr and the exit status.

use std::error::Error;
use std::fmt;
use std::process::ExitCode;

/// Exit status of a command that could not do its work.
pub(crate) const RUNTIME: u8 = 1;
/// Exit status of a command line or manifest that is wrong.
pub(crate) const USAGE: u8 = 2;

/// Why a command ends without having done its work.
#[derive(Debug)]
pub(crate) enum Failure {
    /// Something went wrong; printed as `error: TEXT`.
    Runtime(String),
    /// The caller asked for something that makes no sense; printed as `error: TEXT`.
    Usage(String),
    /// The manifest is wrong; printed as they are, one line per field.
    Manifest(Vec<String>),
    /// A VM ended badly, which has been said already: the status tells how.
    Ended(u8),
}

impl Failure {
    /// Prints the failure and gives its exit status.
    pub(crate) fn report(self) -> ExitCode {
        match self {
            Self::Runtime(text) => {
                eprintln!("error: {}", visible(&text));
                ExitCode::from(RUNTIME)
            }
            Self::Usage(text) => {
                eprintln!("error: {}", visible(&text));
                ExitCode::from(USAGE)
            }
            Self::Manifest(lines) => {
                for line in lines {
                    eprintln!("{}", visible(&line));
                }
                ExitCode::from(USAGE)
            }
            Self::Ended(status) => ExitCode::from(status),
        }
    }

    /// A runtime failure: what was attempted, and why it failed.
    pub(crate) fn at<E: Error + 'static>(attempt: impl fmt::Display) -> impl FnOnce(E) -> Self {
        move |error| Self::Runtime(format!("{attempt}: {}", chain(&error)))
    }
}

impl<E: Error + 'static> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::Runtime(chain(&error))
    }
}

/// An error and its causes in one line, joined by `: `.
pub(crate) fn chain(error: &(dyn Error + 'static)) -> String {
    let mut text = message(error);
    let mut cause = shown_cause(error);
    while let Some(error) = cause {
        let next = message(error);
        // Some libraries repeat their cause in their own text.
        if !text.ends_with(&next) {
            text.push_str(": ");
            text.push_str(&next);
        }
        cause = shown_cause(error);
    }
    text
}

/// What is worth telling of why. How a connection to a monitor broke off says nothing to who asked for it.
fn shown_cause<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a (dyn Error + 'static)> {
    let cause = error.source()?;
    (!error.is::<tonic::Status>() && !cause.is::<tonic::transport::Error>()).then_some(cause)
}

/// An error's text without its causes. A monitor's refusal is its message, without gRPC's codes and metadata.
fn message(error: &(dyn Error + 'static)) -> String {
    match error.downcast_ref::<tonic::Status>() {
        // It is this side's, and not the monitor's word.
        Some(status) if status.source().is_some() => {
            "the VM has ended, or its monitor died: `husk list` tells".to_owned()
        }
        Some(status) if !status.message().is_empty() => one_line(status.message()),
        Some(status) => one_line(status.code().description()),
        None => one_line(&error.to_string()),
    }
}

/// Prints what is worth knowing of a VM that starts all the same.
pub(crate) fn note(text: &str) {
    eprintln!("note: {}", visible(text));
}

/// Text with names from elsewhere in it, such as a file's: nothing in it moves the cursor, colours or reorders.
pub(crate) fn visible(text: &str) -> String {
    let mut visible = String::with_capacity(text.len());
    for c in text.chars() {
        let reorders =
            matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
        if c.is_control() || reorders || matches!(c, '\u{2028}' | '\u{2029}') {
            visible.extend(c.escape_default());
        } else {
            visible.push(c);
        }
    }
    visible
}

/// Makes text from elsewhere fit for one line of a terminal: lines joined by `; `, control characters visible.
pub(crate) fn one_line(text: &str) -> String {
    let mut line = String::new();
    for part in text.lines() {
        let shown = visible(&part.replace('\t', " "));
        let part = shown.trim();
        if part.is_empty() {
            continue;
        }
        if !line.is_empty() {
            line.push_str(if line.ends_with([':', ',', ';']) {
                " "
            } else {
                "; "
            });
        }
        line.push_str(part);
    }
    without_error_numbers(line)
}

/// Takes Rust's ` (os error 2)` out, which says in a number what stands before it in words.
fn without_error_numbers(mut line: String) -> String {
    const BEGIN: &str = " (os error ";
    let mut from = 0;
    while let Some(found) = line[from..].find(BEGIN) {
        let start = from + found;
        let rest = &line[start + BEGIN.len()..];
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        if digits > 0 && rest[digits..].starts_with(')') {
            line.replace_range(start..start + BEGIN.len() + digits + 1, "");
            from = start;
        } else {
            from = start + BEGIN.len();
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Outer(&'static str, std::io::Error);

    impl fmt::Display for Outer {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str(self.0)
        }
    }

    impl Error for Outer {
        fn source(&self) -> Option<&(dyn Error + 'static)> {
            Some(&self.1)
        }
    }

    #[test]
    fn causes_are_chained() {
        let error = Outer("read vm.yaml", std::io::Error::other("disk on fire"));
        assert_eq!(chain(&error), "read vm.yaml: disk on fire");
    }

    #[test]
    fn a_repeated_cause_is_said_once() {
        let error = Outer("read: disk on fire", std::io::Error::other("disk on fire"));
        assert_eq!(chain(&error), "read: disk on fire");
    }

    #[test]
    fn a_refusal_is_told_in_the_monitors_words() {
        let status = tonic::Status::failed_precondition("the VM is not paused");
        assert_eq!(chain(&status), "the VM is not paused");
        assert_eq!(
            chain(&tonic::Status::unavailable("")),
            "The service is currently unavailable"
        );
    }

    #[test]
    fn a_connection_that_broke_off_is_told_in_words() {
        let broken = std::io::Error::from(std::io::ErrorKind::BrokenPipe);
        let status = tonic::Status::from_error(Box::new(broken));
        assert_eq!(
            chain(&status),
            "the VM has ended, or its monitor died: `husk list` tells"
        );
    }

    #[test]
    fn error_numbers_are_left_out() {
        let error = std::io::Error::from_raw_os_error(2);
        assert_eq!(chain(&error), "No such file or directory");
        assert_eq!(one_line("a (os error 2): b (os error 13)"), "a: b");
        assert_eq!(
            one_line("a (os error ), b (os error x) (os error 7"),
            "a (os error ), b (os error x) (os error 7"
        );
    }

    #[test]
    fn text_from_elsewhere_cannot_forge_lines_or_colours() {
        assert_eq!(one_line("a\nerror: b\x1b[31m\r\n"), "a; error: b\\u{1b}[31m");
        assert_eq!(visible("a\nb\x1b[31m\u{202e}é"), "a\\nb\\u{1b}[31m\\u{202e}é");
        assert_eq!(one_line(" tried:\n  x,\n\n  y\n"), "tried: x, y");
    }
}
