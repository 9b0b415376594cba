//! Allowed system calls by role. The documentation of the crate describes how to find missing calls.

use libc::{
    SYS_brk, SYS_clock_gettime, SYS_clock_nanosleep, SYS_clone, SYS_clone3, SYS_close, SYS_dup,
    SYS_epoll_create1, SYS_epoll_ctl, SYS_epoll_pwait, SYS_epoll_wait, SYS_eventfd2, SYS_exit,
    SYS_exit_group, SYS_fallocate, SYS_fcntl, SYS_fdatasync, SYS_fstat, SYS_fstatfs, SYS_fsync,
    SYS_ftruncate, SYS_futex, SYS_getcwd, SYS_getpid, SYS_getrandom, SYS_getsockopt, SYS_gettid,
    SYS_io_uring_enter, SYS_io_uring_register, SYS_io_uring_setup, SYS_ioctl, SYS_lseek, SYS_madvise,
    SYS_mmap, SYS_mprotect, SYS_mremap, SYS_munmap, SYS_nanosleep, SYS_newfstatat, SYS_open, SYS_openat,
    SYS_poll, SYS_ppoll, SYS_prctl, SYS_pread64, SYS_preadv, SYS_preadv2, SYS_pwrite64, SYS_pwritev,
    SYS_pwritev2, SYS_read, SYS_readlink, SYS_readlinkat, SYS_readv, SYS_recvfrom, SYS_recvmsg,
    SYS_restart_syscall, SYS_rseq, SYS_rt_sigaction, SYS_rt_sigprocmask, SYS_rt_sigreturn,
    SYS_sched_getaffinity, SYS_sched_setscheduler, SYS_sched_yield, SYS_seccomp, SYS_sendmsg, SYS_sendto,
    SYS_set_robust_list, SYS_shutdown, SYS_sigaltstack, SYS_statx, SYS_tgkill, SYS_write, SYS_writev, c_int,
    c_long,
};

use crate::role::ThreadRole;

/// Stands for the number of the process that installs a filter. No process has it, nor does any other condition.
pub const OWN_PROCESS: c_int = 0x7e5f_a11e;

/// An allowed system call with conditions on its arguments. Several entries of the same call are alternatives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AllowedSyscall {
    pub number: c_long,
    /// All must hold.
    pub conditions: [Option<ArgCondition>; 2],
}

/// Condition on the low 32 bits of an argument; the kernel ignores the high bits of all arguments checked here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArgCondition {
    pub argument: u8,
    /// Mask of the bits that are compared.
    pub mask: u32,
    pub value: u32,
}

const fn any(number: c_long) -> AllowedSyscall {
    let conditions = [None; 2];
    AllowedSyscall { number, conditions }
}

const fn when(number: c_long, condition: ArgCondition) -> AllowedSyscall {
    let conditions = [Some(condition), None];
    AllowedSyscall { number, conditions }
}

const fn both(number: c_long, first: ArgCondition, second: ArgCondition) -> AllowedSyscall {
    let conditions = [Some(first), Some(second)];
    AllowedSyscall { number, conditions }
}

const fn is(argument: u8, value: c_int) -> ArgCondition {
    ArgCondition {
        argument,
        mask: u32::MAX,
        value: value as u32,
    }
}

const fn has(argument: u8, bits: c_int) -> ArgCondition {
    ArgCondition {
        argument,
        mask: bits as u32,
        value: bits as u32,
    }
}

const fn has_not(argument: u8, bits: c_int) -> ArgCondition {
    ArgCondition {
        argument,
        mask: bits as u32,
        value: 0,
    }
}

const fn ioctl(request: u32) -> AllowedSyscall {
    when(SYS_ioctl, is(1, request as c_int))
}

const fn fcntl(command: c_int) -> AllowedSyscall {
    when(SYS_fcntl, is(1, command))
}

