//! The fields of a VMI's spec, of instance types and of preferences that Husk reads, under KubeVirt's names.
//!
//! All other fields are in the schema table only.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::quantity::Quantity;

/// Declares the types of the spec: every field is optional in a manifest or has a default that means "not given".
macro_rules! manifest {
    ($($(#[$meta:meta])* $name:ident { $($(#[$field_meta:meta])* $field:ident: $type:ty,)* })*) => {$(
        $(#[$meta])*
        #[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
        #[serde(rename_all = "camelCase", default)]
        pub struct $name {
            $(
                $(#[$field_meta])*
                #[allow(missing_docs, reason = "named and described by KubeVirt's API reference")]
                pub $field: $type,
            )*
        }
    )*};
}

mod common;
mod credentials;
mod instancetype;
mod network;

pub use common::{Empty, Named};
pub use credentials::{
    AccessCredential, CredentialSecret, CredentialSource, PasswordPropagation, SshPropagation, SshPublicKey,
    SshUsers, UserPassword,
};
pub use instancetype::{
    ClockPreferences, CpuInstancetype, CpuPreferences, CpuRequirement, FirmwarePreferences, InstancetypeSpec,
    IoThreads, MachinePreferences, MemoryInstancetype, MemoryRequirement, PreferenceRequirements,
    PreferenceSpec, SpreadOptions, VolumePreferences,
};
pub use network::{DhcpOptions, DhcpPrivateOption, DnsConfig, Interface, Multus, Network, PodNetwork, Port};

manifest! {
    /// `spec`
    Spec {
        domain: Domain,
        start_strategy: Option<String>,
        eviction_strategy: Option<String>,
        termination_grace_period_seconds: Option<u64>,
        volumes: Vec<Volume>,
        hostname: Option<String>,
        subdomain: Option<String>,
        dns_policy: Option<String>,
        dns_config: Option<DnsConfig>,
        networks: Vec<Network>,
        architecture: Option<String>,
        liveness_probe: Option<Probe>,
        readiness_probe: Option<Probe>,
        access_credentials: Vec<AccessCredential>,
    }

    /// `spec.domain`
    Domain {
        resources: Resources,
        cpu: Cpu,
        memory: MemorySpec,
        machine: Machine,
        firmware: Firmware,
        clock: Clock,
        features: Features,
        devices: Devices,
        io_threads_policy: Option<String>,
        reboot_policy: Option<String>,
    }

    /// `spec.domain.resources`
    Resources {
        requests: BTreeMap<String, Quantity>,
        limits: BTreeMap<String, Quantity>,
    }

    /// `spec.domain.cpu`; a count of 0 is "not given"
    Cpu {
        cores: u32,
        sockets: u32,
        max_sockets: u32,
        threads: u32,
        model: Option<String>,
        features: Vec<CpuFeature>,
        dedicated_cpu_placement: bool,
        isolate_emulator_thread: bool,
    }

    /// `spec.domain.cpu.features[]`
    CpuFeature {
        name: String,
        policy: Option<String>,
    }

    /// `spec.domain.memory`
    MemorySpec {
        hugepages: Option<Hugepages>,
        guest: Option<Quantity>,
    }

    /// `spec.domain.memory.hugepages`
    Hugepages {
        page_size: String,
    }

    /// `spec.domain.machine`
    Machine {
        #[serde(rename = "type")]
        machine_type: String,
    }

    /// `spec.domain.firmware`
    Firmware {
        uuid: Option<String>,
        bootloader: Option<Bootloader>,
        serial: Option<String>,
        kernel_boot: Option<KernelBoot>,
    }

    /// `spec.domain.firmware.bootloader`
    Bootloader {
        bios: Option<Empty>,
        efi: Option<Efi>,
    }

    /// `spec.domain.firmware.bootloader.efi`
    Efi {
        secure_boot: Option<bool>,
    }

    /// `spec.domain.firmware.kernelBoot`
    KernelBoot {
        kernel_args: Option<String>,
        container: Option<KernelBootContainer>,
    }

    /// `spec.domain.firmware.kernelBoot.container`
    KernelBootContainer {
        image: Option<String>,
        image_pull_policy: Option<String>,
        image_pull_secret: Option<String>,
        kernel_path: Option<String>,
        initrd_path: Option<String>,
    }

    /// `spec.domain.clock`
    Clock {
        utc: Option<ClockUtc>,
        timezone: Option<String>,
    }

    /// `spec.domain.clock.utc`
    ClockUtc {
        offset_seconds: Option<i64>,
    }

    /// `spec.domain.features`
    Features {
        acpi: Option<Feature>,
        apic: Option<Feature>,
        smm: Option<Feature>,
    }

    /// A feature, on unless `enabled` is false
    Feature {
        enabled: Option<bool>,
    }

    /// `spec.domain.devices`
    Devices {
        disks: Vec<Disk>,
        interfaces: Vec<Interface>,
        inputs: Vec<Input>,
        filesystems: Vec<Named>,
        autoattach_pod_interface: Option<bool>,
        autoattach_serial_console: Option<bool>,
        autoattach_mem_balloon: Option<bool>,
        #[serde(rename = "autoattachVSOCK")]
        autoattach_vsock: bool,
        log_serial_console: Option<bool>,
        disable_hotplug: bool,
        block_multi_queue: bool,
        network_interface_multiqueue: bool,
        rng: Option<Empty>,
        watchdog: Option<Watchdog>,
        tpm: Option<Feature>,
        downward_metrics: Option<Empty>,
    }

    /// `spec.domain.devices.watchdog`
    Watchdog {
        name: String,
        i6300esb: I6300esbWatchdog,
    }

    /// `spec.domain.devices.watchdog.i6300esb`
    I6300esbWatchdog {
        action: Option<String>,
    }

    /// `spec.domain.devices.inputs[]`
    Input {
        name: String,
        bus: Option<String>,
        #[serde(rename = "type")]
        input_type: String,
    }

    /// `spec.domain.devices.disks[]`
    Disk {
        name: String,
        disk: Option<DiskTarget>,
        lun: Option<DiskTarget>,
        cdrom: Option<DiskTarget>,
        boot_order: Option<i64>,
        serial: Option<String>,
        #[serde(rename = "dedicatedIOThread")]
        dedicated_io_thread: bool,
        cache: Option<String>,
        io: Option<String>,
        block_size: Option<BlockSize>,
        shareable: bool,
        error_policy: Option<String>,
    }

    /// `spec.domain.devices.disks[].disk`, `.lun` and `.cdrom`
    DiskTarget {
        bus: Option<String>,
        readonly: Option<bool>,
        pci_address: Option<String>,
        tray: Option<String>,
        reservation: bool,
    }

    /// `spec.domain.devices.disks[].blockSize`
    BlockSize {
        custom: Option<CustomBlockSize>,
        match_volume: Option<Feature>,
    }

    /// `spec.domain.devices.disks[].blockSize.custom`
    CustomBlockSize {
        logical: i64,
        physical: i64,
        discard_granularity: Option<i64>,
    }

    /// `spec.livenessProbe` and `spec.readinessProbe`
    Probe {
        guest_agent_ping: Option<Empty>,
        exec: Option<Empty>,
        http_get: Option<Empty>,
        tcp_socket: Option<Empty>,
    }

    /// `spec.volumes[]`
    Volume {
        name: String,
        host_disk: Option<HostDisk>,
        persistent_volume_claim: Option<Claim>,
        cloud_init_no_cloud: Option<CloudInit>,
        cloud_init_config_drive: Option<CloudInit>,
        sysprep: Option<Empty>,
        container_disk: Option<ContainerDisk>,
        ephemeral: Option<Ephemeral>,
        empty_disk: Option<EmptyDisk>,
        data_volume: Option<DataVolume>,
        config_map: Option<ConfigMapVolume>,
        secret: Option<SecretVolume>,
        #[serde(rename = "downwardAPI")]
        downward_api: Option<DownwardApiVolume>,
        service_account: Option<ServiceAccountVolume>,
        downward_metrics: Option<Empty>,
        memory_dump: Option<Empty>,
        container_path: Option<Empty>,
    }

    /// `spec.volumes[].hostDisk`
    HostDisk {
        path: String,
        #[serde(rename = "type")]
        disk_type: String,
        capacity: Option<Quantity>,
    }

    /// `spec.volumes[].persistentVolumeClaim`
    Claim {
        claim_name: String,
        read_only: bool,
        hotpluggable: bool,
    }

    /// `spec.volumes[].cloudInitNoCloud` and `.cloudInitConfigDrive`
    CloudInit {
        secret_ref: Option<Empty>,
        user_data_base64: Option<String>,
        user_data: Option<String>,
        network_data_secret_ref: Option<Empty>,
        network_data_base64: Option<String>,
        network_data: Option<String>,
    }

    /// `spec.volumes[].containerDisk`
    ContainerDisk {
        image: String,
        path: Option<String>,
        image_pull_policy: Option<String>,
        image_pull_secret: Option<String>,
    }

    /// `spec.volumes[].emptyDisk`
    EmptyDisk {
        capacity: Option<Quantity>,
    }

    /// `spec.volumes[].dataVolume`
    DataVolume {
        name: String,
        hotpluggable: bool,
    }

    /// `spec.volumes[].ephemeral`
    Ephemeral {
        persistent_volume_claim: Option<Claim>,
    }

    /// `spec.volumes[].configMap`
    ConfigMapVolume {
        name: String,
        optional: bool,
        volume_label: Option<String>,
    }

    /// `spec.volumes[].secret`
    SecretVolume {
        secret_name: String,
        optional: bool,
        volume_label: Option<String>,
    }

    /// `spec.volumes[].downwardAPI`
    DownwardApiVolume {
        volume_label: Option<String>,
    }

    /// `spec.volumes[].serviceAccount`
    ServiceAccountVolume {
        service_account_name: String,
    }
}

impl Spec {
    /// The volume of this name.
    pub fn volume(&self, name: &str) -> Option<&Volume> {
        self.volumes.iter().find(|volume| volume.name == name)
    }
}

impl Resources {
    /// Limit of a resource, else its request; with the name of the list.
    pub(crate) fn limit_or_request(&self, resource: &str) -> Option<(&'static str, Quantity)> {
        self.limit(resource).or_else(|| self.request(resource))
    }

    /// Request of a resource, else its limit; with the name of the list. Those of 0 do not count.
    pub(crate) fn request_or_limit(&self, resource: &str) -> Option<(&'static str, Quantity)> {
        let given = [self.request(resource), self.limit(resource)];
        let mut given = given.into_iter().flatten();
        given.find(|(_, quantity)| *quantity != Quantity::from_value(0))
    }

    fn request(&self, resource: &str) -> Option<(&'static str, Quantity)> {
        self.requests
            .get(resource)
            .map(|quantity| ("requests", *quantity))
    }

    fn limit(&self, resource: &str) -> Option<(&'static str, Quantity)> {
        self.limits.get(resource).map(|quantity| ("limits", *quantity))
    }
}

impl Feature {
    /// True if the feature is on; a feature without `enabled` is on.
    pub fn is_on(&self) -> bool {
        self.enabled.unwrap_or(true)
    }
}

impl Disk {
    /// Name and content of the target field; the default is `disk`.
    pub(crate) fn target(&self) -> (&'static str, Option<&DiskTarget>) {
        match (&self.disk, &self.lun, &self.cdrom) {
            (Some(disk), _, _) => ("disk", Some(disk)),
            (None, Some(lun), _) => ("lun", Some(lun)),
            (None, None, Some(cdrom)) => ("cdrom", Some(cdrom)),
            (None, None, None) => ("disk", None),
        }
    }

    /// Bus of the disk; the default is KubeVirt's on amd64, sata.
    pub(crate) fn bus(&self) -> &str {
        let given = self.target().1.and_then(|target| target.bus.as_deref());
        given.filter(|bus| !bus.is_empty()).unwrap_or("sata")
    }

    /// True if it becomes a virtio-blk device. All other disks are on the SCSI controller.
    pub(crate) fn is_virtio_blk(&self) -> bool {
        self.target().0 == "disk" && self.bus() == "virtio"
    }
}

impl Volume {
    /// True if it can be hot-plugged and unplugged.
    pub fn is_hotpluggable(&self) -> bool {
        let claim = self.persistent_volume_claim.as_ref();
        claim.is_some_and(|claim| claim.hotpluggable)
            || self.data_volume.as_ref().is_some_and(|data| data.hotpluggable)
    }

    /// `KIND/NAME` of the object or image behind it, if the manifest names one.
    #[must_use]
    pub fn origin(&self) -> Option<String> {
        let claim = self.persistent_volume_claim.as_ref();
        let ephemeral = self
            .ephemeral
            .as_ref()
            .and_then(|volume| volume.persistent_volume_claim.as_ref());
        let names = [
            ("persistentVolumeClaim", claim.map(|claim| &claim.claim_name)),
            ("ephemeral", ephemeral.map(|claim| &claim.claim_name)),
            ("dataVolume", self.data_volume.as_ref().map(|data| &data.name)),
            (
                "containerDisk",
                self.container_disk.as_ref().map(|disk| &disk.image),
            ),
            ("hostDisk", self.host_disk.as_ref().map(|disk| &disk.path)),
            ("configMap", self.config_map.as_ref().map(|map| &map.name)),
            ("secret", self.secret.as_ref().map(|secret| &secret.secret_name)),
        ];
        let (kind, name) = names.into_iter().find_map(|(kind, name)| Some((kind, name?)))?;
        Some(format!("{kind}/{name}"))
    }

    /// Number of sources; valid volumes have one.
    pub(crate) fn sources(&self) -> usize {
        [
            self.host_disk.is_some(),
            self.persistent_volume_claim.is_some(),
            self.cloud_init_no_cloud.is_some(),
            self.cloud_init_config_drive.is_some(),
            self.sysprep.is_some(),
            self.container_disk.is_some(),
            self.ephemeral.is_some(),
            self.empty_disk.is_some(),
            self.data_volume.is_some(),
            self.config_map.is_some(),
            self.secret.is_some(),
            self.downward_api.is_some(),
            self.service_account.is_some(),
            self.downward_metrics.is_some(),
            self.memory_dump.is_some(),
            self.container_path.is_some(),
        ]
        .into_iter()
        .filter(|given| *given)
        .count()
    }
}
