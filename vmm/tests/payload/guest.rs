//! Guests of a few instructions as ELF kernels. Their bytes work in 32-bit and in 64-bit mode.

const LOAD: u64 = 0x10_0000;

/// `out dx, al`.
pub fn out(port: u16, value: u8) -> Vec<u8> {
    let [low, high] = port.to_le_bytes();
    vec![0x66, 0xba, low, high, 0xb0, value, 0xee]
}

/// `mov dx, 0xcf8; mov eax, address; out dx, eax`, then a byte to the data port: a write to PCI configuration space.
pub fn pci_config(slot: u8, register: u8, value: u8) -> Vec<u8> {
    let address = 0x8000_0000 | u32::from(slot) << 11 | u32::from(register & !3);
    let [a, b, c, d] = address.to_le_bytes();
    let mut code = vec![0x66, 0xba, 0xf8, 0x0c, 0xb8, a, b, c, d, 0xef];
    code.extend(out(0xcfc + u16::from(register & 3), value));
    code
}

pub fn print(text: &str) -> Vec<u8> {
    text.bytes().flat_map(|b| out(0x3f8, b)).collect()
}

/// `mov rsi/esi, address; mov ecx, len; mov dx, COM1; rep outsb`, for text at `LOAD + offset`.
pub fn print_string(offset: u8, len: u8) -> Vec<u8> {
    let [a, b, c, d] = (LOAD as u32 + u32::from(offset)).to_le_bytes();
    vec![
        0xbe, a, b, c, d, 0xb9, len, 0, 0, 0, 0x66, 0xba, 0xf8, 0x03, 0xf3, 0x6e,
    ]
}

pub fn power_off() -> Vec<u8> {
    out(0x600, 0x34)
}

pub fn reset() -> Vec<u8> {
    out(0x602, 1)
}

/// `hlt` for ever.
pub fn halt() -> Vec<u8> {
    vec![0xf4, 0xeb, 0xfd]
}

/// Prints `byte` for ever.
pub fn print_for_ever(byte: u8) -> Vec<u8> {
    let mut code = out(0x3f8, byte);
    code.extend([0xeb, (-(code.len() as i8) - 2) as u8]);
    code
}

/// An undefined instruction with no handler: a triple fault.
pub fn triple_fault() -> Vec<u8> {
    vec![0x0f, 0x0b]
}

/// An ELF kernel of `code`; with `pvh`, one with a PVH entry note.
pub fn elf(code: &[u8], pvh: bool) -> Vec<u8> {
    let headers = if pvh { 2u16 } else { 1 };
    let note: Vec<u8> = [4u32, 8, 18]
        .iter()
        .flat_map(|w| w.to_le_bytes())
        .chain(*b"Xen\0")
        .chain(LOAD.to_le_bytes())
        .collect();
    let note_at = 64 + 56 * u64::from(headers);
    let code_at = note_at + note.len() as u64;
    let mut image = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
    for half in [2u16, 62] {
        image.extend(half.to_le_bytes());
    }
    image.extend(1u32.to_le_bytes());
    for word in [LOAD, 64, 0] {
        image.extend(word.to_le_bytes());
    }
    image.extend(0u32.to_le_bytes());
    for half in [64u16, 56, headers, 0, 0, 0] {
        image.extend(half.to_le_bytes());
    }
    let mut segment = |kind: u32, at: u64, address: u64, len: usize| {
        image.extend(kind.to_le_bytes());
        image.extend(7u32.to_le_bytes());
        for word in [at, address, address, len as u64, len as u64, 4] {
            image.extend(word.to_le_bytes());
        }
    };
    segment(1, code_at, LOAD, code.len());
    if pvh {
        segment(4, note_at, 0, note.len());
    }
    image.extend(note);
    image.extend(code);
    image
}
