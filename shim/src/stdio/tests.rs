use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::thread;
use std::time::Instant;

use husk_proto::shim::v1::ConsoleOutput;
use rustix::fs::{CWD, Mode, mkfifoat};
use tokio::net::UnixStream;

use super::*;

fn on_runtime(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async { timeout(Duration::from_secs(30), test).await.expect("stalled") });
}

fn fifo(dir: &Path, name: &str) -> String {
    let path = dir.join(name);
    mkfifoat(CWD, &path, Mode::RUSR | Mode::WUSR).unwrap();
    path.display().to_string()
}

async fn read(from: &mut (impl AsyncReadExt + Unpin), length: usize) -> String {
    let mut bytes = vec![0; length];
    from.read_exact(&mut bytes).await.unwrap();
    String::from_utf8(bytes).unwrap()
}

#[test]
fn fifos_carry_the_console_and_the_failure_reason() {
    on_runtime(async {
        let dir = tempfile::tempdir().unwrap();
        let (mut guest, ours) = UnixStream::pair().unwrap();
        let console = Console::start(ours, dir.path().join("console.log"));
        let stdio = Stdio {
            stdin: fifo(dir.path(), "in"),
            stdout: fifo(dir.path(), "out"),
            stderr: fifo(dir.path(), "err"),
            terminal: false,
        };
        // Earlier output is not lost.
        guest.write_all(b"power-on ").await.unwrap();
        let streams = stdio.connect(Some(&console)).await.unwrap();
        let mut out = pipe::OpenOptions::new().open_receiver(&stdio.stdout).unwrap();
        let mut err = pipe::OpenOptions::new().open_receiver(&stdio.stderr).unwrap();
        guest.write_all(b"login: ").await.unwrap();
        assert_eq!(read(&mut out, 16).await, "power-on login: ");
        let mut typed = pipe::OpenOptions::new().open_sender(&stdio.stdin).unwrap();
        typed.write_all(b"root\n").await.unwrap();
        assert_eq!(read(&mut guest, 5).await, "root\n");
        // A client that disconnects and reconnects.
        drop(typed);
        let mut typed = pipe::OpenOptions::new().open_sender(&stdio.stdin).unwrap();
        typed.write_all(b"x").await.unwrap();
        assert_eq!(read(&mut guest, 1).await, "x");
        drop(guest);
        streams.end(Some("the guest kernel panicked".into())).await;
        assert_eq!(read(&mut err, 33).await, "husk: the guest kernel panicked\r\n");
        let mut rest = Vec::new();
        out.read_to_end(&mut rest).await.unwrap();
        assert!(rest.is_empty());
    });
}

/// A console with an input: the guest's end, and the path of the FIFO.
async fn with_input(dir: &Path) -> (UnixStream, Console, Streams, String) {
    let (guest, ours) = UnixStream::pair().unwrap();
    let console = Console::start(ours, dir.join("console.log"));
    let stdio = Stdio {
        stdin: fifo(dir, "in"),
        ..Stdio::default()
    };
    let streams = stdio.connect(Some(&console)).await.unwrap();
    (guest, console, streams, stdio.stdin)
}

#[test]
fn input_from_before_its_end_reaches_the_guest() {
    on_runtime(async {
        let dir = tempfile::tempdir().unwrap();
        let (mut guest, _console, mut streams, stdin) = with_input(dir.path()).await;
        let text = "typed ".repeat(10_000);
        let mut typed = pipe::OpenOptions::new().open_sender(&stdin).unwrap();
        typed.write_all(text.as_bytes()).await.unwrap();
        drop(typed);
        streams.close_stdin();
        assert_eq!(read(&mut guest, text.len()).await, text);
        while pipe::OpenOptions::new().open_sender(&stdin).is_ok() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        drop(guest);
        streams.end(None).await;
    });
}

