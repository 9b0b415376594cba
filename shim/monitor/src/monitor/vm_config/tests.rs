use std::collections::BTreeMap;
use std::path::PathBuf;

use husk_proto::vmm::v1::disk::Cache;
use husk_vmi::{
    BlockSize as PlannedBlockSize, CacheMode, DiskSource, FormatPolicy, Memory, Topology, WatchdogAction,
};

use husk_volumes::{BackingImage, BlockSizes};

use husk_vmi::ScsiAddress;

use super::*;

fn plan(change: impl FnOnce(&mut DiskPlan)) -> VmPlan {
    let mut disk = DiskPlan {
        name: "data".into(),
        target: "vda".into(),
        controller: Controller::VirtioBlk,
        device: DeviceType::Disk,
        read_only: false,
        overlay: false,
        format: FormatPolicy::Raw,
        serial: None,
        cache: CacheMode::Auto,
        shareable: false,
        block_size: PlannedBlockSize::Default,
        error_policy: ErrorPolicy::Stop,
        preallocated: false,
        queues: 1,
        io_thread: None,
        boot_order: None,
        origin: None,
        source: DiskSource::EmptyDisk {
            capacity_bytes: 1 << 20,
        },
    };
    change(&mut disk);
    VmPlan {
        name: "vm".into(),
        namespace: "default".into(),
        uid: None,
        uuid: uuid::Uuid::nil(),
        serial: None,
        topology: Topology {
            sockets: 1,
            cores: 1,
            threads: 1,
        },
        memory: Memory {
            guest_bytes: 1 << 27,
            hugepage_bytes: None,
        },
        disks: vec![disk],
        scsi: None,
        boot: BootPlan::Disks {
            order: Vec::new(),
            append: None,
        },
        rng: false,
        balloon: false,
        vhost_vsock_cid: None,
        downward_metrics: false,
        watchdog: Some(WatchdogAction::Pause),
        serial_console: false,
        acpi: true,
        rtc_offset_seconds: 0,
        grace_period_seconds: 30,
        credentials: husk_vmi::CredentialsPlan::default(),
        start_paused: false,
        new_image_bytes: BTreeMap::new(),
        nics: Vec::new(),
        hostname: "vm".into(),
        subdomain: None,
        warnings: Vec::new(),
    }
}

fn devices() -> HostDevices {
    HostDevices {
        kvm: tempfile::tempfile().unwrap().into(),
        vhost_vsock: None,
    }
}

#[test]
fn disk_config_matches_the_plan() {
    let open = |block_sizes| OpenDisk {
        file: None,
        base: None,
        new_overlay: false,
        private: false,
        path: PathBuf::new(),
        read_only: true,
        cache: Cache::Writethrough,
        format: ImageFormat::Raw,
        block_sizes,
        lun: None,
    };
    let told =
        |change: fn(&mut DiskPlan), block_sizes| disk(&plan(change).disks[0], &open(block_sizes), None, None);
    let plain = told(|_| {}, None);
    assert_eq!(
        (plain.error_policy(), plain.queues, plain.block_size),
        (WireErrorPolicy::Stop, 1, None)
    );
    let sizes = BlockSizes {
        logical: 4096,
        physical: 8192,
        discard_granularity: None,
    };
    let wanted = Disk {
        id: "data".into(),
        file: None,
        read_only: true,
        serial: "S".into(),
        cache: Cache::Writethrough.into(),
        error_policy: WireErrorPolicy::Enospace.into(),
        queues: 4,
        block_size: Some(BlockSize {
            size: Some(Size::Custom(Custom {
                logical: 4096,
                physical: 8192,
            })),
        }),
        format: Format::Raw.into(),
        preallocated: true,
        ..Disk::default()
    };
    let change = |disk: &mut DiskPlan| {
        disk.serial = Some("S".into());
        disk.error_policy = ErrorPolicy::Enospace;
        disk.preallocated = true;
        disk.queues = 4;
    };
    assert_eq!(told(change, Some(sizes)), wanted);
}

