//! The network of a VM in existing namespaces.

use std::io::Write;
use std::process::Stdio;
use std::time::Duration;

use husk_monitor::launch::{LaunchError, MonitorConfig};
use husk_network::{Netns, NetworkLocation};
use husk_proto::shim::v1::{KillRequest, Phase};
use husk_shim_testing::pod::{POD_MAC, Pod};
use husk_vmi::{NicBinding, NicDhcp, NicNetwork, NicPlan, VmPlan};
use rustix::process::Signal;

use super::fixture::{Fixture, alive, eventually, plan, signal};

pub fn nic(binding: NicBinding) -> NicPlan {
    NicPlan {
        name: "default".into(),
        network: NicNetwork::Pod,
        binding,
        mac: None,
        queues: 1,
        link_up: true,
        dhcp: NicDhcp::default(),
    }
}

pub fn masquerade() -> NicBinding {
    NicBinding::Masquerade {
        cidr: None,
        cidr6: None,
        ports: Vec::new(),
    }
}

pub fn with_nic(name: &str, binding: NicBinding) -> VmPlan {
    let mut plan = plan(name);
    plan.nics.push(nic(binding));
    plan.hostname = "demo-host".into();
    plan
}

pub fn on(f: &Fixture, pod: &Pod, plan: VmPlan) -> MonitorConfig {
    MonitorConfig {
        netns: Some(pod.path().into()),
        ..f.config(plan)
    }
}

pub fn refusal(f: &Fixture, config: &MonitorConfig) -> String {
    match f.start_config(config).map(|vm| vm.monitor) {
        Err(LaunchError::Failed { message, .. }) => message,
        other => panic!("{other:?}"),
    }
}

/// Number of taps that a process has open.
pub fn taps(pid: u32) -> usize {
    let open = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
    open.filter(|fd| std::fs::read_link(fd.path()).is_ok_and(|to| to == std::path::Path::new("/dev/net/tun")))
        .count()
}

pub fn pod_network_is_prepared_and_restored() {
    for (binding, name, address) in [
        (NicBinding::Bridge, "bridge", "10.244.1.5"),
        (masquerade(), "masquerade", "10.0.2.2"),
    ] {
        let f = Fixture::new();
        let pod = Pod::with_address();
        let before = pod.state();
        let mut vm = f.start_config(&on(&f, &pod, with_nic("demo", binding))).unwrap();
        eventually("the guest is offered its address", || {
            vm.said().contains(&format!(
                "default is offered {address} Some(Hostname(\"demo-host\"))"
            ))
        });
        assert!(vm.said().contains("mtu 1450 queues 1\n"), "{}", vm.said());
        assert_eq!((taps(vm.monitor), taps(vm.vmm)), (0, 1));

        let info = vm.info();
        let [shown] = info.interfaces.as_slice() else {
            panic!("{info:?}");
        };
        assert_eq!((shown.name.as_str(), shown.device.as_str()), ("default", "eth0"));
        assert_eq!(
            (shown.binding.as_str(), &shown.addresses[..]),
            (name, &["10.244.1.5".to_owned()][..])
        );
        assert_eq!((shown.mtu, shown.queues, shown.link_up), (1450, 1, true));
        assert_eq!(shown.mac == POD_MAC.to_string(), name == "bridge");

        assert_ne!(pod.state(), before);
        let status = vm.ends(async |mut client| drop(client.kill(KillRequest {}).await.unwrap()));
        assert_eq!(
            (status.phase(), status.reason.as_str()),
            (Phase::Failed, "Killed")
        );
        assert_eq!(pod.state(), before);
        f.is_clean(&vm.pids());
    }
}

pub fn failed_start_restores_the_network() {
    let f = Fixture::new();
    let pod = Pod::with_address();
    let before = pod.state();
    for (name, why) in [
        ("refused", "config.memory: too much of it"),
        ("dies-early", "out of luck"),
        ("no-kernel", "disk data: no partition table"),
    ] {
        let plan = with_nic(name, NicBinding::Bridge);
        assert_eq!(refusal(&f, &on(&f, &pod, plan)), why);
        assert_eq!(pod.state(), before, "{name}");
    }
    // The first interface is prepared, the second one has no device.
    let mut two = with_nic("demo", NicBinding::Bridge);
    two.nics.push(NicPlan {
        name: "red".into(),
        network: NicNetwork::Multus {
            network_name: "red".into(),
            default: false,
        },
        ..nic(NicBinding::Bridge)
    });
    assert_eq!(
        refusal(&f, &on(&f, &pod, two)),
        format!(
            "--netns {}: interface \"red\": pod link (podb1f51a511f1) is missing: let a network plugin add it first",
            pod.path()
        )
    );
    assert_eq!(pod.state(), before);
    f.is_clean(&[]);
}

