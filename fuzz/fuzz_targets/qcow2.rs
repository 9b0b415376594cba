//! Feeds reads, writes, discards and flushes to a qcow2 image whose header and tables may be changed, over a raw base
//! or none, through an engine. Asserts that an image without changes reads back what was written, also when it is
//! opened again.

#![no_main]

use std::fs::File;
use std::io;

use arbitrary::Arbitrary;
use husk_disk::testing::InlineImage;
use husk_disk::{CacheMode, DiskId, DiskOptions, Engine, ErrorPolicy, ImageFormat, IoBuffer, IoRequest};
use husk_fuzz::images::file;
use husk_fuzz::qcow2::{Edit, Image, Shape};
use libfuzzer_sys::fuzz_target;

#[derive(Arbitrary, Debug)]
struct Input {
    shape: Shape,
    base: Option<Base>,
    read_only: bool,
    writethrough: bool,
    edits: Vec<Edit>,
    cut: Option<u16>,
    steps: Vec<Step>,
}

#[derive(Arbitrary, Debug)]
struct Base {
    sectors: u8,
    fill: u8,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
struct Place {
    from_end: bool,
    sector: u16,
    sectors: u8,
}

#[derive(Arbitrary, Debug)]
enum Step {
    Read {
        place: Place,
        split: u8,
        /// All pieces go to the memory of the first, as a guest may ask that wants none of the data.
        repeated: bool,
    },
    Write {
        place: Place,
        split: u8,
        fill: u8,
        durable: bool,
    },
    Discard {
        place: Place,
        durable: bool,
    },
    Zero {
        place: Place,
        unmap: bool,
        durable: bool,
    },
    Flush,
    Extent(Place),
    Reopen,
}

impl Place {
    fn range(self, size: u64) -> (u64, usize) {
        let total = size / 512;
        let sector = u64::from(self.sector) % total;
        let sector = if self.from_end { total - 1 - sector } else { sector };
        let sectors = (1 + u64::from(self.sectors)).min(total - sector);
        (sector * 512, sectors as usize * 512)
    }
}

struct Opened {
    image: InlineImage,
    engine: Engine,
    disk: DiskId,
}

impl Opened {
    fn open(image: &File, base: Option<&File>, options: DiskOptions) -> io::Result<Self> {
        let fd = |file: &File| file.try_clone().expect("a descriptor").into();
        let image = InlineImage::open(fd(image), base.map(|base| (fd(base), ImageFormat::Raw)), options)?;
        let (engine, disk) = image.engine(1)?;
        Ok(Self { image, engine, disk })
    }

