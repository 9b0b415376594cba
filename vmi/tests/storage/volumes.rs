//! Sources of volumes.

use super::common::{vmi, with};
use super::{planned, resources};
use husk_vmi::{DiskSource, FormatPolicy, PodResources, SeedData, SeedLayout, VmPlan, plan};
use serde_json::{Value, json};

#[test]
fn a_volume_without_a_disk_gets_one() {
    let plan = planned(&[(
        "volumes",
        json!([{"name": "scratch", "emptyDisk": {"capacity": "10Mi"}}, {"name": "root", "dataVolume": {"name": "root"}}]),
    )])
    .unwrap();
    let names: Vec<_> = plan
        .disks
        .iter()
        .map(|disk| (disk.name.as_str(), disk.target.as_str()))
        .collect();
    assert_eq!(names, [("root", "vda"), ("scratch", "sda")]);
    assert!(
        plan.warnings
            .iter()
            .any(|warning| warning.field == "spec.volumes[0]")
    );
}

#[test]
fn sources_without_data_name_the_remedy() {
    for (source, kind, what) in [
        (
            json!({"persistentVolumeClaim": {"claimName": "c"}}),
            "persistentVolumeClaim",
            "a raw image or a block device",
        ),
        (
            json!({"dataVolume": {"name": "c"}}),
            "dataVolume",
            "a raw image or a block device",
        ),
        (
            json!({"ephemeral": {"persistentVolumeClaim": {"claimName": "c"}}}),
            "ephemeral",
            "a raw image or a block device",
        ),
        (
            json!({"containerDisk": {"image": "i"}}),
            "containerDisk",
            "an image file, a directory with one in disk/, an OCI layout or an image archive",
        ),
    ] {
        let mut volume = source;
        volume["name"] = json!("data");
        let manifest = with(&[("volumes/0", volume), ("domain/devices/disks", json!([]))]);
        let errors = plan(&vmi(&manifest), &PodResources::default()).unwrap_err();
        let field = format!("spec.volumes[0].{kind}");
        let line =
            format!("{field}: Required value: {field} needs data: pass {what} with --volume data=PATH");
        assert_eq!(errors[0].to_string(), line);
    }
    let mut resources = resources(&[("root", "/r.img")]);
    resources.volumes.insert("typo".to_owned(), "/x".into());
    let errors = plan(&vmi(&with(&[])), &resources).unwrap_err();
    assert_eq!(
        errors[0].to_string(),
        "spec.volumes: Not found: --volume names 'typo', but there is no such volume"
    );
}

#[test]
fn a_claims_image_can_be_created_unless_it_is_hotplugged() {
    let size = |name: &str, mode: &str, request: &str| {
        json!({"name": name, "persistentVolumeClaimInfo": {
            "volumeMode": mode, "capacity": {"storage": "2Gi"}, "requests": {"storage": request},
            "filesystemOverhead": "0.055",
        }})
    };
    let claim = |name: &str| json!({"name": name, "persistentVolumeClaim": {"claimName": name}});
    let mut manifest = with(&[
        (
            "volumes",
            json!([
                claim("root"), claim("block"), claim("unknown"),
                {"name": "filled", "dataVolume": {"name": "filled"}},
                {"name": "hot", "dataVolume": {"name": "hot", "hotpluggable": true}},
                {"name": "base", "ephemeral": {"persistentVolumeClaim": {"claimName": "base"}}},
            ]),
        ),
        ("domain/devices/disks", json!([])),
    ]);
    manifest["status"] = json!({"volumeStatus": [
        size("root", "Filesystem", "1Gi"), size("block", "Block", "1Gi"), size("filled", "Filesystem", "5000000"),
        size("hot", "Filesystem", "1Gi"), size("base", "Filesystem", "1Gi"),
    ]});
    let names = ["root", "block", "unknown", "filled", "hot", "base"].map(|name| (name, "/claim"));
    let plan = plan(&vmi(&manifest), &resources(&names)).unwrap();
    let wanted = [("filled".to_owned(), 4 << 20), ("root".to_owned(), 1 << 30)];
    assert_eq!(plan.new_image_bytes, wanted.into());
}

fn source(volume: Value) -> Result<DiskSource, String> {
    let mut volume = volume;
    volume["name"] = json!("data");
    let manifest = with(&[("volumes/0", volume), ("domain/devices/disks", json!([]))]);
    match plan(&vmi(&manifest), &PodResources::default()) {
        Ok(mut plan) => Ok(plan.disks.remove(0).source),
        Err(errors) => Err(errors[0].to_string()),
    }
}

