//! Real files through both kinds of engine.

mod common;

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};

use common::*;
use husk_disk::{CacheMode, Disk, DiskOptions, EngineKind, IoRequest};

fn round_trip(kind: EngineKind, disk: &Disk, shift: usize) {
    let reader = disk.reader();
    let mut served = serve(kind, disk);
    let expected = pattern(MIB as usize, 7);
    let mut memory = [vec![0; shift], expected.clone()].concat();
    for (offset, step) in [
        (512u64, 4096),
        (MIB, 1000),
        (2 * MIB + 1024, 1 << 20),
        (4 * MIB, 700),
    ] {
        let out = pieces(&mut memory[shift..], step);
        let results = run(
            &mut served,
            &[IoRequest::Write {
                offset,
                buffers: &out,
                durable: false,
            }],
        );
        assert!(results.iter().all(Result::is_ok), "{results:?}");
        assert!(run(&mut served, &[IoRequest::Flush])[0].is_ok());
        let mut back = vec![0; MIB as usize + shift];
        let buffers = pieces(&mut back[shift..], step);
        run(
            &mut served,
            &[IoRequest::Read {
                offset,
                buffers: &buffers,
            }],
        )
        .remove(0)
        .unwrap();
        assert!(back[shift..] == expected);
        let mut odd = vec![0; 5000];
        reader.read_at(offset + 333, &mut odd).unwrap();
        assert!(odd == expected[333..5333]);
    }
}

#[test]
fn data_survives_a_round_trip() {
    for kind in KINDS {
        for cache in [CacheMode::Writeback, CacheMode::Writethrough] {
            let file = image(8 * MIB);
            let options = DiskOptions {
                cache,
                ..DiskOptions::default()
            };
            round_trip(kind, &disk(&file, 0, options), 0);
        }
    }
}

#[test]
fn direct_io_takes_any_alignment() {
    for kind in KINDS {
        for shift in [0, 1] {
            let file = image(8 * MIB);
            let options = DiskOptions {
                cache: CacheMode::None,
                ..DiskOptions::default()
            };
            round_trip(kind, &disk(&file, libc::O_DIRECT, options), shift);
        }
    }
}

#[test]
fn several_engines_do_without_direct_io_where_it_rewrites_blocks() {
    // tmpfs does direct I/O of whole pages only, and none before Linux 6.6.
    let file = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
    file.as_file().set_len(8 * MIB).unwrap();
    let mut direct = OpenOptions::new();
    if direct
        .read(true)
        .custom_flags(libc::O_DIRECT)
        .open(file.path())
        .is_err()
    {
        return;
    }
    let options = DiskOptions {
        cache: CacheMode::None,
        ..DiskOptions::default()
    };
    let open = || disk(&file, libc::O_DIRECT, options);
    assert!(open().for_engines(1).unwrap().needs_one_engine());
    for kind in KINDS {
        let disk = open().for_engines(2).unwrap();
        assert!(!disk.needs_one_engine());
        assert!(disk.geometry().write_cache);
        let _other = serve(kind, &disk);
        round_trip(kind, &disk, 1);
    }
}

#[test]
fn a_full_engine_completes() {
    for kind in KINDS {
        let file = image(8 * MIB);
        let disk = disk(&file, 0, reporting());
        let mut served = serve(kind, &disk);
        let depth = usize::from(served.engine.depth());
        let mut memory: Vec<_> = (0..depth).map(|i| vec![i as u8; 4096]).collect();
        let buffers: Vec<_> = memory.iter_mut().map(|m| pieces(m, 1024)).collect();
        let requests: Vec<_> = buffers
            .iter()
            .enumerate()
            .map(|(i, buffers)| IoRequest::Write {
                offset: i as u64 * 4096,
                buffers,
                durable: i % 2 == 0,
            })
            .collect();
        for _ in 0..3 {
            assert!(run(&mut served, &requests).iter().all(Result::is_ok));
        }
        for i in 0..depth {
            let mut back = [0; 4096];
            file.as_file().read_exact_at(&mut back, i as u64 * 4096).unwrap();
            assert_eq!(back, [i as u8; 4096]);
        }
    }
}

#[test]
fn dropping_an_engine_waits_for_its_requests() {
    for kind in KINDS {
        let file = image(64 * MIB);
        let disk = disk(&file, 0, reporting());
        let mut served = serve(kind, &disk);
        let mut memory = pattern(32 * MIB as usize, 3);
        let buffers = pieces(&mut memory, 1 << 20);
        // SAFETY: the memory outlives the engine, which is dropped next.
        unsafe {
            served.engine.submit(
                0,
                served.disk,
                IoRequest::Write {
                    offset: 0,
                    buffers: &buffers,
                    durable: true,
                },
            )
        };
        served.engine.kick().unwrap();
        drop(served);
        // The first call's share at least; a request cut short by a drop need not go on.
        let mut back = vec![0; 4096];
        file.as_file().read_exact_at(&mut back, 0).unwrap();
        assert!(back == memory[..4096]);
    }
}

