//! Removes the options that a server does not need.
//!
//! The codec trusts the length of some options to the point of a panic, and stops at the first option that it cannot
//! read, such as a host name that is not UTF-8. So it only gets the options that are used, and only with a valid
//! length.

/// Length of a DHCPv4 packet before its options, with the magic cookie.
const HEADER: usize = 240;
/// Magic cookie of DHCP (RFC 2131, section 3).
const MAGIC: [u8; 4] = [99, 130, 83, 99];
const PAD: u8 = 0;
const END: u8 = 255;

/// Keeps requested address, message type, server identifier and client identifier. `None` if the packet is not DHCP.
pub(super) fn v4(packet: &[u8]) -> Option<Vec<u8>> {
    let (header, mut rest) = packet.split_at_checked(HEADER)?;
    if header[HEADER - 4..] != MAGIC {
        return None;
    }
    let mut kept = header.to_vec();
    while let [code, tail @ ..] = rest {
        rest = match *code {
            PAD => tail,
            END => break,
            _ => {
                let Some((length, tail)) = tail.split_first() else {
                    break;
                };
                let Some((value, tail)) = tail.split_at_checked((*length).into()) else {
                    break;
                };
                if matches!((code, length), (50 | 54, 4) | (53, 1) | (61, 2..)) {
                    kept.extend([*code, *length]);
                    kept.extend(value);
                }
                tail
            }
        };
    }
    kept.push(END);
    Some(kept)
}

/// Keeps client and server identifier, IA_NA with its addresses, and rapid commit.
pub(super) fn v6(packet: &[u8]) -> Option<Vec<u8>> {
    let (header, options) = packet.split_at_checked(4)?;
    let mut kept = header.to_vec();
    for (code, value) in V6Options(options) {
        match (code, value.len()) {
            (1 | 2, 1..) | (14, 0) => push(&mut kept, code, value),
            (3, 12..) => {
                let (fixed, inner) = value.split_at(12);
                let mut association = fixed.to_vec();
                for (code, value) in V6Options(inner) {
                    if let (5, Some(address)) = (code, value.get(..24)) {
                        push(&mut association, code, address);
                    }
                }
                push(&mut kept, code, &association);
            }
            _ => {}
        }
    }
    Some(kept)
}

fn push(kept: &mut Vec<u8>, code: u16, value: &[u8]) {
    kept.extend(code.to_be_bytes());
    // Never longer than the option it was copied from.
    kept.extend((value.len() as u16).to_be_bytes());
    kept.extend(value);
}

/// Iterator over options up to the first truncated one.
struct V6Options<'a>(&'a [u8]);

impl<'a> Iterator for V6Options<'a> {
    type Item = (u16, &'a [u8]);

    fn next(&mut self) -> Option<(u16, &'a [u8])> {
        let (head, rest) = self.0.split_at_checked(4)?;
        let length = u16::from_be_bytes([head[2], head[3]]);
        let (value, rest) = rest.split_at_checked(length.into())?;
        self.0 = rest;
        Some((u16::from_be_bytes([head[0], head[1]]), value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_options_survive_malformed_ones() {
        let mut packet = vec![0; HEADER];
        packet[236..].copy_from_slice(&MAGIC);
        // Client network interface identifier (94) with a wrong length, at which the codec panics.
        packet.extend([
            94, 1, 9, 0, 53, 1, 1, 12, 2, 0xff, 0xfe, 50, 4, 10, 0, 0, 1, 50, 3, 1, 2, 3, 7, 200,
        ]);
        let kept = v4(&packet).unwrap();
        assert_eq!(kept[HEADER..], [53, 1, 1, 50, 4, 10, 0, 0, 1, 255]);
        packet[239] = 0;
        assert_eq!(v4(&packet), None);
    }

    #[test]
    fn nested_options_are_kept_one_level_deep() {
        let address = [[7; 24].as_slice(), &[0, 13, 0, 0]].concat();
        let mut association = vec![1; 12];
        push(&mut association, 5, &address);
        push(&mut association, 9, &[0; 40]);
        let mut packet = vec![1, 0, 0, 1];
        push(&mut packet, 17, &[1]);
        push(&mut packet, 3, &association);
        packet.extend([0, 1, 0, 99]);
        let mut wanted = vec![1; 12];
        push(&mut wanted, 5, &[7; 24]);
        let mut all = vec![1, 0, 0, 1];
        push(&mut all, 3, &wanted);
        assert_eq!(v6(&packet), Some(all));
    }
}
