//! The monitor as a real process, with a fake VMM. This program is monitor, VMM and embedding process as well, by its
//! first argument.

mod discs;
mod embedded;
mod fake_nic;
mod fake_vmm;
mod fixture;
mod interfaces;
mod lives;
mod lost_writes;
mod networks;
mod snapshot_disks;
mod snapshot_interfaces;
mod snapshots;
mod standalone;
mod starts;
mod sync;
mod volume_sources;
mod volumes;
mod vsock;

use std::fs::File;
use std::process::ExitCode;

use libtest_mimic::{Arguments, Trial};

/// Trials of the functions of one module, each ignored if `$ignored`.
macro_rules! trials {
    ($ignored:expr, $module:ident: $($test:ident),* $(,)?) => {
        [$((concat!(stringify!($module), "::", stringify!($test)), $module::$test as fn())),*].map(|(name, test)| {
            Trial::test(name, move || {
                test();
                Ok(())
            })
            .with_ignored_flag($ignored)
        })
    };
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.first().map(String::as_str) {
        Some("--control-fd") => fake_vmm::main(),
        Some("monitor") => monitor(),
        Some("embedded") => embedded::main(&arguments),
        _ => run(),
    }
}

fn monitor() -> ExitCode {
    tracing_subscriber::fmt()
        .with_ansi(false)
        .with_writer(std::io::stderr)
        .init();
    husk_monitor::monitor::serve()
}

