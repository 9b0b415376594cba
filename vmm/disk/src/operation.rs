//! A request as a sequence of system calls: chooses the next call from the result of the last one.
//!
//! It does not execute calls, so both backends share it and tests can feed it any results. It handles short transfers,
//! the alignment of direct I/O (through a bounce buffer that reads the rest of a partial block first) and file systems
//! without `fallocate`.

use crate::aligned_buf::AlignedBuf;
use crate::geometry::Align;
use crate::io_backend::{IoCall, IovecList};
use crate::request::IoBuffer;

/// Size of the largest bounce buffer in bytes. Longer requests go through it in pieces.
const BOUNCE: u64 = 256 << 10;

/// Maximum iovecs of one call (UIO_MAXIOV).
const VECTOR: usize = 1024;

/// Interrupted calls in a row before a request fails.
const RETRIES: u8 = 64;

/// Iovecs that an operation keeps allocated between requests: enough for a fragmented 256 KiB. There are many
/// operations, so not more.
const KEPT_BUFFERS: usize = 64;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum OperationKind {
    Read,
    Write,
    #[default]
    Flush,
    Discard,
    Zero {
        unmap: bool,
    },
}

/// Capabilities of the image's file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FileTraits {
    pub align: Align,
    /// A discard does something: not in a preallocated image, and cleared by the first refusal.
    pub discard: bool,
    /// Unit in bytes that a discard may cover: the logical block of a block device, 1 for a file. A power of two.
    pub discard_block: u64,
    /// `fallocate` punches holes: not in a preallocated image, and cleared by the first refusal.
    pub punch: bool,
    /// `fallocate` zeroes ranges; cleared by the first refusal.
    pub zero_range: bool,
}

/// The next action of an operation.
#[derive(Debug)]
pub(crate) enum NextAction {
    IoCall(IoCall),
    /// Allocate a bounce buffer of this many bytes, see [`Operation::set_bounce_buffer`].
    Bounce(usize),
    Done,
    /// The request failed with this error number. It can be retried, see [`Operation::retry`].
    Failed(i32),
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Stage {
    /// Decide how to continue with the rest.
    #[default]
    Choose,
    /// Transfer between the caller's buffers and the file.
    Transfer,
    /// Read from the file into the bounce buffer.
    Fill,
    /// Write the bounce buffer to the file.
    Drain,
    Punch,
    ZeroRange,
    Sync,
    Done,
    Failed,
}

/// One request. Reused for the next one, with its allocations.
#[derive(Debug, Default)]
pub(crate) struct Operation {
    kind: OperationKind,
    durable: bool,
    /// First byte of the whole request.
    start: u64,
    /// The range that is left to do, in bytes of the disk.
    offset: u64,
    end: u64,
    /// All but the first one that is not done are whole.
    buffers: Vec<IoBuffer>,
    /// Index of the first buffer that is not done.
    first: usize,
    /// Bytes of that buffer that are done, and that it lacks.
    done_of_first: usize,
    bounce: Option<Box<Bounce>>,
    /// Write zeroes because `fallocate` refused the range.
    write_zeroes_explicitly: bool,
    stage: Stage,
    /// Error number of a failed request and the stage that failed.
    failure: (i32, Stage),
    retries: u8,
}

#[derive(Debug)]
struct Bounce {
    memory: AlignedBuf,
    capacity: u64,
    /// The aligned range of the disk that the buffer holds now.
    start: u64,
    len: u64,
    /// Bytes of the range that calls have transferred so far.
    done: u64,
    iovec: IoBuffer,
}

impl Operation {
    /// Starts a request for `len` bytes at `offset`. The range is on the disk, and `buffers` have the same total
    /// length.
    pub fn begin(&mut self, kind: OperationKind, offset: u64, len: u64, buffers: &[IoBuffer], durable: bool) {
        self.kind = kind;
        self.durable = durable;
        self.start = offset;
        self.offset = offset;
        self.end = offset + len;
        self.buffers.extend_from_slice(buffers);
        self.stage = Stage::Choose;
    }

    /// True if the next step begins a piece of zeroes, which `fallocate` does not write.
    pub fn begins_zeroes(&self, traits: &FileTraits) -> bool {
        let OperationKind::Zero { unmap } = self.kind else {
            return false;
        };
        let allocates = traits.zero_range || unmap && traits.punch;
        let explicit = self.write_zeroes_explicitly || !allocates;
        self.stage == Stage::Choose && self.offset < self.end && explicit
    }

    /// Gives the bounce buffer back, between two pieces. Returns true if there was one.
    pub fn release_bounce_buffer(&mut self) -> bool {
        self.bounce.take().is_some()
    }