#[test]
fn slow_reader_blocks_neither_guest_nor_exit() {
    on_runtime(async {
        let dir = tempfile::tempdir().unwrap();
        let (mut guest, ours) = UnixStream::pair().unwrap();
        let console = Console::start(ours, dir.path().join("console.log"));
        let stdio = Stdio {
            stdout: fifo(dir.path(), "out"),
            ..Stdio::default()
        };
        let streams = stdio.connect(Some(&console)).await.unwrap();
        let begun = Instant::now();
        for _ in 0..2048 {
            guest.write_all(&[b'x'; 4096]).await.unwrap();
        }
        assert!(begun.elapsed() < DRAIN);
        drop(guest);
        streams.end(None).await;
    });
}

/// A file that takes no more bytes until some are read from it: a FIFO. Also returns the number of bytes.
fn full(dir: &Path) -> (File, usize) {
    let mut options = File::options();
    options.read(true).write(true).custom_flags(libc::O_NONBLOCK);
    let mut file = options.open(fifo(dir, "full")).unwrap();
    let mut bytes = 0;
    while file.write(&[b'x'; TYPED]).is_ok() {
        bytes += TYPED;
    }
    (file, bytes)
}

#[test]
fn a_full_disk_does_not_end_the_log() {
    on_runtime(async {
        let dir = tempfile::tempdir().unwrap();
        // Its writes fail, as on a full disk.
        let (mut disk, bytes) = full(dir.path());
        let sink = Sink::File(Arc::new(disk.try_clone().unwrap()));
        let (console, output) = tokio::sync::mpsc::channel(1);
        let (_end, ended) = oneshot::channel();
        let copied = tokio::spawn(copy(output, sink, ended));
        let data = |text: &str| ConsoleOutput {
            output: Some(Output::Data(text.into())),
        };
        console.send(data("lost")).await.unwrap();
        console.send(data("lost or kept")).await.unwrap();
        // The second one has been received, so the write of the first one has failed.
        drop(console.reserve().await.unwrap());
        disk.read_exact(&mut vec![0; bytes]).unwrap();
        console.send(data("the end")).await.unwrap();
        drop(console);
        copied.await.unwrap();
        let mut kept = vec![0; 64];
        let length = disk.read(&mut kept).unwrap();
        assert!(kept[..length].ends_with(b"the end"), "{kept:?}");
    });
}

#[test]
fn a_stalled_disk_does_not_stop_the_runtime() {
    on_runtime(async {
        let dir = tempfile::tempdir().unwrap();
        let (mut disk, bytes) = full(dir.path());
        // Writes block, as on a stalled disk, until the thread reads.
        let blocking = File::options().write(true).open(dir.path().join("full"));
        let mut sink = Sink::File(Arc::new(blocking.unwrap()));
        let recovery = thread::spawn(move || {
            thread::sleep(Duration::from_millis(500));
            disk.read_exact(&mut vec![0; bytes]).unwrap();
            disk
        });
        let written = timeout(Duration::from_millis(50), sink.write(b"late")).await;
        assert!(written.is_err(), "the runtime waited");
        let mut late = [0; 4];
        let mut disk = recovery.join().unwrap();
        while disk.read_exact(&mut late).is_err() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert_eq!(&late, b"late");
    });
}

#[test]
fn files_are_appended_to_and_other_places_are_refused() {
    on_runtime(async {
        let dir = tempfile::tempdir().unwrap();
        let (guest, ours) = UnixStream::pair().unwrap();
        let console = Console::start(ours, dir.path().join("console.log"));
        let log = dir.path().join("log");
        let stdio = Stdio {
            stdout: format!("file://{}", log.display()),
            ..Stdio::default()
        };
        let streams = stdio.connect(Some(&console)).await.unwrap();
        drop(guest);
        streams.end(Some("why".into())).await;
        assert_eq!(std::fs::read_to_string(log).unwrap(), "husk: why\r\n");
        let stdio = Stdio {
            stdout: "binary:///bin/logger".into(),
            ..Stdio::default()
        };
        let error = stdio.connect(Some(&console)).await.unwrap_err().to_string();
        assert_eq!(
            error,
            "output to binary:// is not supported: give a FIFO or file://"
        );
    });
}
