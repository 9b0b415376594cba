//! Discs of CD-ROM drives.

use super::*;

fn disc(blocks: u64, seed: u8) -> Disk {
    disc_with(ErrorPolicy::Report, blocks, seed)
}

fn disc_with(error_policy: ErrorPolicy, blocks: u64, seed: u8) -> Disk {
    let file = image(blocks);
    file.write_all_at(&pattern((blocks * 512) as usize, seed), 0)
        .unwrap();
    let options = DiskOptions {
        read_only: true,
        error_policy,
        ..DiskOptions::default()
    };
    open(&file, options)
}

fn drive(guest: &mut Guest, disc: Option<Disk>) {
    let drive = NewUnit {
        medium: Medium::CdRom(disc),
        ..unit("cd", at(0, 5), open(&image(4), reporting()))
    };
    guest.handle.add(drive).wait().unwrap();
    guest.settle(0, 5);
}

fn read(guest: &mut Guest) -> Ended {
    guest.run(at(0, 5), &read10(1, 1), &[(DATA, 2048, WRITE)])
}

#[test]
fn a_disc_can_be_read_ejected_and_replaced() {
    let (mut guest, _file) = Guest::new();
    // Half a block at the end is left out.
    drive(&mut guest, Some(disc(10, 1)));
    assert_eq!(guest.handle.list().wait().unwrap()[1].bytes, Some(2 * 2048));
    assert!(read(&mut guest).good());
    assert_eq!(guest.get(DATA, 2048), pattern(5120, 1)[2048..4096]);
    // Nothing replaces the disc that is in the drive.
    let second = guest.handle.insert("cd", disc(16, 2)).wait();
    assert!(matches!(second, Err(ScsiError::Loaded(_))));
    assert!(read(&mut guest).good());
    assert!(guest.handle.eject("cd", false).wait().unwrap().is_some());
    guest.handle.insert("cd", disc(16, 2)).wait().unwrap();
    assert_eq!(read(&mut guest).sense(), (6, 0x28, 0));
    assert!(read(&mut guest).good());
    assert_eq!(guest.get(DATA, 2048), pattern(8192, 2)[2048..4096]);
    let taken = guest.handle.eject("cd", false).wait().unwrap().unwrap();
    assert_eq!(taken.size(), 8192);
    assert_eq!(read(&mut guest).sense(), (2, 0x3a, 2));
    assert!(guest.handle.eject("cd", false).wait().unwrap().is_none());
    let readable = guest.handle.insert("cd", disc(18, 3)).wait().unwrap();
    assert_eq!(readable, 4 * 2048);
    assert_eq!(read(&mut guest).sense(), (6, 0x28, 0));
    assert!(read(&mut guest).good());
    // A reset does not eject the disc.
    guest.connect(HOTPLUG);
    guest.settle(0, 5);
    assert!(read(&mut guest).good());
    let written = guest.run(at(0, 5), &write10(0, 1), &[(DATA, 2048, 0)]);
    assert!(!written.good());
}

#[test]
fn media_changes_need_a_drive_and_a_disc() {
    let (mut guest, _file) = Guest::new();
    drive(&mut guest, None);
    assert_eq!(read(&mut guest).sense(), (2, 0x3a, 1));
    let insert = |id: &str, disc| guest.handle.insert(id, disc).wait();
    assert!(matches!(
        insert("first", disc(16, 0)),
        Err(ScsiError::NotADrive(_))
    ));
    assert!(matches!(insert("cd", disc(3, 0)), Err(ScsiError::Medium(..))));
    assert!(matches!(
        guest.handle.eject("first", true).wait(),
        Err(ScsiError::NotADrive(_))
    ));
    insert("cd", disc(16, 0)).unwrap();
    // PREVENT ALLOW MEDIUM REMOVAL
    assert_eq!(
        guest.run(at(0, 5), &[0x1e, 0, 0, 0, 1, 0], &[]).sense(),
        (6, 0x28, 0)
    );
    assert!(guest.run(at(0, 5), &[0x1e, 0, 0, 0, 1, 0], &[]).good());
    let prevented = guest.handle.eject("cd", false).wait();
    assert!(matches!(prevented, Err(ScsiError::Prevented(_))));
    // GET EVENT STATUS NOTIFICATION: an eject request, and a disc that stays.
    let status = [0x4a, 1, 0, 0, 0x10, 0, 0, 0, 8, 0];
    assert!(guest.run(at(0, 5), &status, &[(DATA, 8, WRITE)]).good());
    assert_eq!(guest.get(DATA, 8)[4..6], [1, 2]);
    assert!(read(&mut guest).good());
    assert!(guest.handle.eject("cd", true).wait().unwrap().is_some());
    guest.handle.remove("cd").wait().unwrap();
}

#[test]
fn eject_waits_for_running_reads() {
    let (mut guest, script) = Guest::scripted(8, ErrorPolicy::Stop);
    drive(&mut guest, Some(disc(16, 0)));
    guest.add(at(0, 5), &read10(0, 1), &[(DATA, 2048, WRITE)]);
    guest.request[0].kick();
    let tag = Guest::made(&script, 1)[0].tag;
    let handle = guest.handle.clone();
    let ejecting = thread::spawn(move || handle.eject("cd", true).wait());
    linger();
    assert!(!ejecting.is_finished());
    script.finish(tag, Ok(()));
    assert!(ejecting.join().unwrap().unwrap().is_some());
    guest.request[0].wait();
}

#[test]
fn a_disc_ejected_while_paused_pauses_nothing_again() {
    let (mut guest, script) = Guest::scripted(8, ErrorPolicy::Report);
    drive(&mut guest, Some(disc_with(ErrorPolicy::Stop, 16, 0)));
    let (_, response) = guest.add(at(0, 5), &read10(0, 1), &[(DATA, 2048, WRITE)]);
    guest.request[0].kick();
    script.finish(Guest::made(&script, 1)[0].tag, Err(libc::EIO));
    let stops = Arc::clone(&guest.stops);
    wait_for("the owner's call", || {
        (*stops.lock().unwrap() == ["cd"]).then_some(())
    });
    let queues = guest.scsi.quiesce().unwrap();
    let ejected = guest.handle.eject("cd", false);
    guest.activate(HOTPLUG | CHANGE, queues);
    script.finish(Guest::made(&script, 2)[1].tag, Err(libc::EIO));
    let (_, used) = guest.request[0].wait();
    assert!(!guest.ended(response, used).good());
    assert!(ejected.wait().unwrap().is_some());
    assert_eq!(stops.lock().unwrap().len(), 1);
}
