use husk_agent_testing::device_manager::{DeviceManager, api, connect};

use super::*;

#[tokio::test]
async fn device_is_registered_listed_and_allocated() {
    let dir = tempfile::tempdir().unwrap();
    let (plugins, node) = (dir.path().join("plugins"), dir.path().join("kvm"));
    std::fs::create_dir(&plugins).unwrap();
    std::fs::write(&node, "").unwrap();
    let kubelet = DeviceManager::default();
    let first = kubelet.start(&plugins);
    let device = NodeDevice {
        name: "kvm",
        path: node.clone(),
        gate: None,
    };
    let (plugin, mut registered) = DevicePlugin::new(device, 3, plugins.clone());
    let (stop, stopped) = watch::channel(false);
    let running = tokio::spawn(plugin.run(stopped));
    registered.wait_for(|registered| *registered).await.unwrap();
    let wanted = api::RegisterRequest {
        version: "v1beta1".into(),
        endpoint: "kubevirt-kvm.sock".into(),
        resource_name: "devices.kubevirt.io/kvm".into(),
        options: Some(api::DevicePluginOptions::default()),
    };
    assert_eq!(kubelet.registrations(), [wanted]);

    let mut client = connect(plugins.join("kubevirt-kvm.sock")).await;
    let mut lists = client.list_and_watch(api::Empty {}).await.unwrap().into_inner();
    let list = lists.message().await.unwrap().unwrap().devices;
    let seen: Vec<_> = list
        .iter()
        .map(|device| (device.id.as_str(), device.health.as_str()))
        .collect();
    assert_eq!(
        seen,
        [("kvm0", "Healthy"), ("kvm1", "Healthy"), ("kvm2", "Healthy")]
    );
    let request = api::AllocateRequest {
        container_requests: vec![api::ContainerAllocateRequest {
            devices_ids: vec!["kvm1".into()],
        }],
    };
    let allocated = client.allocate(request).await.unwrap().into_inner();
    let path = node.display().to_string();
    let spec = &allocated.container_responses[0].devices[0];
    assert_eq!((&spec.host_path, &spec.container_path), (&path, &path));
    assert_eq!(spec.permissions, "rwm");

    std::fs::remove_file(&node).unwrap();
    let list = lists.message().await.unwrap().unwrap().devices;
    assert!(list.iter().all(|device| device.health == "Unhealthy"), "{list:?}");

    // A kubelet that restarts has forgotten the plugin.
    first.abort();
    let second = kubelet.start(&plugins);
    while kubelet.registrations().len() < 2 {
        assert!(*registered.borrow(), "the node would not be schedulable");
        sleep(Duration::from_millis(10)).await;
    }

    let mut client = connect(plugins.join("kubevirt-kvm.sock")).await;
    let mut lists = client.list_and_watch(api::Empty {}).await.unwrap().into_inner();
    assert_eq!(lists.message().await.unwrap().unwrap().devices.len(), 3);
    stop.send_replace(true);
    assert_eq!(lists.message().await.unwrap().unwrap().devices, []);
    running.await.unwrap();
    assert!(!plugins.join("kubevirt-kvm.sock").exists());
    second.abort();
}

#[tokio::test(start_paused = true)]
async fn plugin_waits_for_a_kubelet() {
    let dir = tempfile::tempdir().unwrap();
    let kubelet = DeviceManager::default();
    let device = NodeDevice {
        name: "tun",
        path: "/dev/null".into(),
        gate: None,
    };
    let (plugin, mut registered) = DevicePlugin::new(device, 1, dir.path().to_owned());
    let (stop, stopped) = watch::channel(false);
    let running = tokio::spawn(plugin.run(stopped));
    sleep(Duration::from_secs(30)).await;
    assert!(!*registered.borrow_and_update());
    let server = kubelet.start(dir.path());
    registered.wait_for(|registered| *registered).await.unwrap();

    // One that does not come back is noticed later.
    server.abort();
    std::fs::remove_file(dir.path().join(KUBELET_SOCKET)).unwrap();
    sleep(Duration::from_secs(40)).await;
    assert!(*registered.borrow());
    sleep(Duration::from_secs(40)).await;
    assert!(!*registered.borrow());
    stop.send_replace(true);
    running.await.unwrap();
}

#[tokio::test]
async fn a_device_with_a_gate_is_published_while_it_is_on() {
    let dir = tempfile::tempdir().unwrap();
    let kubelet = DeviceManager::default();
    let server = kubelet.start(dir.path());
    let gated = node_devices()
        .into_iter()
        .find(|device| device.gate == Some("VSOCK"));
    let (plugin, mut registered) = DevicePlugin::new(gated.unwrap(), 1, dir.path().to_owned());
    let (gate, is_on) = watch::channel(false);
    let (stop, stopped) = watch::channel(false);
    let running = tokio::spawn(async move { plugin.publish_while(is_on, stopped).await });
    registered.wait_for(|registered| *registered).await.unwrap();
    sleep(CHECK_INTERVAL * 2).await;
    assert_eq!(kubelet.registrations(), []);

    for turns in 1..=2 {
        gate.send_replace(true);
        while kubelet.registrations().len() < turns {
            sleep(Duration::from_millis(10)).await;
        }
        let mut client = connect(dir.path().join("kubevirt-vhost-vsock.sock")).await;
        let mut lists = client.list_and_watch(api::Empty {}).await.unwrap().into_inner();
        assert_eq!(lists.message().await.unwrap().unwrap().devices.len(), 1);
        gate.send_replace(false);
        assert_eq!(lists.message().await.unwrap().unwrap().devices, []);
        assert!(*registered.borrow(), "the node would not be schedulable");
    }
    stop.send_replace(true);
    running.await.unwrap();
    server.abort();
}

#[tokio::test(start_paused = true)]
async fn a_device_whose_gate_is_on_keeps_vmis_away_until_it_is_registered() {
    let dir = tempfile::tempdir().unwrap();
    let gated = node_devices().into_iter().find(|device| device.gate.is_some());
    let (plugin, mut registered) = DevicePlugin::new(gated.unwrap(), 1, dir.path().to_owned());
    let (gate, is_on) = watch::channel(true);
    let (stop, stopped) = watch::channel(false);
    let running = tokio::spawn(async move { plugin.publish_while(is_on, stopped).await });
    registered.wait_for(|registered| *registered).await.unwrap();
    registered.wait_for(|registered| !*registered).await.unwrap();
    gate.send_replace(false);
    registered.wait_for(|registered| *registered).await.unwrap();
    gate.send_replace(true);
    registered.wait_for(|registered| !*registered).await.unwrap();
    stop.send_replace(true);
    running.await.unwrap();
}
