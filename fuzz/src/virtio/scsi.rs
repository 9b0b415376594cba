//! virtio-scsi with disks on images in memory, a CD-ROM drive and a passthrough device.

use std::fs::File;
use std::sync::Arc;

use arbitrary::Arbitrary;
use husk_devices::virtio::VirtioDevice;
use husk_devices::virtio::testing::{Descriptor, WRITE};
use husk_disk::{Disk, DiskOptions, EngineKind};
use husk_virtio_scsi::target::Lun;
use husk_virtio_scsi::{Medium, NewUnit, PassthroughUnit, ScsiConfig, ScsiHandle, UnitAddress, VirtioScsi};

use super::blk::error_policy;
use super::cdb::{Cdb, List, exact};
use super::{Bench, Buffer, DATA, Guest, descriptors, image, lun, pattern, pieces};

const SIZE: u64 = 0x1_0000;
const PAGE: u64 = 4096;
/// Bytes of a header before the CDB, and of a response before the sense data.
const HEADER: usize = 19;
const RESPONSE: u32 = 12;

#[derive(Arbitrary, Debug)]
pub struct Setup {
    error_policy: u8,
    read_only: bool,
    /// There is a passthrough device, with which the controller is not saved.
    passthrough: Option<(lun::Setup, lun::Answer)>,
}

/// The LUN field of a request.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub enum Address {
    Disk,
    Drive,
    Passthrough,
    Other,
    Plugged(u8),
    Absent,
    ReportLuns,
    Any([u8; 8]),
}

impl Address {
    fn field(self) -> [u8; 8] {
        let at = |target, lun| [1, target, 0x40, lun, 0, 0, 0, 0];
        match self {
            Self::Disk => at(0, 0),
            Self::Drive => at(0, 1),
            Self::Passthrough => at(0, 2),
            Self::Other => at(1, 0),
            Self::Plugged(number) => at(2, number % 4),
            Self::Absent => at(0, 9),
            Self::ReportLuns => [0xc1, 1, 0, 0, 0, 0, 0, 0],
            Self::Any(field) => field,
        }
    }
}

#[derive(Arbitrary, Debug)]
pub enum Request {
    Command {
        second_queue: bool,
        address: Address,
        id: u8,
        attribute: u8,
        cdb: Cdb,
        list: List,
        data_out: Vec<Buffer>,
        data_in: Vec<Buffer>,
        cut: u8,
        indirect: bool,
    },
    /// A task management function, or a query or subscription of asynchronous notifications.
    Control {
        kind: u8,
        function: u8,
        address: Address,
        id: u8,
    },
    /// TEST UNIT READY for every unit, which takes its unit attention.
    Ready,
    EventBuffers(u8),
    Host(Host),
}

#[derive(Arbitrary, Clone, Copy, Debug)]
pub enum Host {
    Add(u8),
    Remove(u8),
    Truncate(u8),
    Resize,
    Insert,
    Eject(bool),
}

pub struct ScsiBench {
    disk: File,
    disc: File,
    options: DiskOptions,
    /// All units that exist or existed.
    units: Vec<NewUnit>,
}

fn address(target: u8, lun: u16) -> UnitAddress {
    let lun = Lun::new(lun).expect("a LUN");
    UnitAddress { target, lun }
}

fn open(file: &File, options: DiskOptions) -> Disk {
    let descriptor = file.try_clone().expect("a descriptor").into();
    Disk::open_raw(descriptor, options).expect("a disk")
}

fn unit(id: &str, (target, lun): (u8, u16), medium: Medium) -> NewUnit {
    NewUnit {
        id: id.into(),
        address: address(target, lun),
        serial: String::new(),
        medium,
        shareable: target == 2,
    }
}

fn plugged(number: u8) -> String {
    format!("plugged{}", number % 4)
}

impl ScsiBench {
    fn disc(&self) -> Disk {
        let read_only = true;
        open(
            &self.disc,
            DiskOptions {
                read_only,
                ..self.options
            },
        )
    }

    /// Bytes of the CDB and sense fields, as the driver can read them.
    fn sizes(guest: &Guest) -> (usize, u32) {
        let mut sizes = [0; 8];
        guest.device.read_config(20, &mut sizes);
        let [sense, cdb] = [0, 4].map(|at| u16::from_le_bytes([sizes[at], sizes[at + 1]]));
        (cdb.into(), sense.into())
    }

