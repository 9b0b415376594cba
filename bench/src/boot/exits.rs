//! Parses the trace of a boot.

use crate::trace::Event;
use std::collections::BTreeMap;

/// Number of events of each kind.
pub type Counts = BTreeMap<String, u64>;

/// Events from the start of a VMM until its guest printed a marker on its serial line.
#[derive(Debug, Default, PartialEq)]
pub struct Exits {
    /// VM exits by hardware exit reason.
    pub reasons: Counts,
    /// VM exits that reach the VMM's process, by KVM exit reason.
    pub to_vmm: Counts,
    /// Accesses to I/O ports, by direction and port.
    pub ports: Counts,
    /// MMIO accesses, by direction and page.
    pub mmio: Counts,
    /// Start times of programs, in seconds of the monotonic clock.
    pub execs: Vec<(String, f64)>,
    /// Time of the first exit: the guest runs.
    pub first: Option<f64>,
    /// Time of the first byte on the serial line.
    pub first_byte: Option<f64>,
    /// Time of the marker.
    pub marker: Option<f64>,
    /// Time of the last access to a port.
    pub last_port: Option<f64>,
}

impl Exits {
    /// Parses the text form of a trace, up to `marker` if there is one.
    pub fn read(trace: &str, marker: Option<&str>) -> Self {
        let mut exits = Self::default();
        let mut said = String::new();
        for event in trace.lines().filter_map(Event::parse) {
            exits.count(&event, &mut said);
            if marker.is_some_and(|marker| said.ends_with(marker)) {
                exits.marker = Some(event.time);
                break;
            }
        }
        exits
    }

    fn count(&mut self, event: &Event<'_>, said: &mut String) {
        let add = |counts: &mut Counts, key: String| *counts.entry(key).or_insert(0) += 1;
        match event.name {
            "kvm_exit" => {
                self.first.get_or_insert(event.time);
                add(&mut self.reasons, event.after("reason").to_owned());
            }
            "kvm_userspace_exit" => {
                let reason = event.after("reason").trim_start_matches("KVM_EXIT_");
                add(&mut self.to_vmm, reason.to_lowercase());
            }
            "kvm_pio" => {
                self.last_port = Some(event.time);
                let direction = event.args.trim_start_matches("pio_").split(' ').next();
                let key = format!("{} {}", direction.unwrap_or_default(), event.after("at"));
                if let Some(byte) = event.serial_byte() {
                    self.first_byte.get_or_insert(event.time);
                    said.push(byte.into());
                }
                add(&mut self.ports, key);
            }
            "kvm_mmio" => {
                let kind = event.args.trim_start_matches("mmio ").split(' ').next();
                // A read that no device within KVM handles appears twice: at the request and at the reply.
                if let Some(direction @ ("read" | "write")) = kind {
                    let page = u64::from_str_radix(event.after("gpa").trim_start_matches("0x"), 16);
                    add(
                        &mut self.mmio,
                        format!("{direction} {:#x}", page.unwrap_or(0) & !0xfff),
                    );
                }
            }
            "sched_process_exec" => {
                let path = event.args.trim_start_matches("filename=").split(' ').next();
                let name = path.and_then(|path| path.rsplit('/').next()).unwrap_or_default();
                self.execs.push((name.to_owned(), event.time));
            }
            _ => {}
        }
    }

    /// Start time of the program `name`; /proc/self/exe is not the name of a program.
    pub fn exec(&self, name: &str) -> Option<f64> {
        self.execs
            .iter()
            .find(|(program, _)| program == name)
            .map(|(_, time)| *time)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRACE: &str = "\
# tracer: nop
            husk-100     [000] .....    10.000000: sched_process_exec: filename=/tmp/husk pid=100 old_pid=100
        husk-vmm-101     [001] .....    10.500000: sched_process_exec: filename=/tmp/husk-vmm pid=101 old_pid=101
           vcpu0-102     [001] d....    11.000000: kvm_exit: vcpu 0 reason npf rip 0x1000 info1 0x1 info2 0x0
           vcpu0-102     [001] .....    11.000001: kvm_userspace_exit: reason KVM_EXIT_MMIO (6)
           vcpu0-102     [001] .....    11.000002: kvm_mmio: mmio unsatisfied-read len 4 gpa 0xe0001004 val 0x0
           vcpu0-102     [001] .....    11.000003: kvm_mmio: mmio read len 4 gpa 0xe0001004 val 0x5
           vcpu0-102     [001] d....    11.100000: kvm_exit: vcpu 0 reason io rip 0x1000 info1 0x1 info2 0x0
       CPU 0/KVM-102     [001] .....    11.100001: kvm_pio: pio_write at 0x3f8 size 1 count 1 val 0x4f 
       CPU 0/KVM-102     [001] .....    11.200001: kvm_pio: pio_read at 0x3fd size 1 count 1 val 0x60 
       CPU 0/KVM-102     [001] .....    11.300001: kvm_pio: pio_write at 0x3f8 size 1 count 1 val 0x4b 
           vcpu0-102     [001] d....    11.400000: kvm_exit: vcpu 0 reason hlt rip 0x1000 info1 0x1 info2 0x0
";

    #[test]
    fn a_boot_is_counted_up_to_its_marker() {
        let exits = Exits::read(TRACE, Some("OK"));
        assert_eq!(exits.marker, Some(11.300_001));
        assert_eq!(exits.first, Some(11.0));
        assert_eq!(exits.first_byte, Some(11.100_001));
        assert_eq!(exits.reasons, Counts::from([("io".into(), 1), ("npf".into(), 1)]));
        assert_eq!(exits.to_vmm, Counts::from([("mmio".into(), 1)]));
        assert_eq!(exits.mmio, Counts::from([("read 0xe0001000".into(), 1)]));
        assert_eq!(exits.ports["write 0x3f8"], 2);
        assert_eq!(exits.exec("husk-vmm"), Some(10.5));
        let all = Exits::read(TRACE, None);
        assert_eq!((all.marker, all.reasons["hlt"]), (None, 1));
    }
}