fn run() -> ExitCode {
    let mut arguments = Arguments::from_args();
    // The tests mostly wait.
    arguments.test_threads.get_or_insert(4);
    let no_network = !can_prepare_networks();
    let mut trials = Vec::new();
    trials.extend(trials![
        false,
        starts:
        started_vm_is_listed,
        duplicate_name_is_refused,
        vmm_refusal_is_reported_and_cleaned_up,
        early_vmm_death_is_reported,
        bad_environment_variable_is_named,
        bad_volume_is_reported_and_cleaned_up,
        refused_image_is_named,
        all_descriptors_of_many_disks_arrive,
        long_names_work,
        vm_ends_when_its_launcher_dies,
        hanging_start_can_be_killed,
    ]);
    trials.extend(trials![false, embedded: build_can_be_stopped]);
    trials.extend(trials![
        false,
        lives:
        power_button_ends_the_vm,
        unresponsive_guest_is_killed_after_the_grace_period,
        kill_without_a_grace_period_succeeds,
        unresponsive_vmm_is_killed,
        second_signal_kills,
        signal_after_a_shutdown_does_not_kill,
        paused_vm_is_resumed_for_shutdown,
        resume_returns_although_an_io_error_pauses_again,
        vm_goes_on_after_an_io_error_that_has_passed,
        killed_vmm_is_cleaned_up,
        vmm_ends_with_its_monitor,
        guest_exit_reason_is_reported,
        reboots_are_counted,
        reboots_in_a_loop_are_told_now_and_then,
        soft_reboot_needs_a_running_guest,
        shutdown_waits_for_a_soft_reboot_under_way,
        console_has_one_session,
        port_of_the_guest_agent_stays_open,
        image_locks_are_released_at_exit,
    ]);
    trials.extend(trials![
        false,
        vsock:
        programs_connect_to_the_guest,
        the_guest_connects_to_programs,
        guest_that_connects_in_vain_does_not_fill_the_log,
        programs_that_say_nothing_hold_up_others_for_a_limited_time,
    ]);
    trials.extend(trials![
        false,
        volumes:
        volume_is_plugged_and_unplugged,
        removal_while_paused_completes_on_resume,
        refused_volume_changes_nothing,
        volume_is_shown_at_the_vmms_address,
        grown_file_resizes_the_disk,
        volume_that_was_added_too_late_is_removed_before_the_next,
    ]);
    trials.extend(trials![
        false,
        sync:
        sync_applies_the_vmi,
        sync_refuses_changes_that_need_a_restart,
        sync_reports_pending_removals,
        sync_after_a_restore_keeps_plugged_volumes,
        sync_pauses_a_vm_that_is_paused_for_a_snapshot,
        sync_calls_are_serialised,
        status_watch_includes_disks_and_metrics,
    ]);
    trials.extend(trials![
        false,
        lost_writes:
        sync_reports_lost_writes_once,
        sync_reports_lost_writes_of_a_late_removal,
        sync_reports_lost_writes_after_a_failed_call,
        sync_reports_lost_writes_of_a_replaced_volume,
    ]);
    trials.extend(trials![
        false,
        volume_sources:
        pod_volumes_come_from_the_hotplug_directory,
        volume_is_passed_as_a_descriptor,
    ]);
    trials.extend(trials![
        false,
        discs:
        sync_inserts_and_ejects_discs,
        locked_tray_delays_the_ejection,
        disc_is_added_and_removed_by_name,
        disc_that_was_inserted_too_late_is_ejected_before_the_next,
    ]);
    trials.extend(trials![
        false,
        snapshots:
        vms_go_on_from_a_snapshot,
        checksums_are_written_on_request,
        memory_is_saved_before_the_pause_on_request,
        guest_that_reboots_in_a_live_save_goes_on,
        vm_runs_on_unless_it_was_paused,
        resume_waits_for_a_snapshot_that_can_be_told,
        refused_save_leaves_nothing,
        manifest_that_is_too_large_is_refused_before_the_save,
        vm_goes_on_although_its_resume_fails_once,
        interrupted_snapshot_leaves_nothing,
        shutdown_gives_a_snapshot_up,
        vmm_that_dies_while_saving_leaves_nothing,
        plugged_volume_stays_plugged,
        damaged_snapshot_is_refused,
    ]);
    trials.extend(trials![
        false,
        snapshot_disks:
        snapshot_with_a_disk_outside_is_for_a_vm_that_stays,
        snapshot_with_a_disk_outside_is_restored_once,
        restore_without_a_guest_that_ran_does_not_count,
        disk_is_copied_in_full_on_request,
        claim_grows_and_volume_is_plugged_after_the_snapshot,
        claim_outside_a_snapshot_grows_when_the_vm_goes_on,
    ]);
    trials.extend(trials![
        no_network,
        sync:
        sync_applies_interfaces,
    ]);
    trials.extend(trials![
        no_network,
        lost_writes:
        sync_reports_lost_writes_after_a_failed_change_of_an_interface,
    ]);
    trials.extend(trials![
        no_network,
        snapshot_disks:
        disk_that_does_not_fit_leaves_nothing,
    ]);
    trials.extend(trials![
        no_network,
        snapshot_interfaces:
        interfaces_keep_their_addresses,
        plugged_interface_keeps_its_slot,
        interface_that_is_being_unplugged_is_not_saved,
        clone_gets_other_nics_in_the_same_slots,
        guest_that_does_not_release_its_nics_is_ended,
    ]);
    trials.extend(trials![
        no_network,
        networks:
        pod_network_is_prepared_and_restored,
        failed_start_restores_the_network,
        aborted_start_restores_the_network,
        unusable_network_is_reported,
        network_of_a_killed_monitor_is_restored,
        namespace_of_a_dying_vm_is_reused,
    ]);
    trials.extend(trials![
        no_network,
        interfaces:
        interface_is_plugged_and_unplugged,
        removal_while_paused_completes_on_resume,
        refused_interface_changes_nothing,
        plugged_interfaces_are_restored_at_exit,
    ]);
    trials.extend(trials![
        no_network,
        standalone:
        standalone_vm_gets_its_own_network,
        failed_starts_leave_nothing,
        killed_processes_leave_nothing,
    ]);
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// True if this user can prepare VM networks: root with /dev/net/tun. The root of a user namespace has no other users,
/// one of which the VMM becomes.
fn can_prepare_networks() -> bool {
    let tun = File::options().read(true).write(true).open("/dev/net/tun");
    rustix::process::geteuid().is_root() && tun.is_ok()
}