/// Flags with which glibc creates a thread, and no others; musl adds CLONE_DETACHED, which Linux ignores.
const THREAD: c_int = libc::CLONE_VM
    | libc::CLONE_FS
    | libc::CLONE_FILES
    | libc::CLONE_SIGHAND
    | libc::CLONE_THREAD
    | libc::CLONE_SYSVSEM
    | libc::CLONE_SETTLS
    | libc::CLONE_PARENT_SETTID
    | libc::CLONE_CHILD_CLEARTID;

/// Signal that makes a vCPU leave the guest: the first real-time signal not used by glibc.
pub const KICK_SIGNAL: c_int = 34;

/// Calls that fail with an error number, since programs work without them; all other calls kill the process.
pub const REFUSED: [(u32, &[c_long]); 2] = [
    // Its flags are in memory, which a filter cannot read. glibc and musl fall back to clone.
    (libc::ENOSYS as u32, &[SYS_clone3]),
    (
        libc::EPERM as u32,
        &[
            // An engine made after the start is served by threads.
            SYS_io_uring_setup,
            // The allocator asks how memory is overcommitted, and std how many processors the cgroup has; a panic's
            // backtrace looks for the program's file and where it is. None of them would be found in the empty root.
            SYS_open,
            SYS_openat,
            SYS_readlink,
            SYS_readlinkat,
            SYS_getcwd,
        ],
    ),
];

/// Calls of the Rust runtime, the C library and the allocator on any thread.
const RUNTIME: &[AllowedSyscall] = &[
    any(SYS_read),
    any(SYS_write),
    any(SYS_close),
    any(SYS_futex),
    when(SYS_mmap, has_not(2, libc::PROT_EXEC)),
    when(SYS_mprotect, has_not(2, libc::PROT_EXEC)),
    any(SYS_munmap),
    any(SYS_mremap),
    any(SYS_madvise),
    any(SYS_brk),
    any(SYS_getrandom),
    any(SYS_sched_yield),
    // Number of processors, from which the allocator derives its number of arenas.
    any(SYS_sched_getaffinity),
    // For clocks that the vDSO cannot read.
    any(SYS_clock_gettime),
    any(SYS_clock_nanosleep),
    any(SYS_nanosleep),
    // The kernel continues an interrupted sleep after SIGSTOP and SIGCONT.
    any(SYS_restart_syscall),
    any(SYS_rt_sigprocmask),
    any(SYS_rt_sigreturn),
    // The stack overflow handler: uninstalled when its thread ends, and on a fault that is no overflow.
    any(SYS_sigaltstack),
    when(SYS_rt_sigaction, is(0, libc::SIGSEGV)),
    when(SYS_rt_sigaction, is(0, libc::SIGBUS)),
    // abort(3)
    when(SYS_rt_sigaction, is(0, libc::SIGABRT)),
    both(SYS_tgkill, is(0, OWN_PROCESS), is(2, libc::SIGABRT)),
    any(SYS_getpid),
    any(SYS_gettid),
    // Builds with debug assertions look whether a descriptor is open before they close it.
    fcntl(libc::F_GETFD),
    any(SYS_exit),
    any(SYS_exit_group),
];

/// Starting a thread, and its calls before it has installed its filter.
const STARTING: &[AllowedSyscall] = &[
    when(
        SYS_clone,
        ArgCondition {
            argument: 0,
            mask: !(libc::CLONE_DETACHED as u32),
            value: THREAD as u32,
        },
    ),
    any(SYS_set_robust_list),
    any(SYS_rseq),
    when(SYS_prctl, is(0, libc::PR_SET_NAME)),
    when(SYS_prctl, is(0, libc::PR_SET_NO_NEW_PRIVS)),
    // Without flags: a flag of seccomp(2) returns a user-notification listener.
    both(
        SYS_seccomp,
        is(0, libc::SECCOMP_SET_MODE_FILTER as c_int),
        is(1, 0),
    ),
];

