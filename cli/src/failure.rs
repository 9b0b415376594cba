//! Errors of commands: the text on stderr and the exit status.

use std::error::Error;
use std::fmt;
use std::process::ExitCode;

/// Exit status of a command that failed.
pub(crate) const RUNTIME: u8 = 1;
/// Exit status for a wrong command line or manifest.
pub(crate) const USAGE: u8 = 2;

/// Reason why a command failed.
#[derive(Debug)]
pub(crate) enum Failure {
    /// A failure at run time; printed as `error: TEXT`.
    Runtime(String),
    /// The request is invalid; printed as `error: TEXT`.
    Usage(String),
    /// The manifest is invalid; these lines, one per field, are printed as they are.
    Manifest(Vec<String>),
    /// The reason was already printed; only the exit status is left.
    Ended(u8),
}

impl Failure {
    /// Prints the failure and returns its exit status.
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

    /// Maps an error to a runtime failure with the text `ATTEMPT: ERROR`.
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

/// The cause of an error, unless it is a detail of the connection to the monitor, which does not help the user.
fn shown_cause<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a (dyn Error + 'static)> {
    let cause = error.source()?;
    (!error.is::<tonic::Status>() && !cause.is::<tonic::transport::Error>()).then_some(cause)
}

/// Text of an error without its causes. Of a gRPC status only the message is used, without code and metadata.
fn message(error: &(dyn Error + 'static)) -> String {
    match error.downcast_ref::<tonic::Status>() {
        // A status with a source was made by the client, not sent by the monitor.
        Some(status) if status.source().is_some() => {
            "the VM has ended or its monitor died; `husk list` shows which VMs run".to_owned()
        }
        Some(status) if !status.message().is_empty() => one_line(status.message()),
        Some(status) => one_line(status.code().description()),
        None => one_line(&error.to_string()),
    }
}

/// Prints a warning to stderr. The command continues.
pub(crate) fn print_warning(text: &str) {
    eprintln!("warning: {}", visible(text));
}

/// Escapes control and bidirectional characters, so that untrusted text, such as a file name, cannot control the
/// terminal.
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

/// Turns untrusted text into one line for a terminal: joins lines by `; ` and escapes control characters.
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

/// Removes Rust's ` (os error 2)`, which repeats the preceding text as a number.
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
    fn a_repeated_cause_is_printed_once() {
        let error = Outer("read: disk on fire", std::io::Error::other("disk on fire"));
        assert_eq!(chain(&error), "read: disk on fire");
    }

    #[test]
    fn a_status_is_reduced_to_its_message() {
        let status = tonic::Status::failed_precondition("the VM is not paused");
        assert_eq!(chain(&status), "the VM is not paused");
        assert_eq!(
            chain(&tonic::Status::unavailable("")),
            "The service is currently unavailable"
        );
    }

    #[test]
    fn a_broken_connection_has_a_readable_text() {
        let broken = std::io::Error::from(std::io::ErrorKind::BrokenPipe);
        let status = tonic::Status::from_error(Box::new(broken));
        assert_eq!(
            chain(&status),
            "the VM has ended or its monitor died; `husk list` shows which VMs run"
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
