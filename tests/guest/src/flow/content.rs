//! Content of a stream: numbers that encode their own offset.

/// Period in bytes of a stream's repeated part.
const PERIOD: usize = 4096;

/// A block whose first eight bytes are its offset.
const LINE: u64 = 64;

/// The bytes of a stream, any piece of which can be generated separately: a repeated block of noise, with a number for
/// the position in each line. A guest would take longer to generate only numbers than to send them.
#[derive(Debug, Clone)]
pub struct Content {
    seed: u64,
    noise: Vec<u8>,
}

impl Content {
    /// Creates the content for `seed`; another seed gives other bytes.
    pub fn new(seed: u64) -> Self {
        let words = (0..PERIOD as u64 / 8).map(|number| mixed(!seed, number));
        Self {
            seed,
            noise: words.flat_map(u64::to_le_bytes).collect(),
        }
    }

    /// The bytes from `offset`.
    pub fn fill(&self, offset: u64, bytes: &mut [u8]) {
        let (mut at, mut rest) = (offset, bytes);
        while !rest.is_empty() {
            let from = (at % PERIOD as u64) as usize;
            let (piece, more) = rest.split_at_mut(rest.len().min(PERIOD - from));
            piece.copy_from_slice(&self.noise[from..from + piece.len()]);
            self.stamp(at, piece);
            at += piece.len() as u64;
            rest = more;
        }
    }

    /// Writes the numbers into a piece of at most one period.
    fn stamp(&self, at: u64, piece: &mut [u8]) {
        for line in at / LINE..(at + piece.len() as u64).div_ceil(LINE) {
            let word = mixed(self.seed, line).to_le_bytes();
            let begin = line * LINE;
            // The first line may start before the piece, and the last may end after it.
            let cut = at.saturating_sub(begin) as usize;
            let to = begin.saturating_sub(at) as usize;
            let word = word.get(cut..).unwrap_or_default();
            let place = &mut piece[to..];
            let len = word.len().min(place.len());
            place[..len].copy_from_slice(&word[..len]);
        }
    }

    /// The position of the first wrong byte, in data that starts at `offset`.
    pub fn difference(&self, offset: u64, bytes: &[u8], scratch: &mut [u8]) -> Option<u64> {
        let wanted = &mut scratch[..bytes.len()];
        self.fill(offset, wanted);
        if bytes == wanted {
            return None;
        }
        let place = bytes
            .iter()
            .zip(wanted)
            .position(|(seen, wanted)| seen != wanted)?;
        Some(offset + place as u64)
    }
}

/// Sebastiano Vigna's splitmix64, which computes each number independently of the previous ones.
fn mixed(seed: u64, number: u64) -> u64 {
    let mut word = seed.wrapping_add(number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_piece_is_as_in_the_whole() {
        let content = Content::new(7);
        let (mut whole, mut scratch) = (vec![0; 3 * PERIOD], vec![0; PERIOD]);
        content.fill(0, &mut whole);
        for (from, len) in [
            (0, 8),
            (16, 21),
            (60, 9),
            (67, 3),
            (4090, 100),
            (4096, 4096),
            (5000, 4000),
        ] {
            let mut piece = vec![0; len];
            content.fill(from as u64, &mut piece);
            assert_eq!(piece, whole[from..from + len], "{len} from {from} on");
            assert_eq!(content.difference(from as u64, &piece, &mut scratch), None);
            piece[len - 1] ^= 1;
            let place = (from + len - 1) as u64;
            assert_eq!(content.difference(from as u64, &piece, &mut scratch), Some(place));
        }
    }

    #[test]
    fn misplaced_bytes_are_not_accepted() {
        let content = Content::new(7);
        let (mut whole, mut scratch) = (vec![0; 2 * PERIOD], vec![0; PERIOD]);
        content.fill(0, &mut whole);
        for (piece, to) in [
            (&whole[..64], 64),
            (&whole[..PERIOD], PERIOD as u64),
            (&whole[PERIOD..], 0),
        ] {
            assert!(content.difference(to, piece, &mut scratch).is_some());
        }
        assert!(
            Content::new(8)
                .difference(8, &whole[8..64], &mut scratch)
                .is_some()
        );
    }
}
