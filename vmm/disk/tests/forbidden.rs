//! Hosts on which io_uring is refused by a seccomp filter, as in the VMM after its start and in many containers.

use std::io;
use std::thread;

use husk_disk::{Disk, DiskId, DiskOptions, Engine, EngineKind, IoRequest};

/// From now on this thread gets EPERM from io_uring_setup, and from io_uring_register but to update files.
fn forbid() {
    let statement = |code: u32, k: u32| libc::sock_filter {
        code: code as u16,
        jt: 0,
        jf: 0,
        k,
    };
    let equal = |k: libc::c_long, jt: u8| libc::sock_filter {
        code: (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16,
        jt,
        jf: 0,
        k: k as u32,
    };
    let mut filter = [
        // The system call's number is the first field of seccomp_data.
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0),
        equal(libc::SYS_io_uring_setup, 4),
        equal(libc::SYS_io_uring_register, 1),
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW),
        // The low half of the second argument: IORING_REGISTER_FILES_UPDATE.
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 24),
        equal(6, 1),
        statement(
            libc::BPF_RET | libc::BPF_K,
            libc::SECCOMP_RET_ERRNO | libc::EPERM as u32,
        ),
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog {
        len: filter.len() as u16,
        filter: filter.as_mut_ptr(),
    };
    // SAFETY: the program points at as many instructions as it says; the filter changes no memory.
    let failed = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0
            || libc::prctl(
                libc::PR_SET_SECCOMP,
                libc::SECCOMP_MODE_FILTER,
                &raw const program,
            ) != 0
    };
    assert!(!failed, "{}", io::Error::last_os_error());
}

fn disk() -> Disk {
    let file = tempfile::tempfile_in("/var/tmp").unwrap();
    file.set_len(4096).unwrap();
    Disk::open_raw(file.into(), DiskOptions::default()).unwrap()
}

fn new(kind: EngineKind) -> io::Result<Engine> {
    Engine::new(kind, 32, 2)
}

fn works(engine: &mut Engine, disk: DiskId) {
    for tag in 0..engine.depth() {
        // SAFETY: a flush has no buffers.
        unsafe { engine.submit(tag, disk, IoRequest::Flush) };
    }
    engine.kick().unwrap();
    for _ in 0..engine.depth() {
        let done = loop {
            match engine.complete() {
                Some(done) => break done,
                None => engine.wait(),
            }
        };
        done.result.unwrap();
    }
}

#[test]
fn threads_replace_io_uring_and_existing_rings_keep_working() {
    thread::spawn(|| {
        let mut before = new(EngineKind::Uring).unwrap();
        let first = before.attach(&disk()).unwrap();
        forbid();
        let error = new(EngineKind::Uring).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EPERM));
        let mut after = new(EngineKind::Auto).unwrap();
        assert!(format!("{before:?}").contains("UringBackend"));
        assert!(format!("{after:?}").contains("ThreadBackend"));
        works(&mut before, first);
        // Disks can still be attached and detached.
        let second = before.attach(&disk()).unwrap();
        works(&mut before, second);
        before.detach(first).unwrap();
        works(&mut before, second);
        let third = after.attach(&disk()).unwrap();
        works(&mut after, third);
    })
    .join()
    .unwrap();
}
