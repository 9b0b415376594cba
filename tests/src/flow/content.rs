//! What a stream carries: numbers that tell where they belong.

/// The bytes of a stream, of which any piece can be made on its own.
#[derive(Debug, Clone, Copy)]
pub struct Content {
    seed: u64,
}

impl Content {
    /// Another seed, other bytes.
    pub fn new(seed: u64) -> Self {
        Self { seed }
    }

    /// The bytes from `offset`, a multiple of eight, on.
    pub fn fill(self, offset: u64, bytes: &mut [u8]) {
        for (number, place) in (offset / 8..).zip(bytes.chunks_mut(8)) {
            let word = self.word(number).to_le_bytes();
            place.copy_from_slice(&word[..place.len()]);
        }
    }

    /// The place of the first byte that is not as it should be, of those from `offset` on.
    pub fn difference(self, offset: u64, bytes: &[u8], scratch: &mut [u8]) -> Option<u64> {
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

    /// Sebastiano Vigna's splitmix64, which needs nothing of the numbers before.
    fn word(self, number: u64) -> u64 {
        let mut word = self.seed.wrapping_add(number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_piece_is_as_in_the_whole() {
        let content = Content::new(7);
        let (mut whole, mut piece, mut scratch) = ([0; 64], [0; 21], [0; 64]);
        content.fill(0, &mut whole);
        content.fill(16, &mut piece);
        assert_eq!(piece, whole[16..37]);
        assert_eq!(content.difference(16, &piece, &mut scratch), None);
        piece[20] ^= 1;
        assert_eq!(content.difference(16, &piece, &mut scratch), Some(36));
        // Neither what belongs elsewhere nor another stream's is taken for it.
        assert!(content.difference(8, &whole[..8], &mut scratch).is_some());
        assert!(Content::new(8).difference(0, &whole, &mut scratch).is_some());
    }
}
