//! Reads a guest's serial line, with the time at which each piece of output arrived.

use anyhow::{Result, bail};
use std::io::Read;
use std::ops::Range;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Instant;

/// Number of characters of the line that are quoted at the end of an error.
const TAIL: usize = 600;

/// A serial line that is being recorded: a thread reads output as it arrives.
#[derive(Debug)]
pub struct Serial {
    chunks: Receiver<(Instant, Vec<u8>)>,
    text: Vec<u8>,
    /// End offset in `text` of each chunk, and the time it arrived.
    arrivals: Vec<(usize, Instant)>,
    /// The words that were matched last.
    done: Range<usize>,
    /// Text between the last two matches.
    said: Range<usize>,
}

impl Serial {
    /// Starts recording `line` until it ends.
    pub fn watch(mut line: impl Read + Send + 'static) -> Self {
        let (sender, chunks) = channel();
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(count @ 1..) = line.read(&mut buffer) {
                if sender.send((Instant::now(), buffer[..count].to_vec())).is_err() {
                    break;
                }
            }
        });
        Self {
            chunks,
            text: Vec::new(),
            arrivals: Vec::new(),
            done: 0..0,
            said: 0..0,
        }
    }

    /// Waits until the guest prints `words` after the previous match; returns the time at which they arrived.
    ///
    /// # Errors
    /// If the line ends or `deadline` passes first; the error ends with the guest's last output.
    pub fn wait_for(&mut self, words: &str, deadline: Instant) -> Result<Instant> {
        match self.poll(&[words], deadline)? {
            Some((_, when)) => Ok(when),
            None => bail!("the guest did not say {words:?} in time; last:\n{}", self.tail()),
        }
    }

    /// Waits for the first of several texts; returns its index and arrival time, or `None` if `pause` ends first.
    ///
    /// # Errors
    /// If the line ends.
    pub fn poll(&mut self, words: &[&str], pause: Instant) -> Result<Option<(usize, Instant)>> {
        let longest = words.iter().map(|words| words.len()).max().unwrap_or(0);
        let mut searched = self.done.end;
        loop {
            let found = words.iter().enumerate().filter_map(|(which, words)| {
                let at = searched + find(&self.text[searched..], words.as_bytes())?;
                Some((at + words.len(), at, which))
            });
            if let Some((end, at, which)) = found.min() {
                self.said = self.done.end..at;
                self.done = at..end;
                let chunk = self.arrivals.partition_point(|(chunk_end, _)| *chunk_end < end);
                return Ok(Some((which, self.arrivals[chunk].1)));
            }
            searched = self.done.end.max(self.text.len().saturating_sub(longest));
            match self
                .chunks
                .recv_timeout(pause.saturating_duration_since(Instant::now()))
            {
                Ok((when, bytes)) => self.take(when, &bytes),
                Err(RecvTimeoutError::Timeout) => return Ok(None),
                Err(RecvTimeoutError::Disconnected) => {
                    bail!("the guest ended without saying {words:?}; last:\n{}", self.tail())
                }
            }
        }
    }

    /// Waits until the line has ended and no more output can arrive.
    ///
    /// # Errors
    /// If `deadline` passes first.
    pub fn wait_for_end(&mut self, deadline: Instant) -> Result<()> {
        loop {
            match self
                .chunks
                .recv_timeout(deadline.saturating_duration_since(Instant::now()))
            {
                Ok((when, bytes)) => self.take(when, &bytes),
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
                Err(RecvTimeoutError::Timeout) => {
                    bail!("the guest did not end in time; last:\n{}", self.tail())
                }
            }
        }
    }

    fn take(&mut self, when: Instant, bytes: &[u8]) {
        self.text.extend_from_slice(bytes);
        self.arrivals.push((self.text.len(), when));
    }

    /// Text between the last two matches.
    pub fn said(&self) -> String {
        plain(&String::from_utf8_lossy(&self.text[self.said.clone()]))
    }

    /// The last line received, complete or not.
    pub fn last_line(&self) -> String {
        let start = self.text.len().saturating_sub(TAIL);
        let text = plain(&String::from_utf8_lossy(&self.text[start..]));
        text.lines()
            .rfind(|line| !line.trim().is_empty())
            .unwrap_or_default()
            .to_owned()
    }

    fn tail(&self) -> String {
        plain(&String::from_utf8_lossy(
            &self.text[self.text.len().saturating_sub(TAIL)..],
        ))
    }
}

/// `text` without carriage returns, terminal sequences and other control characters.
pub fn plain(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text.chars().peekable();
    while let Some(c) = rest.next() {
        if c == '\x1b' {
            if rest.next_if_eq(&'[').is_some() {
                // Parameters, then one final letter.
                for c in rest.by_ref() {
                    if ('@'..='~').contains(&c) {
                        break;
                    }
                }
            } else {
                rest.next();
            }
        } else if c == '\n' || c == '\t' || !c.is_control() {
            out.push(c);
        }
    }
    out
}

fn find(text: &[u8], words: &[u8]) -> Option<usize> {
    text.windows(words.len().max(1))
        .position(|window| window == words)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::time::Duration;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(10)
    }

    #[test]
    fn words_are_found_across_chunks_and_timed() {
        let (reader, mut writer) = std::io::pipe().expect("a pipe");
        let mut serial = Serial::watch(reader);
        let began = Instant::now();
        writer.write_all(b"boot log\nlog").expect("written");
        let late = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(80));
            writer.write_all(b"in: ").expect("written");
        });
        serial.wait_for("log\n", soon()).expect("said");
        let at = serial.wait_for("login: ", soon()).expect("said");
        assert!(at - began >= Duration::from_millis(80));
        late.join().expect("joined");
        let end = serial.wait_for("more", soon()).expect_err("ended").to_string();
        assert!(end.contains("ended without") && end.ends_with("login: "), "{end}");
    }

    #[test]
    fn time_runs_out() {
        let (reader, mut writer) = std::io::pipe().expect("a pipe");
        let mut serial = Serial::watch(reader);
        writer.write_all(b"one two").expect("written");
        let short = || Instant::now() + Duration::from_millis(30);
        assert_eq!(serial.poll(&["three"], short()).expect("no end"), None);
        let none = serial.wait_for("three", short());
        assert!(none.expect_err("nothing came").to_string().contains("in time"));
        // Output that arrived meanwhile is not lost.
        let (which, _) = serial
            .poll(&["two", "one"], short())
            .expect("no end")
            .expect("said");
        assert_eq!(which, 1);
    }

    #[test]
    fn an_answer_is_cut_out() {
        let mut serial = Serial::watch(&b"$ echo <ls >end\r\n<\x1b[1mvda\x1b[0m\r\nvdb\r\n>"[..]);
        serial.wait_for("\n<", soon()).expect("said");
        serial.wait_for(">", soon()).expect("said");
        assert_eq!(serial.said(), "vda\nvdb\n");
        assert_eq!(serial.last_line(), ">");
    }
}