    fn host(&mut self, act: Host, handle: &ScsiHandle) {
        match act {
            Host::Add(number) => {
                let id = plugged(number);
                let known = self.units.iter().find(|unit| unit.id == id).cloned();
                let new = known.unwrap_or_else(|| {
                    let disk = open(&image(SIZE), self.options);
                    let new = unit(&id, (2, u16::from(number % 4)), Medium::Disk(disk));
                    self.units.push(new.clone());
                    new
                });
                drop(handle.add(new));
            }
            // A removal may wait for the driver.
            Host::Remove(number) => drop(handle.remove(&plugged(number))),
            Host::Truncate(pages) => {
                let pages = 1 + u64::from(pages) % (SIZE / PAGE);
                self.disk.set_len(pages * PAGE).expect("memory");
            }
            Host::Resize => {
                handle.resize("disk").expect("a size");
            }
            Host::Insert => drop(handle.insert("drive", self.disc())),
            Host::Eject(force) => drop(handle.eject("drive", force)),
        }
    }

    /// The chain of a command in memory, and the address of its response.
    fn chain(guest: &mut Guest, address: Address, cdb: &[u8], data: &[Descriptor]) -> (Vec<Descriptor>, u64) {
        let at = guest.slot();
        let response = at + 0x200;
        let (cdb_size, sense_size) = Self::sizes(guest);
        let mut header = vec![0; HEADER + cdb_size.max(cdb.len())];
        header[..8].copy_from_slice(&address.field());
        header[HEADER..HEADER + cdb.len()].copy_from_slice(cdb);
        guest.put(at, &header);
        let mut chain = vec![(at, (HEADER + cdb_size) as u32, 0)];
        chain.extend(data.iter().filter(|data| data.2 == 0));
        chain.push((response, RESPONSE + sense_size, WRITE));
        chain.extend(data.iter().filter(|data| data.2 != 0));
        (chain, response)
    }

    /// Performs a command of the first disk. Returns the code and the status of its response.
    fn command(guest: &mut Guest, cdb: &[u8], data: &[Descriptor]) -> (u8, u8) {
        let (chain, response) = Self::chain(guest, Address::Disk, cdb, data);
        guest.serve(2, &chain);
        let response = guest.get(response, RESPONSE as usize);
        (response[11], response[10])
    }
}

impl Bench for ScsiBench {
    type Setup = Setup;
    type Request = Request;
    type Handle = ScsiHandle;
    // The host changes the units.
    const REFUSED: &[&str] = &["device.units"];
    // The controller's thread may be asked to stop before it has looked at its queues.
    const PATIENCE: u32 = 10;

    fn new(setup: &Setup) -> Self {
        let options = DiskOptions {
            read_only: false,
            error_policy: error_policy(setup.error_policy),
            ..DiskOptions::default()
        };
        let read_only = setup.read_only;
        let other = open(&image(SIZE), DiskOptions { read_only, ..options });
        let mut bench = Self {
            disk: image(SIZE),
            disc: image(SIZE),
            options,
            units: Vec::new(),
        };
        bench.units = vec![
            unit("disk", (0, 0), Medium::Disk(open(&bench.disk, options))),
            unit("drive", (0, 1), Medium::CdRom(Some(bench.disc()))),
            unit("other", (1, 0), Medium::Disk(other)),
        ];
        if let Some((setup, answer)) = &setup.passthrough {
            let passthrough = PassthroughUnit {
                device: Arc::new(lun::Device(answer.clone())),
                limits: setup.limits(),
                image: None,
            };
            bench
                .units
                .push(unit("lun", (0, 2), Medium::Passthrough(passthrough)));
        }
        bench
    }

    fn device(&mut self, like: Option<&ScsiHandle>) -> (Box<dyn VirtioDevice>, ScsiHandle) {
        let mut units = self.units.clone();
        if let Some(handle) = like {
            let there = handle.list().wait().expect("a list");
            units.retain(|unit| there.iter().any(|info| info.id == unit.id));
        }
        let setup = ScsiConfig {
            queues: 2,
            max_target: 3,
            units,
            engine: EngineKind::Auto,
            on_io_error: Arc::new(|_, _| {}),
        };
        let (scsi, handle) = VirtioScsi::new(setup).expect("a controller");
        (Box::new(scsi), handle)
    }