#[test]
fn scsi_disk_has_its_address_and_a_drive_may_be_empty() {
    let mut vm = plan(|disk| disk.controller = Controller::VirtioScsi(ScsiAddress { target: 1, lun: 300 }));
    vm.disks[0].shareable = true;
    let mut drive = plan(|disk| {
        disk.name = "drive".into();
        disk.controller = Controller::VirtioScsi(ScsiAddress { target: 0, lun: 0 });
        disk.device = DeviceType::Cdrom { tray_open: false };
    });
    vm.disks.append(&mut drive.disks);
    let open = |file: Option<std::fs::File>| OpenDisk {
        file: file.map(OwnedFd::from),
        base: None,
        new_overlay: false,
        private: false,
        path: PathBuf::new(),
        read_only: true,
        cache: Cache::Writeback,
        format: ImageFormat::Raw,
        block_sizes: None,
        lun: None,
    };
    let volumes = Volumes {
        disks: vec![open(Some(tempfile::tempfile().unwrap())), open(None)],
        kernel: None,
        initrd: None,
    };
    let prepared = PreparedConfig::new(&vm, volumes, Vec::new(), devices(), GuestSockets::default());
    assert_eq!(prepared.descriptors.len(), 2);
    assert_eq!(prepared.config.disks, []);
    let told: Vec<_> = prepared
        .config
        .scsi_disks
        .iter()
        .map(|scsi| {
            let disk = scsi.disk.as_ref().unwrap();
            let place = (scsi.controller, scsi.target, scsi.lun);
            (
                &disk.id[..],
                place,
                scsi.r#type(),
                scsi.shareable,
                disk.file.is_some(),
            )
        })
        .collect();
    let wanted = [
        ("data", (0, 1, Some(300)), Type::Disk, true, true),
        ("drive", (0, 0, Some(0)), Type::Cdrom, false, false),
    ];
    assert_eq!(told, wanted);
}

#[test]
fn the_watchdog_has_the_action_of_the_plan() {
    let told = |action| {
        let mut vm = plan(|_| {});
        vm.watchdog = action;
        vm.disks.clear();
        let volumes = Volumes {
            disks: Vec::new(),
            kernel: None,
            initrd: None,
        };
        let prepared = PreparedConfig::new(&vm, volumes, Vec::new(), devices(), GuestSockets::default());
        prepared.config.watchdog.map(|watchdog| watchdog.action())
    };
    assert_eq!(told(None), None);
    for (planned, action) in [
        (WatchdogAction::Reset, Action::Reset),
        (WatchdogAction::Poweroff, Action::Poweroff),
        (WatchdogAction::Shutdown, Action::Shutdown),
        (WatchdogAction::Pause, Action::Pause),
    ] {
        assert_eq!(told(Some(planned)), Some(action));
    }
}

#[test]
fn the_disk_of_downward_metrics_has_the_monitors_file() {
    let vm = plan(|disk| disk.source = DiskSource::DownwardMetrics);
    let volumes = Volumes {
        disks: vec![OpenDisk {
            file: None,
            base: None,
            new_overlay: false,
            private: false,
            path: PathBuf::new(),
            read_only: true,
            cache: Cache::Writeback,
            format: ImageFormat::Raw,
            block_sizes: None,
            lun: None,
        }],
        kernel: None,
        initrd: None,
    };
    let file = || OwnedFd::from(tempfile::tempfile().unwrap());
    let sockets = GuestSockets {
        metrics_disk: Some(file()),
        ..GuestSockets::default()
    };
    let prepared = PreparedConfig::new(&vm, volumes, Vec::new(), devices(), sockets);
    let disk = &prepared.config.disks[0];
    assert!(disk.file.is_some() && disk.read_only, "{disk:?}");
    assert_eq!(prepared.descriptors.len(), 2);
}

