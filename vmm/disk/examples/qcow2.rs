//! Checks that `cargo test` leaves out, because they need `qemu-img`, or time.
//!
//! `qcow2 soak DIR [ROUNDS]` has images that `qemu-img` made, of every kind, written to at random, many requests at
//! once, and asks `qemu-img` afterwards whether they are sound and hold what they should. For hosts that have it, such
//! as the lab: it fails where there is none.
//!
//! `qcow2 bench DIR` compares a raw file with an overlay over it: random 4 KiB, one and 32 requests at once.

use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use husk_disk::{Disk, DiskId, DiskOptions, Engine, EngineKind, ImageFormat, IoBuffer, IoRequest};

const MIB: u64 = 1 << 20;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args[..] {
        ["soak", dir] => soak(Path::new(dir), 3),
        ["soak", dir, rounds] => soak(Path::new(dir), rounds.parse().expect("a number of rounds")),
        ["bench", dir] => bench(Path::new(dir)),
        _ => {
            eprintln!("qcow2 soak DIR [ROUNDS] | qcow2 bench DIR");
            std::process::exit(2);
        }
    }
}

/// xorshift64
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

fn open(path: &Path, write: bool) -> File {
    let file = OpenOptions::new().read(true).write(write).open(path);
    file.unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn complete(engine: &mut Engine) -> (u16, io::Result<()>) {
    loop {
        engine.kick().expect("a working engine");
        if let Some(done) = engine.complete() {
            return (done.tag, done.result);
        }
        engine.wait();
    }
}

fn qemu_img(args: &[&str]) {
    let output = Command::new("qemu-img")
        .args(args)
        .output()
        .expect("qemu-img in PATH");
    let (out, err) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert!(output.status.success(), "qemu-img {args:?}:\n{out}{err}");
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a path that is text")
}

/// An image, its base, and the names of both formats for `qemu-img`.
struct Chain {
    name: String,
    image: PathBuf,
    base: Option<(PathBuf, ImageFormat)>,
}

impl Chain {
    fn open(&self) -> Disk {
        let base = self.base.as_ref();
        let base = base.map(|(path, format)| (open(path, false).into(), *format));
        Disk::open_qcow2(open(&self.image, true).into(), base, DiskOptions::default())
            .unwrap_or_else(|error| panic!("{}: {error}", self.name))
    }

    fn json(&self) -> String {
        let file = |path: &Path| format!(r#""file":{{"driver":"file","filename":"{}"}}"#, text(path));
        let backing = match &self.base {
            None => r#","backing":null"#.to_string(),
            Some((path, format)) => {
                let driver = match format {
                    ImageFormat::Raw => "raw",
                    ImageFormat::Qcow2 => "qcow2",
                };
                format!(r#","backing":{{"driver":"{driver}",{}}}"#, file(path))
            }
        };
        format!(r#"json:{{"driver":"qcow2",{}{backing}}}"#, file(&self.image))
    }
}

fn soak(dir: &Path, rounds: usize) {
    let size = 32 * MIB + 512;
    let raw = dir.join("base.raw");
    let content: Vec<u8> = (0..20 * MIB)
        .map(|i| if i & MIB == 0 { (i / 512 % 251) as u8 } else { 0 })
        .collect();
    std::fs::write(&raw, &content).expect("room for a base");
    let packed = dir.join("base.qcow2");
    qemu_img(&[
        "convert",
        "-c",
        "-f",
        "raw",
        "-O",
        "qcow2",
        text(&raw),
        text(&packed),
    ]);
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let bases = [
        None,
        Some((raw.clone(), ImageFormat::Raw)),
        Some((packed.clone(), ImageFormat::Qcow2)),
    ];
    for options in [
        None,
        Some("cluster_size=512"),
        Some("cluster_size=4096,refcount_bits=1"),
        Some("cluster_size=2M,refcount_bits=64"),
        Some("compat=0.10"),
        Some("lazy_refcounts=on"),
        Some("preallocation=metadata"),
    ] {
        for base in &bases {
            let image = dir.join("image.qcow2");
            let _ = std::fs::remove_file(&image);
            match options {
                None => {
                    let file = File::create_new(&image).expect("a new file");
                    drop(file);
                    Disk::create_overlay(open(&image, true).into(), size).expect("an overlay");
                }
                Some(options) => {
                    let size = size.to_string();
                    qemu_img(&["create", "-q", "-f", "qcow2", "-o", options, text(&image), &size]);
                }
            }
            let mut model = vec![0; size as usize];
            // Metadata that is allocated beforehand hides the base.
            if base.is_some() && options != Some("preallocation=metadata") {
                model[..content.len()].copy_from_slice(&content);
            }
            let name = format!(
                "{} over {:?}",
                options.unwrap_or("ours"),
                base.as_ref().map(|(_, f)| f)
            );
            let base = base.clone();
            soak_one(&Chain { name, image, base }, &mut model, rounds, &mut random);
        }
    }
    // An image that is compressed itself.
    let name = "compressed".into();
    let (image, base) = (packed, None);
    let mut model = content;
    soak_one(&Chain { name, image, base }, &mut model, rounds, &mut random);
    println!("every image is sound and holds what it should");
}

fn soak_one(chain: &Chain, model: &mut [u8], rounds: usize, random: &mut Random) {
    let expected = chain.image.with_extension("expected");
    for _ in 0..rounds {
        let disk = chain.open();
        let mut engine = Engine::new(EngineKind::Auto, 64, 1).expect("an engine");
        let id = engine.attach(&disk).expect("a place");
        for _ in 0..40 {
            storm(&mut engine, id, model, random);
        }
        engine.detach(id).expect("nothing in flight");
        let mut held = vec![0; model.len()];
        disk.reader().read_at(0, &mut held).expect("what it holds");
        assert!(held == *model, "{}: other content", chain.name);
        drop((engine, disk));
        qemu_img(&["check", "-q", "-f", "qcow2", text(&chain.image)]);
        std::fs::write(&expected, &*model).expect("room for a copy");
        qemu_img(&["compare", "-q", "-F", "raw", &chain.json(), text(&expected)]);
    }
    println!("{}: sound", chain.name);
}

/// Many requests at once, none of which overlaps another. Reads and discards are not looked into: what counts is what
/// the image holds, and for what was discarded both are right, so it is written again.
fn storm(engine: &mut Engine, disk: DiskId, model: &mut [u8], random: &mut Random) {
    let sectors = model.len() as u64 / 512;
    let near = random.below(sectors);
    let mut taken: Vec<Range<u64>> = Vec::new();
    let mut requests: Vec<(u64, Vec<u8>)> = Vec::new();
    for _ in 0..64 {
        let start = if random.below(2) == 0 {
            random.below(sectors)
        } else {
            (near + random.below(256)).min(sectors - 1)
        };
        let most = if random.below(8) == 0 { 1024 } else { 16 };
        let end = (start + 1 + random.below(most)).min(sectors);
        if taken.iter().all(|t| end <= t.start || t.end <= start) {
            taken.push(start..end);
            let fill = random.below(256) as u8;
            requests.push((random.below(8), vec![fill; ((end - start) * 512) as usize]));
        }
    }
    for again in [false, true] {
        let mut running = 0;
        for (tag, (sectors, (kind, memory))) in taken.iter().zip(&mut requests).enumerate() {
            let (offset, len, durable) = (sectors.start * 512, memory.len() as u64, false);
            let range = offset as usize..(offset + len) as usize;
            let buffer = [IoBuffer::new(memory.as_mut_ptr(), memory.len())];
            let write = IoRequest::Write {
                offset,
                buffers: &buffer,
                durable,
            };
            let request = match (*kind, again) {
                (0, true) => {
                    model[range].copy_from_slice(memory);
                    write
                }
                (_, true) => continue,
                (0, false) => IoRequest::Discard { offset, len, durable },
                (kind @ 1..=2, false) => {
                    model[range].fill(0);
                    let unmap = kind == 1;
                    IoRequest::WriteZeroes {
                        offset,
                        len,
                        unmap,
                        durable,
                    }
                }
                (3, false) => IoRequest::Flush,
                _ => {
                    model[range].copy_from_slice(memory);
                    write
                }
            };
            // SAFETY: the memory lives, unmoved, until the completions below.
            unsafe { engine.submit(tag as u16, disk, request) };
            running += 1;
        }
        for _ in 0..running {
            complete(engine).1.expect("a request");
        }
    }
}

fn bench(dir: &Path) {
    let size = 256 * MIB;
    let (raw, overlay) = (dir.join("bench.raw"), dir.join("bench.qcow2"));
    let base = File::create(&raw).expect("a new file");
    let piece = vec![1; MIB as usize];
    for at in (0..size).step_by(MIB as usize) {
        base.write_all_at(&piece, at).expect("room for a base");
    }
    drop(base);
    let _ = File::create(&overlay).expect("a new file");
    Disk::create_overlay(open(&overlay, true).into(), size).expect("an overlay");
    let as_raw = || Disk::open_raw(open(&raw, true).into(), DiskOptions::default()).expect("a disk");
    let as_overlay = || {
        let base = Some((open(&raw, false).into(), ImageFormat::Raw));
        Disk::open_qcow2(open(&overlay, true).into(), base, DiskOptions::default()).expect("a disk")
    };
    for depth in [1, 32] {
        for write in [false, true] {
            let what = if write { "write" } else { "read" };
            let raw = rate(&as_raw(), depth, write);
            let empty = rate(&as_overlay(), depth, write);
            let full = if write {
                rate(&as_overlay(), depth, write)
            } else {
                empty
            };
            println!(
                "{what} depth {depth}: raw {raw:.0}/s, overlay {empty:.0}/s ({:.2}), again {full:.0}/s ({:.2})",
                empty / raw,
                full / raw
            );
        }
    }
}

/// Requests in a second.
fn rate(disk: &Disk, depth: u16, write: bool) -> f64 {
    let mut engine = Engine::new(EngineKind::Auto, depth, 1).expect("an engine");
    let id = engine.attach(disk).expect("a place");
    let mut memory = vec![vec![7; 4096]; depth.into()];
    let mut random = Random(88_172_645_463_325_252);
    let blocks = disk.size() / 4096;
    let mut start = |engine: &mut Engine, tag: u16| {
        let bytes = &mut memory[usize::from(tag)];
        let buffers = [IoBuffer::new(bytes.as_mut_ptr(), bytes.len())];
        let (offset, durable) = (random.below(blocks) * 4096, false);
        let request = if write {
            IoRequest::Write {
                offset,
                buffers: &buffers,
                durable,
            }
        } else {
            IoRequest::Read {
                offset,
                buffers: &buffers,
            }
        };
        // SAFETY: the memory lives, unmoved, until all is complete below.
        unsafe { engine.submit(tag, id, request) };
    };
    let began = Instant::now();
    (0..depth).for_each(|tag| start(&mut engine, tag));
    let (mut done, mut running) = (0u32, depth);
    while running > 0 {
        let (tag, result) = complete(&mut engine);
        result.expect("a request");
        done += 1;
        if began.elapsed() < Duration::from_secs(2) {
            start(&mut engine, tag);
        } else {
            running -= 1;
        }
    }
    f64::from(done) / began.elapsed().as_secs_f64()
}
