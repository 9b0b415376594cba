//! Boots the lab and shuts it down.

use super::image::{self, Image};
use super::snapshot::Snapshot;
use super::state::{Lab, LabFolder, Process};
use super::{disk_space, hang_report, ssh};
use crate::checkout;
use crate::progress::{Progress, Step};
use crate::qmp::Qmp;
use crate::shell;
use anyhow::{Context, Result, bail};
use base64::Engine;
use rustix::process::{Signal, setsid};
use serde_json::json;
use sha2::{Digest, Sha256};
use std::ffi::OsString;
use std::fs::File;
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

/// Maximum time of a boot, on a machine busy with other work.
const BOOT_LIMIT: Duration = Duration::from_secs(240);

/// Maximum time that a running lab may take to answer before it counts as hung.
pub const HUNG: Duration = Duration::from_secs(45);

/// Maximum time that a reboot into a new image waits for commands in the old lab.
const BUSY_LIMIT: Duration = Duration::from_secs(900);

/// The booted lab of the current image: the running one if it answers, else a new one.
pub fn up(progress: &Progress, number: u32) -> Result<Lab> {
    let dir = LabFolder::find(number)?;
    let mut mute = None;
    if let Some(lab) = running(&dir) {
        if ssh::greets(lab.port, HUNG) {
            return Ok(lab);
        }
        mute = Some(lab.qemu);
    }
    let _lock = dir.lock()?;
    // Another command may have booted it meanwhile.
    if let Some(lab) = running(&dir)
        && mute != Some(lab.qemu)
        && ssh::greets(lab.port, HUNG)
    {
        return Ok(lab);
    }
    let image = image::ensure(progress)?;
    if let Some(old) = dir.read() {
        if !old.qemu.alive() {
            eprintln!("the lab has ended by itself: booting it again");
        } else if !old.booted {
            eprintln!("the lab was left half booted: booting it again");
        } else if mute != Some(old.qemu) && old.alive() && ssh::greets(old.port, HUNG) {
            wait_until_unused(&dir)?;
            shut_down(&old);
        } else if let Err(full) = disk_space::not_full(dir.folder()) {
            clear(&dir, &old);
            return Err(full.context("the lab was stopped"));
        } else {
            match hang_report::write(&dir, &old) {
                Ok(report) => eprintln!(
                    "the lab does not answer, see {}: booting it again",
                    report.display()
                ),
                Err(error) => eprintln!("the lab does not answer ({error:#}): booting it again"),
            }
        }
        clear(&dir, &old);
    }
    kill_stray(&dir);
    disk_space::ensure(dir.folder())?;
    let step = progress.step(match number {
        1 => "booting the lab".to_owned(),
        _ => format!("booting lab {number}"),
    });
    let lab = boot(&dir, &image, &step)?;
    step.done();
    Ok(lab)
}

/// The lab, if its processes run and it has the current image; it may hang.
pub fn running(dir: &LabFolder) -> Option<Lab> {
    let lab = dir.read()?;
    (lab.booted && lab.alive() && lab.image == image::hash()).then_some(lab)
}

fn wait_until_unused(dir: &LabFolder) -> Result<()> {
    let deadline = Instant::now() + BUSY_LIMIT;
    let mut said = false;
    while dir.users() > 0 {
        if !said {
            eprintln!(
                "the lab's recipe has changed: waiting for {} commands in the old lab",
                dir.users()
            );
            said = true;
        }
        if Instant::now() >= deadline {
            bail!(
                "commands still run in the lab of the old recipe: end them, or run cargo xtask lab down --force"
            );
        }
        std::thread::sleep(Duration::from_millis(500));
    }
    Ok(())
}

/// Shuts the lab down, cleanly if it responds.
pub fn down(number: u32, force: bool) -> Result<()> {
    let dir = LabFolder::find(number)?;
    let _lock = dir.lock()?;
    let Some(lab) = dir.read() else {
        return Ok(());
    };
    if !force && lab.alive() && dir.users() > 0 {
        bail!("{} commands run in the lab: --force ends them", dir.users());
    }
    shut_down(&lab);
    clear(&dir, &lab);
    Ok(())
}