/// Loops that wait for eventfds.
const EVENTS: &[AllowedSyscall] = &[
    any(SYS_epoll_create1),
    any(SYS_epoll_ctl),
    any(SYS_epoll_wait),
    any(SYS_epoll_pwait),
    any(SYS_poll),
    any(SYS_ppoll),
    any(SYS_eventfd2),
    any(SYS_dup),
    fcntl(libc::F_DUPFD_CLOEXEC),
];

/// A worker sets its scheduling policy, which decides whether it preempts the vCPU that wakes it.
const SCHED_POLICY: &[AllowedSyscall] = &[when(SYS_sched_setscheduler, is(0, 0))];

/// One direction of a connection ends.
const HALF_CLOSE: &[AllowedSyscall] = &[any(SYS_shutdown)];

/// Use of existing rings, whose operations were restricted when they were created.
const RING: &[AllowedSyscall] = &[any(SYS_io_uring_enter)];

/// IORING_REGISTER_FILES_UPDATE, the only registration that the rings still allow: disks are attached and detached.
const RING_FILES: &[AllowedSyscall] = &[when(SYS_io_uring_register, is(1, 6))];

/// Reads and writes of an image that need no ring.
const SYNCHRONOUS_CALLS: &[AllowedSyscall] = &[any(SYS_preadv2), any(SYS_pwritev2)];

/// Metadata and content of open files.
const READ_FILES: &[AllowedSyscall] = &[
    any(SYS_fstat),
    // By descriptor; a name would be looked up in the empty root.
    when(SYS_newfstatat, has(3, libc::AT_EMPTY_PATH)),
    when(SYS_statx, has(2, libc::AT_EMPTY_PATH)),
    // When one fails, std asks with no path and no descriptor whether the kernel has it.
    both(SYS_statx, is(0, 0), is(1, 0)),
    fcntl(libc::F_GETFL),
    any(SYS_lseek),
    any(SYS_pread64),
    any(SYS_preadv),
];

/// A qcow2 image, whose file grows and is written at many offsets.
const WRITE_FILES: &[AllowedSyscall] = &[
    any(SYS_pwrite64),
    any(SYS_pwritev),
    any(SYS_fdatasync),
    any(SYS_fsync),
    any(SYS_fallocate),
    any(SYS_ftruncate),
    // imago looks up the type of the file system.
    any(SYS_fstatfs),
];

/// The calls of a raw image.
const DISK_CALLS: &[AllowedSyscall] = &[
    any(SYS_preadv2),
    any(SYS_pwritev2),
    // Instead of those on older kernels.
    any(SYS_preadv),
    any(SYS_pwritev),
    any(SYS_fdatasync),
    any(SYS_fallocate),
];

/// Properties of a block device.
const BLOCK_DEVICES: &[AllowedSyscall] = &[
    ioctl(0x1268),      // BLKSSZGET
    ioctl(0x127b),      // BLKPBSZGET
    ioctl(0x127a),      // BLKALIGNOFF
    ioctl(0x1278),      // BLKIOMIN
    ioctl(0x1279),      // BLKIOOPT
    ioctl(0x1267),      // BLKSECTGET
    ioctl(0x8008_1272), // BLKGETSIZE64
];

/// `fallocate` cannot discard on a block device.
const DISCARD: &[AllowedSyscall] = &[ioctl(0x1277)]; // BLKDISCARD

/// A SCSI device of the host, and the channel to the monitor, which executes what takes a privilege.
const SCSI_GENERIC: &[AllowedSyscall] = &[
    ioctl(0x2285), // SG_IO
    any(SYS_sendto),
    any(SYS_recvfrom),
];

/// SG_GET_VERSION_NUM: detects a SCSI generic device.
const SCSI_PROBE: &[AllowedSyscall] = &[ioctl(0x2282)];

const KVM_RUN: &[AllowedSyscall] = &[ioctl(0xae80)];

