//! SMBIOS 3 tables (DMTF DSP0134 3.2), which `dmidecode` shows. Guests read their UUID from them.

use uuid::Uuid;

use crate::cpuid::Topology;
use crate::layout::{self, Layout};

/// The machine's identity from the manifest.
#[derive(Clone, Debug, Default)]
pub struct SystemIdentity {
    /// System UUID.
    pub uuid: Uuid,
    /// System serial number, may be empty.
    pub serial: String,
}

const ENTRY_POINT_LEN: usize = 24;
/// Maximum length of a string in characters: the manifest allows 256.
const STRING_MAX: usize = 256;

/// One structure under construction: formatted area, then its strings.
struct Structure {
    data: Vec<u8>,
    strings: Vec<String>,
}

impl Structure {
    fn new(kind: u8, handle: u16) -> Self {
        let mut data = vec![kind, 0];
        data.extend(handle.to_le_bytes());
        Self {
            data,
            strings: Vec::new(),
        }
    }

    fn bytes(mut self, bytes: &[u8]) -> Self {
        self.data.extend_from_slice(bytes);
        self
    }

    /// A string reference; an empty string is "not specified" (0).
    fn string(mut self, text: &str) -> Self {
        let text: String = text.chars().filter(|c| *c != '\0').take(STRING_MAX).collect();
        let number = if text.is_empty() {
            0
        } else {
            self.strings.push(text);
            self.strings.len() as u8
        };
        self.data.push(number);
        self
    }

    fn append_to(mut self, out: &mut Vec<u8>) {
        self.data[1] = self.data.len() as u8;
        out.extend(self.data);
        for string in &self.strings {
            out.extend(string.as_bytes());
            out.push(0);
        }
        if self.strings.is_empty() {
            out.push(0);
        }
        out.push(0);
    }
}

const BIOS: u16 = 0x000;
const SYSTEM: u16 = 0x100;
const CHASSIS: u16 = 0x300;
const PROCESSOR: u16 = 0x400;
const MEMORY_ARRAY: u16 = 0x1000;
const MEMORY_DEVICE: u16 = 0x1100;
const MAPPED_ADDRESS: u16 = 0x1300;
const BOOT: u16 = 0x2000;
const END: u16 = 0x7f00;

const UNKNOWN: u8 = 2;
/// Largest memory device whose size fits the 15-bit MiB field.
const SMALL_DEVICE_MIB: u64 = 0x7fff;

fn processors(topology: Topology, out: &mut Vec<u8>) {
    // 1 to 255 counts are given as bytes; the 16-bit fields repeat them.
    let (cores, threads) = (topology.cores, topology.cores * topology.threads);
    for socket in 0..topology.sockets {
        Structure::new(4, PROCESSOR + socket as u16)
            .string(&format!("CPU {socket}"))
            .bytes(&[3, 1]) // central processor, family "other"
            .string("Husk")
            .bytes(&[0; 8]) // processor id
            .string("")
            .bytes(&[0, 0, 0, 0, 0, 0, 0]) // voltage, external clock, maximum and current speed: unknown
            .bytes(&[0x41, 1]) // populated, enabled; upgrade "other"
            .bytes(&[0xff, 0xff, 0xff, 0xff, 0xff, 0xff]) // no cache handles
            .string("")
            .string("")
            .string("")
            .bytes(&[cores as u8, cores as u8, threads.min(255) as u8])
            .bytes(&[4, 0]) // 64-bit capable
            .bytes(&[1, 0]) // family 2 "other"
            .bytes(&(cores as u16).to_le_bytes())
            .bytes(&(cores as u16).to_le_bytes())
            .bytes(&(threads as u16).to_le_bytes())
            .append_to(out);
    }
}

