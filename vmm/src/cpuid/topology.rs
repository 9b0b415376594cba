//! The CPU topology and the APIC ids that encode it.

/// Sockets, cores per socket, threads per core.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Topology {
    /// Packages.
    pub sockets: u32,
    /// Cores in each package.
    pub cores: u32,
    /// Threads in each core.
    pub threads: u32,
}

/// Highest APIC id of a MADT local APIC entry and of an MSI message.
pub(super) const MAX_APIC_ID: u32 = 254;

/// Errors of a CPU topology.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum TopologyError {
    /// A factor is zero, or the product overflows.
    #[error("{0} sockets x {1} cores x {2} threads is not a CPU topology")]
    Invalid(u32, u32, u32),
    /// The APIC ids exceed [`MAX_APIC_ID`].
    #[error("{vcpus} vCPUs need APIC ids up to {apic_id}, the limit is 254")]
    TooMany {
        /// Number of vCPUs.
        vcpus: u32,
        /// The last vCPU's APIC id.
        apic_id: u32,
    },
}

/// Bits needed to number `n` items.
pub(super) fn bits(n: u32) -> u32 {
    n.next_power_of_two().trailing_zeros()
}

impl Topology {
    /// Checks that every vCPU has an APIC id.
    pub fn check(self) -> Result<Self, TopologyError> {
        let Self {
            sockets,
            cores,
            threads,
        } = self;
        let invalid = TopologyError::Invalid(sockets, cores, threads);
        let small = |n: u32| (1..=255).contains(&n);
        if !(small(sockets) && small(cores) && small(threads)) {
            return Err(invalid);
        }
        let vcpus = sockets * cores * threads;
        let apic_id = self.apic_id(vcpus - 1);
        if apic_id > MAX_APIC_ID {
            Err(TopologyError::TooMany { vcpus, apic_id })
        } else {
            Ok(self)
        }
    }

    /// Number of vCPUs.
    pub fn vcpus(self) -> u32 {
        self.sockets * self.cores * self.threads
    }

    /// The (x2)APIC id of vCPU `index`: bit fields of thread, core and package numbers.
    pub fn apic_id(self, index: u32) -> u32 {
        let thread = index % self.threads;
        let core = index / self.threads % self.cores;
        let package = index / self.threads / self.cores;
        package << self.package_shift() | core << self.core_shift() | thread
    }

    pub(super) fn core_shift(self) -> u32 {
        bits(self.threads)
    }

    pub(super) fn package_shift(self) -> u32 {
        bits(self.cores) + self.core_shift()
    }

    pub(super) fn threads_per_package(self) -> u32 {
        self.cores * self.threads
    }
}
