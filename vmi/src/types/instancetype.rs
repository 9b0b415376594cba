//! The specs of instance types and preferences. A value that is written into the VMI as it is stays JSON.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Map, Value};

use super::Hugepages;
use crate::quantity::Quantity;

manifest! {
    /// `spec` of an instance type
    InstancetypeSpec {
        node_selector: Option<BTreeMap<String, String>>,
        scheduler_name: String,
        cpu: CpuInstancetype,
        memory: MemoryInstancetype,
        gpus: Vec<Value>,
        host_devices: Vec<Value>,
        io_threads_policy: Option<String>,
        io_threads: IoThreads,
        launch_security: Option<Value>,
        annotations: BTreeMap<String, String>,
    }

    /// `spec.cpu` of an instance type
    CpuInstancetype {
        guest: u32,
        model: Option<String>,
        #[serde(rename = "dedicatedCPUPlacement")]
        dedicated_cpu_placement: Option<bool>,
        numa: Option<Value>,
        isolate_emulator_thread: Option<bool>,
        realtime: Option<Value>,
        max_sockets: Option<u32>,
    }

    /// `spec.memory` of an instance type
    MemoryInstancetype {
        guest: Option<Quantity>,
        hugepages: Option<Hugepages>,
        overcommit_percent: u8,
        max_guest: Option<Quantity>,
    }

    /// `spec.ioThreads` of an instance type
    IoThreads {
        supplemental_pool_thread_count: Option<u32>,
    }

    /// `spec` of a preference
    PreferenceSpec {
        clock: ClockPreferences,
        cpu: CpuPreferences,
        devices: Map<String, Value>,
        features: Map<String, Value>,
        firmware: FirmwarePreferences,
        machine: MachinePreferences,
        volumes: VolumePreferences,
        preferred_subdomain: Option<String>,
        preferred_termination_grace_period_seconds: Option<u64>,
        requirements: PreferenceRequirements,
        annotations: BTreeMap<String, String>,
        prefer_spread_socket_to_core_ratio: u32,
        preferred_architecture: Option<String>,
        preferred_launch_security: Option<Value>,
    }

    /// `spec.clock` of a preference
    ClockPreferences {
        preferred_clock_offset: Option<Map<String, Value>>,
        preferred_timer: Option<Value>,
    }

    /// `spec.cpu` of a preference
    CpuPreferences {
        #[serde(rename = "preferredCPUTopology")]
        preferred_cpu_topology: Option<String>,
        spread_options: SpreadOptions,
        #[serde(rename = "preferredCPUFeatures")]
        preferred_cpu_features: Vec<Value>,
    }

    /// `spec.cpu.spreadOptions` of a preference
    SpreadOptions {
        across: Option<String>,
        ratio: Option<u32>,
    }

    /// `spec.firmware` of a preference
    FirmwarePreferences {
        preferred_use_bios: Option<bool>,
        preferred_use_bios_serial: Option<bool>,
        preferred_use_efi: Option<bool>,
        preferred_use_secure_boot: Option<bool>,
        preferred_efi: Option<Value>,
    }

    /// `spec.machine` of a preference
    MachinePreferences {
        preferred_machine_type: String,
    }

    /// `spec.volumes` of a preference
    VolumePreferences {
        preferred_storage_class_name: String,
    }

    /// `spec.requirements` of a preference
    PreferenceRequirements {
        cpu: Option<CpuRequirement>,
        memory: Option<MemoryRequirement>,
        architecture: Option<String>,
    }

    /// `spec.requirements.cpu` of a preference
    CpuRequirement {
        guest: u32,
    }

    /// `spec.requirements.memory` of a preference
    MemoryRequirement {
        guest: Option<Quantity>,
    }
}
