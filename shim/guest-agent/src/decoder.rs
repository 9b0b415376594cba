//! Splits the guest's bytes into lines, with bounded memory.

use crate::error::Fault;

/// Byte that the agent sends before the reply to `guest-sync-delimited`. It occurs in no UTF-8 text.
pub(crate) const SENTINEL: u8 = 0xff;

/// The line that is being received.
#[derive(Debug, Default)]
pub(crate) struct LineDecoder {
    line: Vec<u8>,
    mode: Mode,
    /// Longest line, in bytes without its end.
    limit: usize,
    /// Bytes that may still arrive for this reply, and how many there were at its start.
    left: usize,
    budget: usize,
}

/// State of the decoder.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Skips everything up to the sentinel. A line after it that is too long is skipped as well.
    #[default]
    Hunting,
    /// After the sentinel while hunting.
    Found,
    /// Each line is a reply.
    Synchronized,
}

impl LineDecoder {
    /// Begins the reception of a reply of at most `limit` bytes, among at most `budget` bytes in all.
    pub(crate) fn begin(&mut self, mode: Mode, limit: usize, budget: usize) {
        self.line = Vec::new();
        self.mode = mode;
        self.limit = limit;
        self.left = budget;
        self.budget = budget;
    }

    /// Looks for the next sentinel, within the same budget.
    pub(crate) fn resync(&mut self) {
        self.mode = Mode::Hunting;
    }

    /// Takes bytes from the front of `input` up to the end of a line that is not blank, and returns that line; `None`
    /// after all of `input`.
    ///
    /// # Errors
    /// A line is longer than the limit; more bytes came than the budget. [`LineDecoder::begin`] must follow.
    pub(crate) fn take(&mut self, input: &mut &[u8]) -> Result<Option<Vec<u8>>, Fault> {
        while !input.is_empty() {
            let end = input.iter().position(|byte| matches!(*byte, b'\n' | SENTINEL));
            let (part, ended_by) = match end {
                Some(end) => (&input[..end], Some(input[end])),
                None => (*input, None),
            };
            let used = part.len() + usize::from(ended_by.is_some());
            self.left = self.left.checked_sub(used).ok_or(Fault::Flood(self.budget))?;
            *input = &input[used..];
            self.append(part)?;
            match ended_by {
                // The agent's parser starts a new value here, so the bytes before belong to no reply.
                Some(SENTINEL) => {
                    self.line.clear();
                    if self.mode == Mode::Hunting {
                        self.mode = Mode::Found;
                    }
                }
                Some(_) if self.mode != Mode::Hunting => {
                    let line = std::mem::take(&mut self.line);
                    if !line.trim_ascii().is_empty() {
                        return Ok(Some(line));
                    }
                }
                _ => {}
            }
        }
        Ok(None)
    }

    fn append(&mut self, part: &[u8]) -> Result<(), Fault> {
        if self.mode == Mode::Hunting {
            return Ok(());
        }
        if self.line.len() + part.len() <= self.limit {
            self.line.extend_from_slice(part);
            return Ok(());
        }
        self.line = Vec::new();
        if self.mode == Mode::Synchronized {
            return Err(Fault::TooLong(self.limit));
        }
        self.mode = Mode::Hunting;
        Ok(())
    }

    /// Bytes of memory in use.
    #[cfg(test)]
    pub(crate) fn capacity(&self) -> usize {
        self.line.capacity()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn decoder(mode: Mode) -> LineDecoder {
        let mut decoder = LineDecoder::default();
        decoder.begin(mode, 16, 64);
        decoder
    }

    fn line(decoder: &mut LineDecoder, mut input: &[u8]) -> Option<Vec<u8>> {
        decoder.take(&mut input).unwrap()
    }

    #[test]
    fn a_line_may_arrive_in_parts_and_blank_lines_are_skipped() {
        let mut decoder = decoder(Mode::Synchronized);
        let mut input: &[u8] = b"\r\n  \n{\"re";
        assert_eq!(decoder.take(&mut input), Ok(None));
        let mut input: &[u8] = b"turn\"}\nnext";
        assert_eq!(decoder.take(&mut input), Ok(Some(b"{\"return\"}".to_vec())));
        assert_eq!(input, b"next");
    }

    #[test]
    fn hunting_skips_to_the_sentinel_and_long_lines_after_it() {
        let mut decoder = decoder(Mode::Hunting);
        assert_eq!(
            line(&mut decoder, b"{}\ngarbage\xff\xff12\n"),
            Some(b"12".to_vec())
        );
        assert_eq!(line(&mut decoder, b"3\n"), Some(b"3".to_vec()));
        assert_eq!(line(&mut decoder, b"0123456789abcdefg\n"), None);
        assert_eq!(line(&mut decoder, b"4\n\xff5\n"), Some(b"5".to_vec()));
    }

    #[test]
    fn the_sentinel_drops_an_unfinished_line() {
        assert_eq!(
            line(&mut decoder(Mode::Synchronized), b"{\"ret\xff{}\n"),
            Some(b"{}".to_vec())
        );
    }

    #[test]
    fn lines_and_replies_are_bounded() {
        let mut input: &[u8] = b"0123456789abcdefg";
        assert_eq!(
            decoder(Mode::Synchronized).take(&mut input),
            Err(Fault::TooLong(16))
        );
        let mut decoder = decoder(Mode::Synchronized);
        assert_eq!(decoder.take(&mut &[b'\n'; 64][..]), Ok(None));
        assert_eq!(decoder.take(&mut &[b'\n'; 1][..]), Err(Fault::Flood(64)));
        decoder.begin(Mode::Hunting, 16, 64);
        assert_eq!(decoder.take(&mut &[0; 64][..]), Ok(None));
        assert_eq!(decoder.take(&mut &[0; 1][..]), Err(Fault::Flood(64)));
    }

    proptest! {
        /// The parts in which bytes arrive do not matter, and no input takes more memory than the limit allows.
        #[test]
        fn splits_do_not_matter(
            bytes in proptest::collection::vec(prop_oneof![Just(b'\n'), Just(SENTINEL), any::<u8>()], 0..300),
            part in 1usize..20,
            is_synchronized: bool,
        ) {
            let mode = if is_synchronized { Mode::Synchronized } else { Mode::Hunting };
            let run = |parts: &mut dyn Iterator<Item = &[u8]>| {
                let mut decoder = decoder(mode);
                let mut lines = Vec::new();
                for mut part in parts {
                    loop {
                        assert!(decoder.capacity() <= 32);
                        match decoder.take(&mut part) {
                            Ok(Some(line)) => lines.push(Ok(line)),
                            Ok(None) => break,
                            Err(fault) => {
                                lines.push(Err(fault));
                                return lines;
                            }
                        }
                    }
                }
                lines
            };
            let whole = run(&mut std::iter::once(&bytes[..]));
            let split = run(&mut bytes.chunks(part));
            // A fault is found at the latest at the end of its line, so a split may find it one line earlier.
            let received = |line: &Result<Vec<u8>, Fault>| line.clone().ok();
            let whole: Vec<_> = whole.iter().filter_map(received).collect();
            let split: Vec<_> = split.iter().filter_map(received).collect();
            prop_assert_eq!(whole, split);
        }
    }
}
