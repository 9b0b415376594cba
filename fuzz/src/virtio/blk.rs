//! virtio-blk on an image in memory.

use std::fs::File;
use std::sync::Arc;

use arbitrary::Arbitrary;
use husk_devices::virtio::VirtioDevice;
use husk_devices::virtio::testing::WRITE;
use husk_disk::{BlockSize, CacheMode, Disk, DiskOptions, EngineKind, ErrorPolicy};
use husk_virtio_blk::{Blk, BlkHandle, BlkSetup};

use super::{Bench, Buffer, DATA, Guest, descriptors, image, pattern, pieces};

const SIZE: u64 = 0x1_0000;
const PAGE: u64 = 4096;

const IN: u32 = 0;
const OUT: u32 = 1;

#[derive(Arbitrary, Debug)]
pub struct Setup {
    read_only: bool,
    writethrough: bool,
    large_blocks: bool,
    two_queues: bool,
    error_policy: u8,
}

impl Setup {
    fn options(&self) -> DiskOptions {
        let (logical, physical) = (4096, 4096);
        DiskOptions {
            read_only: self.read_only,
            cache: match self.writethrough {
                true => CacheMode::Writethrough,
                false => CacheMode::Writeback,
            },
            block_size: match self.large_blocks {
                true => BlockSize::Custom { logical, physical },
                false => BlockSize::Auto,
            },
            error_policy: error_policy(self.error_policy),
            preallocated: false,
        }
    }
}

pub fn error_policy(number: u8) -> ErrorPolicy {
    match number % 4 {
        0 => ErrorPolicy::Stop,
        1 => ErrorPolicy::Report,
        2 => ErrorPolicy::Ignore,
        _ => ErrorPolicy::NoSpace,
    }
}

#[derive(Arbitrary, Clone, Copy, Debug)]
pub enum Kind {
    In,
    Out,
    Flush,
    GetId,
    Discard,
    WriteZeroes,
    Other(u32),
}

impl Kind {
    fn number(self) -> u32 {
        match self {
            Self::In => IN,
            Self::Out => OUT,
            Self::Flush => 4,
            Self::GetId => 8,
            Self::Discard => 11,
            Self::WriteZeroes => 13,
            Self::Other(kind) => kind,
        }
    }
}

#[derive(Arbitrary, Clone, Copy, Debug)]
pub enum Sector {
    Near(u8),
    Page(u8),
    Any(u64),
}

impl Sector {
    fn number(self) -> u64 {
        match self {
            Self::Near(sector) => sector.into(),
            Self::Page(page) => 8 * u64::from(page),
            Self::Any(sector) => sector,
        }
    }
}

#[derive(Arbitrary, Debug)]
pub enum Request {
    Io {
        kind: Kind,
        sector: Sector,
        data: Vec<Buffer>,
        shape: Shape,
    },
    Range {
        kind: Kind,
        sector: Sector,
        sectors: u32,
        flags: u8,
        shape: Shape,
    },
    /// The image shrinks, or has its size again: reads behind its end fail.
    Truncate(u8),
    Resize,
}

/// Layout of a request in descriptors.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub struct Shape {
    queue: u8,
    indirect: bool,
    cut: u8,
}

pub struct BlkBench {
    file: File,
    disk: Disk,
    queues: u16,
}

impl BlkBench {
    fn chain(guest: &mut Guest, kind: u32, sector: u64, data: &[(u64, u32, u16)], shape: Shape) {
        let at = guest.slot();
        guest.put(at, &header(kind, sector));
        let mut chain = pieces(at, 16, shape.cut.into(), 0);
        chain.extend(data);
        chain.push((at + 16, 1, WRITE));
        let queue = guest.queue(shape.queue);
        guest.add(queue, &chain, shape.indirect);
    }

    /// Performs a request of a page. Returns its status.
    fn page(guest: &mut Guest, kind: u32, data: (u64, u32, u16)) -> u8 {
        let at = guest.slot();
        guest.put(at, &header(kind, 0));
        guest.put(at + 16, &[0xff]);
        guest.serve(0, &[(at, 16, 0), data, (at + 16, 1, WRITE)]);
        guest.get(at + 16, 1)[0]
    }
}

fn header(kind: u32, sector: u64) -> Vec<u8> {
    [&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat()
}

impl Bench for BlkBench {
    type Setup = Setup;
    type Request = Request;
    type Handle = BlkHandle;

    fn new(setup: &Setup) -> Self {
        let file = image(SIZE);
        let descriptor = file.try_clone().expect("a descriptor").into();
        Self {
            disk: Disk::open_raw(descriptor, setup.options()).expect("a disk"),
            file,
            queues: if setup.two_queues { 2 } else { 1 },
        }
    }

    fn device(&mut self, _: Option<&BlkHandle>) -> (Box<dyn VirtioDevice>, BlkHandle) {
        let setup = BlkSetup {
            id: "fuzz".into(),
            disk: self.disk.clone(),
            serial: "serial".into(),
            queues: self.queues,
            engine: EngineKind::Auto,
            on_io_stop: Arc::new(|_| {}),
        };
        let (blk, handle) = Blk::new(setup).expect("an engine");
        (Box::new(blk), handle)
    }

    fn request(&mut self, request: &Request, handle: &BlkHandle, guest: &mut Guest) {
        match *request {
            Request::Io {
                kind,
                sector,
                ref data,
                shape,
            } => {
                let fills = matches!(kind, Kind::In | Kind::GetId);
                let data = descriptors(data, if fills { WRITE } else { 0 });
                Self::chain(guest, kind.number(), sector.number(), &data, shape);
            }
            Request::Range {
                kind,
                sector,
                sectors,
                flags,
                shape,
            } => {
                let at = guest.slot();
                let mut range = sector.number().to_le_bytes().to_vec();
                range.extend([sectors, flags.into()].map(u32::to_le_bytes).concat());
                guest.put(at, &range);
                Self::chain(guest, kind.number(), 0, &[(at, 16, 0)], shape);
            }
            Request::Truncate(pages) => {
                let pages = 1 + u64::from(pages) % (SIZE / PAGE);
                self.file.set_len(pages * PAGE).expect("memory");
            }
            Request::Resize => {
                let size = handle.resize().expect("a size");
                assert_eq!(size, handle.geometry().size);
            }
        }
    }

    fn repair(&mut self, handle: &BlkHandle) {
        self.file.set_len(SIZE).expect("memory");
        handle.resize().expect("the size again");
    }

    fn check(&mut self, handle: &BlkHandle, guest: &mut Guest) {
        let (there, back) = (DATA, DATA + PAGE);
        let bytes = pattern(PAGE as usize, 1);
        guest.put(there, &bytes);
        let read_only = handle.geometry().read_only;
        let written = Self::page(guest, OUT, (there, PAGE as u32, 0));
        assert_eq!(written, u8::from(read_only));
        assert_eq!(Self::page(guest, IN, (back, PAGE as u32, WRITE)), 0);
        assert!(read_only || guest.get(back, PAGE as usize) == bytes);
    }
}
