//! Images, and requests to them beside a model of their content.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use proptest::prelude::*;

use super::super::create;
use crate::{
    Disk, DiskId, DiskOptions, Engine, EngineKind, ErrorPolicy, ImageFormat, IoBuffer, IoCompletion,
    IoRequest, SECTOR,
};

pub fn options() -> DiskOptions {
    DiskOptions {
        error_policy: ErrorPolicy::Report,
        ..DiskOptions::default()
    }
}

pub fn reading() -> DiskOptions {
    DiskOptions {
        read_only: true,
        ..options()
    }
}

pub fn fd(file: &File) -> OwnedFd {
    file.try_clone().unwrap().into()
}

/// An empty image.
pub fn image(size: u64, cluster: usize) -> File {
    let file = tempfile::tempfile_in("/var/tmp").unwrap();
    create(&Arc::new(file.try_clone().unwrap()), size, cluster).unwrap();
    file
}

pub fn open(file: &File, base: Option<&(File, ImageFormat)>) -> Disk {
    let base = base.map(|(file, format)| (fd(file), *format));
    Disk::open_qcow2(fd(file), base, options()).unwrap()
}

#[derive(Clone, Debug)]
pub struct Op {
    pub kind: u8,
    pub sector: u64,
    pub sectors: u64,
    /// Bytes of a buffer.
    pub step: usize,
    pub fill: u8,
}

impl Op {
    pub fn range(&self) -> std::ops::Range<usize> {
        (self.sector * SECTOR) as usize..((self.sector + self.sectors) * SECTOR) as usize
    }
}

/// Drops requests that overlap earlier ones, so that there is one right result.
pub fn apart(ops: Vec<Op>, size: u64) -> Vec<Op> {
    let mut kept: Vec<Op> = Vec::new();
    for mut op in ops {
        op.sector %= size / SECTOR;
        op.sectors = op.sectors.min(size / SECTOR - op.sector);
        if kept
            .iter()
            .all(|k| op.range().end <= k.range().start || k.range().end <= op.range().start)
        {
            kept.push(op);
        }
    }
    kept
}

pub fn buffers(memory: &mut [u8], step: usize) -> Vec<IoBuffer> {
    memory
        .chunks_mut(step)
        .map(|c| IoBuffer::new(c.as_mut_ptr(), c.len()))
        .collect()
}

/// All at once; checks reads against `model`, and brings it up to date.
pub fn batch(engine: &mut Engine, disk: DiskId, ops: &[Op], model: &mut [u8], cluster: usize) {
    let mut memory: Vec<_> = ops.iter().map(|op| vec![op.fill; op.range().len()]).collect();
    for (tag, (op, memory)) in ops.iter().zip(&mut memory).enumerate() {
        let (offset, len) = (op.sector * SECTOR, op.sectors * SECTOR);
        let pieces = buffers(memory, op.step);
        let (durable, unmap) = (op.fill % 8 == 0, op.fill % 2 == 0);
        let request = match op.kind {
            0 => IoRequest::Read {
                offset,
                buffers: &pieces,
            },
            1 => IoRequest::Write {
                offset,
                buffers: &pieces,
                durable,
            },
            2 => IoRequest::Discard { offset, len, durable },
            3 => IoRequest::WriteZeroes {
                offset,
                len,
                unmap,
                durable,
            },
            _ => IoRequest::Flush,
        };
        // SAFETY: the memory lives, unmoved, until the completions below.
        unsafe { engine.submit(tag as u16, disk, request) };
    }
    for _ in ops {
        let done = complete(engine);
        done.result.unwrap();
    }
    for (op, memory) in ops.iter().zip(&memory) {
        let range = op.range();
        match op.kind {
            0 => assert!(memory[..] == model[range], "{op:?}"),
            1 => model[range].fill(op.fill),
            2 => {
                let start = range.start.next_multiple_of(cluster);
                let end = if range.end == model.len() {
                    range.end
                } else {
                    range.end & !(cluster - 1)
                };
                if start < end {
                    model[start..end].fill(0);
                }
            }
            3 => model[range].fill(0),
            _ => {}
        }
    }
}