    /// Clears the request. Returns true if it held a bounce buffer.
    pub fn clear(&mut self) -> bool {
        self.buffers.clear();
        self.buffers.shrink_to(KEPT_BUFFERS);
        self.first = 0;
        self.done_of_first = 0;
        self.write_zeroes_explicitly = false;
        self.retries = 0;
        self.release_bounce_buffer()
    }

    /// The blocks of the disk, as byte offsets, that the rest of the request touches.
    pub fn blocks(&self, align: Align) -> (u64, u64) {
        (
            self.offset & !(align.offset - 1),
            self.end.next_multiple_of(align.offset),
        )
    }

    /// True if the request changes the disk.
    pub fn changes(&self) -> bool {
        matches!(
            self.kind,
            OperationKind::Write | OperationKind::Zero { .. } | OperationKind::Discard
        )
    }

    /// True if the request writes back parts of blocks outside its range.
    pub fn rewrites(&self, align: Align) -> bool {
        matches!(self.kind, OperationKind::Write | OperationKind::Zero { .. })
            && self.blocks(align) != (self.offset, self.end)
    }

    /// The next action. After [`NextAction::IoCall`], call [`Operation::call_done`] first.
    pub fn next(&mut self, traits: &FileTraits) -> NextAction {
        if self.stage == Stage::Choose {
            self.stage = match self.choose(traits) {
                Ok(stage) => stage,
                Err(bounce) => return bounce,
            };
        }
        match self.stage {
            Stage::Transfer => self.transfer(traits.align),
            Stage::Fill | Stage::Drain => self.bounce_call(traits.align),
            Stage::Punch => self.allocate(libc::FALLOC_FL_PUNCH_HOLE),
            Stage::ZeroRange => self.allocate(libc::FALLOC_FL_ZERO_RANGE),
            Stage::Sync => NextAction::IoCall(IoCall::Sync),
            Stage::Failed => NextAction::Failed(self.failure.0),
            Stage::Choose | Stage::Done => NextAction::Done,
        }
    }

    fn choose(&mut self, traits: &FileTraits) -> Result<Stage, NextAction> {
        Ok(match self.kind {
            OperationKind::Flush => Stage::Sync,
            OperationKind::Write | OperationKind::Zero { .. }
                if self.offset == self.end && self.needs_separate_sync(traits.align) =>
            {
                Stage::Sync
            }
            _ if self.offset == self.end => Stage::Done,
            // A discard is a hint: a file without holes may ignore it.
            OperationKind::Discard if traits.discard => self.cut(traits.discard_block),
            OperationKind::Discard => Stage::Done,
            OperationKind::Zero { unmap: true } if traits.punch && !self.write_zeroes_explicitly => {
                Stage::Punch
            }
            OperationKind::Zero { .. } if traits.zero_range && !self.write_zeroes_explicitly => {
                Stage::ZeroRange
            }
            OperationKind::Read | OperationKind::Write if self.aligned(traits.align) => Stage::Transfer,
            _ => return self.next_piece(traits.align),
        })
    }

    /// Cuts the range of a discard to whole blocks.
    fn cut(&mut self, block: u64) -> Stage {
        self.offset = self.offset.next_multiple_of(block);
        self.end &= !(block - 1);
        match self.offset < self.end {
            true => Stage::Punch,
            false => Stage::Done,
        }
    }

    /// True if a durable write needs a separate fdatasync instead of RWF_DSYNC. With the page cache, RWF_DSYNC may
    /// report an error of an earlier write, once, and it could not be told from an error of this write.
    fn needs_separate_sync(&self, align: Align) -> bool {
        self.durable && align == Align::NONE
    }

    fn aligned(&self, align: Align) -> bool {
        align == Align::NONE
            || self.blocks(align) == (self.offset, self.end)
                && self.buffers[self.first..].iter().all(|b| {
                    (b.start() as usize).is_multiple_of(align.memory)
                        && (b.len() as u64).is_multiple_of(align.offset)
                })
    }

    /// Points the bounce buffer at the next piece, or asks for a buffer.
    fn next_piece(&mut self, align: Align) -> Result<Stage, NextAction> {
        let (start, stop) = self.blocks(align);
        let Some(bounce) = &mut self.bounce else {
            return Err(NextAction::Bounce(
                (stop - start).min(BOUNCE.max(align.offset)) as usize
            ));
        };
        bounce.start = start;
        bounce.len = (stop - start).min(bounce.capacity);
        bounce.done = 0;
        let partial = self.offset != start || self.end < start + bounce.len;
        if self.kind == OperationKind::Read || partial {
            return Ok(Stage::Fill);
        }
        Ok(self.fill_in())
    }