#[test]
fn made_disks_have_whole_mebibytes() {
    let empty = |capacity: &str| source(json!({"emptyDisk": {"capacity": capacity}}));
    assert_eq!(
        empty("10M"),
        Ok(DiskSource::EmptyDisk {
            capacity_bytes: 9 << 20
        })
    );
    assert_eq!(
        empty("1M").unwrap_err(),
        "spec.volumes[0].emptyDisk.capacity: Invalid value: the size for volume data is too low, must be at least 1MiB"
    );
    assert!(empty("-1Gi").is_err());
    let host = |path: &str, capacity: Value| {
        source(json!({"hostDisk": {"path": path, "type": "DiskOrCreate", "capacity": capacity}}))
    };
    let made = DiskSource::HostDisk {
        path: "/d/a.img".into(),
        create_bytes: Some(1 << 30),
    };
    assert_eq!(host("/d/a.img", json!("1Gi")), Ok(made));
    let found = DiskSource::HostDisk {
        path: "/d/a.img".into(),
        create_bytes: None,
    };
    assert_eq!(host("/d/a.img", Value::Null), Ok(found));
    assert_eq!(
        host("/d/a.img", json!("1M")).unwrap_err(),
        "spec.volumes[0].hostDisk.capacity: Invalid value: the size for volume data is too low, must be at least 1MiB"
    );
    assert_eq!(
        host("a.img", json!("1Gi")).unwrap_err(),
        "spec.volumes[0].hostDisk.path: Invalid value: spec.volumes[0].hostDisk.path 'a.img' must be an absolute path"
    );
}

/// The seed of a VMI, with what the caller has for its volume.
fn seed(
    kind: &str,
    data: Value,
    more: &[(&str, Value)],
    data_dir: Option<&str>,
) -> Result<DiskSource, String> {
    let mut all = vec![
        ("volumes/0", json!({"name": "root", kind: data})),
        (
            "domain/firmware/uuid",
            json!("5d307ca9-b3ef-428c-8861-06e72d69f223"),
        ),
    ];
    all.extend_from_slice(more);
    let resources = data_dir.map_or_else(PodResources::default, |dir| resources(&[("root", dir)]));
    match plan(&vmi(&with(&all)), &resources) {
        Ok(mut plan) => {
            let disk = plan.disks.remove(0);
            assert!(disk.read_only && !disk.overlay && disk.format == FormatPolicy::Raw);
            Ok(disk.source)
        }
        Err(errors) => Err(errors[0].to_string()),
    }
}

fn inline(text: &str) -> SeedData {
    SeedData::Inline(text.as_bytes().to_vec())
}