#[test]
fn discard_and_write_zeroes_free_space() {
    for kind in KINDS {
        let file = image(4 * MIB);
        file.as_file()
            .write_all_at(&pattern(4 * MIB as usize, 1), 0)
            .unwrap();
        file.as_file().sync_all().unwrap();
        let full = file.as_file().metadata().unwrap().blocks();
        let disk = disk(&file, 0, reporting());
        let mut served = serve(kind, &disk);
        let requests = [
            IoRequest::Discard {
                offset: 0,
                len: MIB,
                durable: true,
            },
            IoRequest::WriteZeroes {
                offset: MIB,
                len: MIB,
                unmap: true,
                durable: false,
            },
            IoRequest::WriteZeroes {
                offset: 2 * MIB + 512,
                len: 1024,
                unmap: false,
                durable: true,
            },
        ];
        assert!(run(&mut served, &requests).iter().all(Result::is_ok));
        let metadata = file.as_file().metadata().unwrap();
        assert!(
            metadata.blocks() <= full - 2 * MIB / 512,
            "{full} -> {}",
            metadata.blocks()
        );
        assert_eq!(metadata.len(), 4 * MIB);
        let mut back = vec![1; 4 * MIB as usize];
        file.as_file().read_exact_at(&mut back, 0).unwrap();
        let mut expected = pattern(4 * MIB as usize, 1);
        expected[..2 * MIB as usize].fill(0);
        expected[2 * MIB as usize + 512..2 * MIB as usize + 1536].fill(0);
        assert!(back == expected);
    }
}

#[test]
fn a_preallocated_image_keeps_its_blocks() {
    for kind in KINDS {
        let file = image(MIB);
        file.as_file().write_all_at(&pattern(MIB as usize, 1), 0).unwrap();
        file.as_file().sync_all().unwrap();
        let full = file.as_file().metadata().unwrap().blocks();
        let options = DiskOptions {
            preallocated: true,
            ..reporting()
        };
        let mut served = serve(kind, &disk(&file, 0, options));
        let half = MIB / 2;
        let requests = [
            IoRequest::Discard {
                offset: 0,
                len: half,
                durable: true,
            },
            IoRequest::WriteZeroes {
                offset: half,
                len: half,
                unmap: true,
                durable: true,
            },
        ];
        assert!(run(&mut served, &requests).iter().all(Result::is_ok));
        assert!(file.as_file().metadata().unwrap().blocks() >= full);
        let mut back = vec![1; MIB as usize];
        file.as_file().read_exact_at(&mut back, 0).unwrap();
        let mut expected = pattern(MIB as usize, 1);
        expected[half as usize..].fill(0);
        assert!(back == expected);
    }
}

#[test]
fn an_image_cut_short_is_an_error() {
    for kind in KINDS {
        let file = image(MIB);
        let disk = disk(&file, 0, reporting());
        let mut served = serve(kind, &disk);
        file.as_file().set_len(4096).unwrap();
        let mut memory = vec![0; 8192];
        let buffers = pieces(&mut memory, 8192);
        let result = run(
            &mut served,
            &[IoRequest::Read {
                offset: 0,
                buffers: &buffers,
            }],
        )
        .remove(0);
        assert_eq!(result.unwrap_err().raw_os_error(), Some(libc::EIO));
        let mut byte = [0];
        assert!(disk.reader().read_at(MIB - 1, &mut byte).is_err());
    }
}

#[test]
fn engines_share_a_disk() {
    let file = image(MIB);
    let disk = disk(&file, 0, DiskOptions::default());
    let [mut first, mut second] = [EngineKind::Uring, EngineKind::Threads].map(|kind| serve(kind, &disk));
    let mut memory = vec![9; 512];
    let buffers = pieces(&mut memory, 512);
    let write = IoRequest::Write {
        offset: 0,
        buffers: &buffers,
        durable: false,
    };
    run(&mut first, &[write]).remove(0).unwrap();
    let mut back = vec![0; 512];
    let buffers = pieces(&mut back, 512);
    let read = IoRequest::Read {
        offset: 0,
        buffers: &buffers,
    };
    run(&mut second, &[read]).remove(0).unwrap();
    assert_eq!(back, [9; 512]);
}

#[test]
fn unsuitable_files_are_refused() {
    let refused =
        |file: File, options: DiskOptions| Disk::open_raw(file.into(), options).unwrap_err().to_string();
    let default = DiskOptions::default();
    assert_eq!(
        refused(image(0).into_file(), default),
        "size 0 must be a non-zero multiple of 512"
    );
    assert_eq!(
        refused(image(1000).into_file(), default),
        "size 1000 must be a non-zero multiple of 512"
    );
    assert_eq!(
        refused(File::open("/var/tmp").unwrap(), default),
        "not a regular file or a block device"
    );
    let file = image(4096);
    let read_only = || File::open(file.path()).unwrap();
    let error = refused(read_only(), default);
    assert_eq!(error, "opened for reading only, but the disk is not read-only");
    let write_only = OpenOptions::new().write(true).open(file.path()).unwrap();
    assert_eq!(refused(write_only, default), "opened for writing only");
    let direct = DiskOptions {
        cache: CacheMode::None,
        ..default
    };
    let error = refused(open(file.path(), 0), direct);
    assert_eq!(error, "cache mode none needs a file opened with O_DIRECT");
    let disk = Disk::open_raw(
        read_only().into(),
        DiskOptions {
            read_only: true,
            ..default
        },
    )
    .unwrap();
    assert!(disk.geometry().read_only && !disk.geometry().write_cache);
    assert_eq!(disk.geometry().size, 4096);
    assert_eq!(
        disk.reader().read_at(4000, &mut [0; 97]).unwrap_err().kind(),
        io::ErrorKind::UnexpectedEof
    );
    assert_eq!(
        disk.reader().read_at(u64::MAX, &mut [0; 2]).unwrap_err().kind(),
        io::ErrorKind::UnexpectedEof
    );
}
