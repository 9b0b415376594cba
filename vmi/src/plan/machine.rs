//! vCPUs, memory, clock and vsock of a plan.

use super::types::{Memory, Topology};
use crate::field::FieldError;
use crate::load::Vmi;
use crate::quantity::Quantity;

/// Maximum number of vCPUs: 8-bit APIC ids without the broadcast id.
const MOST_VCPUS: u32 = 254;
/// Highest 8-bit APIC id that is not the broadcast id.
const MOST_APIC_ID: u32 = 254;
/// Minimum guest memory in bytes.
const LEAST_MEMORY: u64 = 16 << 20;
/// Maximum guest memory in bytes: 46 physical address bits, which every x86-64 server has.
const MOST_MEMORY: u64 = 64 << 40;
/// Page size without huge pages, in bytes.
const PAGE: u64 = 4096;
/// Maximum offset of the guest's clock from UTC in seconds: 100 years.
const FARTHEST: i64 = 100 * 366 * 86_400;

impl Vmi {
    /// Path of the field that sets the size of guest memory.
    #[must_use]
    pub fn memory_field(&self) -> String {
        self.at(&memory_given(self).0)
    }
}

/// Topology from `cpu`; if that is empty, one socket per CPU of the limit or the request.
pub(super) fn topology(vmi: &Vmi, errors: &mut Vec<FieldError>) -> Topology {
    let cpu = &vmi.spec.domain.cpu;
    let resources = &vmi.spec.domain.resources;
    let (mut field, mut sockets) = ("domain.cpu".to_owned(), cpu.sockets);
    if cpu.sockets == 0
        && cpu.cores == 0
        && cpu.threads == 0
        && let Some((list, cpus)) = resources.limit_or_request("cpu")
    {
        field = format!("domain.resources.{list}.cpu");
        sockets = u32::try_from(cpus.value()).unwrap_or(if cpus.is_negative() { 0 } else { u32::MAX });
    }
    let topology = Topology {
        sockets: sockets.max(1),
        cores: cpu.cores.max(1),
        threads: cpu.threads.max(1),
    };
    if topology.vcpus() > MOST_VCPUS {
        let path = vmi.at(&field);
        let Topology {
            sockets,
            cores,
            threads,
        } = topology;
        let text = format!(
            "{path} asks for {sockets} sockets x {cores} cores x {threads} threads; a VM has at most {MOST_VCPUS} vCPUs"
        );
        errors.push(FieldError::invalid(path, text));
    } else if topology.last_apic_id() > MOST_APIC_ID {
        let path = vmi.at(&field);
        let text = format!(
            "{path} needs APIC ids up to {}, but the maximum is {MOST_APIC_ID}: make cores and threads powers of \
             two, or use fewer",
            topology.last_apic_id()
        );
        errors.push(FieldError::invalid(path, text));
    }
    topology
}

impl Topology {
    /// APIC id of the last vCPU. Socket, core and thread are bit fields of the id.
    fn last_apic_id(self) -> u32 {
        let bits = |count: u32| count.next_power_of_two().trailing_zeros();
        let (core, socket) = (bits(self.threads), bits(self.threads) + bits(self.cores));
        (self.sockets - 1) << socket | (self.cores - 1) << core | (self.threads - 1)
    }
}

/// Path and value of the field that sets the size of guest memory.
pub(super) fn memory_given(vmi: &Vmi) -> (String, Option<Quantity>) {
    let domain = &vmi.spec.domain;
    match (domain.memory.guest, domain.resources.request_or_limit("memory")) {
        (Some(guest), _) => ("domain.memory.guest".to_owned(), Some(guest)),
        (None, Some((list, quantity))) => (format!("domain.resources.{list}.memory"), Some(quantity)),
        (None, None) => {
            let pages = domain.memory.hugepages.as_ref();
            (
                "domain.memory.hugepages.pageSize".to_owned(),
                pages.and_then(|pages| pages.page_size.parse().ok()),
            )
        }
    }
}

