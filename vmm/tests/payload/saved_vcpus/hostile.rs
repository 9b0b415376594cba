//! Saved state that KVM refuses, or that nobody saved.

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use serde_json::{Value, json};

use super::*;

/// The state of the one vCPU.
fn state(document: &mut Value) -> &mut Value {
    &mut document["vcpus"][0]["state"]
}

/// The error of a restore after `change`.
fn refusal(change: impl FnOnce(&mut Value)) -> String {
    let source = run_to_wait(&[programs::registers()]);
    let mut document: Value = serde_json::from_str(&save(&source)).unwrap();
    change(&mut document);
    match try_restore(&document.to_string(), &source) {
        Ok(_) => panic!("restored"),
        Err(error) => error.to_string(),
    }
}

/// Changes the base64 text of a field.
fn edit(field: &mut Value, change: impl FnOnce(&mut [u8])) {
    let mut bytes = STANDARD.decode(field.as_str().unwrap()).unwrap();
    change(&mut bytes);
    *field = STANDARD.encode(bytes).into();
}

#[test]
fn an_msr_that_kvm_does_not_take_is_named() {
    let error = refusal(|document| {
        let msrs = state(document)["msrs"].as_array_mut().unwrap();
        let lstar = msrs
            .iter_mut()
            .find(|msr| msr["index"] == 0xc000_0082u32)
            .unwrap();
        lstar["value"] = json!(0x8000_0000_0000_0000u64);
    });
    assert_eq!(
        error,
        "vCPU 0: KVM refuses the value 0x8000000000000000 of MSR 0xc0000082"
    );
    let unknown = json!({"index": 0xdead_0000u32, "value": 7});
    let error = refusal(|document| state(document)["msrs"].as_array_mut().unwrap().insert(3, unknown));
    assert_eq!(error, "vCPU 0: KVM refuses the value 0x7 of MSR 0xdead0000");
}

#[test]
fn features_without_saved_state_are_named() {
    const EFER: usize = 8 * 24 + 2 * 16 + 5 * 8;
    let error = refusal(|document| {
        edit(&mut state(document)["sregs"], |bytes| {
            assert_eq!(bytes[EFER + 1], 5, "LME and LMA");
            bytes[EFER + 1] |= 0x10;
        });
    });
    assert!(error.contains("uses SVM,"), "{error}");
    let error = refusal(|document| edit(&mut state(document)["xcrs"], |bytes| bytes[18] |= 4));
    assert!(error.contains("uses AMX,"), "{error}");
}

#[test]
fn a_cpu_that_the_host_does_not_offer_is_named() {
    let error = refusal(|document| {
        let entries = document["vcpus"][0]["cpuid"].as_array_mut().unwrap();
        let leaf = entries.iter_mut().find(|entry| entry["function"] == 7).unwrap();
        leaf["edx"] = json!(leaf["edx"].as_u64().unwrap() | 1 << 24);
    });
    assert_eq!(
        error,
        "the host's processor or KVM does not offer the guest's AMX-TILE"
    );
}

#[test]
fn capabilities_that_the_host_does_not_offer_are_named() {
    let error = refusal(|document| {
        let msr = json!({"index": 0x10a, "value": 1u64 << 63});
        state(document)["msrs"].as_array_mut().unwrap().push(msr);
    });
    assert_eq!(
        error,
        "the host's processor or KVM does not offer the guest's IA32_ARCH_CAPABILITIES bit 63"
    );
}

#[test]
fn foreign_bytes_are_an_error_or_a_state_of_the_guest() {
    let source = run_to_wait(&[programs::registers()]);
    let saved: Value = serde_json::from_str(&save(&source)).unwrap();
    let fields = vec!["events", "regs", "sregs", "debug", "xcrs", "xsave", "lapic"];
    let changes = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..40);
    let mut runner = TestRunner::new(Config {
        cases: 64,
        failure_persistence: None,
        ..Config::default()
    });
    let case = (prop::sample::select(fields), changes, any::<u32>());
    let run = runner.run(&case, |(field, changes, mp_state)| {
        let mut document = saved.clone();
        let state = state(&mut document);
        edit(&mut state[field], |bytes| {
            for (index, value) in changes {
                let at = index.index(bytes.len());
                bytes[at] = value;
            }
        });
        state["mp_state"] = (mp_state % 12).into();
        // The thread of each vCPU answers, whatever KVM says.
        if let Err(error) = try_restore(&document.to_string(), &source) {
            prop_assert!(error.to_string().starts_with("vCPU 0: "), "{error}");
            prop_assert!(!error.to_string().contains("does not answer"), "{error}");
        }
        Ok(())
    });
    run.unwrap();
}
