//! Passthrough devices behind the controller.

use std::sync::mpsc::{Receiver, Sender, channel};

use super::*;
use crate::PassthroughUnit;
use crate::target::{CommandResult, DeliveryFailure, PassthroughData, PassthroughDevice, PassthroughLimits};

/// A disk in memory that executes each command when the test gives its result.
#[derive(Debug)]
struct Device {
    blocks: Mutex<Vec<u8>>,
    begun: Sender<u8>,
    /// Results of the next commands; without a sender the disk chooses them.
    ends: Option<Mutex<Receiver<Result<CommandResult, DeliveryFailure>>>>,
}

impl PassthroughDevice for Device {
    fn execute(
        &self,
        cdb: &[u8],
        data: PassthroughData<'_>,
        _: Duration,
    ) -> Result<CommandResult, DeliveryFailure> {
        let _ = self.begun.send(cdb[0]);
        if let Some(ends) = &self.ends {
            let end = ends.lock().unwrap().recv();
            return end.unwrap_or(Err(DeliveryFailure::Aborted));
        }
        assert_ne!(cdb[0], 0x1b, "a device that panics");
        let at = 512 * usize::from(cdb.get(5).copied().unwrap_or(0));
        let mut blocks = self.blocks.lock().unwrap();
        match data {
            PassthroughData::In(bytes) => bytes.copy_from_slice(&blocks[at..][..bytes.len()]),
            PassthroughData::Out(bytes) => blocks[at..][..bytes.len()].copy_from_slice(bytes),
            PassthroughData::None => {}
        }
        Ok(CommandResult::default())
    }
}

struct Ends {
    begun: Receiver<u8>,
    ends: Sender<Result<CommandResult, DeliveryFailure>>,
    device: Arc<Device>,
}

const LIMITS: PassthroughLimits = PassthroughLimits {
    block_size: 512,
    blocks: 1024,
    max_transfer: 512 << 10,
    read_only: false,
    privileged: false,
    reservation: false,
};

/// A guest with a passthrough device at LUN 5. `told`: the test gives the result of each command.
fn guest(told: bool) -> (Guest, Ends) {
    let (mut guest, _file) = Guest::new();
    let (begin, begun) = channel();
    let (ends, tell) = channel();
    let device = Arc::new(Device {
        blocks: Mutex::new(vec![0; 1 << 20]),
        begun: begin,
        ends: told.then(|| Mutex::new(tell)),
    });
    let unit = NewUnit {
        id: "lun".into(),
        address: at(0, 5),
        serial: String::new(),
        medium: Medium::Passthrough(PassthroughUnit {
            device: device.clone(),
            limits: LIMITS,
            image: None,
        }),
        shareable: false,
    };
    guest.handle.add(unit).wait().unwrap();
    guest.settle(0, 5);
    (guest, Ends { begun, ends, device })
}

#[test]
fn a_passthrough_device_is_not_saved() {
    let (mut guest, _ends) = guest(false);
    guest.scsi.quiesce().unwrap();
    let refused = guest.scsi.save().unwrap_err().to_string();
    assert_eq!(refused, "disk \"lun\" is a device of the host (LUN passthrough)");
}

#[test]
fn data_goes_both_ways() {
    let (mut guest, _ends) = guest(false);
    let data = pattern(8192, 3);
    guest.put(DATA, &data);
    let out = [(DATA, 1000, 0), (DATA + 1000, 7192, 0)];
    let ended = guest.run(at(0, 5), &write10(7, 16), &out);
    assert!(ended.good() && ended.residual == 0, "{ended:?}");
    let back = [(DATA + 0x10_0000, 5000, WRITE), (DATA + 0x20_0000, 4000, WRITE)];
    let ended = guest.run(at(0, 5), &read10(7, 16), &back);
    assert!(ended.good(), "{ended:?}");
    assert_eq!((ended.residual, ended.used), (808, RESPONSE + 8192));
    assert_eq!(guest.get(DATA + 0x10_0000, 5000), data[..5000]);
    assert_eq!(guest.get(DATA + 0x20_0000, 3192), data[5000..]);
    // A buffer outside of memory fails the command.
    let outside = [(END as u64 - 100, 8192, WRITE)];
    assert_eq!(guest.run(at(0, 5), &read10(7, 16), &outside).code, 9);
    // A device that panics fails the command too.
    assert_eq!(guest.run(at(0, 5), &[0x1b, 0, 0, 0, 1, 0], &[]).code, 9);
    assert!(guest.run(at(0, 5), &[0; 6], &[]).good());
    let info = guest.handle.list().wait().unwrap().remove(1);
    assert_eq!((info.bytes, info.read_only), (Some(512 << 10), false));
}