    /// Answers [`NextAction::Bounce`]. Returns true if there was memory; else the request fails.
    pub fn set_bounce_buffer(&mut self, bytes: usize, align: Align) -> bool {
        match AlignedBuf::new(bytes, align.memory.max(align.offset as usize)) {
            Ok(memory) => {
                let (start, len, done) = (0, 0, 0);
                let iovec = IoBuffer::new(std::ptr::null_mut(), 0);
                let capacity = bytes as u64;
                self.bounce = Some(Box::new(Bounce {
                    memory,
                    capacity,
                    start,
                    len,
                    done,
                    iovec,
                }));
            }
            Err(_) => self.stage = self.failed(libc::ENOMEM),
        }
        self.bounce.is_some()
    }

    fn transfer(&self, align: Align) -> NextAction {
        let buffers = &self.buffers[self.first..];
        // IoBuffer is a transparent wrapper of iovec.
        let vector = IovecList {
            start: buffers.as_ptr().cast(),
            count: buffers.len().min(VECTOR) as u32,
        };
        let offset = self.offset;
        NextAction::IoCall(match self.kind {
            OperationKind::Read => IoCall::Read { offset, vector },
            _ => IoCall::Write {
                offset,
                vector,
                durable: self.durable && !self.needs_separate_sync(align),
            },
        })
    }

    fn bounce_call(&mut self, align: Align) -> NextAction {
        let durable = self.durable && !self.needs_separate_sync(align);
        let Some(bounce) = &mut self.bounce else {
            return NextAction::Failed(libc::EIO);
        };
        let rest = &mut bounce.memory.as_mut()[bounce.done as usize..bounce.len as usize];
        bounce.iovec = IoBuffer::new(rest.as_mut_ptr(), rest.len());
        let vector = IovecList {
            start: (&raw const bounce.iovec).cast(),
            count: 1,
        };
        let offset = bounce.start + bounce.done;
        NextAction::IoCall(match self.stage {
            Stage::Fill => IoCall::Read { offset, vector },
            _ => IoCall::Write {
                offset,
                vector,
                durable,
            },
        })
    }

    fn allocate(&self, mode: i32) -> NextAction {
        let (offset, len) = (self.offset, self.end - self.offset);
        NextAction::IoCall(IoCall::Allocate {
            mode: mode | libc::FALLOC_FL_KEEP_SIZE,
            offset,
            len,
            hint: self.kind == OperationKind::Discard,
        })
    }

    /// The kind of the request.
    pub fn kind(&self) -> OperationKind {
        self.kind
    }

    /// True for a flush request.
    pub fn is_flush(&self) -> bool {
        self.kind == OperationKind::Flush
    }

    /// Marks the operation as failed with `errno`.
    pub fn fail(&mut self, errno: i32) {
        self.failure = (errno, Stage::Sync);
        self.stage = Stage::Failed;
    }

    fn failed(&mut self, errno: i32) -> Stage {
        self.failure = (errno, self.stage);
        Stage::Failed
    }

    /// Continues a failed request where it failed.
    pub fn retry(&mut self) {
        self.stage = match self.failure.1 {
            // Chooses again for what is left.
            Stage::Transfer => Stage::Choose,
            // The page cache may have dropped what was written, so it is written again.
            Stage::Sync if !self.is_flush() => return self.restart(),
            stage => stage,
        };
    }

    /// Starts a failed request again from its first byte.
    pub fn restart(&mut self) {
        self.offset = self.start;
        if let Some(buffer) = self.buffers.get_mut(self.first) {
            let done = std::mem::take(&mut self.done_of_first);
            *buffer = IoBuffer::new(buffer.start().wrapping_sub(done), buffer.len() + done);
        }
        self.first = 0;
        self.stage = Stage::Choose;
    }

    /// Error number of a failed request.
    pub fn errno(&self) -> i32 {
        self.failure.0
    }

    /// True if the failed step should have made earlier writes stable.
    pub fn failed_to_sync(&self) -> bool {
        self.stage == Stage::Failed && self.failure.1 == Stage::Sync
    }

    /// True if the failed step was a write to the file.
    pub fn failed_to_write(&self) -> bool {
        let write = self.kind == OperationKind::Write;
        self.stage == Stage::Failed
            && matches!(
                (self.failure.1, write),
                (Stage::Drain, _) | (Stage::Transfer, true)
            )
    }

    /// Fills the rest of a read with zeroes.
    pub fn zero_rest(&mut self) {
        if self.kind == OperationKind::Read {
            self.consume(self.end - self.offset, |caller, len| {
                // SAFETY: valid for writes by the contract of `Engine::submit`.
                unsafe { caller.write_bytes(0, len) }
            });
        }
    }

    /// First byte of the disk behind the request.
    pub fn end(&self) -> u64 {
        self.end
    }