#[test]
fn a_seed_has_the_instances_id_and_name() {
    let data = json!({"userDataBase64": "aGVs\nbG8=", "networkData": "version: 2"});
    let cases = [
        (
            "cloudInitNoCloud",
            SeedLayout::NoCloud,
            json!({"instance-id": "5d307ca9-b3ef-428c-8861-06e72d69f223", "local-hostname": "other"}),
        ),
        (
            "cloudInitConfigDrive",
            SeedLayout::ConfigDrive,
            json!({"instance_id": "testvmi.default", "hostname": "other", "uuid": "5d307ca9-b3ef-428c-8861-06e72d69f223"}),
        ),
    ];
    for (kind, wanted_layout, wanted) in cases {
        let other = [("hostname", json!("other"))];
        let source = seed(kind, data.clone(), &other, None).unwrap();
        let DiskSource::CloudInit {
            layout,
            meta_data,
            user_data,
            network_data,
            ..
        } = source
        else {
            panic!("{source:?}")
        };
        assert_eq!(layout, wanted_layout);
        assert_eq!(serde_json::from_str::<Value>(&meta_data).unwrap(), wanted);
        assert_eq!(user_data, inline("hello"));
        assert_eq!(network_data, Some(inline("version: 2")));
        let source = seed(kind, json!({"networkData": "v"}), &[], None).unwrap();
        let DiskSource::CloudInit {
            meta_data, user_data, ..
        } = source
        else {
            panic!("{source:?}")
        };
        assert!(meta_data.contains(r#""testvmi""#), "{meta_data}");
        assert_eq!(user_data, inline(""));
    }
}

#[test]
fn base64_may_end_with_bits_that_mean_nothing() {
    for (encoded, wanted) in [("YR==", "a"), ("YWJ=", "ab")] {
        let source = seed("cloudInitNoCloud", json!({"userDataBase64": encoded}), &[], None).unwrap();
        assert!(matches!(source, DiskSource::CloudInit { user_data, .. } if user_data == inline(wanted)));
    }
    for wrong in ["YR", "YR=", "Y===", "YR==YR=="] {
        let refused = seed("cloudInitNoCloud", json!({"userDataBase64": wrong}), &[], None).unwrap_err();
        assert!(refused.ends_with("is not a valid base64 value."), "{refused}");
    }
}

#[test]
fn a_seed_names_the_instance_type() {
    let [of_cluster, own] = [
        "kubevirt.io/cluster-instancetype-name",
        "kubevirt.io/instancetype-name",
    ];
    for (kind, key) in [
        ("cloudInitNoCloud", "instance-type"),
        ("cloudInitConfigDrive", "instance_type"),
    ] {
        for (annotations, wanted) in [
            (json!({}), Value::Null),
            (json!({own: "small"}), json!("small")),
            (json!({of_cluster: "u1.small"}), json!("u1.small")),
            (json!({own: "small", of_cluster: "u1.small"}), json!("u1.small")),
            (json!({own: "small", of_cluster: ""}), json!("small")),
        ] {
            let mut manifest = with(&[("volumes/0", json!({"name": "root", kind: {"userData": "a"}}))]);
            manifest["metadata"]["annotations"] = annotations;
            let plan = plan(&vmi(&manifest), &PodResources::default()).unwrap();
            let DiskSource::CloudInit { meta_data, .. } = &plan.disks[0].source else {
                panic!("{:?}", plan.disks)
            };
            let meta_data: Value = serde_json::from_str(meta_data).unwrap();
            assert_eq!(meta_data[key], wanted, "{kind}");
        }
    }
}

#[test]
fn secrets_of_a_seed_come_from_single_files() {
    let files = [
        ("userdata", "/0"),
        ("userData", "/1"),
        ("networkdata", "/2"),
        ("networkData", "/3"),
    ];
    let files = files.map(|(key, path)| (key.to_owned(), path.into()));
    let resources = PodResources {
        seed_files: [("root".to_owned(), files.to_vec())].into(),
        ..PodResources::default()
    };
    let both = json!({"secretRef": {"name": "s"}, "networkDataSecretRef": {"name": "n"}});
    let vmi = vmi(&with(&[(
        "volumes/0",
        json!({"name": "root", "cloudInitNoCloud": both}),
    )]));
    let plan = plan(&vmi, &resources).unwrap();
    let source = &plan.disks[0].source;
    let DiskSource::CloudInit {
        user_data,
        network_data,
        ..
    } = source
    else {
        panic!("{source:?}")
    };
    let files = |paths: [&str; 2]| SeedData::SecretFiles(paths.map(Into::into).into());
    assert_eq!(user_data, &files(["/0", "/1"]));
    assert_eq!(network_data, &Some(files(["/2", "/3"])));
    plan.live(&vmi).unwrap();
}

#[test]
fn secrets_of_a_seed_come_from_a_directory() {
    for kind in ["cloudInitNoCloud", "cloudInitConfigDrive"] {
        let both = json!({"secretRef": {"name": "s"}, "networkDataSecretRef": {"name": "n"}});
        let source = seed(kind, both.clone(), &[], Some("/secret")).unwrap();
        let DiskSource::CloudInit {
            user_data,
            network_data,
            ..
        } = source
        else {
            panic!("{source:?}")
        };
        assert_eq!(user_data, SeedData::Secret("/secret".into()));
        assert_eq!(network_data, Some(SeedData::Secret("/secret".into())));
        let error = seed(kind, both, &[], None).unwrap_err();
        let field = format!("spec.volumes[0].{kind}.secretRef");
        assert_eq!(
            error,
            format!(
                "{field}: Required value: {field} needs data: pass a directory with the Secret's files with \
                 --volume root=DIR"
            )
        );
        let error = seed(kind, json!({"userData": "a"}), &[], Some("/secret")).unwrap_err();
        assert!(error.contains("needs no data: omit"), "{error}");
    }
}

#[test]
fn objects_become_disks_of_their_files() {
    let files = |volume: Value, dir: Option<&str>| {
        let kind = volume.as_object().unwrap().keys().next().unwrap().clone();
        seed(&kind, volume[&kind].clone(), &[], dir)
    };
    for (volume, label) in [
        (json!({"configMap": {"name": "a"}}), "cfgdata"),
        (
            json!({"configMap": {"name": "a", "volumeLabel": "OEMDRV"}}),
            "OEMDRV",
        ),
        (
            json!({"secret": {"secretName": "a", "volumeLabel": "cidata"}}),
            "cidata",
        ),
        (json!({"downwardAPI": {"volumeLabel": "x"}}), "x"),
        (json!({"serviceAccount": {"serviceAccountName": "a"}}), "cfgdata"),
    ] {
        let kind = volume.as_object().unwrap().keys().next().unwrap().clone();
        let wanted = DiskSource::Files {
            dir: Some("/d".into()),
            label: label.into(),
        };
        assert_eq!(files(volume.clone(), Some("/d")), Ok(wanted));
        let field = format!("spec.volumes[0].{kind}");
        assert_eq!(
            files(volume, None).unwrap_err(),
            format!(
                "{field}: Required value: {field} needs data: pass a directory with a file for each key with \
                 --volume root=DIR"
            )
        );
    }
    let optional = json!({"secret": {"secretName": "a", "optional": true}});
    assert!(matches!(
        files(optional, None),
        Ok(DiskSource::Files { dir: None, .. })
    ));
    for label in ["x".repeat(33), "a\nb".into(), "é".into()] {
        let volume = json!({"configMap": {"name": "a", "volumeLabel": label}});
        let error = files(volume, Some("/d")).unwrap_err();
        assert!(
            error.starts_with("spec.volumes[0].configMap.volumeLabel: Invalid value:"),
            "{error}"
        );
    }
}

#[test]
fn ephemeral_disks_get_overlays_and_new_images_are_probed() {
    for (volume, read_only, overlay, format) in [
        (
            json!({"containerDisk": {"image": "i"}}),
            false,
            true,
            FormatPolicy::Probe,
        ),
        (
            json!({"containerDisk": {"image": "i"}}),
            true,
            false,
            FormatPolicy::Probe,
        ),
        (
            json!({"ephemeral": {"persistentVolumeClaim": {"claimName": "c"}}}),
            false,
            true,
            FormatPolicy::Raw,
        ),
        (
            json!({"ephemeral": {"persistentVolumeClaim": {"claimName": "c"}}}),
            true,
            false,
            FormatPolicy::Raw,
        ),
        (
            json!({"persistentVolumeClaim": {"claimName": "c"}}),
            false,
            false,
            FormatPolicy::Raw,
        ),
        (
            json!({"hostDisk": {"path": "/a", "type": "Disk"}}),
            false,
            false,
            FormatPolicy::Raw,
        ),
    ] {
        let mut volume = volume;
        volume["name"] = json!("root");
        let plan = planned(&[
            ("volumes/0", volume.clone()),
            ("domain/devices/disks/0/disk/readonly", json!(read_only)),
        ])
        .unwrap();
        let disk = &plan.disks[0];
        assert_eq!(
            (disk.read_only, disk.overlay, disk.format),
            (read_only, overlay, format),
            "{volume}"
        );
    }
    let claim = json!({"persistentVolumeClaim": {"claimName": "c", "readOnly": true}, "name": "root"});
    assert!(planned(&[("volumes/0", claim)]).unwrap().disks[0].read_only);
    let nameless = json!({"ephemeral": {}, "name": "root"});
    let errors = planned(&[("volumes/0", nameless)]).unwrap_err();
    assert_eq!(errors[0].field, "spec.volumes[0].ephemeral.persistentVolumeClaim");
}

#[test]
fn a_plan_with_any_bytes_survives_serialisation() {
    let seed = json!({"name": "root", "cloudInitNoCloud": {"userDataBase64": "/wD+", "networkData": "v: 2"}});
    let plan = plan(&vmi(&with(&[("volumes/0", seed)])), &PodResources::default()).unwrap();
    let text = serde_json::to_string(&plan).unwrap();
    assert!(
        text.contains(r#""userData":{"inline":{"base64":"/wD+"}}"#)
            && text.contains(r#""networkData":{"inline":"v: 2"}"#),
        "{text}"
    );
    assert_eq!(serde_json::from_str::<VmPlan>(&text).unwrap(), plan);
}

#[test]
fn a_container_disk_keeps_its_path_inside_the_image() {
    let manifest = with(&[(
        "volumes/0",
        json!({"name": "root", "containerDisk": {"image": "i", "path": "/disk/a.qcow2"}}),
    )]);
    let plan = plan(&vmi(&manifest), &resources(&[("root", "/r.img")])).unwrap();
    let source = DiskSource::ContainerDisk {
        path: "/r.img".into(),
        image_path: Some("disk/a.qcow2".into()),
    };
    assert_eq!(plan.disks[0].source, source);
}