/// Requests a clean shutdown of `lab`, and waits for it.
fn shut_down(lab: &Lab) {
    if lab.qemu.alive() && ssh::quietly(lab.port, "systemctl poweroff", Duration::from_secs(10)).is_some() {
        lab.qemu.ended_within(Duration::from_secs(20));
    }
}

/// Removes all processes and files of `lab`, running or not, and its record.
fn clear(dir: &LabFolder, lab: &Lab) {
    lab.qemu.signal(Signal::KILL);
    lab.qemu.ended_within(Duration::from_secs(10));
    for server in &lab.servers {
        // They end with QEMU.
        if !server.ended_within(Duration::from_secs(2)) {
            server.signal(Signal::KILL);
        }
    }
    let _ = std::fs::remove_dir_all(&lab.sockets);
    dir.forget();
}

/// Kills a QEMU of this lab folder that is not in its record, for example after the record was deleted.
fn kill_stray(dir: &LabFolder) {
    let pid = std::fs::read_to_string(dir.file("qemu.pid")).unwrap_or_default();
    let Some(stray) = pid.trim().parse().ok().and_then(Process::running) else {
        return;
    };
    let words = std::fs::read(format!("/proc/{}/cmdline", stray.pid)).unwrap_or_default();
    let folder = dir.folder().to_string_lossy();
    if String::from_utf8_lossy(&words).contains(&format!("{folder}/qemu.pid")) {
        eprintln!("ending a lab nobody knows of");
        stray.signal(Signal::KILL);
        stray.ended_within(Duration::from_secs(10));
    }
}

/// Disk and state that QEMU starts with.
#[derive(Debug, Clone, Copy)]
enum Start<'a> {
    /// The image's disk; changes are discarded.
    Boot,
    /// The disk of this snapshot, which is still to be saved.
    Save(&'a Snapshot),
    /// The state and disk of this snapshot.
    Restore(&'a Snapshot),
}

fn boot(dir: &LabFolder, image: &Image, step: &Step) -> Result<Lab> {
    if std::env::var_os("HUSK_LAB_BOOT").is_none_or(|value| value != "1") {
        match restore(dir, image, step) {
            Ok(lab) => return Ok(lab),
            Err(error) => step.say(&format!(
                "the lab does not start from a snapshot, and boots: {error:#}"
            )),
        }
    }
    let mut lab = launch(dir, image, Start::Boot)?;
    finish(dir, image, &mut lab, step)?;
    Ok(lab)
}

/// Starts the lab from the snapshot of a booted one, and makes the snapshot first if there is none.
fn restore(dir: &LabFolder, image: &Image, step: &Step) -> Result<Lab> {
    let snapshot = Snapshot::find(&snapshot_key(image)?)?;
    if !snapshot.exists() {
        let _lock = snapshot.lock()?;
        if !snapshot.exists() {
            let made = save(dir, image, &snapshot, step);
            if made.is_err() {
                snapshot.remove();
            }
            made.context("no snapshot was made")?;
        }
    }
    let mut lab = launch(dir, image, Start::Restore(&snapshot))?;
    let restored = snapshot
        .load(&lab.sockets.join("qmp"))
        .and_then(|()| finish(dir, image, &mut lab, step));
    if let Err(error) = restored {
        clear(dir, &lab);
        snapshot.remove();
        return Err(error.context("it was removed"));
    }
    Ok(lab)
}

/// Boots a lab and saves it as `snapshot`.
fn save(dir: &LabFolder, image: &Image, snapshot: &Snapshot, step: &Step) -> Result<()> {
    snapshot.prepare(image)?;
    let lab = launch(dir, image, Start::Save(snapshot))?;
    let saved = await_ssh(dir, &lab, step).and_then(|()| {
        // Otherwise every lab would repeat the background work that is left after the boot.
        ssh::quietly(lab.port, "systemctl is-system-running --wait; sync", BOOT_LIMIT);
        snapshot.save(&lab.sockets.join("qmp"))
    });
    if saved.is_ok() {
        lab.qemu.ended_within(Duration::from_secs(30));
    }
    clear(dir, &lab);
    saved
}

/// Starts QEMU, and records it so that the next command ends it if this command is ended.
fn launch(dir: &LabFolder, image: &Image, start: Start<'_>) -> Result<Lab> {
    let sockets = tempfile::Builder::new().prefix("husk-lab.").tempdir()?;
    // The port is free now. If another process takes it before QEMU does, QEMU exits with an error.
    let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port();
    let mut qemu = qemu(dir, image, sockets.path(), port, start)?;
    let log = File::create(dir.file("qemu.log"))?;
    let mut child = detach(&mut qemu, &log).spawn().context("cannot start QEMU")?;
    let pid = i32::try_from(child.id())?;
    let Some(process) = Process::running(pid) else {
        bail!("QEMU ended at once:\n{}", tail(&dir.file("qemu.log")));
    };
    let lab = Lab {
        qemu: process,
        servers: Vec::new(),
        port,
        image: image.hash.clone(),
        sockets: sockets.keep(),
        since: SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)?
            .as_secs(),
        booted: false,
    };
    dir.write(&lab)?;
    if !makes(&mut child, &lab.sockets.join("qmp"))? {
        let why = tail(&dir.file("qemu.log"));
        clear(dir, &lab);
        bail!("QEMU does not start:\n{why}");
    }
    // Reaps QEMU when it ends, for as long as this process runs.
    std::thread::spawn(move || child.wait());
    Ok(lab)
}

