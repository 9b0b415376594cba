//! Bit fields of CPUID registers.

/// Sets `width` bits from bit `shift` on.
pub(super) fn field(register: &mut u32, shift: u32, width: u32, value: u32) {
    let mask = ((1u64 << width) - 1) as u32;
    *register = *register & !(mask << shift) | (value & mask) << shift;
}
