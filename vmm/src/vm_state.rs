//! State of KVM that belongs to the whole VM: interrupt controllers and clock. There is no PIT.

use kvm_bindings::{
    KVM_CLOCK_HOST_TSC, KVM_CLOCK_REALTIME, KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER,
    KVM_IRQCHIP_PIC_SLAVE, kvm_clock_data, kvm_irqchip, kvm_irqchip__bindgen_ty_1,
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

/// A moment after kvmclock was set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClockMoment {
    /// Time since then, in nanoseconds.
    pub elapsed: u64,
    /// The host's TSC.
    pub host_tsc: u64,
}

/// The host's TSC when KVM read its clock. None before Linux 5.16, and if the host's clock source is not its TSC.
fn host_tsc(clock: &kvm_clock_data) -> Option<u64> {
    (clock.flags & KVM_CLOCK_HOST_TSC != 0).then_some(clock.host_tsc)
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
    /// Reads kvmclock, and adds the TSCs that the vCPUs had at the pause, as they are at the same moment. Otherwise the
    /// guest's clocks would differ by the time between the two, which may be long on a busy host.
    pub fn capture(vm: &VmFd, mut tscs: Vec<SavedTsc>) -> Result<Self, KvmError> {
        let clock = vm.get_clock().map_err(failed("read clock"))?;
        if let Some(host) = host_tsc(&clock) {
            tscs.iter_mut().for_each(|tsc| *tsc = tsc.at(host));
        }
        Ok(Self {
            kvmclock: clock.clock,
            realtime: (clock.flags & KVM_CLOCK_REALTIME != 0).then_some(clock.realtime),
            tscs,
        })
    }

    /// Sets kvmclock to its saved value. The time in between does not pass for it. Returns a moment after that, if the
    /// host's clock source is its TSC. [`crate::vcpu::set_tscs`] sets the TSCs.
    pub fn restore(&self, vm: &VmFd) -> Result<Option<ClockMoment>, KvmError> {
        let clock = kvm_clock_data {
            clock: self.kvmclock,
            ..Default::default()
        };
        vm.set_clock(&clock).map_err(failed("set clock"))?;
        let now = vm.get_clock().map_err(failed("read clock"))?;
        Ok(host_tsc(&now).map(|host_tsc| ClockMoment {
            elapsed: now.clock.saturating_sub(self.kvmclock),
            host_tsc,
        }))
    }
}