/// Waits until a program has made its socket; false if it ends first, or has not after 30 seconds.
fn makes(child: &mut Child, socket: &Path) -> Result<bool> {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !socket.exists() {
        if child.try_wait()?.is_some() || Instant::now() > deadline {
            return Ok(false);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(true)
}

/// Waits until a lab accepts commands.
fn await_ssh(dir: &LabFolder, lab: &Lab, step: &Step) -> Result<()> {
    let started = Instant::now();
    loop {
        let why = if !lab.qemu.alive() {
            "the lab's QEMU ended while booting".to_owned()
        } else if started.elapsed() > BOOT_LIMIT {
            format!("the lab did not boot within {} s", BOOT_LIMIT.as_secs())
        } else {
            step.news(tail(&dir.file("serial.log")).lines().last().unwrap_or_default());
            if ssh::greets(lab.port, Duration::from_secs(5)) && ssh::answers(lab, Duration::from_secs(60)) {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(100));
            continue;
        };
        let logs = [dir.file("qemu.log"), dir.file("serial.log")].map(|log| tail(&log));
        clear(dir, lab);
        bail!("{why}\n{}", logs.join("\n"));
    }
}

/// Waits for a lab, hot-plugs the host's folders and records the lab as booted.
///
/// They are hot-plugged, because the state of a QEMU with vhost-user devices cannot be saved.
fn finish(dir: &LabFolder, image: &Image, lab: &mut Lab, step: &Step) -> Result<()> {
    await_ssh(dir, lab, step)?;
    let cache = checkout::cache()?;
    let mut qmp = Qmp::connect(&lab.sockets.join("qmp"))?;
    for (tag, folder) in [("checkout", checkout::root()), ("cache", cache.as_path())] {
        let socket = lab.sockets.join(tag);
        lab.servers.push(serve(dir, image, folder, &socket)?);
        dir.write(lab)?;
        let address = json!({ "type": "unix", "data": { "path": socket } });
        let backend = json!({ "type": "socket", "data": { "addr": address, "server": false } });
        qmp.execute("chardev-add", json!({ "id": tag, "backend": backend }))?;
        qmp.execute(
            "device_add",
            json!({ "driver": "vhost-user-fs-pci", "id": tag, "chardev": tag, "tag": tag, "bus": format!("port-{tag}") }),
        )?;
    }
    attach(lab)?;
    lab.booted = true;
    dir.write(lab)
}

/// Sets the lab's clock, and mounts the host's folders in it.
pub fn attach(lab: &Lab) -> Result<()> {
    let cache = checkout::cache()?;
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?;
    let script = shell::quote(include_str!("guest/attach.sh"));
    let words = shell::join([
        checkout::root().to_string_lossy().into_owned(),
        cache.to_string_lossy().into_owned(),
        format!("{:.2}", now.as_secs_f64()),
    ]);
    let attach = format!("sh -c {script} attach.sh {words} 2>&1");
    match ssh::quietly(lab.port, &attach, BOOT_LIMIT) {
        Some((Some(0), _)) => Ok(()),
        Some((_, text)) => bail!("the lab does not mount the host's folders: {}", text.trim()),
        None => bail!(
            "the lab does not mount the host's folders in {} s",
            BOOT_LIMIT.as_secs()
        ),
    }
}

/// Starts a file server for `folder` on `socket`.
fn serve(dir: &LabFolder, image: &Image, folder: &Path, socket: &Path) -> Result<Process> {
    let log = File::options()
        .create(true)
        .append(true)
        .open(dir.file("virtiofsd.log"))?;
    let mut command = image.command("usr/libexec/virtiofsd");
    command
        .arg("--socket-path")
        .arg(socket)
        .arg("--shared-dir")
        .arg(folder);
    command.args([
        "--sandbox",
        "none",
        "--cache",
        "auto",
        "--inode-file-handles=never",
    ]);
    let mut child = detach(&mut command, &log)
        .spawn()
        .context("cannot start virtiofsd")?;
    let process = Process::running(i32::try_from(child.id())?);
    if !makes(&mut child, socket)? {
        bail!(
            "virtiofsd does not serve {}:\n{}",
            folder.display(),
            tail(&dir.file("virtiofsd.log"))
        );
    }
    process.context("virtiofsd ended at once")
}

/// An AMD-V processor without 5-level page tables, unlike `max`.
const CPU: &str = "EPYC,svm=on,npt=on";

/// With two, one of Husk's guests in ten triple-faulted or hung: traces (QEMU 10.0) show VM exits that give the guest
/// the registers of the lab's kernel. With one, none did. The cause in TCG is not known.
const PROCESSORS: &str = "1";

/// Hash of everything that a snapshot depends on.
fn snapshot_key(image: &Image) -> Result<String> {
    let mut digest = Sha256::new();
    digest.update(&image.hash);
    for option in machine(image)? {
        digest.update(option.as_bytes());
        digest.update([0]);
    }
    Ok(digest.finalize()[..8]
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect())
}

/// QEMU's options for the machine, which are the same for every lab of this user.
fn machine(image: &Image) -> Result<Vec<OsString>> {
    let key = base64::engine::general_purpose::STANDARD.encode(ssh::key()? + "\n");
    let memory = memory_mib()?;
    let root = image.root();
    let mut options: Vec<OsString> = Vec::new();
    options.extend(["-L".into(), root.join("usr/share/qemu").into()]);
    options.extend(["-L".into(), root.join("usr/share/seabios").into()]);
    options.extend(["-kernel".into(), image.kernel().into()]);
    options.extend(["-initrd".into(), image.initrd().into()]);
    let words = format!(
        "-name husk-lab -nodefaults -no-user-config -display none -no-reboot \
         -M q35,accel=tcg,memory-backend=ram,vmport=off -cpu {CPU} -smp {PROCESSORS} -m {memory}M \
         -object memory-backend-memfd,id=ram,size={memory}M,share=on \
         -device virtio-balloon-pci,free-page-reporting=on \
         -device virtio-blk-pci,drive=disk \
         -device virtio-net-pci,netdev=net,romfile= \
         -object rng-random,id=rng,filename=/dev/urandom -device virtio-rng-pci,rng=rng \
         -device pcie-root-port,id=port-checkout,chassis=1,slot=1 \
         -device pcie-root-port,id=port-cache,chassis=2,slot=2 \
         -device pcie-root-port,id=port-nic,chassis=3,slot=3"
    );
    // Free-page reporting returns memory to this machine that guests in the lab have freed.
    options.extend(words.split_whitespace().map(OsString::from));
    options.extend([
        "-append".into(),
        format!(
            "root=/dev/vda rw console=ttyS0 net.ifnames=0 panic=1 unknown_nmi_panic panic_print=0x41 mitigations=off systemd.show_status=0 husk.key={key}"
        )
        .into(),
    ]);
    Ok(options)
}

fn qemu(dir: &LabFolder, image: &Image, sockets: &Path, port: u16, start: Start<'_>) -> Result<Command> {
    let root = image.root();
    let _ = std::fs::rename(dir.file("serial.log"), dir.file("serial.log.old"));
    let drive = match start {
        Start::Boot => format!("format=raw,snapshot=on,file={}", comma(&image.disk())),
        Start::Save(snapshot) => format!("format=qcow2,file={}", comma(&snapshot.disk())),
        Start::Restore(snapshot) => format!("format=qcow2,snapshot=on,file={}", comma(&snapshot.disk())),
    };
    let mut qemu = image.command("usr/bin/qemu-system-x86_64");
    // With `snapshot=on` the disk's changes go to an unlinked file there.
    qemu.env("TMPDIR", dir.folder())
        .env("QEMU_MODULE_DIR", root.join("usr/lib/x86_64-linux-gnu/qemu"))
        .arg("-pidfile")
        .arg(dir.file("qemu.pid"))
        .args(machine(image)?)
        // Disk images in the lab are unpacked with their holes filled: zeros take no space here.
        .arg("-drive")
        .arg(format!(
            "if=none,id=disk,cache=unsafe,discard=unmap,detect-zeroes=unmap,{drive}"
        ))
        .args([
            "-netdev",
            &format!("user,id=net,hostfwd=tcp:127.0.0.1:{port}-:22"),
        ])
        .args(["-serial", &format!("file:{}", comma(&dir.file("serial.log")))])
        .args([
            "-qmp",
            &format!("unix:{},server=on,wait=off", comma(&sockets.join("qmp"))),
        ]);
    if let Start::Restore(_) = start {
        qemu.args(["-incoming", "defer"]);
    }
    Ok(qemu)
}

/// `path` as a value within a QEMU option, where a comma is doubled.
pub(super) fn comma(path: &Path) -> String {
    path.to_string_lossy().replace(',', ",,")
}

/// Memory of one lab: 8 GiB, or three eighths of the machine's memory if that is less, so that two labs and a build
/// fit.
fn memory_mib() -> Result<u64> {
    Ok((machine_mib()? * 3 / 8).min(8 * 1024))
}

/// Memory of this machine.
pub fn machine_mib() -> Result<u64> {
    let info = std::fs::read_to_string("/proc/meminfo")?;
    let total: u64 = info
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:")?.trim().strip_suffix("kB"))
        .and_then(|kib| kib.trim().parse().ok())
        .context("/proc/meminfo has no MemTotal")?;
    Ok(total / 1024)
}

/// `command`, set up to outlive this process: with its output in `log`, in a session of its own, and without inherited
/// files, whose other ends may wait for them to be closed.
pub fn detach<'a>(command: &'a mut Command, log: &File) -> &'a mut Command {
    let clone = || log.try_clone().map_or_else(|_| Stdio::null(), Stdio::from);
    command.stdin(Stdio::null()).stdout(clone()).stderr(clone());
    // SAFETY: only async-signal-safe system calls on plain numbers; they touch no memory of this process.
    unsafe {
        command.pre_exec(|| {
            setsid()?;
            let flags = libc::CLOSE_RANGE_CLOEXEC.cast_signed();
            if libc::close_range(3, libc::c_uint::MAX, flags) != 0 {
                return Err(std::io::Error::last_os_error());
            }
            Ok(())
        })
    }
}

/// The last lines of a log, without control characters.
fn tail(log: &PathBuf) -> String {
    let bytes = std::fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<String> = text
        .lines()
        .map(|line| line.replace(|c: char| c.is_control() && c != '\t', ""))
        .collect();
    lines[lines.len().saturating_sub(25)..].join("\n")
}
