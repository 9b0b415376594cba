//! Addresses of logical units and the LUN field of requests and events (virtio 1.2, section 5.6.6.1).

use crate::target::Lun;

/// The address of a logical unit on the controller. The channel is always 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UnitAddress {
    /// Target.
    pub target: u8,
    /// Logical unit number.
    pub lun: Lun,
}

impl std::fmt::Display for UnitAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "target {} LUN {}", self.target, self.lun.number())
    }
}

/// The LUN field of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LunField {
    /// A logical unit, which may not exist.
    Unit(UnitAddress),
    /// Not a logical unit of this target. This includes the REPORT LUNS well known logical unit.
    Target(u8),
    /// Not a target.
    Nowhere,
}

/// The REPORT LUNS well known logical unit.
const REPORT_LUNS: [u8; 8] = [0xc1, 0x01, 0, 0, 0, 0, 0, 0];

impl LunField {
    pub fn parse(field: [u8; 8]) -> Self {
        if field == REPORT_LUNS {
            // It names no target. REPORT LUNS reports the LUNs of one target at a time.
            return Self::Target(0);
        }
        let [1, target, ..] = field else {
            return Self::Nowhere;
        };
        let mut bytes = [0; 8];
        bytes[..6].copy_from_slice(&field[2..]);
        match Lun::from_bytes(bytes) {
            Some(lun) => Self::Unit(UnitAddress { target, lun }),
            None => Self::Target(target),
        }
    }
}

impl UnitAddress {
    /// The LUN field of an event. Drivers look a unit up by these bytes as REPORT LUNS returned them: flat space
    /// addressing from 256 on only, unlike in requests.
    pub(crate) fn to_field(self) -> [u8; 8] {
        let [high, low, ..] = self.lun.to_bytes();
        [1, self.target, high, low, 0, 0, 0, 0]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unit(target: u8, lun: u16) -> LunField {
        let lun = Lun::new(lun).unwrap();
        LunField::Unit(UnitAddress { target, lun })
    }

    #[test]
    fn fields_of_requests() {
        for (field, addressed) in [
            ([1, 0, 0, 0, 0, 0, 0, 0], unit(0, 0)),
            ([1, 7, 0, 9, 0, 0, 0, 0], unit(7, 9)),
            ([1, 255, 0x40, 9, 0, 0, 0, 0], unit(255, 9)),
            ([1, 3, 0x7f, 0xff, 0, 0, 0, 0], unit(3, 16_383)),
            ([1, 3, 0x01, 0x00, 0, 0, 0, 0], LunField::Target(3)),
            ([1, 3, 0x80, 0x00, 0, 0, 0, 0], LunField::Target(3)),
            ([1, 3, 0xc1, 0x01, 0, 0, 0, 0], LunField::Target(3)),
            ([1, 3, 0x00, 0x00, 0, 0, 0, 1], LunField::Target(3)),
            ([0xc1, 1, 0, 0, 0, 0, 0, 0], LunField::Target(0)),
            ([0xc1, 1, 0, 0, 0, 0, 0, 1], LunField::Nowhere),
            ([0, 0, 0, 0, 0, 0, 0, 0], LunField::Nowhere),
            ([2, 0, 0, 0, 0, 0, 0, 0], LunField::Nowhere),
        ] {
            assert_eq!(LunField::parse(field), addressed, "{field:x?}");
        }
    }

    #[test]
    fn fields_of_events_are_read_back() {
        for number in [0, 1, 255, 256, 300, 16_383] {
            let lun = Lun::new(number).unwrap();
            let address = UnitAddress { target: 5, lun };
            let field = address.to_field();
            assert_eq!(LunField::parse(field), LunField::Unit(address));
            assert_eq!(field[2] & 0x40 != 0, number > 255);
        }
    }
}
