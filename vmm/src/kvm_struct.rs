//! Structures of KVM's API in saved state: base64 of exactly the structure's bytes.
//!
//! The serde implementations of kvm-bindings accept any length: they pad or cut what they read.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use kvm_bindings::{
    kvm_debugregs, kvm_irqchip__bindgen_ty_1, kvm_lapic_state, kvm_regs, kvm_sregs, kvm_vcpu_events,
    kvm_xcrs, kvm_xsave,
};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// A structure of KVM's API that is saved whole.
pub trait KvmStruct: FromBytes + IntoBytes + Immutable + Default {
    /// Name of the structure's content, for errors.
    const NAME: &'static str;
}

macro_rules! kvm_structs {
    ($($kind:ty: $name:literal,)*) => {
        $(impl KvmStruct for $kind {
            const NAME: &'static str = $name;
        })*
    };
}

kvm_structs! {
    kvm_regs: "registers",
    kvm_sregs: "special registers",
    kvm_vcpu_events: "vCPU events",
    kvm_debugregs: "debug registers",
    kvm_xcrs: "XCRs",
    kvm_xsave: "XSAVE state",
    kvm_lapic_state: "local APIC",
    kvm_irqchip__bindgen_ty_1: "irqchip",
}

/// A [`KvmStruct`] that is read and written as base64.
#[derive(Clone, Copy, Default)]
pub struct Base64<T>(pub T);

impl<T: KvmStruct> std::fmt::Debug for Base64<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(T::NAME)
    }
}

impl<T: KvmStruct> PartialEq for Base64<T> {
    fn eq(&self, other: &Self) -> bool {
        self.0.as_bytes() == other.0.as_bytes()
    }
}

impl<T: KvmStruct> Serialize for Base64<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&STANDARD.encode(self.0.as_bytes()))
    }
}

impl<'de, T: KvmStruct> Deserialize<'de> for Base64<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)
            .map_err(|error| D::Error::custom(format_args!("{}: {error}", T::NAME)))?;
        let bytes = STANDARD
            .decode(&text)
            .map_err(|error| D::Error::custom(format_args!("{}: no base64: {error}", T::NAME)))?;
        let value = T::read_from_bytes(&bytes).map_err(|_| {
            let (got, size) = (bytes.len(), size_of::<T>());
            D::Error::custom(format_args!("{}: {got} bytes, not {size}", T::NAME))
        })?;
        Ok(Self(value))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read<T: KvmStruct>(bytes: &[u8]) -> Result<Base64<T>, String> {
        let text = format!("{:?}", STANDARD.encode(bytes));
        serde_json::from_str(&text).map_err(|e| e.to_string())
    }

    #[test]
    fn another_length_or_alphabet_is_refused_by_name() {
        let size = size_of::<kvm_lapic_state>();
        assert!(read::<kvm_lapic_state>(&vec![1; size]).is_ok());
        for len in [0, 1, size - 1, size + 1, 2 * size] {
            let error = read::<kvm_lapic_state>(&vec![1; len]).unwrap_err();
            assert!(
                error.contains(&format!("local APIC: {len} bytes, not {size}")),
                "{error}"
            );
        }
        for text in ["\"*\"", "7", "null", "[]"] {
            let error = serde_json::from_str::<Base64<kvm_xcrs>>(text).unwrap_err();
            assert!(error.to_string().contains("XCRs"), "{error}");
        }
    }

    proptest! {
        #[test]
        fn every_byte_is_kept(bytes in prop::collection::vec(any::<u8>(), size_of::<kvm_regs>())) {
            let value = read::<kvm_regs>(&bytes).unwrap();
            prop_assert_eq!(value.0.as_bytes(), &bytes[..]);
            let text = serde_json::to_string(&value).unwrap();
            prop_assert_eq!(serde_json::from_str::<Base64<kvm_regs>>(&text).unwrap(), value);
        }

        #[test]
        fn foreign_text_is_an_error(text in ".{0,300}") {
            let json = serde_json::to_string(&text).unwrap();
            prop_assert!(serde_json::from_str::<Base64<kvm_sregs>>(&json).is_err());
        }
    }
}