    /// Takes the result of the call.
    pub fn call_done(&mut self, result: i32, traits: &mut FileTraits) {
        if matches!(-result, libc::EINTR | libc::EAGAIN) && self.retries < RETRIES {
            self.retries += 1;
            return;
        }
        self.retries = 0;
        self.stage = match self.stage {
            Stage::Punch | Stage::ZeroRange => self.allocated(result, traits),
            stage if result < 0 => {
                debug_assert!(stage != Stage::Choose);
                self.failed(-result)
            }
            Stage::Transfer => match result {
                // The image ended early: it was truncated while it was open.
                0 => self.failed(libc::EIO),
                n => {
                    self.consume(n as u64, |_, _| ());
                    Stage::Choose
                }
            },
            Stage::Fill | Stage::Drain => self.bounced(result as u64, traits.align),
            _ => Stage::Done,
        };
    }

    fn allocated(&mut self, result: i32, traits: &mut FileTraits) -> Stage {
        let ability = match (self.stage, self.kind) {
            (Stage::Punch, OperationKind::Discard) => &mut traits.discard,
            (Stage::Punch, _) => &mut traits.punch,
            _ => &mut traits.zero_range,
        };
        match -result {
            0 if self.durable => Stage::Sync,
            0 => Stage::Done,
            libc::EOPNOTSUPP | libc::ENOSYS => {
                *ability = false;
                Stage::Choose
            }
            // A device that cannot discard this range, or at all: then the kernel sends no further ones.
            libc::EINVAL | libc::EREMOTEIO if self.kind == OperationKind::Discard => Stage::Done,
            libc::EINVAL => {
                self.write_zeroes_explicitly = true;
                Stage::Choose
            }
            errno => self.failed(errno),
        }
    }

    fn bounced(&mut self, moved: u64, align: Align) -> Stage {
        let Some(bounce) = &mut self.bounce else {
            return self.failed(libc::EIO);
        };
        // Direct I/O continues at block boundaries only.
        let moved = moved & !(align.offset - 1);
        if moved == 0 {
            return self.failed(libc::EIO);
        }
        bounce.done += moved;
        if bounce.done < bounce.len {
            return self.stage;
        }
        match (self.stage, self.kind) {
            (Stage::Fill, OperationKind::Read) => {
                self.copy(|caller, bounce, len| {
                    // SAFETY: `len` bytes are ours at `bounce`, and at `caller` by the contract of `Engine::submit`;
                    // they do not overlap. The guest may write there in the meantime, which changes only what it will
                    // find there.
                    unsafe { std::ptr::copy_nonoverlapping(bounce, caller, len) }
                });
                Stage::Choose
            }
            (Stage::Fill, _) => self.fill_in(),
            _ => Stage::Choose,
        }
    }

    /// Copies this request's bytes into the bounce buffer, to be written next.
    fn fill_in(&mut self) -> Stage {
        if let (OperationKind::Zero { .. }, Some(bounce)) = (self.kind, &mut self.bounce) {
            let skip = self.offset - bounce.start;
            let len = (self.end - self.offset).min(bounce.len - skip);
            bounce.memory.as_mut()[skip as usize..][..len as usize].fill(0);
            self.offset += len;
        } else {
            self.copy(|caller, bounce, len| {
                // SAFETY: as when reading, in the other direction.
                unsafe { std::ptr::copy_nonoverlapping(caller, bounce, len) }
            });
        }
        if let Some(bounce) = &mut self.bounce {
            bounce.done = 0;
        }
        Stage::Drain
    }

    /// Calls `each(caller's memory, bounce buffer's memory, length)` for the bytes of this piece that are in both, and
    /// advances past it.
    fn copy(&mut self, each: impl Fn(*mut u8, *mut u8, usize)) {
        let Some(mut bounce) = self.bounce.take() else {
            return;
        };
        let skip = self.offset - bounce.start;
        let len = (self.end - self.offset).min(bounce.len - skip);
        let mut at = skip as usize;
        let memory = bounce.memory.as_mut();
        self.consume(len, |caller, len| {
            each(caller, memory[at..at + len].as_mut_ptr(), len);
            at += len;
        });
        self.bounce = Some(bounce);
    }

    /// Advances by `len` bytes and calls `each` for each piece of the caller's memory.
    fn consume(&mut self, len: u64, mut each: impl FnMut(*mut u8, usize)) {
        self.offset += len;
        let mut rest = len as usize;
        while let Some(buffer) = self.buffers.get_mut(self.first)
            && rest > 0
        {
            let part = rest.min(buffer.len());
            each(buffer.start(), part);
            *buffer = IoBuffer::new(buffer.start().wrapping_add(part), buffer.len() - part);
            self.done_of_first += part;
            if buffer.len() == 0 {
                let len = std::mem::take(&mut self.done_of_first);
                *buffer = IoBuffer::new(buffer.start().wrapping_sub(len), len);
                self.first += 1;
            }
            rest -= part;
        }
    }
}