pub fn aborted_start_restores_the_network() {
    let f = Fixture::new();
    let pod = Pod::with_address();
    let before = pod.state();
    // At different times: while the network is prepared, and while the VMM builds the machine.
    for delay in [0, 5, 20, 60, 300] {
        let config = on(&f, &pod, with_nic("hangs", NicBinding::Bridge));
        let mut monitor = f
            .monitor()
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let json = serde_json::to_vec(&config).unwrap();
        monitor.stdin.take().unwrap().write_all(&json).unwrap();
        eventually("it has claimed its name", || {
            f.state().find("default", "hangs").is_ok()
        });
        // Before the monitor handles signals, a signal kills it, as in another test.
        eventually("it prepares the network", || {
            f.state().path().join("default/hangs/netns.json").exists()
        });
        std::thread::sleep(Duration::from_millis(delay));
        signal(monitor.id(), Signal::TERM);
        let output = monitor.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(said.contains(r#"{"failed":{"reason":"Killed""#), "{said}");
        assert_eq!(pod.state(), before, "after {delay} ms");
        f.is_clean(&[]);
    }
}

pub fn unusable_network_is_reported() {
    let f = Fixture::new();
    let named = "name a network namespace, such as /run/netns/NAME or /proc/PID/ns/net";
    for (path, why) in [
        ("/nonexistent", format!("No such file or directory (os error 2): {named}")),
        ("/proc/self/ns/mnt", format!("it is not a network namespace: {named}")),
        (
            "/proc/self/ns/net",
            "this is the machine's own network, whose address the guest would take over: name another namespace"
                .to_owned(),
        ),
    ] {
        let config = MonitorConfig {
            netns: Some(path.into()),
            ..f.config(with_nic("demo", NicBinding::Bridge))
        };
        assert_eq!(refusal(&f, &config), format!("--netns {path}: {why}"));
    }
    let pod = Pod::with_address();
    let mut first = f
        .start_config(&on(&f, &pod, with_nic("first", NicBinding::Bridge)))
        .unwrap();
    let told = refusal(&f, &on(&f, &pod, with_nic("second", NicBinding::Bridge)));
    assert!(
        told.contains("eth0")
            && told.ends_with(": a namespace is one VM's at a time; if no VM has this one, make a new one"),
        "{told}"
    );
    assert_eq!(taps(first.vmm), 1);
    first.ends(async |mut client| drop(client.kill(KillRequest {}).await.unwrap()));
    f.is_clean(&first.pids());
}

pub fn network_of_a_killed_monitor_is_restored() {
    let f = Fixture::new();
    for (binding, gone) in [
        (NicBinding::Bridge, false),
        (masquerade(), false),
        (NicBinding::Bridge, true),
    ] {
        let pod = Pod::with_address();
        let before = pod.state();
        let vm = f.start_config(&on(&f, &pod, with_nic("demo", binding))).unwrap();
        signal(vm.monitor, Signal::KILL);
        eventually("the VMM ends", || !alive(vm.vmm));
        eventually("the monitor's lock goes", || f.state().list().unwrap().is_empty());
        assert_ne!(pod.state(), before);
        if gone {
            // The path names another namespace now, which is left alone.
            let other = Pod::with_address();
            rustix::io::dup2(&other.netns, &mut descriptor(&pod)).unwrap();
            let untouched = other.state();
            assert_eq!(f.state().remove_abandoned().unwrap().len(), 1);
            assert_eq!(other.state(), untouched);
        } else {
            assert_eq!(f.state().remove_abandoned().unwrap().len(), 1);
            assert_eq!(pod.state(), before);
        }
        f.is_clean(&vm.pids());
    }
}

/// The descriptor that the pod's path names, for another file to take its place.
fn descriptor(pod: &Pod) -> std::mem::ManuallyDrop<std::os::fd::OwnedFd> {
    use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
    // SAFETY: the pod owns the descriptor and outlives this; it is not closed here.
    std::mem::ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(pod.netns.as_fd().as_raw_fd()) })
}

pub fn namespace_of_a_dying_vm_is_reused() {
    let f = Fixture::new();
    let pod = Pod::with_address();
    let before = pod.state();
    // Killed just before the other starts, while its processes are still dying.
    let vm = f
        .start_config(&on(&f, &pod, with_nic("one", NicBinding::Bridge)))
        .unwrap();
    signal(vm.monitor, Signal::KILL);
    f.state()
        .remove_abandoned_for(std::path::Path::new(&pod.path()))
        .unwrap();
    let mut next = f
        .start_config(&on(&f, &pod, with_nic("two", NicBinding::Bridge)))
        .unwrap();
    next.ends(async |mut client| drop(client.kill(KillRequest {}).await.unwrap()));
    assert_eq!(pod.state(), before);

    // A VM that is slow to end.
    let claimed = f.state().claim("default", "slow").unwrap();
    let netns = Netns::open(std::path::Path::new(&pod.path())).unwrap();
    let location = NetworkLocation::Netns {
        path: pod.path().into(),
        id: netns.id().unwrap(),
    };
    location.save(claimed.dir().path()).unwrap();
    let dies = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(300));
        drop(claimed);
    });
    let removed = f
        .state()
        .remove_abandoned_for(std::path::Path::new(&pod.path()))
        .unwrap();
    assert_eq!(removed.len(), 1);
    dies.join().unwrap();
    f.is_clean(&[vm.pids(), next.pids()].concat());
}