    fn run(&mut self, request: IoRequest<'_>) -> io::Result<()> {
        // SAFETY: the caller's buffers outlive the completion, which comes before this function ends.
        unsafe { self.engine.submit(0, self.disk, request) };
        self.engine.complete().expect("a request ends").result
    }
}

fn pieces(memory: &mut [u8], split: u8) -> Vec<IoBuffer> {
    let step = match split {
        0 => memory.len(),
        split => usize::from(split) * 37,
    };
    let pieces = memory.chunks_mut(step);
    pieces
        .map(|piece| IoBuffer::new(piece.as_mut_ptr(), piece.len()))
        .collect()
}

fuzz_target!(|input: Input| {
    let mut image = Image::build(&input.shape);
    let valid = input.edits.is_empty() && input.cut.is_none();
    input.edits.iter().take(12).for_each(|edit| image.edit(edit));
    let stored = file(&image.bytes);
    if let Some(len) = input.cut {
        stored.set_len(len.into()).expect("a shorter file");
    }
    let below: Option<Vec<u8>> = input.base.as_ref().map(|base| {
        let len = (1 + usize::from(base.sectors)) * 512;
        (0..len)
            .map(|at| base.fill ^ (at / 512) as u8 ^ at as u8)
            .collect()
    });
    let base = below.as_ref().map(|content| file(content));
    let options = DiskOptions {
        read_only: input.read_only,
        cache: if input.writethrough {
            CacheMode::Writethrough
        } else {
            CacheMode::Writeback
        },
        error_policy: ErrorPolicy::Report,
        ..DiskOptions::default()
    };

    let mut model = image.content;
    for (sector, _) in image.from_base.iter().enumerate().filter(|(_, from)| **from) {
        let range = sector * 512..(sector + 1) * 512;
        if let Some(content) = below.as_ref().and_then(|base| base.get(range.clone())) {
            model[range].copy_from_slice(content);
        }
    }
    let all = |opened: &Opened| {
        let mut content = vec![1; model_len(opened)];
        opened
            .image
            .read_at(0, &mut content)
            .expect("what a valid image holds");
        content
    };
    let mut opened = match Opened::open(&stored, base.as_ref(), options) {
        Ok(opened) => opened,
        Err(error) => return assert!(!valid, "{error}"),
    };
    if valid {
        same(&all(&opened), &model, "what it held at first");
    }

    for step in input.steps.iter().take(32) {
        let size = opened.image.size();
        match *step {
            Step::Read {
                place,
                split,
                repeated,
            } => {
                let (offset, len) = place.range(size);
                let mut memory = vec![0xaa; len];
                let mut buffers = pieces(&mut memory, split);
                let first = buffers[0];
                if repeated {
                    for piece in &mut buffers {
                        *piece = IoBuffer::new(first.start(), piece.len());
                    }
                }
                let buffers = &buffers;
                let done = opened.run(IoRequest::Read { offset, buffers });
                if valid {
                    done.expect("a read");
                    let mut expected = vec![0xaa; len];
                    let step_len = if repeated { first.len() } else { len };
                    for part in model[offset as usize..][..len].chunks(step_len) {
                        expected[..part.len()].copy_from_slice(part);
                    }
                    assert!(memory == expected, "{step:?}");
                }
            }
            Step::Write {
                place,
                split,
                fill,
                durable,
            } => {
                let (offset, len) = place.range(size);
                let mut memory: Vec<u8> = (0..len).map(|at| fill ^ (at / 512) as u8).collect();
                let buffers = &pieces(&mut memory, split);
                let done = opened.run(IoRequest::Write {
                    offset,
                    buffers,
                    durable,
                });
                if valid && !input.read_only {
                    done.expect("a write");
                    model[offset as usize..][..len].copy_from_slice(&memory);
                }
            }
            Step::Discard { place, durable } => {
                let (offset, len) = place.range(size);
                let done = opened.run(IoRequest::Discard {
                    offset,
                    len: len as u64,
                    durable,
                });
                if valid && !input.read_only {
                    done.expect("a discard");
                    // Whole clusters; the last one may end with the disk.
                    let (start, end) = (offset as usize, offset as usize + len);
                    let start = start.next_multiple_of(image.cluster);
                    let end = if end == model.len() {
                        end
                    } else {
                        end & !(image.cluster - 1)
                    };
                    if start < end && !image.version_2 {
                        model[start..end].fill(0);
                    }
                }
            }
            Step::Zero {
                place,
                unmap,
                durable,
            } => {
                let (offset, len) = place.range(size);
                let len64 = len as u64;
                let done = opened.run(IoRequest::WriteZeroes {
                    offset,
                    len: len64,
                    unmap,
                    durable,
                });
                if valid && !input.read_only {
                    done.expect("zeroes");
                    model[offset as usize..][..len].fill(0);
                }
            }
            Step::Flush => {
                let done = opened.run(IoRequest::Flush);
                assert!(!valid || done.is_ok());
            }
            Step::Extent(place) => {
                let (offset, _) = place.range(size);
                let extent = opened.image.extent(offset);
                if valid {
                    let extent = extent.expect("an extent");
                    assert!(extent.offset == offset && extent.len > 0 && extent.len <= size - offset);
                    let range = offset as usize..(offset + extent.len) as usize;
                    assert!(extent.allocated || model[range].iter().all(|byte| *byte == 0));
                }
            }
            Step::Reopen => {
                drop(opened);
                opened = match Opened::open(&stored, base.as_ref(), options) {
                    Ok(opened) => opened,
                    Err(error) => return assert!(!valid, "{error}"),
                };
            }
        }
    }
    if valid {
        same(&all(&opened), &model, "what it holds at the end");
        drop(opened);
        let opened = Opened::open(&stored, base.as_ref(), options).expect("it is opened again");
        same(&all(&opened), &model, "what it holds when it is opened again");
    }
});

fn same(held: &[u8], model: &[u8], what: &str) {
    let differs = held.iter().zip(model).position(|(held, model)| held != model);
    assert_eq!(differs, None, "{what}");
}

fn model_len(opened: &Opened) -> usize {
    usize::try_from(opened.image.size()).expect("a small disk")
}
