//! A driver that does anything, for every virtio device.
//!
//! The device stands still while the driver acts. [`Action::Run`] lets it take all that is available and stops it
//! again, so that an input has the same effect each time. After [`Action::Start`] it runs beside the driver.

use std::fmt::Debug;
use std::fs::File;
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::Once;

use arbitrary::Arbitrary;
use husk_devices::component::RestoreError;
use husk_devices::virtio::VirtioDevice;
use husk_devices::virtio::testing::{Descriptor, WRITE};
use serde_json::Value;
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace};

use crate::json::Mutation;
pub use guest::Guest;

pub mod balloon;
pub mod blk;
pub mod cdb;
pub mod console;
mod guest;
pub mod lun;
pub mod net;
mod offered;
pub mod rng;
pub mod scsi;
pub mod unit;
pub mod vsock;

/// Guest memory: the queues, a page for each; buffers of any kind; headers and answers of proper requests; their data,
/// up to a hole. Then more.
const QUEUES: u64 = 0x1000;
const BUFFERS: u64 = 0x1_0000;
const SLOTS: u64 = 0x2_0000;
pub const DATA: u64 = 0x3_0000;
const END: u64 = 0x4_0000;
const BEYOND: u64 = 0x10_0000;
const BEYOND_END: u64 = 0x11_0000;

/// Bytes of a page of the dirty bitmap.
const PAGE: usize = 0x1000;

/// Bytes of the memory that a proper request has for itself, and the number of such requests before it is reused.
const SLOT: u64 = 0x400;
const SLOT_COUNT: u64 = 64;

/// Most actions of a program.
const MAX_ACTIONS: usize = 32;
/// Maximum number of saves in a program. After a save the target makes a new device, which takes as long as the rest of
/// a program.
const MAX_SAVES: usize = 2;
/// Most descriptors of a chain.
const MAX_CHAIN: usize = 20;

/// An address of guest memory, or outside of it.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub enum Place {
    Buffers(u8),
    Data(u16),
    Slots(u16),
    Queues(u16),
    End(i8),
    Beyond(i8),
    BeyondEnd(i8),
    Anywhere(u64),
}

impl Place {
    pub fn address(self) -> u64 {
        match self {
            Self::Buffers(at) => BUFFERS + 16 * u64::from(at),
            Self::Data(at) => DATA + u64::from(at),
            Self::Slots(at) => SLOTS + u64::from(at),
            Self::Queues(at) => QUEUES + u64::from(at) % (BUFFERS - QUEUES),
            Self::End(at) => END.wrapping_add_signed(at.into()),
            Self::Beyond(at) => BEYOND.wrapping_add_signed(at.into()),
            Self::BeyondEnd(at) => BEYOND_END.wrapping_add_signed(at.into()),
            Self::Anywhere(at) => at,
        }
    }
}

/// The length of a buffer.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub enum Len {
    Bytes(u8),
    Sectors(u8),
    Pages(u8),
    Any(u32),
}

impl Len {
    pub fn bytes(self) -> u32 {
        match self {
            Self::Bytes(count) => count.into(),
            Self::Sectors(count) => 512 * u32::from(count % 32),
            Self::Pages(count) => 4096 * u32::from(count % 16),
            Self::Any(count) => count,
        }
    }
}

/// A buffer in guest memory.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub struct Buffer {
    pub place: Place,
    pub len: Len,
}

impl Buffer {
    fn descriptor(self, flags: u16) -> Descriptor {
        (self.place.address(), self.len.bytes(), flags)
    }
}

/// The descriptors of `buffers`, as many as a chain may have.
pub fn descriptors(buffers: &[Buffer], flags: u16) -> Vec<Descriptor> {
    let buffers = buffers.iter().take(MAX_CHAIN);
    buffers.map(|buffer| buffer.descriptor(flags)).collect()
}

/// The descriptors of `len` bytes at `at`, in two pieces if `cut` lies inside.
pub fn pieces(at: u64, len: u32, cut: u32, flags: u16) -> Vec<Descriptor> {
    if cut == 0 || cut >= len {
        return vec![(at, len, flags)];
    }
    vec![(at, cut, flags), (at + u64::from(cut), len - cut, flags)]
}