pub fn complete(engine: &mut Engine) -> IoCompletion {
    loop {
        engine.kick().unwrap();
        if let Some(done) = engine.complete() {
            return done;
        }
        engine.wait();
    }
}

pub fn all(disk: &Disk) -> Vec<u8> {
    let mut content = vec![1; disk.size() as usize];
    disk.reader().read_at(0, &mut content).unwrap();
    content
}

/// A base of `size` bytes and its content.
pub fn base(kind: u8, size: u64) -> Option<((File, ImageFormat), Vec<u8>)> {
    let content: Vec<u8> = (0..size).map(|i| (i / 512 % 251) as u8 | 1).collect();
    match kind {
        0 => None,
        1 => {
            let file = tempfile::tempfile_in("/var/tmp").unwrap();
            file.write_all_at(&content, 0).unwrap();
            Some(((file, ImageFormat::Raw), content))
        }
        _ => {
            let file = image(size, 4096);
            let disk = open(&file, None);
            let mut engine = Engine::new(EngineKind::Threads, 1, 1).unwrap();
            let id = engine.attach(&disk).unwrap();
            // Every other MiB.
            let mut content = content;
            for (i, piece) in content.chunks_mut(1 << 20).enumerate() {
                if i % 2 == 1 {
                    piece.fill(0);
                    continue;
                }
                let pieces = buffers(piece, 1 << 16);
                let offset = (i << 20) as u64;
                let durable = false;
                let write = IoRequest::Write {
                    offset,
                    buffers: &pieces,
                    durable,
                };
                // SAFETY: the memory outlives the completion.
                unsafe { engine.submit(0, id, write) };
                complete(&mut engine).result.unwrap();
            }
            Some(((file, ImageFormat::Qcow2), content))
        }
    }
}

pub fn ops(many: usize) -> impl Strategy<Value = Vec<Op>> {
    let kind = prop_oneof![3 => Just(0u8), 6 => Just(1), 1 => Just(2), 1 => Just(3), 1 => Just(4)];
    let sectors = prop_oneof![4 => 1..16u64, 1 => 1..600u64];
    // Most at a few offsets, so that several are in one cluster.
    let sector = prop_oneof![2 => 0..512u64, 1 => 0..1_000_000u64];
    let op = (
        kind,
        sector,
        sectors,
        prop_oneof![Just(512usize), Just(700), Just(1 << 16)],
        1..=255u8,
    );
    let op = op.prop_map(|(kind, sector, sectors, step, fill)| Op {
        kind,
        sector,
        sectors,
        step,
        fill,
    });
    prop::collection::vec(op, 1..many)
}

/// A disk in an engine of its own, one request at a time.
pub struct Served(Engine, DiskId);

impl Served {
    pub fn new(disk: &Disk) -> Self {
        let mut engine = Engine::new(EngineKind::Threads, 1, 1).unwrap();
        let id = engine.attach(disk).unwrap();
        Self(engine, id)
    }

    pub fn run(&mut self, request: IoRequest<'_>) -> io::Result<()> {
        // SAFETY: the callers' buffers outlive the completion.
        unsafe { self.0.submit(0, self.1, request) };
        complete(&mut self.0).result
    }

    pub fn write(&mut self, offset: u64, memory: &mut [u8]) -> io::Result<()> {
        let buffers = &buffers(memory, 4096);
        self.run(IoRequest::Write {
            offset,
            buffers,
            durable: false,
        })
    }

    pub fn zero(&mut self, offset: u64, len: u64, unmap: bool) -> io::Result<()> {
        self.run(IoRequest::WriteZeroes {
            offset,
            len,
            unmap,
            durable: false,
        })
    }

    pub fn read(&mut self, offset: u64, memory: &mut [u8]) -> io::Result<()> {
        let buffers = &buffers(memory, 4096);
        self.run(IoRequest::Read { offset, buffers })
    }
}