fn memory(layout: &Layout, out: &mut Vec<u8>) {
    let bytes: u64 = layout.ram.iter().map(|r| r.end - r.start).sum();
    Structure::new(16, MEMORY_ARRAY)
        .bytes(&[1, 3, 6]) // other location, system memory, multi-bit ECC
        .bytes(&0x8000_0000u32.to_le_bytes()) // see the extended capacity
        .bytes(&[0xfe, 0xff, 1, 0]) // no error handle, one device
        .bytes(&bytes.to_le_bytes())
        .append_to(out);
    let mib = bytes >> 20;
    let small = if mib < SMALL_DEVICE_MIB {
        mib as u16
    } else {
        SMALL_DEVICE_MIB as u16
    };
    let extended = if mib < SMALL_DEVICE_MIB {
        0
    } else {
        (mib as u32) & 0x7fff_ffff
    };
    Structure::new(17, MEMORY_DEVICE)
        .bytes(&MEMORY_ARRAY.to_le_bytes())
        .bytes(&[0xfe, 0xff, 0xff, 0xff, 0xff, 0xff]) // no error handle, widths unknown
        .bytes(&small.to_le_bytes())
        .bytes(&[9, 0]) // DIMM, no set
        .string("DIMM 0")
        .string("")
        .bytes(&[7, UNKNOWN, 0]) // RAM; type detail: unknown
        .bytes(&[0, 0]) // speed
        .string("Husk")
        .string("")
        .string("")
        .string("")
        .bytes(&[0]) // attributes
        .bytes(&extended.to_le_bytes())
        .bytes(&[0; 8]) // configured speed and voltages
        .append_to(out);
    for (i, range) in layout.ram.iter().enumerate() {
        Structure::new(19, MAPPED_ADDRESS + i as u16)
            .bytes(&[0xff; 8]) // see the extended addresses
            .bytes(&MEMORY_ARRAY.to_le_bytes())
            .bytes(&[1])
            .bytes(&range.start.to_le_bytes())
            .bytes(&(range.end - 1).to_le_bytes())
            .append_to(out);
    }
}

fn structures(identity: &SystemIdentity, topology: Topology, layout: &Layout) -> Vec<u8> {
    let mut out = Vec::new();
    let version = env!("CARGO_PKG_VERSION");
    Structure::new(0, BIOS)
        .string("Husk")
        .string(version)
        .bytes(&[0, 0])
        .string("")
        .bytes(&[0])
        .bytes(&(1u64 << 3).to_le_bytes()) // characteristics not supported
        .bytes(&[1, 0x10]) // ACPI; a virtual machine
        .bytes(&[0, 0, 0xff, 0xff])
        .append_to(&mut out);
    Structure::new(1, SYSTEM)
        .string("KubeVirt")
        .string("None")
        .string("")
        .string(&identity.serial)
        .bytes(&identity.uuid.to_bytes_le())
        .bytes(&[6]) // woken by the power switch
        .string("")
        .string("KubeVirt")
        .append_to(&mut out);
    Structure::new(3, CHASSIS)
        .string("Husk")
        .bytes(&[1]) // other
        .string("")
        .string("")
        .string("")
        .bytes(&[3, 3, 3, UNKNOWN]) // states safe, security unknown
        .bytes(&[0; 8])
        .string("")
        .append_to(&mut out);
    processors(topology, &mut out);
    memory(layout, &mut out);
    Structure::new(32, BOOT).bytes(&[0; 7]).append_to(&mut out);
    Structure::new(127, END).append_to(&mut out);
    out
}

/// The tables are larger than [`layout::SMBIOS`].
#[derive(Debug, thiserror::Error)]
#[error("SMBIOS tables need {0} bytes, only {limit} are reserved", limit = layout::SMBIOS.end - layout::SMBIOS.start)]
pub struct SmbiosTooLarge(usize);

