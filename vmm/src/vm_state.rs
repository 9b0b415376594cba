//! State of KVM that belongs to the whole VM: interrupt controllers and clock. There is no PIT.

use kvm_bindings::{
    KVM_CLOCK_REALTIME, KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, kvm_clock_data,
    kvm_irqchip, kvm_irqchip__bindgen_ty_1,
};
use kvm_ioctls::VmFd;
use serde::{Deserialize, Serialize};

use crate::kvm::{KvmError, failed};
use crate::kvm_struct::Base64;
use crate::vcpu::state::tsc::SavedTsc;

/// The interrupt controllers that all vCPUs share.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedIrqchips {
    pic_master: Base64<kvm_irqchip__bindgen_ty_1>,
    pic_slave: Base64<kvm_irqchip__bindgen_ty_1>,
    ioapic: Base64<kvm_irqchip__bindgen_ty_1>,
}

fn read_irqchip(vm: &VmFd, chip_id: u32) -> Result<Base64<kvm_irqchip__bindgen_ty_1>, KvmError> {
    let mut chip = kvm_irqchip {
        chip_id,
        ..Default::default()
    };
    vm.get_irqchip(&mut chip).map_err(failed("read irqchip"))?;
    Ok(Base64(chip.chip))
}

impl SavedIrqchips {
    /// Reads the interrupt controllers. All vCPUs must be out of the guest.
    pub fn capture(vm: &VmFd) -> Result<Self, KvmError> {
        Ok(Self {
            pic_master: read_irqchip(vm, KVM_IRQCHIP_PIC_MASTER)?,
            pic_slave: read_irqchip(vm, KVM_IRQCHIP_PIC_SLAVE)?,
            ioapic: read_irqchip(vm, KVM_IRQCHIP_IOAPIC)?,
        })
    }

    /// Writes the interrupt controllers. The state of all vCPUs comes before: the I/O APIC may deliver a pending
    /// interrupt at once, and restoring a local APIC would lose it.
    pub fn restore(&self, vm: &VmFd) -> Result<(), KvmError> {
        let chips = [
            (KVM_IRQCHIP_PIC_MASTER, &self.pic_master),
            (KVM_IRQCHIP_PIC_SLAVE, &self.pic_slave),
            (KVM_IRQCHIP_IOAPIC, &self.ioapic),
        ];
        for (chip_id, chip) in chips {
            let chip = kvm_irqchip {
                chip_id,
                chip: chip.0,
                ..Default::default()
            };
            vm.set_irqchip(&chip).map_err(failed("set irqchip"))?;
        }
        Ok(())
    }
}

/// kvmclock and TSCs of a machine whose vCPUs are out of the guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedClock {
    /// kvmclock, in nanoseconds.
    pub kvmclock: u64,
    /// The host's CLOCK_REALTIME at that value, in nanoseconds. None before Linux 5.16, and if the host's clock source
    /// is not its TSC.
    // Without this, serde reads a missing field as None.
    #[serde(deserialize_with = "Option::deserialize")]
    pub realtime: Option<u64>,
    /// TSCs in the order of the vCPUs.
    pub tscs: Vec<SavedTsc>,
}

impl SavedClock {
    /// Reads kvmclock, and adds the TSCs that the vCPUs had at the pause.
    pub fn capture(vm: &VmFd, tscs: Vec<SavedTsc>) -> Result<Self, KvmError> {
        let clock = vm.get_clock().map_err(failed("read clock"))?;
        Ok(Self {
            kvmclock: clock.clock,
            realtime: (clock.flags & KVM_CLOCK_REALTIME != 0).then_some(clock.realtime),
            tscs,
        })
    }

    /// Sets kvmclock to its saved value. The time in between does not pass for it. [`crate::vcpu::set_tscs`] sets the TSCs.
    pub fn restore(&self, vm: &VmFd) -> Result<(), KvmError> {
        let clock = kvm_clock_data {
            clock: self.kvmclock,
            ..Default::default()
        };
        vm.set_clock(&clock).map_err(failed("set clock"))
    }
}
