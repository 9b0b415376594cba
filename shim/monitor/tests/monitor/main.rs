//! The monitor against a VMM that only plays one, as real processes: both are this program under other arguments.

mod embedded;
mod fake_nic;
mod fake_vmm;
mod fixture;
mod interfaces;
mod lives;
mod networks;
mod standalone;
mod starts;
mod sync;
mod volumes;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};

type Test = (&'static str, fn());

const TESTS: &[Test] = &[
    ("starts::a_vm_runs_and_is_found", starts::a_vm_runs_and_is_found),
    ("starts::a_name_is_taken_once", starts::a_name_is_taken_once),
    (
        "starts::what_the_vmm_refuses_is_told_and_nothing_stays",
        starts::what_the_vmm_refuses_is_told_and_nothing_stays,
    ),
    (
        "starts::a_vmm_that_dies_early_is_told",
        starts::a_vmm_that_dies_early_is_told,
    ),
    (
        "starts::a_variable_that_leads_nowhere_is_named",
        starts::a_variable_that_leads_nowhere_is_named,
    ),
    (
        "starts::a_bad_volume_is_told_and_nothing_stays",
        starts::a_bad_volume_is_told_and_nothing_stays,
    ),
    (
        "starts::an_image_the_vmm_refuses_is_told_by_its_name",
        starts::an_image_the_vmm_refuses_is_told_by_its_name,
    ),
    (
        "starts::every_descriptor_of_many_disks_arrives",
        starts::every_descriptor_of_many_disks_arrives,
    ),
    ("starts::long_names_work", starts::long_names_work),
    (
        "starts::a_vm_whose_starter_died_ends",
        starts::a_vm_whose_starter_died_ends,
    ),
    (
        "starts::a_start_that_hangs_can_be_ended",
        starts::a_start_that_hangs_can_be_ended,
    ),
    ("lives::the_button_ends_it_well", lives::the_button_ends_it_well),
    (
        "lives::a_deaf_guest_is_killed_after_its_grace_period",
        lives::a_deaf_guest_is_killed_after_its_grace_period,
    ),
    ("lives::a_deaf_vmm_is_killed_too", lives::a_deaf_vmm_is_killed_too),
    (
        "lives::signals_ask_and_then_insist",
        lives::signals_ask_and_then_insist,
    ),
    (
        "lives::a_paused_vm_is_resumed_to_be_shut_down",
        lives::a_paused_vm_is_resumed_to_be_shut_down,
    ),
    (
        "lives::a_killed_vmm_leaves_nothing",
        lives::a_killed_vmm_leaves_nothing,
    ),
    (
        "lives::a_killed_monitor_takes_its_vmm_along",
        lives::a_killed_monitor_takes_its_vmm_along,
    ),
    (
        "lives::the_guests_end_is_told_with_its_reason",
        lives::the_guests_end_is_told_with_its_reason,
    ),
    ("lives::reboots_are_counted", lives::reboots_are_counted),
    (
        "lives::the_console_is_one_sessions",
        lives::the_console_is_one_sessions,
    ),
    (
        "lives::images_are_free_again_after_the_end",
        lives::images_are_free_again_after_the_end,
    ),
    (
        "volumes::a_volume_comes_and_goes",
        volumes::a_volume_comes_and_goes,
    ),
    (
        "volumes::what_is_removed_while_paused_goes_later",
        volumes::what_is_removed_while_paused_goes_later,
    ),
    (
        "volumes::what_cannot_be_added_is_told_and_changes_nothing",
        volumes::what_cannot_be_added_is_told_and_changes_nothing,
    ),
    (
        "volumes::a_volume_is_shown_at_the_address_the_vmm_gave_it",
        volumes::a_volume_is_shown_at_the_address_the_vmm_gave_it,
    ),
    (
        "volumes::a_disk_follows_its_file_when_that_grows",
        volumes::a_disk_follows_its_file_when_that_grows,
    ),
    ("sync::a_vm_follows_its_vmi", sync::a_vm_follows_its_vmi),
    (
        "sync::what_takes_a_restart_is_refused_and_nothing_is_done",
        sync::what_takes_a_restart_is_refused_and_nothing_is_done,
    ),
    (
        "sync::what_a_guest_clings_to_goes_later",
        sync::what_a_guest_clings_to_goes_later,
    ),
    (
        "sync::calls_are_served_one_after_the_other",
        sync::calls_are_served_one_after_the_other,
    ),
    (
        "sync::a_pods_volumes_come_from_its_hotplug_directory",
        sync::a_pods_volumes_come_from_its_hotplug_directory,
    ),
    (
        "sync::a_volume_is_handed_over_by_its_descriptor",
        sync::a_volume_is_handed_over_by_its_descriptor,
    ),
    (
        "sync::who_watches_sees_disks_and_metrics",
        sync::who_watches_sees_disks_and_metrics,
    ),
    ("sync::interfaces_follow_the_vmi", sync::interfaces_follow_the_vmi),
    (
        "networks::a_pods_network_is_the_vms_until_its_end",
        networks::a_pods_network_is_the_vms_until_its_end,
    ),
    (
        "networks::a_start_that_fails_gives_the_network_back",
        networks::a_start_that_fails_gives_the_network_back,
    ),
    (
        "networks::a_start_that_is_cut_short_gives_the_network_back",
        networks::a_start_that_is_cut_short_gives_the_network_back,
    ),
    (
        "networks::a_network_that_cannot_be_is_told",
        networks::a_network_that_cannot_be_is_told,
    ),
    (
        "networks::what_a_killed_monitor_did_is_taken_back",
        networks::what_a_killed_monitor_did_is_taken_back,
    ),
    (
        "networks::a_namespace_of_one_that_dies_is_the_next_ones",
        networks::a_namespace_of_one_that_dies_is_the_next_ones,
    ),
    (
        "interfaces::an_interface_comes_and_goes",
        interfaces::an_interface_comes_and_goes,
    ),
    (
        "interfaces::what_is_removed_while_paused_goes_later",
        interfaces::what_is_removed_while_paused_goes_later,
    ),
    (
        "interfaces::what_cannot_be_added_is_told_and_changes_nothing",
        interfaces::what_cannot_be_added_is_told_and_changes_nothing,
    ),
    (
        "interfaces::what_was_added_is_given_back_at_the_end",
        interfaces::what_was_added_is_given_back_at_the_end,
    ),
    (
        "standalone::vms_without_a_pod_have_a_network_of_their_own",
        standalone::vms_without_a_pod_have_a_network_of_their_own,
    ),
    (
        "standalone::starts_that_fail_leave_nothing",
        standalone::starts_that_fail_leave_nothing,
    ),
    (
        "standalone::killed_processes_leave_nothing",
        standalone::killed_processes_leave_nothing,
    ),
];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.first().map(String::as_str) {
        Some("--control-fd") => fake_vmm::main(),
        Some("monitor") => husk_monitor::monitor::serve(),
        Some("embedded") => embedded::main(&arguments),
        _ => run(&arguments),
    }
}

/// What the standard harness does, as far as it is needed: filters by substring, runs in parallel.
fn run(arguments: &[String]) -> ExitCode {
    let filters: Vec<&String> = arguments
        .iter()
        .filter(|argument| !argument.starts_with('-'))
        .collect();
    let chosen = |name: &str| filters.is_empty() || filters.iter().any(|filter| name.contains(*filter));
    let tests: Vec<&Test> = TESTS.iter().filter(|test| chosen(test.0)).collect();
    let (next, failed) = (AtomicUsize::new(0), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while let Some((name, test)) = tests.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let passed = catch_unwind(AssertUnwindSafe(test)).is_ok();
                    println!("test {name} ... {}", if passed { "ok" } else { "FAILED" });
                    failed.fetch_add(usize::from(!passed), Ordering::Relaxed);
                }
            });
        }
    });
    let failed = failed.into_inner();
    // As the standard harness prints it, so that the tests are counted.
    println!(
        "test result: {}. {} passed; {failed} failed; 0 ignored; 0 measured; {} filtered out",
        if failed == 0 { "ok" } else { "FAILED" },
        tests.len() - failed,
        TESTS.len() - tests.len()
    );
    if failed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}