/// Entry point and structures as they are written to [`layout::SMBIOS`].
pub fn tables(
    identity: &SystemIdentity,
    topology: Topology,
    layout: &Layout,
) -> Result<Vec<u8>, SmbiosTooLarge> {
    let body = structures(identity, topology, layout);
    let at = layout::SMBIOS.start + ENTRY_POINT_LEN.next_multiple_of(16) as u64;
    let mut image = b"_SM3_".to_vec();
    image.extend([0, ENTRY_POINT_LEN as u8, 3, 2, 0, 1, 0]);
    image.extend((body.len() as u32).to_le_bytes());
    image.extend(at.to_le_bytes());
    let sum = image.iter().fold(0u8, |a, b| a.wrapping_add(*b));
    image[5] = sum.wrapping_neg();
    image.resize((at - layout::SMBIOS.start) as usize, 0);
    image.extend(body);
    let limit = (layout::SMBIOS.end - layout::SMBIOS.start) as usize;
    if image.len() > limit {
        Err(SmbiosTooLarge(image.len()))
    } else {
        Ok(image)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UUID: Uuid = Uuid::from_u128(0x5d307ca9_b3ef_428c_8861_06e72d69f223);

    fn walk(body: &[u8]) -> Vec<(u8, Vec<u8>, Vec<String>)> {
        let (mut at, mut found) = (0, Vec::new());
        while at < body.len() {
            let len = body[at + 1] as usize;
            let data = body[at..at + len].to_vec();
            at += len;
            let mut strings = Vec::new();
            loop {
                let end = at + body[at..].iter().position(|b| *b == 0).unwrap();
                if end == at {
                    at += if strings.is_empty() { 2 } else { 1 };
                    break;
                }
                strings.push(String::from_utf8(body[at..end].to_vec()).unwrap());
                at = end + 1;
            }
            found.push((data[0], data, strings));
        }
        found
    }

    fn image(memory: u64, topology: Topology) -> Vec<u8> {
        let identity = SystemIdentity {
            uuid: UUID,
            serial: "VMware-42 1a bf ä".into(),
        };
        tables(&identity, topology, &Layout::new(memory, 48).unwrap()).unwrap()
    }

    #[test]
    fn the_structures_the_guest_needs_are_there_with_the_lengths_of_the_specification() {
        let image = image(
            5 << 30,
            Topology {
                sockets: 2,
                cores: 1,
                threads: 1,
            },
        );
        assert_eq!(image[..24].iter().fold(0u8, |a, b| a.wrapping_add(*b)), 0);
        let found = walk(&image[32..]);
        let kinds: Vec<_> = found.iter().map(|(kind, data, _)| (*kind, data.len())).collect();
        let expected = [
            (0, 24),
            (1, 27),
            (3, 22),
            (4, 48),
            (4, 48),
            (16, 23),
            (17, 40),
            (19, 31),
            (19, 31),
            (32, 11),
            (127, 4),
        ];
        assert_eq!(kinds, expected);
    }

    #[test]
    fn uuid_and_serial_are_the_manifests() {
        let image = image(
            64 << 20,
            Topology {
                sockets: 1,
                cores: 1,
                threads: 1,
            },
        );
        let (_, system, strings) = walk(&image[32..]).into_iter().find(|s| s.0 == 1).unwrap();
        assert_eq!(Uuid::from_slice_le(&system[8..24]).unwrap(), UUID);
        assert_eq!(strings, ["KubeVirt", "None", "VMware-42 1a bf ä", "KubeVirt"]);
        assert_eq!(system[7], 3);
    }

    #[test]
    fn large_memory_uses_the_extended_size() {
        let image = image(
            64 << 30,
            Topology {
                sockets: 1,
                cores: 1,
                threads: 1,
            },
        );
        let (_, device, _) = walk(&image[32..]).into_iter().find(|s| s.0 == 17).unwrap();
        assert_eq!(u16::from_le_bytes([device[12], device[13]]), 0x7fff);
        assert_eq!(u32::from_le_bytes(device[28..32].try_into().unwrap()), 64 << 10);
    }
}