/// Size of guest memory: `memory.guest`, else the request, else the limit, else one huge page.
pub(super) fn memory(vmi: &Vmi, errors: &mut Vec<FieldError>) -> Memory {
    let domain = &vmi.spec.domain;
    let page_size = domain
        .memory
        .hugepages
        .as_ref()
        .map(|pages| pages.page_size.as_str());
    let hugepage_bytes = page_size.and_then(|size| match size.parse::<Quantity>().ok()?.bytes()? {
        bytes @ (0x20_0000 | 0x4000_0000) => Some(bytes),
        _ => None,
    });
    if page_size.is_some() && hugepage_bytes.is_none() {
        let path = vmi.at("domain.memory.hugepages.pageSize");
        let text = format!(
            "{path} '{}' is not supported; use 2Mi or 1Gi",
            page_size.unwrap_or_default()
        );
        errors.push(FieldError::unsupported(path, text));
    }
    let (field, quantity) = memory_given(vmi);
    let bytes = quantity.and_then(Quantity::bytes).unwrap_or(0);
    let path = vmi.at(&field);
    let fault = match bytes {
        ..LEAST_MEMORY => Some("a guest cannot start with less than 16Mi"),
        LEAST_MEMORY..=MOST_MEMORY => None,
        _ => Some("the maximum is 64Ti"),
    };
    let asked = quantity.unwrap_or(Quantity::from_value(0));
    if let Some(fault) = fault {
        errors.push(FieldError::invalid(&path, format!("{path} '{asked}': {fault}")));
    }
    if let (Some(page), Some(size)) = (hugepage_bytes, page_size)
        && bytes % page != 0
    {
        let text = format!(
            "{path} '{asked}' is not a multiple of the page size {} '{size}'",
            vmi.at("domain.hugepages.size")
        );
        errors.push(FieldError::invalid(path, text));
    }
    // No overflow: a quantity is at most 2^63 - 1.
    Memory {
        guest_bytes: bytes.next_multiple_of(PAGE),
        hugepage_bytes,
    }
}

/// Offset of the guest's real-time clock from UTC in seconds.
pub(super) fn rtc_offset(vmi: &Vmi, now_unix_seconds: i64, errors: &mut Vec<FieldError>) -> i64 {
    let clock = &vmi.spec.domain.clock;
    if let Some(offset) = clock.utc.as_ref().and_then(|utc| utc.offset_seconds) {
        if offset.checked_abs().is_none_or(|distance| distance > FARTHEST) {
            let path = vmi.at("domain.clock.utc.offsetSeconds");
            let text = format!("{path} '{offset}' exceeds 100 years");
            errors.push(FieldError::invalid(path, text));
            return 0;
        }
        return offset;
    }
    let Some(name) = clock.timezone.as_deref().filter(|name| !name.is_empty()) else {
        return 0;
    };
    let now = jiff::Timestamp::from_second(now_unix_seconds).unwrap_or(jiff::Timestamp::UNIX_EPOCH);
    match jiff::tz::TimeZoneDatabase::bundled().get(name) {
        Ok(zone) => i64::from(zone.to_offset(now).seconds()),
        Err(_) => {
            let path = vmi.at("domain.clock.timezone");
            let text = format!("{path} '{name}' is not a known time zone, for example Europe/Berlin");
            errors.push(FieldError::invalid(path, text));
            0
        }
    }
}

/// The guest's CID on the host's AF_VSOCK, if the VMI has one.
pub(super) fn vhost_vsock_cid(vmi: &Vmi, errors: &mut Vec<FieldError>) -> Option<u32> {
    if !vmi.spec.domain.devices.autoattach_vsock {
        return None;
    }
    let Some(given) = &vmi.vsock_cid else {
        let path = vmi.at("domain.devices.autoattachVSOCK");
        let text = format!(
            "{path} needs a VirtualMachineInstance with status.VSOCKCID, which virt-controller sets under the feature \
             gate VSOCK; leave the field out: every VM then has a vsock device of its own"
        );
        errors.push(FieldError::invalid(path, text));
        return None;
    };
    let cid = given.as_u64().and_then(|cid| u32::try_from(cid).ok());
    // The others are of the hypervisor, of loopback and of the host, and any CID.
    let cid = cid.filter(|cid| (3..u32::MAX).contains(cid));
    if cid.is_none() {
        let text = format!(
            "status.VSOCKCID '{given}' is not a number from 3 to {}",
            u32::MAX - 1
        );
        errors.push(FieldError::invalid("status.VSOCKCID", text));
    }
    cid
}