#[test]
fn lun_config_includes_the_privileged_socket() {
    let told = |reservation, privileged: bool| {
        let vm = plan(|disk| {
            disk.controller = Controller::VirtioScsi(ScsiAddress { target: 0, lun: 0 });
            disk.device = DeviceType::Lun { reservation };
        });
        let file = || OwnedFd::from(tempfile::tempfile().unwrap());
        let open = OpenDisk {
            file: Some(file()),
            base: None,
            new_overlay: false,
            private: false,
            path: PathBuf::new(),
            read_only: false,
            cache: Cache::None,
            format: ImageFormat::Raw,
            block_sizes: None,
            lun: Some(husk_volumes::OpenLun {
                privileged: privileged.then(file),
                max_segments: 128,
            }),
        };
        let volumes = Volumes {
            disks: vec![open],
            kernel: None,
            initrd: None,
        };
        let prepared = PreparedConfig::new(&vm, volumes, Vec::new(), devices(), GuestSockets::default());
        assert_eq!(prepared.descriptors.len(), 2 + usize::from(privileged));
        let scsi = prepared.config.scsi_disks.into_iter().next().unwrap();
        assert_eq!(scsi.r#type(), Type::Lun);
        let lun = scsi.passthrough.unwrap();
        (lun.reservation, lun.privileged.is_some(), lun.max_segments)
    };
    assert_eq!(told(true, true), (true, true, 128));
    assert_eq!(told(false, false), (false, false, 128));
}

#[test]
fn overlay_config_includes_its_base() {
    let vm = plan(|_| {});
    let file = || OwnedFd::from(tempfile::tempfile().unwrap());
    let open = OpenDisk {
        file: Some(file()),
        base: Some(BackingImage {
            file: file(),
            format: ImageFormat::Raw,
            private: false,
        }),
        new_overlay: true,
        private: true,
        path: PathBuf::new(),
        read_only: false,
        cache: Cache::Writeback,
        format: ImageFormat::Qcow2,
        block_sizes: None,
        lun: None,
    };
    let volumes = Volumes {
        disks: vec![open],
        kernel: None,
        initrd: None,
    };
    let prepared = PreparedConfig::new(&vm, volumes, Vec::new(), devices(), GuestSockets::default());
    assert_eq!(prepared.descriptors.len(), 3);
    let disk = &prepared.config.disks[0];
    assert_eq!(
        (disk.format(), disk.base_format(), disk.new_overlay),
        (Format::Qcow2, Format::Raw, true)
    );
    assert!(disk.base.is_some() && disk.base != disk.file);
}

#[test]
fn sockets_are_sent_by_the_names_of_their_ports() {
    let file = || OwnedFd::from(tempfile::tempfile().unwrap());
    let sockets = GuestSockets {
        console: Some(file()),
        ports: vec![("first", file()), ("second", file())],
        metrics_disk: None,
    };
    let mut vm = plan(|_| {});
    vm.disks.clear();
    let volumes = Volumes {
        disks: Vec::new(),
        kernel: None,
        initrd: None,
    };
    let prepared = PreparedConfig::new(&vm, volumes, Vec::new(), devices(), sockets);
    assert_eq!(prepared.descriptors.len(), 4);
    let [first, second] = &prepared.config.ports[..] else {
        panic!("{:?}", prepared.config.ports)
    };
    assert_eq!((&first.name[..], &second.name[..]), ("first", "second"));
    assert!(first.stream.is_some() && first.stream != second.stream);
}

#[test]
fn the_guest_has_the_cid_of_the_plan() {
    let told = |cid| {
        let mut vm = plan(|_| {});
        vm.disks.clear();
        vm.vhost_vsock_cid = cid;
        let volumes = Volumes {
            disks: Vec::new(),
            kernel: None,
            initrd: None,
        };
        let mut devices = devices();
        devices.vhost_vsock = cid.map(|_| tempfile::tempfile().unwrap().into());
        let prepared = PreparedConfig::new(&vm, volumes, Vec::new(), devices, GuestSockets::default());
        let PreparedConfig { config, descriptors } = prepared;
        (config.vsock_cid, config.vhost_vsock.is_some(), descriptors.len())
    };
    assert_eq!(told(None), (GUEST_CID, false, 1));
    assert_eq!(told(Some(1234)), (1234, true, 2));
}
