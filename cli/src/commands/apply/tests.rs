use husk_vmi::objects::read_objects;
use serde_json::json;

use super::*;
use crate::machine::fake_systemd::FakeSystemd;
use crate::machine::test_manifests;

fn given(objects: &[Value]) -> Vec<InputObject> {
    let objects = objects.iter().map(ToString::to_string);
    let objects = objects.flat_map(|text| read_objects(&text).unwrap());
    let given = objects.map(|object| InputObject {
        prefix: "vm.yaml: ".to_owned(),
        object,
    });
    given.collect()
}

fn claim_manifest(name: &str, source: Option<&str>) -> Value {
    let mut claim = json!({
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": "1Mi"}},
        },
    });
    if let Some(name) = source {
        claim["spec"]["dataSource"] = json!({"kind": "PersistentVolumeClaim", "name": name});
    }
    claim
}

fn data_volume(name: &str) -> Value {
    test_manifests::data_volume(name, &json!({"blank": {}}))
}

/// A VM with the volume `volume`.
fn vm(name: &str, volume: &str) -> Value {
    json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachine",
        "metadata": {"name": name},
        "spec": {
            "runStrategy": "Always",
            "template": {"spec": {
                "domain": {
                    "memory": {"guest": "64Mi"},
                    "devices": {"disks": [{"name": "data", "disk": {"bus": "scsi"}}]},
                },
                "volumes": [{"name": "data", "dataVolume": {"name": volume, "hotpluggable": true}}],
            }},
        },
    })
}

/// Applies objects without waiting. Returns what systemd was asked to change, too.
fn started(
    stores: &LocalStores,
    objects: &[Value],
    systemd: FakeSystemd,
    runtime: &RuntimeDir,
) -> (Result<(), Failure>, Vec<String>) {
    let given = given(objects);
    let vms = checked_vms(stores, &given).unwrap();
    let applied = apply_objects(stores, &given).unwrap();
    let args = Args {
        files: Vec::new(),
        namespace: None,
        no_wait: true,
    };
    let started = start(&args, stores, systemd.install(), runtime, &applied, &vms);
    (started, FakeSystemd::changes())
}

#[test]
fn copies_of_claims_come_after_their_sources() {
    let folder = tempfile::tempdir().unwrap();
    let stores = LocalStores::at(folder.path());
    let claim = claim_manifest;
    let objects = [
        claim("second", Some("first")),
        claim("first", Some("source")),
        claim("source", None),
    ];
    apply_claims(&stores, &given(&objects)).unwrap();
    assert_eq!(stores.claims.list().unwrap().len(), 3);

    for source in ["none", "circle", "copy"] {
        let objects = [claim("copy", Some(source)), claim("circle", Some("copy"))];
        let Err(Failure::Runtime(text)) = apply_claims(&stores, &given(&objects)) else {
            panic!("{source} was copied");
        };
        let expected = format!("vm.yaml: persistentvolumeclaim/copy: no volume {source}: ");
        assert!(text.starts_with(&expected), "{text}");
    }
}

#[test]
fn the_names_of_all_units_fit() {
    let folder = tempfile::tempdir().unwrap();
    let stores = LocalStores::at(folder.path());
    let of_vm = "v".repeat(MAX_UNIT - "husk@default:.service".len());
    let of_import = "i".repeat(MAX_UNIT - "husk-import@default:.service".len());
    let named = |name: &str, volume: &str| {
        let mut vm = vm(name, volume);
        vm["spec"]["dataVolumeTemplates"] = json!([data_volume(volume)]);
        vm
    };
    let objects = [
        named(&of_vm, &of_import),
        data_volume(&format!("{}j", &of_import[1..])),
    ];
    checked_vms(&stores, &given(&objects)).unwrap();
    for (object, field) in [
        (named(&format!("{of_vm}v"), "data"), "metadata.name"),
        (data_volume(&format!("{of_import}i")), "metadata.name"),
        (
            named("demo", &format!("{of_import}i")),
            "spec.dataVolumeTemplates[0].metadata.name",
        ),
    ] {
        let Err(Failure::Manifest(lines)) = checked_vms(&stores, &given(&[object])) else {
            panic!("{field} fits");
        };
        let expected = format!("vm.yaml: {field}: it is too long, together with the namespace");
        assert_eq!(lines, [expected]);
    }
}

#[test]
fn names_of_claims_stay_in_their_namespace() {
    let folder = tempfile::tempdir().unwrap();
    let stores = LocalStores::at(folder.path());
    let source = |source: Value| {
        let mut vm = vm("demo", "data");
        let volume = &mut vm["spec"]["template"]["spec"]["volumes"][0];
        volume.as_object_mut().unwrap().remove("dataVolume");
        for (kind, fields) in source.as_object().unwrap() {
            volume[kind] = fields.clone();
        }
        checked_vms(&stores, &given(&[vm]))
    };
    for bad in ["../test/data", "/srv/x", "..", "Data", "a/b"] {
        for (given, field) in [
            (
                json!({"persistentVolumeClaim": {"claimName": bad}}),
                "persistentVolumeClaim.claimName",
            ),
            (
                json!({"ephemeral": {"persistentVolumeClaim": {"claimName": bad}}}),
                "ephemeral.persistentVolumeClaim.claimName",
            ),
            (json!({"dataVolume": {"name": bad}}), "dataVolume.name"),
        ] {
            let Err(Failure::Manifest(lines)) = source(given) else {
                panic!("{bad} was taken");
            };
            let [line] = &lines[..] else { panic!("{lines:?}") };
            let expected = format!(
                "vm.yaml: spec.template.spec.volumes[0].{field}: Invalid value: a lowercase RFC 1123 subdomain must"
            );
            assert!(line.starts_with(&expected), "{line}");
        }
    }
    source(json!({"persistentVolumeClaim": {"claimName": "a.b-c"}})).unwrap();
}

