//! Output of a terminal or program so far, and waiting for a pattern in it.

use anyhow::{Result, bail};
use regex::Regex;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Growing output, with the position up to which it has been matched.
#[derive(Debug, Clone, Default)]
pub struct OutputBuffer {
    shared: Arc<(Mutex<State>, Condvar)>,
}

#[derive(Debug, Default)]
struct State {
    text: String,
    seen: usize,
    ended: bool,
    cleaner: Cleaner,
}

impl OutputBuffer {
    /// Appends `bytes` without terminal control sequences.
    pub fn push(&self, bytes: &[u8]) {
        let mut state = self.lock();
        let State { text, cleaner, .. } = &mut *state;
        cleaner.clean(&String::from_utf8_lossy(bytes), text);
        self.shared.1.notify_all();
    }

    /// Marks the end of the output.
    pub fn end(&self) {
        self.lock().ended = true;
        self.shared.1.notify_all();
    }

    /// True if the output has ended.
    pub fn ended(&self) -> bool {
        self.lock().ended
    }

    /// All output.
    pub fn all(&self) -> String {
        self.lock().text.clone()
    }

    /// Output since the last match of [`OutputBuffer::expect`].
    pub fn rest(&self) -> String {
        let state = self.lock();
        state.text[state.seen..].to_owned()
    }

    /// Waits for `pattern` in the output after the last match; returns its groups, the whole match first.
    ///
    /// # Errors
    /// With the end of the text, if `pattern` does not arrive within `limit` or the output has ended.
    pub fn expect(&self, pattern: &str, limit: Duration) -> Result<Vec<String>> {
        let regex = Regex::new(pattern)?;
        let deadline = Instant::now() + limit;
        let mut state = self.lock();
        loop {
            let unseen = &state.text[state.seen..];
            if let Some(found) = regex.captures(unseen) {
                let groups = found
                    .iter()
                    .map(|group| group.map_or("", |group| group.as_str()).to_owned())
                    .collect();
                let end = found.get(0).map_or(0, |whole| whole.end());
                state.seen += end;
                return Ok(groups);
            }
            let why = if state.ended {
                "ended before".to_owned()
            } else if Instant::now() >= deadline {
                format!("{} s went by without", limit.as_secs())
            } else {
                let left = deadline.saturating_duration_since(Instant::now());
                state = self
                    .shared
                    .1
                    .wait_timeout(state, left)
                    .unwrap_or_else(PoisonError::into_inner)
                    .0;
                continue;
            };
            bail!("{why} {pattern:?}; the last was:\n{}", tail(unseen, 1500));
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.shared.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The last `bytes` bytes of `text`, or slightly fewer, from a character boundary.
pub fn tail(text: &str, bytes: usize) -> &str {
    let mut start = text.len().saturating_sub(bytes);
    while !text.is_char_boundary(start) {
        start += 1;
    }
    &text[start..]
}

/// Removes carriage returns and escape sequences, which may arrive in pieces.
#[derive(Debug, Default)]
struct Cleaner {
    state: Escape,
}

#[derive(Debug, Default, Clone, Copy)]
enum Escape {
    #[default]
    None,
    /// After ESC.
    Begun,
    /// In a control sequence, up to a byte from `@` to `~`.
    Control,
    /// In a string, up to BEL or ESC.
    String,
}

impl Cleaner {
    fn clean(&mut self, from: &str, to: &mut String) {
        for c in from.chars() {
            self.state = match (self.state, c) {
                (Escape::None | Escape::String, '\x1b') => Escape::Begun,
                (Escape::None, '\r') => Escape::None,
                (Escape::None, c) => {
                    to.push(c);
                    Escape::None
                }
                (Escape::Begun, '[') => Escape::Control,
                (Escape::Begun, ']' | 'P') => Escape::String,
                (Escape::Begun, _) | (Escape::Control, '@'..='~') | (Escape::String, '\x07') => Escape::None,
                (state @ (Escape::Control | Escape::String), _) => state,
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expected_output_is_skipped() {
        let output = OutputBuffer::default();
        output.push(b"one two");
        let soon = Duration::from_millis(20);
        assert_eq!(output.expect(r"(o)ne", soon).expect("one"), ["one", "o"]);
        assert!(output.expect("one", soon).is_err());
        assert_eq!(output.rest(), " two");
        let other = output.clone();
        let thread = std::thread::spawn(move || other.expect("three", Duration::from_secs(20)));
        output.push(b" thr");
        output.push(b"ee");
        thread.join().expect("no panic").expect("three");
        output.end();
        let error = output.expect("four", Duration::from_secs(60)).expect_err("ended");
        assert!(error.to_string().starts_with("ended before"), "{error}");
    }

    #[test]
    fn terminal_controls_are_left_out() {
        let output = OutputBuffer::default();
        for piece in ["a\x1b[0;1", ";39mb\r\n\x1b]0;title\x07c\x1b[?2004", "hd\x1bMe"] {
            output.push(piece.as_bytes());
        }
        assert_eq!(output.all(), "ab\ncde");
    }

    #[test]
    fn a_tail_begins_at_a_character() {
        assert_eq!(tail("aäöü", 3), "ü");
        assert_eq!(tail("abc", 10), "abc");
    }
}