/// State of a vCPU: pause, reset, save, restore, error report.
const KVM_VCPU: &[AllowedSyscall] = &[
    ioctl(0xaead),      // KVM_KVMCLOCK_CTRL
    ioctl(0xc008_ae88), // KVM_GET_MSRS
    ioctl(0x4008_ae89), // KVM_SET_MSRS
    ioctl(0x8090_ae81), // KVM_GET_REGS
    ioctl(0x4090_ae82), // KVM_SET_REGS
    ioctl(0x8138_ae83), // KVM_GET_SREGS
    ioctl(0x4138_ae84), // KVM_SET_SREGS
    ioctl(0x4400_ae8f), // KVM_SET_LAPIC
    ioctl(0x4004_ae99), // KVM_SET_MP_STATE
    ioctl(0x4040_aea0), // KVM_SET_VCPU_EVENTS
    ioctl(0x4080_aea2), // KVM_SET_DEBUGREGS
    ioctl(0x5000_aea5), // KVM_SET_XSAVE
    ioctl(0x4188_aea7), // KVM_SET_XCRS
    // A pause reads the TSC, with its frequency and offset; resuming sets it.
    ioctl(0xaea3),      // KVM_GET_TSC_KHZ
    ioctl(0x4018_aee2), // KVM_GET_DEVICE_ATTR
    ioctl(0x4018_aee1), // KVM_SET_DEVICE_ATTR
    // The rest of what a save reads.
    ioctl(0x8004_ae98), // KVM_GET_MP_STATE
    ioctl(0x8040_ae9f), // KVM_GET_VCPU_EVENTS
    ioctl(0x8080_aea1), // KVM_GET_DEBUGREGS
    ioctl(0x8188_aea6), // KVM_GET_XCRS
    ioctl(0x9000_aea4), // KVM_GET_XSAVE
    ioctl(0x8400_ae8e), // KVM_GET_LAPIC
];

/// Interrupts and ioeventfds, connected by drivers and by the threads that reset devices.
const KVM_WIRING: &[AllowedSyscall] = &[
    ioctl(0x4020_ae76), // KVM_IRQFD
    ioctl(0x4040_ae79), // KVM_IOEVENTFD
    ioctl(0x4008_ae6a), // KVM_SET_GSI_ROUTING
];

/// The machine: pause, resume, reset, save, and the log of the pages that the guest writes. It is created before the
/// filter is installed.
const KVM_MACHINE: &[AllowedSyscall] = &[
    ioctl(0x8030_ae7c), // KVM_GET_CLOCK
    ioctl(0x4030_ae7b), // KVM_SET_CLOCK
    ioctl(0xc208_ae62), // KVM_GET_IRQCHIP
    ioctl(0x8208_ae63), // KVM_SET_IRQCHIP
    ioctl(0x4020_ae46), // KVM_SET_USER_MEMORY_REGION
    ioctl(0x4010_ae42), // KVM_GET_DIRTY_LOG
    both(SYS_tgkill, is(0, OWN_PROCESS), is(2, KICK_SIGNAL)),
];

/// Tap settings made by the driver, and attaching the tap to vhost.
const TAP: &[AllowedSyscall] = &[
    ioctl(0x4004_54d0), // TUNSETOFFLOAD
    ioctl(0x4004_54d1), // TUNSETTXFILTER
    ioctl(0x4004_54d9), // TUNSETQUEUE
    ioctl(0x4008_af30), // VHOST_NET_SET_BACKEND
];

/// Frames from and to a tap.
const TAP_FRAMES: &[AllowedSyscall] = &[any(SYS_readv), any(SYS_writev)];

/// Handing queues to vhost and taking them back.
const VHOST: &[AllowedSyscall] = &[
    ioctl(0x4008_af00), // VHOST_SET_FEATURES
    ioctl(0x4008_af03), // VHOST_SET_MEM_TABLE
    ioctl(0x4008_af04), // VHOST_SET_LOG_BASE
    ioctl(0x4008_af10), // VHOST_SET_VRING_NUM
    ioctl(0x4028_af11), // VHOST_SET_VRING_ADDR
    ioctl(0x4008_af12), // VHOST_SET_VRING_BASE
    ioctl(0xc008_af12), // VHOST_GET_VRING_BASE
    ioctl(0x4008_af20), // VHOST_SET_VRING_KICK
    ioctl(0x4008_af21), // VHOST_SET_VRING_CALL
    ioctl(0x4008_af22), // VHOST_SET_VRING_ERR
    ioctl(0x4004_af61), // VHOST_VSOCK_SET_RUNNING
];

