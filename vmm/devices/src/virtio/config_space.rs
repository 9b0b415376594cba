//! Device configuration space as bytes (virtio 1.2, section 2.5).

/// Copies `data.len()` bytes at `offset` of `space` to `data`. Bytes beyond the end of `space` read as zero.
pub fn read(space: &[u8], offset: u64, data: &mut [u8]) {
    data.fill(0);
    let rest = usize::try_from(offset)
        .ok()
        .and_then(|offset| space.get(offset..))
        .unwrap_or(&[]);
    let len = rest.len().min(data.len());
    data[..len].copy_from_slice(&rest[..len]);
}

#[cfg(test)]
mod tests {
    use super::read;

    #[test]
    fn reads_end_with_the_space() {
        for (offset, expected) in [
            (0, [1, 2, 3]),
            (2, [3, 4, 0]),
            (4, [0; 3]),
            (5, [0; 3]),
            (u64::MAX - 1, [0; 3]),
        ] {
            let mut data = [0xee; 3];
            read(&[1, 2, 3, 4], offset, &mut data);
            assert_eq!(data, expected, "{offset}");
        }
    }
}