#[test]
fn the_import_of_a_changed_volume_starts_again() {
    let folder = tempfile::tempdir().unwrap();
    let stores = LocalStores::at(folder.path());
    let runtime = RuntimeDir::at(folder.path().join("run"));
    let unit = "husk-import@default:data.service";
    let changes = |object: &Value| {
        let systemd = FakeSystemd {
            units: [(unit.to_owned(), "active")].into(),
            ..FakeSystemd::default()
        };
        let (done, changes) = started(&stores, std::slice::from_ref(object), systemd, &runtime);
        done.unwrap();
        changes
    };
    let start = format!(
        "{unit} {} import-volume default:data",
        unit::program().unwrap().display()
    );
    let mut object = data_volume("data");
    assert_eq!(changes(&object), [start.as_str()]);
    assert_eq!(changes(&object), [start.as_str()]);
    object["metadata"]["labels"] = json!({"a": "b"});
    assert_eq!(changes(&object), [start.as_str()]);
    object["spec"]["source"] = json!({"http": {"url": "http://127.0.0.1:1/disk.img"}});
    assert_eq!(changes(&object), [format!("stop {unit}"), start]);
    stores
        .claims
        .create(&husk_claims::NewClaim::new("default", "data", 1 << 20))
        .unwrap();
    object["spec"]["source"] = json!({"blank": {}});
    assert_eq!(changes(&object), [""; 0]);
}

#[test]
fn vms_start_also_if_an_import_does_not() {
    let folder = tempfile::tempdir().unwrap();
    let stores = LocalStores::at(folder.path());
    let runtime = RuntimeDir::at(folder.path().join("run"));
    let systemd = FakeSystemd {
        fails: Some("systemd-run"),
        ..FakeSystemd::default()
    };
    let objects = [data_volume("data"), vm("demo", "data")];
    let (done, changes) = started(&stores, &objects, systemd, &runtime);
    assert!(matches!(done, Err(Failure::Ended(RUNTIME))), "{done:?}");
    assert_eq!(
        changes.last().map(String::as_str),
        Some("start husk@default:demo.service"),
        "{changes:?}"
    );
}

#[test]
fn a_running_vm_with_a_volume_to_fill_delays_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let stores = LocalStores::at(folder.path());
    let runtime = RuntimeDir::at(folder.path().join("run"));
    let _runs = runtime.claim("default", "runs").unwrap();
    let units = || FakeSystemd {
        units: [("husk@default:runs.service".to_owned(), "active")].into(),
        ..FakeSystemd::default()
    };
    let program = unit::program().unwrap();
    let import = |volume| {
        format!(
            "husk-import@default:{volume}.service {} import-volume default:{volume}",
            program.display()
        )
    };
    let vms = |volume| vec![vm("runs", volume), vm("starts", volume)];
    let start = [
        "enable husk@default:runs.service",
        "enable husk@default:starts.service",
        "start husk@default:starts.service",
    ]
    .map(str::to_owned);

    let objects = [vms("new"), vec![data_volume("new")]].concat();
    let (done, changes) = started(&stores, &objects, units(), &runtime);
    done.unwrap();
    assert_eq!(changes, [vec![import("new")], start.to_vec()].concat());

    // Its import may have failed after an earlier command.
    stores.objects.apply(&data_volume("old")).unwrap();
    let (done, changes) = started(&stores, &vms("old"), units(), &runtime);
    done.unwrap();
    assert_eq!(changes, [start.to_vec(), vec![import("old")]].concat());
    assert_eq!(stores.claims.list().unwrap().len(), 0);

    // Nothing fills it.
    let (done, changes) = started(&stores, &vms("none"), units(), &runtime);
    assert!(matches!(done, Err(Failure::Ended(RUNTIME))), "{done:?}");
    assert_eq!(changes, start);
}

#[test]
fn a_damaged_data_volume_costs_its_vm_alone() {
    let folder = tempfile::tempdir().unwrap();
    let stores = LocalStores::at(folder.path());
    let with_template = |name: &str, volume: &str| {
        let mut vm = vm(name, volume);
        vm["spec"]["dataVolumeTemplates"] = json!([data_volume(volume)]);
        vm
    };
    let damaged = stores.objects.apply(&data_volume("damaged")).unwrap().object.key;
    std::fs::write(stores.objects.file(&damaged), "kind:").unwrap();
    let given = given(&[with_template("a", "damaged"), with_template("b", "good")]);
    let vms = checked_vms(&stores, &given).unwrap();
    let applied = apply_objects(&stores, &given).unwrap();
    let (stored, done) = templates(&stores, &applied, &vms);
    let names: Vec<&str> = stored
        .iter()
        .map(|stored| stored.object.key.name.as_str())
        .collect();
    assert!(done.is_err() && names == ["good"], "{names:?}");
}
