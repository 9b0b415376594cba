//! Where the kernel refuses io_uring: by a seccomp filter, as in the VMM after its start and in many containers.

use std::io;
use std::thread;

use husk_disk::{Disk, Engine, Options, Request};

/// From now on this thread gets EPERM from io_uring_setup and io_uring_register.
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
        equal(libc::SYS_io_uring_setup, 2),
        equal(libc::SYS_io_uring_register, 1),
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW),
        statement(
            libc::BPF_RET | libc::BPF_K,
            libc::SECCOMP_RET_ERRNO | libc::EPERM as u32,
        ),
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

fn open(engine: Engine) -> io::Result<Disk> {
    let file = tempfile::tempfile_in("/var/tmp")?;
    file.set_len(4096)?;
    Disk::open_raw(
        file.into(),
        Options {
            engine,
            ..Options::default()
        },
    )
}

fn works(mut disk: Disk) {
    let mut queue = disk.take_queues().remove(0);
    for tag in 0..queue.depth() {
        // SAFETY: a flush has no buffers.
        unsafe { queue.submit(tag, Request::Flush) };
    }
    queue.kick().unwrap();
    for _ in 0..queue.depth() {
        let done = loop {
            match queue.complete() {
                Some(done) => break done,
                None => queue.wait(),
            }
        };
        done.result.unwrap();
    }
}

#[test]
fn threads_take_over_and_old_rings_go_on() {
    thread::spawn(|| {
        let before = open(Engine::Uring).unwrap();
        forbid();
        let error = open(Engine::Uring).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EPERM));
        let after = open(Engine::Auto).unwrap();
        assert!(format!("{before:?}").contains("Uring"));
        assert!(format!("{after:?}").contains("Threads"));
        works(before);
        works(after);
    })
    .join()
    .unwrap();
}