/// Hot-plugging a NIC.
const NIC_HOTPLUG: &[AllowedSyscall] = &[
    ioctl(0x8004_54d2), // TUNGETIFF
    ioctl(0x4004_54d8), // TUNSETVNETHDRSZ
    fcntl(libc::F_GETFL),
    fcntl(libc::F_SETFL),
    ioctl(0xaf01),      // VHOST_SET_OWNER
    ioctl(0x8008_af00), // VHOST_GET_FEATURES
];

/// The control socket, descriptors that arrive, and the console.
const SOCKETS: &[AllowedSyscall] = &[
    any(SYS_recvfrom),
    any(SYS_recvmsg),
    any(SYS_sendto),
    any(SYS_sendmsg),
    any(SYS_readv),
    any(SYS_writev),
    any(SYS_shutdown),
    any(SYS_getsockopt),
];

/// Calls of the role itself; the most frequent ioctls come first, since they are compared one by one.
fn own_groups(role: ThreadRole) -> &'static [&'static [AllowedSyscall]] {
    match role {
        ThreadRole::Control => &[RUNTIME, STARTING, EVENTS, SOCKETS],
        // It drops the machine at the end, which closes images: a qcow2 image writes its tables.
        ThreadRole::Machine => &[
            RUNTIME,
            STARTING,
            EVENTS,
            KVM_WIRING,
            KVM_MACHINE,
            VHOST,
            NIC_HOTPLUG,
            WRITE_FILES,
        ],
        ThreadRole::Vcpu => &[KVM_RUN, RUNTIME, STARTING, EVENTS, KVM_VCPU, KVM_WIRING, VHOST],
        ThreadRole::Blk => &[RUNTIME, EVENTS, SCHED_POLICY, RING, SYNCHRONOUS_CALLS],
        // It drops the last handles of its disks, which closes images.
        ThreadRole::Scsi => &[
            RUNTIME,
            STARTING,
            EVENTS,
            SCHED_POLICY,
            RING,
            RING_FILES,
            SYNCHRONOUS_CALLS,
            READ_FILES,
            WRITE_FILES,
        ],
        ThreadRole::Net => &[RUNTIME, EVENTS, SCHED_POLICY, TAP_FRAMES],
        ThreadRole::NetControl => &[RUNTIME, EVENTS, SCHED_POLICY, TAP_FRAMES, TAP],
        ThreadRole::Rng | ThreadRole::Balloon | ThreadRole::Console => &[RUNTIME, EVENTS, SCHED_POLICY],
        ThreadRole::Vsock => &[RUNTIME, EVENTS, SCHED_POLICY, HALF_CLOSE],
        ThreadRole::Lun => &[RUNTIME, SCSI_GENERIC],
        ThreadRole::DiskIo => &[RUNTIME, DISK_CALLS],
        ThreadRole::Qcow2 | ThreadRole::Convert => &[RUNTIME, READ_FILES, WRITE_FILES],
        ThreadRole::Discard => &[RUNTIME, DISCARD],
        ThreadRole::Blocking => &[RUNTIME, STARTING, EVENTS, BLOCK_DEVICES, SCSI_GENERIC, SCSI_PROBE],
        // A read may write: imago makes room in its caches, which hold tables that a guest has not flushed.
        ThreadRole::Boot => &[RUNTIME, STARTING, READ_FILES, WRITE_FILES],
    }
}

/// All allowed calls of a role, including those of the threads it starts.
pub fn allowed_syscalls(role: ThreadRole) -> Vec<AllowedSyscall> {
    let own = own_groups(role).iter().flat_map(|group| group.iter().copied());
    let theirs = role.starts().iter().flat_map(|other| allowed_syscalls(*other));
    own.chain(theirs).collect()
}