/// A step of a driver, of the machine or, as a request of the device, of its host.
#[derive(Arbitrary, Debug)]
pub enum Action<R> {
    /// A request that the kind of device knows.
    Request(R),
    Run,
    Start,
    Kick {
        queue: u8,
    },
    /// A chain, or a table of descriptors.
    Chain {
        queue: u8,
        readable: Vec<Buffer>,
        writable: Vec<Buffer>,
        table: Option<Place>,
    },
    /// One descriptor of a queue's table.
    Put {
        queue: u8,
        at: u8,
        buffer: Buffer,
        flags: u8,
        next: u8,
    },
    Offer {
        queue: u8,
        head: u16,
    },
    Available {
        queue: u8,
        index: u16,
    },
    UsedEvent {
        queue: u8,
        index: u16,
    },
    Write {
        place: Place,
        bytes: [u8; 16],
        len: u8,
    },
    ReadConfig {
        offset: u16,
        len: u8,
    },
    WriteConfig {
        offset: u16,
        bytes: [u8; 4],
        len: u8,
    },
    /// A new driver, that accepts all features but these, and enables all queues but these. A device that runs is
    /// reset while it works, or stopped before.
    Connect {
        without: u64,
        disabled: u8,
        works: bool,
    },
    /// Save the device, build a new one and restore it there.
    Save,
}

/// An input: the setup of the device, the features of the first driver, and the actions after that.
#[derive(Arbitrary, Debug)]
pub struct Program<S, R> {
    pub setup: S,
    /// Features that the driver does not accept.
    pub without: u64,
    /// Selects the size of the queues.
    pub size: u8,
    pub actions: Vec<Action<R>>,
}

/// A kind of device, and the host's side of one of them.
pub trait Bench {
    type Setup: Debug;
    type Request: Debug;
    /// The host's control of a device.
    type Handle;
    /// Fields of a saved state for which a driver that breaks the rules can have the state refused.
    const REFUSED: &[&str] = &[];
    /// The device discards pages that the driver names, perhaps those of its rings.
    const DISCARDS: bool = false;
    /// A restored device has the state that was saved, although its host may have changed.
    const SAME: bool = true;
    /// Attempts of the driver to give up the processor until the device must have looked at its queues.
    const PATIENCE: u32 = 0;

    fn new(setup: &Self::Setup) -> Self;
    /// A new device of this host, like the one of this handle if there is one.
    fn device(&mut self, like: Option<&Self::Handle>) -> (Box<dyn VirtioDevice>, Self::Handle);
    /// A proper request of the driver, or an act of the host.
    fn request(&mut self, request: &Self::Request, handle: &Self::Handle, guest: &mut Guest);
    /// The host does its part so that a new driver finds a device that works.
    fn repair(&mut self, _handle: &Self::Handle) {}
    /// Checks that the device serves a new driver.
    fn check(&mut self, handle: &Self::Handle, guest: &mut Guest);
}

/// A device between its host and a guest.
struct Rig<B: Bench> {
    bench: B,
    handle: B::Handle,
    guest: Guest,
    saves: usize,
}

impl<B: Bench> Rig<B> {
    fn new(program: &Program<B::Setup, B::Request>) -> Self {
        let mut bench = B::new(&program.setup);
        let (device, handle) = bench.device(None);
        let guest = Guest::new::<B>(device, program.size, program.without);
        Self {
            bench,
            handle,
            guest,
            saves: 0,
        }
    }

    fn carry_out(&mut self, actions: &[Action<B::Request>]) {
        actions
            .iter()
            .take(MAX_ACTIONS)
            .for_each(|action| self.act(action));
    }

    fn act(&mut self, action: &Action<B::Request>) {
        let guest = &mut self.guest;
        match *action {
            Action::Request(ref request) => self.bench.request(request, &self.handle, guest),
            Action::Run => guest.run(),
            Action::Start => guest.start(),
            Action::Kick { queue } => guest.kick(guest.queue(queue)),
            Action::Chain {
                queue,
                ref readable,
                ref writable,
                table,
            } => {
                let chain = [descriptors(readable, 0), descriptors(writable, WRITE)].concat();
                guest.chain(guest.queue(queue), &chain, table);
            }
            Action::Put {
                queue,
                at,
                buffer,
                flags,
                next,
            } => {
                guest.offered.forget();
                let at = u16::from(at) % guest.size;
                let descriptor = buffer.descriptor(flags.into());
                guest.drivers[guest.queue(queue)].put(at, descriptor, next.into());
            }
            Action::Offer { queue, head } => {
                let queue = guest.queue(queue);
                guest.offered.forget();
                guest.drivers[queue].offer(head);
            }
            Action::Available { queue, index } => {
                let queue = guest.queue(queue);
                guest.offered.forget();
                guest.drivers[queue].set_available(index);
            }
            Action::UsedEvent { queue, index } => guest.drivers[guest.queue(queue)].set_used_event(index),
            Action::Write { place, bytes, len } => {
                let bytes = &bytes[..usize::from(len).min(bytes.len())];
                guest.offered.forget();
                let _ = guest.mem.memory().write(bytes, GuestAddress(place.address()));
            }
            Action::ReadConfig { offset, len } => {
                let mut data = vec![0; len.into()];
                guest.device.read_config(config_offset(offset), &mut data);
            }
            Action::WriteConfig { offset, bytes, len } => {
                let bytes = &bytes[..usize::from(len).min(bytes.len())];
                guest.device.write_config(config_offset(offset), bytes);
            }
            Action::Connect {
                without,
                disabled,
                works,
            } => guest.connect(without, disabled, works),
            Action::Save if self.saves < MAX_SAVES => {
                self.saves += 1;
                self.save(&[]);
            }
            Action::Save => {}
        }
    }