    fn request(&mut self, request: &Request, handle: &ScsiHandle, guest: &mut Guest) {
        match *request {
            Request::Command {
                second_queue,
                address,
                id,
                attribute,
                ref cdb,
                ref list,
                ref data_out,
                ref data_in,
                cut,
                indirect,
            } => {
                let at = guest.slot();
                let (cdb_size, sense_size) = Self::sizes(guest);
                let mut bytes = list.bytes();
                bytes.truncate(0x100);
                let room = data_in
                    .iter()
                    .fold(0, |sum: u32, buffer| sum.saturating_add(buffer.len.bytes()));
                let mut cdb = cdb.bytes(exact(bytes.len(), room as usize));
                cdb.resize(cdb_size, 0);
                let mut header = address.field().to_vec();
                header.extend([id, 0, 0, 0, 0, 0, 0, 0, attribute % 5, 0, 0]);
                header.extend(cdb);
                guest.put(at, &header);
                let mut chain = pieces(at, header.len() as u32, cut.into(), 0);
                if !bytes.is_empty() {
                    guest.put(at + 0x120, &bytes);
                    chain.push((at + 0x120, bytes.len() as u32, 0));
                }
                chain.extend(descriptors(data_out, 0));
                chain.extend(pieces(at + 0x220, RESPONSE + sense_size, cut.into(), WRITE));
                chain.extend(descriptors(data_in, WRITE));
                guest.add(if second_queue { 3 } else { 2 }, &chain, indirect);
            }
            Request::Control {
                kind,
                function,
                address,
                id,
            } => {
                let at = guest.slot();
                let kind = [kind % 4, 0, 0, 0];
                let bytes = match kind[0] {
                    0 => {
                        let function = [function % 9, 0, 0, 0];
                        [&kind[..], &function, &address.field(), &[id, 0, 0, 0, 0, 0, 0, 0]].concat()
                    }
                    _ => [&kind[..], &address.field(), &[function, 0, 0, 0]].concat(),
                };
                guest.put(at, &bytes);
                let answer = if kind[0] == 0 { 1 } else { 5 };
                guest.add(0, &[(at, bytes.len() as u32, 0), (at + 64, answer, WRITE)], false);
            }
            Request::Ready => {
                for address in [
                    Address::Disk,
                    Address::Drive,
                    Address::Passthrough,
                    Address::Other,
                ] {
                    let (chain, _) = Self::chain(guest, address, &[0; 6], &[]);
                    guest.add(2, &chain, false);
                }
            }
            Request::EventBuffers(count) => {
                for _ in 0..count % 8 {
                    let at = guest.slot();
                    guest.add(1, &[(at, 16, WRITE)], false);
                }
            }
            Request::Host(act) => self.host(act, handle),
        }
    }

    fn repair(&mut self, handle: &ScsiHandle) {
        self.disk.set_len(SIZE).expect("memory");
        handle.resize("disk").expect("the size again");
        assert!(
            handle
                .list()
                .wait()
                .expect("a list")
                .iter()
                .any(|info| info.id == "disk")
        );
    }

    fn check(&mut self, _: &ScsiHandle, guest: &mut Guest) {
        let attentions = (0..3).take_while(|_| Self::command(guest, &[0; 6], &[]) != (0, 0));
        assert!(attentions.count() < 3, "TEST UNIT READY");
        let (there, back) = (DATA, DATA + PAGE);
        let bytes = pattern(PAGE as usize, 1);
        guest.put(there, &bytes);
        let transfer = |opcode| [opcode, 0, 0, 0, 0, 0, 0, 0, 8, 0];
        assert_eq!(
            Self::command(guest, &transfer(0x2a), &[(there, PAGE as u32, 0)]),
            (0, 0)
        );
        assert_eq!(
            Self::command(guest, &transfer(0x28), &[(back, PAGE as u32, WRITE)]),
            (0, 0)
        );
        assert_eq!(guest.get(back, PAGE as usize), bytes);
    }
}
