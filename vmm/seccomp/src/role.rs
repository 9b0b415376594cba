//! The roles of the threads of the VMM, and of the process that converts images.

/// Role of a thread, which determines its system calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ThreadRole {
    /// The first thread, once the machine is created: the runtime, the control service and the console.
    Control,
    /// Owns the machine, once it is created.
    Machine,
    /// Runs the guest, and device models when it leaves the guest.
    Vcpu,
    /// Serves a queue of a virtio-blk disk.
    Blk,
    /// The SCSI controller.
    Scsi,
    /// Serves a pair of queues of a NIC.
    Net,
    /// Serves the control queue of a NIC.
    NetControl,
    /// Serves the entropy device.
    Rng,
    /// Serves the balloon.
    Balloon,
    /// Serves the ports of the console device.
    Console,
    /// Serves the connections of the vsock device.
    Vsock,
    /// Executes commands on a SCSI device of the host.
    Lun,
    /// Runs I/O on raw images if io_uring is disabled.
    DiskIo,
    /// Serves a qcow2 image, or looks for the holes of an image.
    Qcow2,
    /// Discards ranges of a block device.
    Discard,
    /// Blocking thread of the runtime: opens, resizes and closes disks.
    Blocking,
    /// Finds, reads and unpacks the kernel. Its helper threads inherit the filter.
    Boot,
    /// Converts an image: the only thread of a process of `husk-import`.
    Convert,
}

impl ThreadRole {
    /// All roles.
    pub const ALL: [Self; 18] = [
        Self::Control,
        Self::Machine,
        Self::Vcpu,
        Self::Blk,
        Self::Scsi,
        Self::Net,
        Self::NetControl,
        Self::Rng,
        Self::Balloon,
        Self::Console,
        Self::Vsock,
        Self::Lun,
        Self::DiskIo,
        Self::Qcow2,
        Self::Discard,
        Self::Blocking,
        Self::Boot,
        Self::Convert,
    ];

    /// Roles of the threads it starts after installing its filter. They inherit it, so it includes their calls.
    #[must_use]
    pub fn starts(self) -> &'static [Self] {
        match self {
            Self::Control => &[Self::Blocking],
            // Paused devices have no workers; resuming starts new ones.
            Self::Machine => &[
                Self::Blk,
                Self::Net,
                Self::NetControl,
                Self::Rng,
                Self::Balloon,
                Self::Console,
                Self::Vsock,
                Self::Boot,
            ],
            // A write to the device status register (DRIVER_OK) starts workers.
            Self::Vcpu => &[
                Self::Blk,
                Self::Net,
                Self::NetControl,
                Self::Rng,
                Self::Balloon,
                Self::Console,
                Self::Vsock,
            ],
            Self::Scsi => &[Self::Lun, Self::Qcow2],
            Self::Blocking => &[Self::Qcow2, Self::Discard],
            Self::Blk
            | Self::Net
            | Self::NetControl
            | Self::Rng
            | Self::Balloon
            | Self::Console
            | Self::Vsock
            | Self::Lun
            | Self::DiskIo
            | Self::Qcow2
            | Self::Discard
            | Self::Boot
            | Self::Convert => &[],
        }
    }
}
