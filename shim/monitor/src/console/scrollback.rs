//! The last output of the guest.

use std::collections::VecDeque;

/// Maximum bytes.
pub(super) const SCROLLBACK: usize = 64 << 10;

#[derive(Debug, Default)]
pub(super) struct Scrollback {
    bytes: VecDeque<u8>,
}

impl Scrollback {
    pub(super) fn append(&mut self, data: &[u8]) {
        let kept = &data[data.len().saturating_sub(SCROLLBACK)..];
        let excess = (self.bytes.len() + kept.len()).saturating_sub(SCROLLBACK);
        self.bytes.drain(..excess);
        self.bytes.extend(kept);
    }

    pub(super) fn content(&self) -> Vec<u8> {
        self.bytes.iter().copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_bytes_are_kept() {
        let mut scrollback = Scrollback::default();
        let all: Vec<u8> = (0..3 * SCROLLBACK + 17).map(|n| (n % 251) as u8).collect();
        for part in all.chunks(1000) {
            scrollback.append(part);
        }
        assert_eq!(scrollback.content(), all[all.len() - SCROLLBACK..]);
        scrollback.append(&all);
        assert_eq!(scrollback.content(), all[all.len() - SCROLLBACK..]);
    }
}