#[test]
fn slow_commands_do_not_delay_others() {
    let (mut guest, ends) = guest(true);
    for _ in 0..40 {
        guest.add(at(0, 5), &[0; 6], &[]);
    }
    guest.request[0].kick();
    for _ in 0..16 {
        ends.begun.recv().unwrap();
    }
    linger();
    assert!(ends.begun.try_recv().is_err(), "more than there are threads");
    // The other disk answers meanwhile.
    assert!(guest.run(at(0, 0), &[0; 6], &[]).good());
    for _ in 0..40 {
        ends.ends.send(Ok(CommandResult::default())).unwrap();
    }
    for _ in 0..40 {
        guest.request[0].wait();
    }
}

#[test]
fn each_failure_has_its_response() {
    let (mut guest, ends) = guest(true);
    let sense = vec![0x70, 0, 3, 0, 0, 0, 0, 10, 0, 0, 0, 0, 0x11, 0, 0, 0, 0, 0];
    ends.ends
        .send(Ok(CommandResult {
            status: 2,
            sense,
            residual: 4096,
        }))
        .unwrap();
    let ended = guest.run(at(0, 5), &read10(0, 8), &[(DATA, 4096, WRITE)]);
    assert_eq!((ended.sense(), ended.residual), ((3, 0x11, 0), 4096));
    for (failure, code) in [
        (DeliveryFailure::Aborted, 2),
        (DeliveryFailure::Reset, 4),
        (DeliveryFailure::Busy, 5),
        (DeliveryFailure::Transport, 6),
        (DeliveryFailure::Target, 7),
        (DeliveryFailure::Nexus, 8),
        (DeliveryFailure::Other, 9),
    ] {
        ends.ends.send(Err(failure)).unwrap();
        let ended = guest.run(at(0, 5), &read10(0, 8), &[(DATA, 4096, WRITE)]);
        assert_eq!((ended.code, ended.residual), (code, 4096));
    }
}

#[test]
fn abort_task_set_waits_for_started_commands_and_cancels_queued_ones() {
    let (mut guest, ends) = guest(true);
    let lun = field(at(0, 5));
    let mut responses = Vec::new();
    for id in 100..120 {
        responses.push(guest.add_with(lun, id, 0, &[0; 6], &[]).1);
    }
    guest.request[0].kick();
    for _ in 0..16 {
        ends.begun.recv().unwrap();
    }
    // ABORT TASK SET: the four that no thread has started are answered at once.
    let response = guest.manage(1, lun, 0);
    for _ in 0..4 {
        guest.request[0].wait();
    }
    linger();
    assert_eq!((guest.control.used(), guest.request[0].used()), (None, None));
    for _ in 0..16 {
        ends.ends.send(Ok(CommandResult::default())).unwrap();
    }
    guest.control.wait();
    assert_eq!(guest.get(response, 1), [0]);
    for _ in 0..16 {
        guest.request[0].wait();
    }
    assert!(responses.iter().all(|at| guest.ended(*at, 0).code == 2));
    assert!(ends.begun.try_recv().is_err(), "no cancelled command");
}

#[test]
fn a_pause_and_a_reset_wait_for_the_device() {
    let (mut guest, ends) = guest(true);
    let (_, response) = guest.add(at(0, 5), &read10(0, 1), &[(DATA, 512, WRITE)]);
    guest.request[0].kick();
    ends.begun.recv().unwrap();
    let later = thread::spawn({
        let tell = ends.ends.clone();
        move || {
            linger();
            tell.send(Ok(CommandResult::default())).unwrap();
        }
    });
    let queues = guest.scsi.quiesce().unwrap();
    later.join().unwrap();
    assert_eq!(guest.ended(response, 0).code, 0);
    guest.activate(HOTPLUG | CHANGE, queues);
    guest.request[0].wait();
    guest.add(at(0, 5), &read10(0, 1), &[(DATA, 512, WRITE)]);
    guest.request[0].kick();
    ends.begun.recv().unwrap();
    ends.ends.send(Err(DeliveryFailure::Gone)).unwrap();
    guest.connect(HOTPLUG | CHANGE);
    guest.settle(0, 5);
}

#[test]
fn a_device_that_is_removed_is_closed() {
    let (guest, ends) = guest(false);
    assert!(Arc::strong_count(&ends.device) > 1);
    let removed = guest.handle.remove("lun").wait().unwrap();
    assert!(removed.disk.is_none() && removed.flushed.is_ok());
    assert_eq!(Arc::strong_count(&ends.device), 1);
    assert!(matches!(guest.handle.resize("lun"), Err(ScsiError::NotFound(_))));
}
