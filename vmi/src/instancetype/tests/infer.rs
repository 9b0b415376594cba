//! Names that volumes give.

use super::*;

/// A VM that infers its instance type from `root`, with the object behind that volume.
fn inferring(volume: Value, others: &[Value], ignore: bool) -> Result<Expansion, Vec<FieldError>> {
    let policy = if ignore {
        "IgnoreInferFromVolumeFailure"
    } else {
        "RejectInferFromVolumeFailure"
    };
    let mut case = Case::typed()
        .set("volumes", json!([volume]))
        .set("domain/memory", json!({"guest": "1Gi"}));
    case.vm["spec"]["instancetype"] =
        json!({"inferFromVolume": "root", "inferFromVolumeFailurePolicy": policy});
    let mut objects = case.objects();
    let others: Vec<_> = others.iter().map(ToString::to_string).collect();
    objects.extend(read_objects(&others.join("\n")).unwrap());
    expand_first(&objects)
}

fn labelled(kind: &str, name: &str, labels: Value, spec: Value) -> Value {
    let version = if kind == "DataVolume" {
        "cdi.kubevirt.io/v1beta1"
    } else {
        "v1"
    };
    json!({"apiVersion": version, "kind": kind, "metadata": {"name": name, "labels": labels}, "spec": spec})
}

#[test]
fn an_instance_type_is_inferred_from_labels() {
    let labels = json!({
        "instancetype.kubevirt.io/default-instancetype": "type",
        "instancetype.kubevirt.io/default-instancetype-kind": "VirtualMachineClusterInstancetype",
    });
    let size = json!({"requests": {"storage": "1Gi"}});
    let claim = |labels| {
        let spec = json!({"accessModes": ["ReadWriteOnce"], "resources": size});
        labelled("PersistentVolumeClaim", "golden", labels, spec)
    };
    let data = |labels, source| {
        labelled(
            "DataVolume",
            "data",
            labels,
            json!({"source": source, "storage": {"resources": size}}),
        )
    };
    let on_claim = json!({"name": "root", "persistentVolumeClaim": {"claimName": "golden"}});
    let on_data = json!({"name": "root", "dataVolume": {"name": "data"}});
    let copy = json!({"pvc": {"namespace": "default", "name": "golden"}});
    for (volume, others) in [
        (&on_claim, vec![claim(labels.clone())]),
        (&on_data, vec![data(labels.clone(), json!({"blank": {}}))]),
        (
            &on_data,
            vec![data(json!({}), copy.clone()), claim(labels.clone())],
        ),
    ] {
        // The policy Ignore drops the template's memory, which would conflict.
        let vmi = inferring(volume.clone(), &others, true).unwrap().vmi;
        assert_eq!(vmi.spec.domain.memory.guest.unwrap().to_string(), "2Gi");
        assert_eq!(vmi.annotations["kubevirt.io/cluster-instancetype-name"], "type");
        let faults = lines(inferring(volume.clone(), &others, false).unwrap_err());
        assert!(
            faults[0].contains("spec.template.spec.domain.memory.guest conflicts"),
            "{faults:?}"
        );
    }
    let unnamed = "spec.instancetype.inferFromVolume: Not found: unable to";
    for (volume, others, ignorable, want) in [
        (
            on_claim.clone(),
            vec![claim(json!({}))],
            true,
            format!(
                "{unnamed} find required instancetype.kubevirt.io/default-instancetype label on the volume"
            ),
        ),
        (
            on_data.clone(),
            vec![data(json!({}), json!({"blank": {}}))],
            true,
            format!("{unnamed} infer defaults from DataVolumeSpec as DataVolumeSource is not supported"),
        ),
        (
            json!({"name": "root", "containerDisk": {"image": "a"}}),
            vec![],
            true,
            format!("{unnamed} infer defaults from volume root as type is not supported"),
        ),
        (
            json!({"name": "other", "containerDisk": {"image": "a"}}),
            vec![],
            false,
            format!("{unnamed} find volume root to infer defaults"),
        ),
        (
            on_data.clone(),
            vec![],
            false,
            "spec.instancetype.inferFromVolume: Not found: persistentvolumeclaims \"data\" not found"
                .to_owned(),
        ),
    ] {
        assert_eq!(
            lines(inferring(volume.clone(), &others, false).unwrap_err()),
            [want]
        );
        let ignored = inferring(volume, &others, true);
        assert_eq!(ignored.is_ok(), ignorable);
        if let Ok(expansion) = ignored {
            assert_eq!(expansion.vmi.spec.domain.memory.guest.unwrap().to_string(), "1Gi");
        }
    }
}

#[test]
fn templates_infer_from_the_claim_that_they_copy() {
    let labels = json!({"instancetype.kubevirt.io/default-preference": "preference"});
    let mut case = Case::preferring(json!({"preferredSubdomain": "sub"}));
    case.vm["spec"]["preference"] = json!({"inferFromVolume": "root"});
    case.vm["spec"]["dataVolumeTemplates"] = json!([{"metadata": {"name": "root"}, "spec": {
        "source": {"pvc": {"namespace": "golden", "name": "debian"}}, "storage": {},
    }}]);
    let case = case.set(
        "volumes",
        json!([{"name": "root", "dataVolume": {"name": "root"}}]),
    );
    let mut claim = labelled(
        "PersistentVolumeClaim",
        "debian",
        labels,
        json!({"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}),
    );
    claim["metadata"]["namespace"] = json!("golden");
    let mut objects = case.objects();
    objects.extend(read_objects(&claim.to_string()).unwrap());
    let vmi = expand_first(&objects).unwrap().vmi;
    assert_eq!(vmi.spec.subdomain.as_deref(), Some("sub"));
}