    /// Saves the device, changes the state, and restores it into a device that is built anew. That goes on, unless it
    /// refuses the state.
    fn save(&mut self, changes: &[Mutation]) {
        self.guest.stop();
        let Ok(saved) = self.guest.device.save() else {
            return;
        };
        let mut value = Value::from(saved.clone());
        changes.iter().for_each(|change| change.apply(&mut value));
        if !changes.is_empty() {
            self.guest.offered.forget();
        }
        let text = serde_json::to_string(&value).expect("JSON");
        let state = serde_json::from_str(&text).expect("the same JSON");
        let (mut twin, handle) = self.bench.device(Some(&self.handle));
        let before = twin.save().ok();
        match twin.restore(&state, self.guest.features) {
            Ok(()) => {
                if changes.is_empty() && B::SAME {
                    assert_eq!(twin.save().ok(), Some(saved));
                }
                self.guest.device = twin;
                self.handle = handle;
            }
            Err(error) => {
                let known = match &error {
                    RestoreError::Field { field, .. } => B::REFUSED.contains(field),
                    _ => false,
                };
                assert!(known || !changes.is_empty(), "{error:?} of {text}");
                assert_eq!(
                    twin.save().ok(),
                    before,
                    "a device that refuses a state is unchanged"
                );
            }
        }
    }

    /// A new driver must be able to use the device.
    fn finish(mut self) {
        self.guest.run();
        self.bench.repair(&self.handle);
        self.guest.connect(0, 0, false);
        self.bench.check(&self.handle, &mut self.guest);
        assert_eq!(self.guest.interrupts.reset(), None);
    }
}

/// Runs a program: no worker may panic, a device that is stopped gives its queues back, and after a reset a new driver
/// can use it.
pub fn run<B: Bench>(program: Program<B::Setup, B::Request>) {
    prepare();
    let mut rig = Rig::<B>::new(&program);
    rig.carry_out(&program.actions);
    rig.finish();
}

/// A program before and after the device is restored from a state that somebody changed.
#[derive(Arbitrary, Debug)]
pub struct Restored<S, R> {
    pub before: Program<S, R>,
    pub changes: Vec<Mutation>,
    pub after: Vec<Action<R>>,
}

/// As [`run`]. A device that refuses the state is unchanged.
pub fn run_restored<B: Bench>(program: Restored<B::Setup, B::Request>) {
    prepare();
    let mut rig = Rig::<B>::new(&program.before);
    rig.carry_out(&program.before.actions);
    rig.save(&program.changes[..program.changes.len().min(4)]);
    rig.carry_out(&program.after);
    rig.finish();
}

/// An offset in a configuration space, mostly one that devices have.
fn config_offset(offset: u16) -> u64 {
    let offset = u64::from(offset);
    if offset < 0xf000 { offset % 64 } else { offset }
}

/// Turns seccomp filters off, which take as long as all else, and keep libFuzzer from writing the input when a worker
/// panics. Ignores SIGPIPE, as every Rust program does.
fn prepare() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        husk_seccomp::testing::turn_filters_off();
        // SAFETY: no handler is installed.
        unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
    });
}

/// A file in memory of this many bytes.
pub fn image(len: u64) -> File {
    // SAFETY: the name is a string; the descriptor is new, and owned by nobody else.
    let file: File = unsafe {
        let fd = libc::memfd_create(c"image".as_ptr(), libc::MFD_CLOEXEC);
        assert!(fd >= 0, "memfd");
        OwnedFd::from_raw_fd(fd).into()
    };
    file.set_len(len).expect("memory");
    file
}

/// Bytes that differ from their neighbours.
pub fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len)
        .map(|at| (at as u8).wrapping_mul(31) ^ (at >> 8) as u8 ^ seed)
        .collect()
}
