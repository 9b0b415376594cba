//! The kinds of threads that the VMM has.

/// What a thread is for, and so what it may ask of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ThreadRole {
    /// The first thread: the runtime, the service and the actor that owns the machine, once the machine is made.
    Control,
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
    /// Waits for a SCSI device of the host.
    Lun,
    /// Makes calls on raw images where io_uring is switched off.
    DiskIo,
    /// Serves a qcow2 image.
    Qcow2,
    /// A thread of the runtime for what blocks: opens, resizes and closes disks.
    Blocking,
    /// Finds, reads and unpacks the kernel. So do its helpers, which only inherit.
    Boot,
}

impl ThreadRole {
    /// All of them.
    pub const ALL: [Self; 13] = [
        Self::Control,
        Self::Vcpu,
        Self::Blk,
        Self::Scsi,
        Self::Net,
        Self::NetControl,
        Self::Rng,
        Self::Balloon,
        Self::Lun,
        Self::DiskIo,
        Self::Qcow2,
        Self::Blocking,
        Self::Boot,
    ];

    /// Whom it starts when it has its filter, which they inherit: it may do what they may.
    #[must_use]
    pub fn starts(self) -> &'static [Self] {
        match self {
            // Devices that are paused have no workers, and get new ones.
            Self::Control => &[
                Self::Blk,
                Self::Net,
                Self::NetControl,
                Self::Rng,
                Self::Balloon,
                Self::Blocking,
                Self::Boot,
            ],
            // A driver that is ready says so with a write to a register.
            Self::Vcpu => &[Self::Blk, Self::Net, Self::NetControl, Self::Rng, Self::Balloon],
            Self::Scsi => &[Self::Lun],
            Self::Blocking => &[Self::Qcow2],
            Self::Blk
            | Self::Net
            | Self::NetControl
            | Self::Rng
            | Self::Balloon
            | Self::Lun
            | Self::DiskIo
            | Self::Qcow2
            | Self::Boot => &[],
        }
    }
}
